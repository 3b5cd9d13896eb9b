"""What a plan is made for: free memory as the hosts say it, links as they were measured, else as they call themselves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gangline.decide.hosts import disk_rate, world_of
from gangline.inventory.facts import Inventory
from gangline.inventory.measured import Collective, Link, Network, save_network
from gangline.planner.saves import DISK
from gangline.runs.cluster import Cluster
from tests.unit.checks.machines import GIB, card, cluster, cpu_only, host, ib_port, inventory, pc, server

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
    assert [placement.free_bytes for placement in world.placements] == [
        facts.gpus[0].memory_free_bytes for facts in seen.hosts
    ]
    assert {placement.memory_from for placement in world.placements} == {"measured"}
    assert world.placements[1].spec is not None
    assert world.placements[1].spec.memory_gb == 10


def test_figures_of_the_cluster_file_stand_for_a_card_that_no_list_has(tmp_path: Path) -> None:
    figures = {"tflops_bf16": 77.0, "memory_gib": 20.0, "bandwidth_gbs": 512.0}
    seen = inventory({"pc1": pc("pc1", [card("NVIDIA Prototype 1", 20, "8.9")])})
    (placement,) = world_of(cluster(host("pc1", gpu=figures)), seen, tmp_path).placements
    assert placement.spec is not None
    assert (placement.spec.tflops, placement.spec.bandwidth_gb_s, placement.gpu) == (77, 512, "NVIDIA Prototype 1")
    assert placement.free_bytes == seen.hosts[0].gpus[0].memory_free_bytes


def test_ranks_that_share_a_card_share_its_memory(tmp_path: Path) -> None:
    seen = inventory({"pc1": pc("pc1", CARDS["pc1"])})
    world = world_of(cluster(host("pc1", slots=2)), seen, tmp_path)
    assert [placement.free_bytes for placement in world.placements] == [
        seen.hosts[0].gpus[0].memory_free_bytes // 2
    ] * 2
    assert world.crowded == ("pc1",)
    assert world_of(cluster(host("pc1")), seen, tmp_path).crowded == ()


def test_a_host_without_cards_offers_its_own_memory_within_its_limit(tmp_path: Path) -> None:
    answer = cpu_only("pc1")
    answer["system"] |= {"memory_limit_bytes": 2 * GIB}
    world = world_of(cluster(host("pc1")), inventory({"pc1": answer}), tmp_path)
    assert world.placements[0].gpu is None
    assert world.placements[0].free_bytes == 2 * GIB
    assert world_of(cluster(host("pc1", slots=2)), inventory({"pc1": answer}), tmp_path).crowded == ()


def test_a_host_that_said_nothing_has_unknown_memory(tmp_path: Path) -> None:
    world = world_of(cluster(host("pc1")), inventory({}), tmp_path)
    assert (world.placements[0].free_bytes, world.placements[0].memory_from) == (None, "unknown")


def test_an_unmeasured_network_is_as_fast_as_its_slowest_interface_and_says_so(tmp_path: Path) -> None:
    members, seen = two()
    answers = {name: pc(name, cards) for name, cards in CARDS.items()}
    answers["pc2"]["nics"][0] |= {"speed_mbps": 100}
    world = world_of(members, inventory(answers), tmp_path)
    assert world.wire.bytes_per_s == pytest.approx(11.75e6)
    assert "gangline bench network" in world.wire.source
    assert world_of(members, seen, tmp_path).wire.bytes_per_s > world.wire.bytes_per_s


THREE = ("pc1", "pc2", "pc3")


def three(*speeds: int | None, kind: str = "ethernet") -> tuple[Cluster, Inventory]:
    answers = {name: pc(name) for name in THREE}
    for answer, speed in zip(answers.values(), speeds, strict=True):
        answer["nics"][0] |= {"speed_mbps": speed, **({"kind": kind} if speed is None else {})}
    return cluster(*map(host, THREE)), inventory(answers)


@pytest.mark.parametrize("speeds", [(100, 1000, 10000), (1000, 100, 10000), (10000, 1000, 100)])
def test_a_ring_is_as_fast_as_the_slowest_interface_on_it_wherever_that_is(
    speeds: tuple[int, ...], tmp_path: Path
) -> None:
    wire = world_of(*three(*speeds), tmp_path).wire
    assert wire.bytes_per_s == pytest.approx(11.75e6)
    assert f"100 Mbit/s of {THREE[speeds.index(100)]}'s interface" in wire.source
    assert wire.spread == 0.15


def test_an_interface_that_says_nothing_does_not_hide_a_slower_one(tmp_path: Path) -> None:
    wire = world_of(*three(100, None, 10000), tmp_path).wire
    assert wire.bytes_per_s == pytest.approx(11.75e6)
    assert wire.spread == 1.0  # it may be slower still
    usual = world_of(*three(10000, None, 10000), tmp_path).wire
    assert usual.bytes_per_s == pytest.approx(117e6)
    assert "assumed to be 1gbit" in usual.source


def test_wifi_is_no_cable(tmp_path: Path) -> None:
    wire = world_of(*three(1000, None, 1000, kind="wifi"), tmp_path).wire
    assert wire.bytes_per_s == pytest.approx(50e6)
    assert "Wi-Fi of pc2's interface" in wire.source
    assert wire.spread == 1.0


def fabric(*names: str, **changed: object) -> tuple[Cluster, Inventory]:
    answers = {name: server(name) for name in names}
    answers[names[-1]]["rdma"] |= changed
    return cluster(*map(host, names)), inventory(answers)


def test_a_thunderbolt_cable_is_known_by_its_driver(tmp_path: Path) -> None:
    members = cluster(host("pc1"), host("pc2"))
    answers = {name: pc(name) for name in ("pc1", "pc2")}
    for answer in answers.values():
        answer["nics"][0] |= {"driver": "thunderbolt-net", "speed_mbps": None}
    wire = world_of(members, inventory(answers), tmp_path).wire
    assert 1e9 < wire.bytes_per_s < 2.5e9
    assert "Thunderbolt" in wire.source
    assert wire.warning


def test_infiniband_is_what_cards_talk_over_whatever_has_the_address(tmp_path: Path) -> None:
    wire = world_of(*fabric("gpu1", "gpu2"), tmp_path).wire
    assert wire.bytes_per_s == pytest.approx(8 * 48e9)  # eight ports of 400 Gbit/s; the address is one of 25 GbE
    assert "3200 Gbit/s of gpu1's InfiniBand" in wire.source
    fewer = world_of(*fabric("gpu1", "gpu2", ports=[ib_port(0, rate_gbps=100.0)]), tmp_path).wire
    assert fewer.bytes_per_s == pytest.approx(12e9)
    assert "gpu2's" in fewer.source


@pytest.mark.parametrize("changed", [{"ports": []}, {"ports": [ib_port(0, state="DOWN")]}, {"may_open": False}])
def test_one_host_without_infiniband_sends_all_over_ethernet(changed: dict[str, object], tmp_path: Path) -> None:
    wire = world_of(*fabric("gpu1", "gpu2", **changed), tmp_path).wire
    assert wire.bytes_per_s == pytest.approx(2e9)  # 25 GbE


def test_who_turns_infiniband_off_gets_what_is_left(tmp_path: Path) -> None:
    _, seen = fabric("gpu1", "gpu2")
    members = cluster(host("gpu1"), host("gpu2", env={"NCCL_IB_DISABLE": "1"}))
    assert world_of(members, seen, tmp_path).wire.bytes_per_s == pytest.approx(2e9)


def test_a_folder_on_a_file_server_is_written_no_faster_than_the_way_there(tmp_path: Path) -> None:
    members, seen = two()
    world = world_of(members, seen, tmp_path)
    assert disk_rate(world, seen) == disk_rate(world, None) == DISK
    answers = {name: pc(name, cards) for name, cards in CARDS.items()}
    for answer in answers.values():
        answer["storage"][0] |= {"filesystem": "nfs4"}
    rate = disk_rate(world, inventory(answers))
    assert rate.high == world.wire.bytes_per_s < DISK.high
    assert rate.likely == world.wire.bytes_per_s / 2  # both hosts write to it at the same time
    assert "nfs4" in rate.source


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
