"""Gradients are cut so that a step is as short as it can be; checked against a walk through every bucket."""

import random

import pytest

from gangline.runs.formulas import BUCKET_S, SMALLEST_BYTES, AllReduce, Window, choose_buckets, exposed_s

GIGABIT = AllReduce(latency_s=8e-4, per_byte_s=4 / 3 / 117.6e6)
"""Three ranks on a ring."""
ADAPTER = 33_554_432


def walked_s(count, num_bytes, wire, windows, *, tail_bytes=0, packed=1.0):
    """The end of the last exchange after the slowest rank's computation, bucket by bucket."""
    sizes = [(num_bytes - tail_bytes) / count] * count + ([tail_bytes] if tail_bytes else [])
    free_s = 0.0
    for place, size in enumerate(sizes, start=1):
        ready_s = max(each.busy_s - each.backward_s * (1 - place / len(sizes)) for each in windows)
        free_s = max(free_s, ready_s) + wire.seconds(size * packed)
    return free_s - max(each.busy_s for each in windows)


def drawn(draw):
    busy_s = draw.uniform(0.1, 10)
    windows = [Window(busy_s=busy_s * draw.uniform(0.5, 1), backward_s=draw.uniform(0.01, busy_s / 3)) for _ in "abc"]
    num_bytes = round(10 ** draw.uniform(5.5, 10))
    wire = AllReduce(latency_s=10 ** draw.uniform(-5, -2), per_byte_s=10 ** -draw.uniform(7, 10))
    return num_bytes, wire, windows, draw.choice([0, num_bytes // 3]), draw.choice([1.0, 0.5])


@pytest.mark.parametrize("seed", range(60))
def test_what_stays_exposed_is_what_a_walk_through_all_buckets_finds(seed):
    draw = random.Random(seed)
    num_bytes, wire, windows, tail_bytes, packed = drawn(draw)
    count = draw.choice([1, 2, 7, 64])
    found = exposed_s(count, num_bytes, wire, windows, tail_bytes=tail_bytes, packed=packed)
    walked = walked_s(count, num_bytes, wire, windows, tail_bytes=tail_bytes, packed=packed)
    assert found == pytest.approx(walked, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_no_other_power_of_two_makes_a_step_shorter(seed):
    num_bytes, wire, windows, tail_bytes, packed = drawn(random.Random(seed))
    cut = choose_buckets(num_bytes, wire, windows, tail_bytes=tail_bytes, packed=packed)

    def cost_s(count):
        return count * BUCKET_S + exposed_s(count, num_bytes, wire, windows, tail_bytes=tail_bytes, packed=packed)

    counts = [1] + [
        2**power for power in range(1, 20) if (num_bytes - tail_bytes) * packed // 2**power >= SMALLEST_BYTES
    ]
    assert cost_s(cut.count) <= min(map(cost_s, counts)) + 1e-12
    assert cut.count in counts
    assert cut.count * cut.num_bytes >= num_bytes - tail_bytes > (cut.count - 1) * cut.num_bytes


def test_an_adapter_hides_on_a_gigabit_network_behind_a_backward_of_a_second():
    cut = choose_buckets(ADAPTER, GIGABIT, [Window(busy_s=14.0, backward_s=0.93)])
    assert cut.count >= 32
    assert cut.exposed_s < 0.02 * 1.4
    whole = exposed_s(1, ADAPTER, GIGABIT, [Window(busy_s=14.0, backward_s=0.93)])
    assert whole > 0.38


def test_where_little_can_be_hidden_there_are_few_buckets():
    short = choose_buckets(ADAPTER, GIGABIT, [Window(busy_s=0.1, backward_s=0.002)])
    assert short.count <= 2
    slow = choose_buckets(ADAPTER, AllReduce(latency_s=0.05, per_byte_s=1e-8), [Window(busy_s=1.0, backward_s=0.6)])
    assert slow.count < choose_buckets(ADAPTER, GIGABIT, [Window(busy_s=1.0, backward_s=0.6)]).count


def test_a_small_adapter_travels_whole():
    cut = choose_buckets(300_000, GIGABIT, [Window(busy_s=1.0, backward_s=0.6)])
    assert (cut.count, cut.num_bytes) == (1, 300_000)


def test_a_little_noise_of_a_measurement_changes_nothing():
    counts = {
        choose_buckets(
            ADAPTER,
            AllReduce(latency_s=8e-4 * noise, per_byte_s=GIGABIT.per_byte_s * noise),
            [Window(busy_s=14.0, backward_s=0.93 * noise)],
        ).count
        for noise in (0.9, 0.95, 1.0, 1.05, 1.1)
    }
    assert len(counts) == 1


def test_a_rank_that_ends_early_is_not_waited_for():
    last = Window(busy_s=10.0, backward_s=1.0)
    early = Window(busy_s=5.0, backward_s=0.01)
    assert choose_buckets(ADAPTER, GIGABIT, [last, early]) == choose_buckets(ADAPTER, GIGABIT, [last])
