"""What a plan is made for: free memory as the hosts say it, links as they were measured, else as they call themselves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gangline.inventory.facts import Inventory
from gangline.inventory.network import Collective, Link, Network, save_network
from gangline.runs.cluster import Cluster
from gangline.steps.machines import world_of
from tests.unit.checks.machines import GIB, card, cluster, cpu_only, host, inventory, pc

CARDS = {
    "pc1": [card("NVIDIA GeForce RTX 4090", 24, "8.9")],
    "pc2": [card("NVIDIA GeForce RTX 3080", 10, "8.6")],
}


def two() -> tuple[Cluster, Inventory]:
    return cluster(host("pc1"), host("pc2")), inventory({name: pc(name, cards) for name, cards in CARDS.items()})


def measured(members: Cluster, **more: object) -> Network:
    return Network(
        cluster=members.name,
        measured="2026-11-01T00:00:00+00:00",
        method="m",
        addresses={each.name: each.address for each in members.hosts},
        slots={each.name: each.slots for each in members.hosts},
        versions={},
        **more,  # type: ignore[arg-type]
    )


def test_free_memory_is_what_the_card_says_now(tmp_path: Path) -> None:
    members, seen = two()
    world = world_of(members, seen, tmp_path)
    assert [seat.free_bytes for seat in world.seats] == [facts.gpus[0].memory_free_bytes for facts in seen.hosts]
    assert {seat.memory_from for seat in world.seats} == {"measured"}
    assert world.seats[1].spec is not None
    assert world.seats[1].spec.memory_gb == 10


def test_ranks_that_share_a_card_share_its_memory(tmp_path: Path) -> None:
    seen = inventory({"pc1": pc("pc1", CARDS["pc1"])})
    world = world_of(cluster(host("pc1", slots=2)), seen, tmp_path)
    assert [seat.free_bytes for seat in world.seats] == [seen.hosts[0].gpus[0].memory_free_bytes // 2] * 2


def test_a_host_without_cards_offers_its_own_memory_within_its_limit(tmp_path: Path) -> None:
    answer = cpu_only("pc1")
    answer["system"] |= {"memory_limit_bytes": 2 * GIB}
    world = world_of(cluster(host("pc1")), inventory({"pc1": answer}), tmp_path)
    assert world.seats[0].gpu is None
    assert world.seats[0].free_bytes == 2 * GIB


def test_a_host_that_said_nothing_has_unknown_memory(tmp_path: Path) -> None:
    world = world_of(cluster(host("pc1")), inventory({}), tmp_path)
    assert (world.seats[0].free_bytes, world.seats[0].memory_from) == (None, "unknown")


def test_an_unmeasured_network_is_as_fast_as_its_slowest_interface_and_says_so(tmp_path: Path) -> None:
    members, seen = two()
    answers = {name: pc(name, cards) for name, cards in CARDS.items()}
    answers["pc2"]["nics"][0] |= {"speed_mbps": 100}
    world = world_of(members, inventory(answers), tmp_path)
    assert world.wire.bytes_per_s == pytest.approx(11.75e6)
    assert "gangline bench network" in world.wire.source
    assert world_of(members, seen, tmp_path).wire.bytes_per_s > world.wire.bytes_per_s


def test_a_measured_network_is_fitted(tmp_path: Path) -> None:
    members, seen = two()
    rate, wait = 100e6, 1e-3
    figures = tuple(
        Collective(
            operation="all_reduce",
            num_bytes=size,
            seconds=2 * wait + size / rate,  # two ranks: each sends all of it, in two messages
            iterations=5,
            world_size=2,
            backend="gloo",
        )
        for size in (1 << 20, 25 << 20)
    )
    save_network(tmp_path, measured(members, collectives=figures))
    world = world_of(members, seen, tmp_path)
    assert world.wire.bytes_per_s == pytest.approx(rate, rel=1e-3)
    assert world.wire.latency_s == pytest.approx(wait, rel=1e-2)
    assert world.wire.source == "measured 2026-11-01"


def test_pairs_alone_give_the_slowest_way_of_the_ring(tmp_path: Path) -> None:
    members, seen = two()
    ways = tuple(
        Link(source=one, target=other, latency_s=4e-4, throughput_mbps=rate)
        for one, other, rate in (("pc1", "pc2", 900.0), ("pc2", "pc1", 400.0))
    )
    save_network(tmp_path, measured(members, links=ways))
    world = world_of(members, seen, tmp_path)
    assert world.wire.bytes_per_s == pytest.approx(50e6)
    assert world.wire.latency_s == pytest.approx(2e-4)


def test_the_figures_of_other_addresses_are_not_taken(tmp_path: Path) -> None:
    members, seen = two()
    ways = (
        Link(source="pc1", target="pc2", throughput_mbps=1.0),
        Link(source="pc2", target="pc1", throughput_mbps=1.0),
    )
    network = measured(members, links=ways)
    save_network(tmp_path, dataclasses.replace(network, addresses={"pc1": "10.9.9.9", "pc2": "10.9.9.8"}))
    assert world_of(members, seen, tmp_path).wire.bytes_per_s > 1e6
