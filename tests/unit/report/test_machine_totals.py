"""Sums over hosts are true: machines and cards count once; what a model can use differs by strategy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gangline.report.machine_totals import totals_of
from gangline.units import format_bytes

GIB = 1 << 30


def host(name, *cards, boot=None, cpus=8, ram=32):
    """cards: GiB, or (uuid, GiB)."""
    gpus = [
        SimpleNamespace(index=number, uuid=card[0], memory_total_bytes=card[1] * GIB)
        if isinstance(card, tuple)
        else SimpleNamespace(index=number, uuid=f"{name}-{number}", memory_total_bytes=card * GIB)
        for number, card in enumerate(cards)
    ]
    machine = SimpleNamespace(boot=boot or f"boot-{name}")
    return SimpleNamespace(
        host=name, gpus=gpus, num_cpus=cpus, memory_total_bytes=ram * GIB, system=SimpleNamespace(machine=machine)
    )


def gib(totals):
    return {kind: size / GIB for kind, size in totals.weights_bytes().items()}


def test_three_unlike_cards_are_28_gib_for_a_pipeline_alone():
    totals = totals_of([host("pc1", 12), host("pc2", 8), host("pc3", 8)])
    assert (totals.num_cards, totals.card_bytes) == (3, 28 * GIB)
    assert gib(totals) == {
        **dict.fromkeys(("ddp", "zero-1", "zero-2", "local-sgd"), 8),
        **dict.fromkeys(("fsdp", "zero-3"), 24),
        "pipeline": 28,
    }
    assert totals.weights_line() == (
        "room for a model: 8 GiB by ddp, zero-1, zero-2, local-sgd · 24 GiB by fsdp, zero-3 · 28 GiB by pipeline"
    )
    assert totals.words() == ["3 hosts", f"3 cards {format_bytes(28 * GIB)}", "24 CPUs", "96 GiB RAM"]


def test_hosts_with_equally_many_cards_can_divide_a_model_inside_each():
    four = gib(totals_of([host("a", 24, 24), host("b", 24, 16)]))
    assert (four["tp"], four["hsdp"], four["fsdp"], four["pipeline"], four["ddp"]) == (32, 32, 64, 88, 16)
    assert not {"tp", "hsdp"} & set(gib(totals_of([host("a", 24, 24), host("b", 24)])))


@pytest.mark.parametrize("hosts", [[], [host("a")], [host("a", 24), host("b")]])
def test_for_fewer_than_two_cards_no_strategy_is_named(hosts):
    assert totals_of(hosts).weights_line() == ""


def test_machines_and_cards_count_once():
    one = [host(name, ("the-card", 24), boot="same") for name in ("a", "b")]
    totals = totals_of([*one, host("c", 8)])
    assert (totals.machines, totals.num_cards, totals.card_bytes, totals.cpus) == (2, 2, 32 * GIB, 16)
    assert totals.words()[:2] == ["3 hosts", "on 2 machines"]
    assert totals.words(silent=1)[:2] == ["4 hosts", "on 3 machines"]


def test_cards_whose_driver_tells_no_id_all_count():
    totals = totals_of([host(name, ("?", 24), ("?", 16)) for name in ("a", "b")])
    assert (totals.num_cards, totals.card_bytes) == (4, 80 * GIB)


def test_of_hosts_that_told_nothing_only_their_number_is_known():
    assert totals_of([]).words(silent=2) == ["2 hosts"]
