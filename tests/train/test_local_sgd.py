"""strategy: local-sgd. Hosts train apart and meet once per round; what can be exact is, and replicas are equal always."""

import math

import pytest

from gangline.strategies.local_sgd.plan import EXCHANGED_NUMBERS, PAYLOAD_BYTES
from tests.train import cases_local_sgd
from tests.train.tolerances import FP32_GRADIENT, FP32_SUM, FP64_OVER_FP32, SAME_SUMS

pytestmark = pytest.mark.rotating


@pytest.mark.parametrize("inner_steps", [1, 4, 7])
def test_one_host_that_goes_where_it_went_does_what_plain_steps_do(pool, inner_steps):
    found = pool(1).run(cases_local_sgd.one_host, inner_steps=inner_steps)[0]
    assert found["steps"] == [*range(inner_steps, 16, inner_steps), 16]
    assert sum(found["round_steps"]) == 16
    assert found["moved"] > 1e-3
    assert found["difference"] < SAME_SUMS
    assert found["last_rate"] == found["rate"]
    if inner_steps == 1:
        assert found["losses"][0] == pytest.approx(found["losses"][1], rel=SAME_SUMS)


@pytest.mark.parametrize("outer", [(1.0, 0.0), (0.7, 0.9)])
@pytest.mark.parametrize(
    ("shares", "hosts"), [([4, 4, 4], None), ([2, 2, 4], ["a", "a", "b"]), ([2, 2, 2, 2], ["a", "a", "b", "b"])]
)
def test_where_steps_are_linear_the_mean_of_hosts_is_the_step_of_the_whole_batch(pool, shares, hosts, outer):
    found = pool(len(shares)).run(cases_local_sgd.linear, shares=shares, hosts=hosts, outer=list(outer))
    for rank in found:
        assert rank["error"] < FP64_OVER_FP32
        assert rank["digest"] == found[0]["digest"]
        assert set(rank["inner_steps"].values()) == {1}


def test_dropout_belongs_to_samples_on_whatever_host(pool):
    for rank in pool(3).run(cases_local_sgd.linear, shares=[2, 2, 4], hosts=["a", "a", "b"], attention_dropout=0.2):
        assert rank["error"] < FP64_OVER_FP32


@pytest.mark.parametrize("payload", ["int8", "bf16", "fp32"])
def test_replicas_are_equal_to_the_bit_after_every_round(pool, payload):
    found = pool(3).run(cases_local_sgd.replicas, shares=[5, 3, 2], payload=payload)
    assert len(set(found[0]["digests"])) == 6
    for rank in found[1:]:
        assert rank["digests"] == found[0]["digests"]
        assert rank["momentum"] == found[0]["momentum"]


def test_ranks_of_one_host_stay_equal_and_only_its_first_keeps_the_momentum(pool):
    hosts = ["a", "a", "b"]
    found = pool(3).run(cases_local_sgd.replicas, shares=[4, 3, 3], hosts=hosts, payload="int8")
    assert found[0]["digests"] == found[1]["digests"] == found[2]["digests"]
    assert found[0]["momentum"] == found[2]["momentum"]
    assert [rank["lines"][0]["sent_bytes"] > 0 for rank in found] == [True, False, True]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp64"])
def test_replicas_are_equal_in_other_precisions(pool, precision):
    found = pool(2).run(cases_local_sgd.replicas, shares=[6, 4], payload="int8", precision=precision)
    assert found[0]["digests"] == found[1]["digests"]


def test_a_round_is_dealt_in_proportion_and_a_faster_host_takes_more_inner_steps(pool):
    lines = pool(3).run(cases_local_sgd.replicas, shares=[5, 3, 2], payload="int8")[0]["lines"]
    assert [line["step"] for line in lines] == [4, 8, 12, 16, 20, 22]
    assert lines[0]["micro_batches"] == [20, 12, 8]
    assert lines[0]["inner_steps"] == {"pc0": 7, "pc1": 4, "pc2": 3}
    assert (lines[0]["samples"], lines[0]["round_steps"]) == (40, 4)
    assert lines[-1]["micro_batches"] == [10, 6, 4]


def test_int8_sends_about_a_quarter_of_fp32(pool):
    small, large = (
        pool(3).run(cases_local_sgd.replicas, shares=[5, 3, 2], payload=payload)[0] for payload in ("int8", "fp32")
    )
    ratio = small["lines"][0]["sent_bytes"] / large["lines"][0]["sent_bytes"]
    assert ratio == pytest.approx((1 + 4 / 256) / 4)
    # to each of two others a third of its values, and its own third of the mean to both; rounded up to whole blocks
    assert large["lines"][0]["sent_bytes"] == pytest.approx(4 * large["num_weights"] * 4 / 3, rel=0.03)


def test_every_sample_is_read_once_per_epoch_by_some_host(pool):
    counts = pool(3).run(cases_local_sgd.reads, shares=[5, 3, 2])
    total = {str(sample): sum(rank.get(str(sample), 0) for rank in counts) for sample in range(37)}
    assert set(total.values()) == {3}


@pytest.mark.parametrize(("payload", "bound"), [("int8", 1.001 / 254), ("bf16", 2**-8), ("fp32", 0.0)])
def test_a_value_on_the_wire_is_off_by_no_more_than_its_block_allows(pool, payload, bound):
    found = pool(1).run(cases_local_sgd.codec, payload=payload)[0]
    assert found["error"] <= bound
    assert found["zeros"]
    assert found["row_bytes"] == found["said_bytes"]
    per_value = {"int8": 1 + 4 / 256, "bf16": 2, "fp32": 4}[payload]
    assert found["row_bytes"] == per_value * found["num_values"]


def test_the_plan_reckons_with_the_widths_of_the_trainer(pool):
    found = pool(1).run(cases_local_sgd.widths)[0]
    assert found == {"bytes": PAYLOAD_BYTES, "at_once": EXCHANGED_NUMBERS}


@pytest.mark.parametrize("chunk", [1 << 20, 700])
@pytest.mark.parametrize("weights", [[5.0, 3.0, 2.0], [1.0, 0.0, 1.0]])
@pytest.mark.parametrize(("payload", "bound"), [("int8", 2.002 / 254), ("bf16", 2**-7), ("fp32", FP32_GRADIENT)])
def test_hosts_move_to_the_weighted_mean_whatever_the_chunks(pool, payload, bound, weights, chunk):
    found = pool(3).run(cases_local_sgd.exchanged, payload=payload, weights=weights, chunk=chunk)
    for rank in found:
        assert rank["digest"] == found[0]["digest"]
        assert rank["error"] <= bound


def test_an_inner_step_without_a_finite_gradient_is_skipped_and_named_by_all(pool):
    found = pool(2).run(cases_local_sgd.poisoned, shares=[3, 3], host=1, bad="step")
    for rank in found:
        assert rank["result"] == "finished"
        assert rank["finite"]
        assert rank["digests"] == found[0]["digests"]
        (event,) = rank["events"]
        assert (event["event"], event["host"], event["step"], len(event["samples"])) == ("step-skipped", "pc1", 4, 3)
        assert rank["skipped"] == 1
        assert all(math.isfinite(loss) for loss in rank["losses"])


def test_a_host_without_a_finite_step_is_left_out_of_that_round(pool):
    found = pool(2).run(cases_local_sgd.poisoned, shares=[3, 3], host=1, bad="all", rounds=2)
    for rank in found:
        assert rank["result"] == "finished"
        assert rank["digests"] == found[0]["digests"]
        left_out = [event for event in rank["events"] if event["event"] == "host-left-out"]
        assert [(event["host"], event["step"]) for event in left_out] == [("pc1", 3), ("pc1", 6)]
        assert rank["skipped"] == 6
        assert all(math.isfinite(loss) for loss in rank["losses"])


def test_a_host_whose_weights_overflow_takes_those_of_the_others_and_begins_anew(pool):
    found = pool(2).run(cases_local_sgd.poisoned, shares=[3, 3], host=0, bad="weights")
    for rank in found:
        assert rank["result"] == "finished"
        assert rank["finite"]
        assert rank["finite_states"]
        assert rank["digests"] == found[0]["digests"]
        assert [event["host"] for event in rank["events"] if event["event"] == "host-left-out"] == ["pc0"]


def test_a_host_that_is_left_out_too_often_stops_the_run(pool):
    for rank in pool(2).run(cases_local_sgd.poisoned, shares=[3, 3], host=1, bad="all", rounds=8):
        assert rank["error"]["kind"] == "RunFailed"
        assert "4 rounds in a row" in rank["error"]["what"]
        assert "pc1" in rank["error"]["seen"]
        assert rank["rounds"] == 4


def test_a_round_in_which_no_host_moved_changes_nothing(pool):
    found = pool(1).run(cases_local_sgd.poisoned, shares=[3], host=0, bad="all", rounds=2)[0]
    assert found["digests"][0] == found["digests"][1]
    assert found["digests"][1] != found["digests"][2]
    assert found["skipped_lines"] == [True, True, *[False] * 6]


@pytest.mark.parametrize(
    ("shares", "hosts", "job"),
    [
        ([5, 3, 2], None, {}),
        ([5, 3, 2], None, {"precision": "fp16"}),
        ([5, 3, 2], ["a", "a", "b"], {}),
        ([5, 3, 2], None, {"outer": (1.0, 0.0)}),
    ],
)
def test_asked_to_leave_within_a_round_it_saves_at_its_end_and_goes_on_bit_equal(pool, tmp_path, shares, hosts, job):
    arguments = {"shares": shares, "hosts": hosts, "job": job}
    whole = pool(3).run(cases_local_sgd.piece, folder=str(tmp_path / "whole"), **arguments)
    first = pool(3).run(cases_local_sgd.piece, folder=str(tmp_path / "cut"), stop_in_step=30, **arguments)
    assert [(rank["result"], rank["step"]) for rank in first] == [("stopped", 8)] * 3
    second = pool(3).run(cases_local_sgd.piece, folder=str(tmp_path / "cut"), resume_step=8, **arguments)
    for before, after, wanted in zip(first, second, whole, strict=True):
        assert before["losses"] + after["losses"] == wanted["losses"]
        assert before["digests"] + after["digests"] == wanted["digests"]
        assert after["states"] == wanted["states"]
    if hosts is None:  # every host went its own way, and goes on with its own states
        assert len({rank["states"] for rank in second}) == 3


def test_other_hosts_go_on_from_any_part(pool, tmp_path):
    first = pool(3).run(cases_local_sgd.piece, folder=str(tmp_path), shares=[5, 3, 2], stop_in_step=30)
    assert first[0]["step"] == 8
    fewer = pool(2).run(cases_local_sgd.piece, folder=str(tmp_path), shares=[7, 3], hosts=["pc1", "new"], resume_step=8)
    assert [rank["result"] for rank in fewer] == ["finished"] * 2
    assert fewer[0]["digests"] == fewer[1]["digests"]
    assert fewer[0]["losses"][-1][1] < first[0]["losses"][0][1]


def test_evaluations_and_saves_come_at_ends_of_rounds(pool):
    for rank in pool(2).run(cases_local_sgd.borders, shares=[6, 4]):
        assert rank["evaluations"] == [0, 8, 12, 16, 20, 22]
        assert rank["saves"] == [8, 12, 20, 22]


def test_the_loss_falls_about_as_far_as_that_of_plain_steps(pool):
    found = pool(3).run(cases_local_sgd.learns, shares=[4, 4, 4], payloads=["int8", "fp32"], steps=80)[0]
    plain = found["plain"][-1][1]
    for payload in ("int8", "fp32"):
        start, end = found[payload][0][1], found[payload][-1][1]
        assert found["plain"][0][1] == pytest.approx(start, rel=FP32_SUM)
        assert plain < 0.75 * start
        assert end < 1.05 * plain


def test_a_slow_host_gets_less_from_the_first_round_on(pool):
    found = pool(2).run(cases_local_sgd.speeds, shares=[6, 6], slowdown=4.0)
    assert found[0]["digests"] == found[1]["digests"]
    assert [sum(counts) for counts in found[0]["micro_batches"]] == [48] * 6
    (start,) = (event for event in found[0]["events"] if event["cause"] == "start")
    assert start["before"] == [6, 6]
    assert "pc0 6 -> " in start["what"]
    fast, slow = (sum(counts) for counts in zip(*found[0]["micro_batches"], strict=True))
    assert slow < fast / 1.5


def test_time_that_a_rank_only_joins_in_does_not_make_it_look_slow(pool):
    busy_s = pool(2).run(cases_local_sgd.joins)
    assert busy_s[0] > 0
    assert busy_s[1] == 0


@pytest.mark.parametrize(("head_answers", "host"), [(True, "pc2"), (False, "a host")])
def test_a_host_that_hangs_is_named_by_the_others_after_a_few_rounds_time(zygote, head_answers, host):
    ranks = zygote.gang(3, cases_local_sgd.hung, {"shares": [4, 3, 3], "head_answers": head_answers})
    *others, _ = ranks.results()
    for rank in others:
        assert rank["error"]["kind"] == "RunFailed"
        assert rank["error"]["what"].startswith(f"{host} did not end a round")
        assert ("cannot be known" in rank["error"]["seen"]) is not head_answers
        assert rank["beats"] > 0


def test_a_long_exchange_between_hosts_is_no_hang_and_no_rank_runs_ahead_of_it(pool):
    first, second, other = pool(3).run(cases_local_sgd.beats, hosts=["a", "a", "b"], chunk=6000)
    assert first["num_chunks"] > 3
    assert first["noted"] == other["noted"] == ["beat"] * first["num_chunks"]
    assert second["noted"] == ["synchronize", "beat"] * first["num_chunks"]
