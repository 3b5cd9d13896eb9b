"""Gradients travel while backward runs, in buckets of a size that fits links and devices, and no wider than asked."""

import pytest

from tests.train import cases_exchange
from tests.train.tolerances import BF16_MEAN, FP32_SUM

pytestmark = pytest.mark.rotating


def test_all_ranks_find_the_same_line(pool):
    one, other = pool(2).run(cases_exchange.wire)
    assert one == other
    assert one["per_byte_s"] >= 0 <= one["latency_s"]
    assert one["per_byte_s"] + one["latency_s"] > 0


@pytest.mark.parametrize(
    ("bytes_per_s", "largest"), [(1.2e6, 128 << 10), (12e6, 1 << 20), (120e6, 8 << 20), (10e9, 8 << 20)]
)
def test_the_line_goes_through_all_reduces_that_the_links_can_bear(pool, bytes_per_s, largest):
    line = pool(1).run(cases_exchange.made_up_wire, latency_s=2e-4, per_byte_s=1 / bytes_per_s)[0]
    assert line["latency_s"] == pytest.approx(2e-4, rel=FP32_SUM)
    assert line["per_byte_s"] == pytest.approx(1 / bytes_per_s, rel=FP32_SUM)
    assert line["largest"] == largest


def test_all_ranks_cut_alike_though_their_clocks_differ(pool):
    ranks = pool(3).run(cases_exchange.settled, shares=[2, 2, 1])
    assert len({rank["bucket_bytes"] for rank in ranks}) == 1
    (event,) = ranks[0]["events"]
    assert event["measured"]
    assert event["bucket_bytes"] == ranks[0]["bucket_bytes"] < event["gradient_bytes"] == ranks[0]["gradient_bytes"]
    # where shares are fixed, the slowest rank has nothing to wait for but the tail of its own exchange
    assert event["backward_s"] == pytest.approx(0.1)
    assert 0 < event["exposed_s"] < 0.1


def run(pool, folder, shares, **changes):
    """One attempt over these shares, on links of 100 MB/s as they are measured."""
    arguments = {"resume_step": None, "stop_after": None, "per_byte_s": 1e-8, **changes}
    return pool(len(shares)).run(cases_exchange.piece, folder=str(folder), shares=shares, **arguments)


def test_a_resumed_run_keeps_its_buckets_though_links_are_measured_anew(pool, tmp_path):
    whole = run(pool, tmp_path / "whole", [5, 3, 2], per_byte_s=1e-6)
    first = run(pool, tmp_path / "cut", [5, 3, 2], per_byte_s=1e-6, stop_after=5)
    second = run(pool, tmp_path / "cut", [5, 3, 2], per_byte_s=1e-9, resume_step=5)
    for rank in range(3):
        assert second[rank]["bucket_bytes"] == first[rank]["bucket_bytes"]
        assert first[rank]["losses"] + second[rank]["losses"] == whole[rank]["losses"]
        assert second[rank]["digest"] == whole[rank]["digest"]


def test_other_buckets_would_give_other_bits(pool, tmp_path):
    """So that the test above cannot pass for another reason."""
    whole = run(pool, tmp_path / "whole", [5, 3, 2], per_byte_s=1e-6)
    first = run(pool, tmp_path / "cut", [5, 3, 2], per_byte_s=1e-6, stop_after=5)
    second = run(pool, tmp_path / "cut", [5, 3, 2], per_byte_s=1e-9, resume_step=5, own_buckets=True)
    assert second[0]["bucket_bytes"] != first[0]["bucket_bytes"]
    assert second[0]["digest"] != whole[0]["digest"]


def test_a_gang_of_another_size_measures_again(pool, tmp_path):
    first = run(pool, tmp_path / "cut", [5, 3, 2], per_byte_s=1e-6, stop_after=5)
    second = run(pool, tmp_path / "cut", [6, 4], per_byte_s=1e-9, resume_step=5)
    assert second[0]["bucket_bytes"] != first[0]["bucket_bytes"]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_buckets_leave_in_the_order_in_which_gradients_are_ready(pool, checkpointing):
    one, other = pool(2).run(cases_exchange.ready_order, checkpointing=checkpointing)
    assert len(one["buckets"]) > 4
    assert [name for bucket in one["buckets"] for name in bucket] == one["ready"]
    assert other["buckets"] == one["buckets"]
    # later layers first
    assert "layers.1." in one["ready"][0]
    assert "layers.0." in one["ready"][-1]


def test_bf16_halves_the_bytes_and_moves_the_loss_by_less_than_a_thousandth(pool):
    exact = pool(3).run(cases_exchange.train, shares=[5, 3, 2], number="fp32", steps=100)
    rounded = pool(3).run(cases_exchange.train, shares=[5, 3, 2], number="bf16", steps=100)
    for rank in range(3):
        assert set(exact[rank]["sent"]) == {"float32"}
        assert set(rounded[rank]["sent"]) == {"bfloat16"}
        # the 100 steps, and the two passes that change nothing were before
        assert exact[rank]["sent"]["float32"] == 100 * exact[rank]["gradient_bytes"]
        assert 2 * rounded[rank]["sent"]["bfloat16"] == exact[rank]["sent"]["float32"]
        assert rounded[rank]["losses"] == pytest.approx(exact[rank]["losses"], rel=BF16_MEAN)
    assert len({rank["digest"] for rank in rounded}) == 1
    assert rounded[0]["digest"] != exact[0]["digest"]
    assert exact[0]["losses"][-1] < 0.99 * exact[0]["losses"][0]


def test_gradients_that_are_bf16_already_travel_as_they_are(pool):
    ranks = pool(2).run(cases_exchange.pure_bf16, shares=[3, 2])
    assert [set(rank["sent"]) for rank in ranks] == [{"bfloat16"}] * 2
    assert ranks[0]["packed"] == 1.0


def test_the_wait_for_a_late_rank_is_told_apart_from_the_wait_for_the_network(pool):
    early_s, late_s = pool(2).run(cases_exchange.late_rank)
    assert early_s > 0.25
    assert late_s < early_s
    (line,) = pool(1).run(cases_exchange.lines)[0]
    assert line["exposed_s"] == 0.05
    assert [(rank["wait_s"], rank["wait_others_s"]) for rank in line["ranks"]] == [(0.25, 0.2), (0.05, 0.0)]
