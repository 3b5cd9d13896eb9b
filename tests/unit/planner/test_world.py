"""Machines that somebody thinks of: read from the command line, added, taken away."""

from __future__ import annotations

import dataclasses

import pytest

from gangline.errors import UsageError
from gangline.planner.machines import bus_of, imagine, link, with_hosts, without_hosts
from tests.unit.planner.worlds import world


def test_machines_are_named_counted_and_known_by_what_people_call_them() -> None:
    placements = imagine("pc1=rtx4090, 2xrtx3090,8 x a100-80gb")
    assert [placement.host for placement in placements] == ["pc1", "host2", "host2", *["host3"] * 8]
    assert [placement.device for placement in placements[:3]] == [0, 0, 1]
    assert (placements[0].gpu, placements[1].label, placements[-1].label) == (
        "GeForce RTX 4090",
        "RTX 3090",
        "A100-SXM4-80GB",
    )
    assert all(placement.memory_from == "catalogue" for placement in placements)
    assert 22 < (placements[0].free_bytes or 0) / 2**30 < 24


def test_a_laptop_is_not_its_desktop_namesake() -> None:
    desktop, laptop = imagine("rtx5070ti,rtx5070ti-laptop")
    assert (desktop.free_bytes or 0) > (laptop.free_bytes or 0)
    assert laptop.label == "RTX 5070 Ti Laptop"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rtx4091", "no GPU named 'rtx4091'"),
        ("pc1=", "no GPU named 'pc1='"),
        ("", "no machine can be read"),
        ("0xrtx4090", "no GPU named"),
        ("a=rtx4090,a=rtx4080", "two machines are called a"),
        ("999xrtx4090,999xrtx4090,999xrtx4090,999xrtx4090,999xrtx4090", "4995 ranks"),
    ],
)
def test_what_is_no_machine_is_refused_with_what_to_write(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        imagine(text)
    assert caught.value.fix
    assert caught.value.seen


def test_a_misspelt_card_or_link_is_answered_with_near_ones() -> None:
    with pytest.raises(UsageError) as caught:
        imagine("rtx 4090 tie")
    assert "RTX 4090" in caught.value.seen
    with pytest.raises(UsageError, match="no link named"):
        link("1 gigabanana")


@pytest.mark.parametrize(
    ("text", "said", "seen"),
    [
        ("pc1=rtx6000", "is the name of 3 cards", "RTX 6000 Ada Generation"),
        ("pc1=tpu v5e", "Google's TPU", "NVIDIA, AMD, Intel or Apple"),
        ("8xgaudi2", "Intel's Gaudi", "NVIDIA, AMD, Intel or Apple"),
        ("ascend 910b", "Huawei's Ascend", "NVIDIA, AMD, Intel or Apple"),
        ("{tflops_bf16: 100, memory_gib: 24}", "bandwidth_gbs is missing", "all of"),
        ("{memory_gib: 24}", "tflops_bf16 and bandwidth_gbs are missing", "all of"),
        ("{tflops_bf16: much, memory_gib: 24, bandwidth_gbs: 900}", "tflops_bf16 is much", "0.1 to 20000"),
        ("{tflops_bf16: 100, memory_gib: -24, bandwidth_gbs: 900}", "memory_gib is -24", "1 to 2048"),
        ("{tflops: 100}", "no figure is called 'tflops'", "tflops_bf16"),
    ],
)
def test_what_is_no_one_gpu_is_refused_by_name(text: str, said: str, seen: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        imagine(text)
    assert seen in caught.value.seen
    assert caught.value.fix


def test_a_card_in_no_list_is_planned_by_its_figures() -> None:
    text = "pc1=2x{tflops_bf16: 100, memory_gib: 24, bandwidth_gbs: 900}, pc2=rtx3090"
    one, two, other = imagine(text)
    assert (one.host, two.host, other.host) == ("pc1", "pc1", "pc2")
    assert (one.spec and one.spec.tflops, one.spec and one.spec.bandwidth_gb_s) == (100, 900)
    assert 23 < (one.free_bytes or 0) / 2**30 < 24


@pytest.mark.parametrize(
    ("typed", "note"),
    [
        ("4090", "taken with 24 GB; there are some with 48, such as 4090-48gb"),
        ("4090-24gb", ""),
        ("3090", ""),
        ("gb10", "its memory is the computer's: 114 of 128 GiB are counted"),
        ("4090-48gb", "a card with exchanged memory chips"),
    ],
)
def test_how_a_name_was_understood_is_told(typed: str, note: str) -> None:
    assert imagine(typed)[0].note == note


def test_a_card_of_two_dies_is_two_placements() -> None:
    placements = imagine("4xmi250x")
    assert [placement.device for placement in placements] == list(range(8))
    assert "each a rank's own, with 64 GB" in placements[0].note


def test_machines_are_added_and_taken_away() -> None:
    more = with_hosts(world(), "rtx4090")
    assert more.hosts == ("pc1", "pc2", "pc3", "host4")
    less = without_hosts(more, ["pc2"])
    assert less.hosts == ("pc1", "pc3", "host4")
    with pytest.raises(UsageError, match="no host 'pc9'"):
        without_hosts(more, ["pc9"])
    with pytest.raises(UsageError, match="no host is left"):
        without_hosts(world("rtx4090"), ["host1"])


def test_a_machine_beside_a_single_one_is_reached_over_an_assumed_network() -> None:
    alone = dataclasses.replace(world("rtx4090"), wire=world().inside)
    assert "assumed" in with_hosts(alone, "rtx3090").wire.source
    assert with_hosts(world(), "rtx3090").wire == world().wire
    assert with_hosts(world(), "2xrtx3090").inside.bytes_per_s <= bus_of(imagine("2xrtx3090")).bytes_per_s


@pytest.mark.parametrize(
    ("cards", "bus"),
    [
        ("8xa100-80gb", "NVLink A100"),
        ("8xh100", "NVLink H100"),
        ("8xb200", "NVLink B200"),
        ("2xH100 NVL", "PCIe"),
        ("2xA100 80GB PCIe", "PCIe"),
        ("2xrtx4090", "PCIe"),
    ],
)
def test_what_joins_cards_is_told_by_their_name(cards: str, bus: str) -> None:
    assert bus in bus_of(imagine(cards)).source


def test_slots_and_memory_of_a_machine_are_written_behind_its_cards() -> None:
    placements = imagine("pc1=2xrtx3090:bus=pcie3-x8:ram=64gb, rtx4090 : ram = 32")
    assert [placement.bus for placement in placements] == ["pcie3-x8", "pcie3-x8", ""]
    assert [placement.ram_bytes for placement in placements] == [64 << 30, 64 << 30, 32 << 30]
    assert placements[0].host_bytes_per_s == link("pcie3-x8").bytes_per_s < placements[2].host_bytes_per_s
    figures = imagine("2x{tflops_bf16: 100, memory_gib: 24, bandwidth_gbs: 900}:bus=pcie5-x16")
    assert {placement.bus for placement in figures} == {"pcie5-x16"}


@pytest.mark.parametrize("words", ["rtx3090:bus=scart", "rtx3090:ram=much", "rtx3090:lanes=8"])
def test_other_words_behind_a_card_are_refused(words: str) -> None:
    with pytest.raises(UsageError, match=r"scart|much|lanes"):
        imagine(words)


def test_a_host_with_one_card_says_nothing_of_the_bus_of_others() -> None:
    assert bus_of(imagine("4xa100-80gb,rtx4090")) == bus_of(imagine("4xa100-80gb"))
