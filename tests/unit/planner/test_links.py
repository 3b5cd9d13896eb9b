"""Links: what measured all-reduces say, rings over unlike links, hosts with several ranks."""

import pytest

from gangline.planner.traffic import (
    GLOO_COPY_S,
    Exchange,
    Fabric,
    LinkModel,
    collective_bytes,
    exchange_s,
    fit_all_reduce,
    num_messages,
    slowest_of_ring,
)

GIGABIT = LinkModel(latency_s=1e-4, bytes_per_s=117.6e6, source="1 GbE")
INSIDE = LinkModel(latency_s=1e-5, bytes_per_s=10e9, source="PCIe")


def ring_s(operation, num_bytes, world_size, link):
    """Seconds of one operation on a ring of equal links, as textbooks have it."""
    messages = num_messages(operation, world_size)
    return messages * link.latency_s + collective_bytes(operation, num_bytes, world_size) / link.bytes_per_s


def exchange(operation="all_reduce", num_bytes=10_000_000, ranks=4, **more):
    return Exchange(what="x", operation=operation, num_bytes=num_bytes, times=1, ranks=ranks, number="fp32", **more)


# mismatched-and-failures.md 2.1: gloo on a ring of three over shaped links, bytes and milliseconds
MEASURED = [(4.0e6, 0.048), (16.8e6, 0.191), (33.6e6, 0.380)]


def test_two_all_reduces_predict_the_third():
    for left_out in range(3):
        size, seconds = MEASURED[left_out]
        rest = [point for number, point in enumerate(MEASURED) if number != left_out]
        link = fit_all_reduce(rest, 3, source="measured")
        assert ring_s("all_reduce", size, 3, link) == pytest.approx(seconds, rel=0.025)
        assert link.bytes_per_s == pytest.approx(117.6e6, rel=0.02)


def test_a_fit_finds_the_link_again():
    points = [(size, ring_s("all_reduce", size, 5, GIGABIT)) for size in (4096, 1 << 20, 1 << 24)]
    link = fit_all_reduce(points, 5, source="m")
    assert (link.latency_s, link.bytes_per_s) == pytest.approx((1e-4, 117.6e6))
    assert link.spread < 1e-9
    noisy = [(size, seconds * factor) for (size, seconds), factor in zip(points, (1.1, 0.95, 1.02), strict=True)]
    assert 0.01 < fit_all_reduce(noisy, 5, source="m").spread < 0.1


def test_what_says_nothing_gives_no_link():
    assert fit_all_reduce([(1e6, 0.1)], 3, source="m") is None
    assert fit_all_reduce([(1e6, 0.1), (1e6, 0.2)], 3, source="m") is None
    assert fit_all_reduce([(1e6, 0.1), (2e6, 0.2)], 1, source="m") is None
    assert fit_all_reduce([(1e3, 0.2), (1e6, 0.1)], 3, source="m") is None  # the larger, the faster


def test_a_latency_is_never_negative():
    link = fit_all_reduce([(1e6, 0.001), (1e7, 0.1)], 3, source="m")
    assert link.latency_s == 0


@pytest.mark.parametrize(
    ("operation", "messages"), [("all_reduce", 6), ("all_gather", 3), ("reduce_scatter", 3), ("send", 1)]
)
def test_messages_of_a_ring_of_four(operation, messages):
    assert num_messages(operation, 4) == messages
    assert num_messages(operation, 1) == 0
    assert num_messages("reduce_scatter", 4, backend="gloo") == 6


def test_a_ring_is_as_fast_as_its_slowest_link():
    rates = {("a", "b"): 290e6, ("b", "c"): 117e6, ("c", "a"): 1e9, ("a", "c"): 1.0}
    link = slowest_of_ring(rates, ("a", "b", "c"), latency_s=1e-4, source="pairs")
    assert link.bytes_per_s == 117e6
    assert slowest_of_ring(rates, ("a",), latency_s=0, source="pairs") is None
    assert slowest_of_ring({}, ("a", "b"), latency_s=0, source="pairs") is None


def test_ranks_of_one_host_do_not_load_its_link_more_than_one():
    alone = exchange_s(exchange(ranks=8), Fabric(slots=(1,) * 8, wire=GIGABIT, inside=INSIDE), shard_size=8)
    four = exchange_s(exchange(ranks=8), Fabric(slots=(4, 4), wire=GIGABIT, inside=INSIDE), shard_size=8)
    assert four == pytest.approx(alone)
    here = exchange_s(exchange(ranks=8), Fabric(slots=(8,), wire=GIGABIT, inside=INSIDE), shard_size=8)
    assert here == pytest.approx(ring_s("all_reduce", 10_000_000, 8, INSIDE))


def test_rings_that_cross_together_share_the_wire():
    fabric = Fabric(slots=(8, 8), wire=GIGABIT, inside=INSIDE)
    took = exchange_s(exchange(ranks=2, among="replicas"), fabric, shard_size=8)
    assert took == pytest.approx(2 * 1e-4 + 8 * 10_000_000 / 117.6e6)
    inside = exchange_s(exchange("all_gather", ranks=8, among="shard"), fabric, shard_size=8)
    assert inside == pytest.approx(ring_s("all_gather", 10_000_000, 8, INSIDE))


def test_activations_cross_one_boundary_at_a_time():
    fabric = Fabric(slots=(2, 1), wire=GIGABIT, inside=INSIDE)
    assert exchange_s(exchange("send", ranks=2, among="next"), fabric, shard_size=3) == GIGABIT.seconds(10_000_000)


def test_gloo_copies_what_it_gathered():
    fabric = Fabric(slots=(1,) * 4, wire=GIGABIT, inside=INSIDE)
    nccl = exchange_s(exchange("all_gather"), fabric, shard_size=4)
    assert exchange_s(exchange("all_gather", backend="gloo"), fabric, shard_size=4) == nccl + 10_000_000 * GLOO_COPY_S
    whole = exchange_s(exchange("all_reduce"), fabric, shard_size=4)
    scattered = exchange_s(exchange("reduce_scatter", backend="gloo"), fabric, shard_size=4)
    assert scattered == pytest.approx(whole + 10_000_000 * GLOO_COPY_S)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "send"])
def test_a_faster_link_is_never_slower(operation):
    took = [
        ring_s(operation, 1e8, 4, LinkModel(latency_s=1e-4, bytes_per_s=rate, source="x"))
        for rate in (1e7, 1e8, 1e9, 1e10)
    ]
    assert took == sorted(took, reverse=True)
