"""The figures that the page draws: least, mean and most of each bucket, only what is new, ranks of every n-th step."""

import json
import math

import pytest

from gangline.page.series import MOST_BUCKETS, MOST_RANK_ROWS, RunSeries, SeenBefore


def line(step, *, loss=1.0, attempt=1, ranks=(), **more):
    record = {"kind": "step", "time": "2026-11-21T07:01:48.000Z", "attempt": attempt, "step": step, "steps": 9000}
    return json.dumps({**record, "loss": loss, "step_s": 1.0, **more, "ranks": list(ranks)})


def row(rank, host="pc1", **more):
    figures = {"micro_batches": 2, "data_s": 0.1, "compute_s": 0.5, "wait_s": 0.3, "wait_others_s": 0.2}
    return {"rank": rank, "host": host, **figures, "memory_bytes": 100 + rank, **more}


def fed(lines):
    series = RunSeries()
    series.feed(lines)
    return series


def test_a_short_run_is_drawn_step_by_step():
    told = fed(line(step, loss=1 / step) for step in range(1, 11)).buckets()
    assert (told["width"], told["step"], told["figures"]["loss"]["mean"][3]) == (1, list(range(1, 11)), 0.25)
    assert "low" not in told["figures"]["loss"]


def test_a_spike_of_one_step_is_seen_in_a_long_run():
    told = fed(line(step, loss=50.0 if step == 4321 else 2.0) for step in range(1, 9001)).buckets()
    assert len(told["step"]) <= MOST_BUCKETS
    assert (max(told["figures"]["loss"]["high"]), min(told["figures"]["loss"]["low"])) == (50.0, 2.0)
    assert told["step"][-1] == 9000


def test_a_part_of_a_run_is_drawn_as_finely_as_it_goes():
    told = fed(line(step) for step in range(1, 9001)).buckets(first=4000, last=4099)
    assert (told["width"], told["step"][0], told["step"][-1]) == (1, 4000, 4099)


def test_a_figure_that_is_not_finite_is_left_out_of_its_bucket():
    told = fed(line(step, loss="nan" if step % 2 else 3.0) for step in range(1, 3001)).buckets()
    loss = told["figures"]["loss"]
    assert set(loss["mean"]) | set(loss["low"]) | set(loss["high"]) == {3.0}
    assert fed([line(1, loss="inf")]).buckets()["figures"]["loss"]["mean"] == [None]
    json.dumps(told, allow_nan=False)


@pytest.mark.parametrize("before", [5, 999, 2500, 8000])
def test_what_comes_later_completes_what_was_there_before(before):
    series = fed(line(step, loss=step) for step in range(1, before + 1))
    had = series.buckets()
    series.feed(line(step, loss=step) for step in range(before + 1, before + 41))
    seen = SeenBefore(generation=had["generation"], width=had["width"], count=len(had["step"]))
    news, whole = series.buckets(before=seen), series.buckets()
    keep = news["from"]
    assert had["step"][:keep] + news["step"] == whole["step"]
    assert had["figures"]["loss"]["mean"][:keep] + news["figures"]["loss"]["mean"] == whole["figures"]["loss"]["mean"]
    if had["width"] == whole["width"]:
        assert len(news["step"]) <= 41 / news["width"] + 2, "only what is new is sent"


def test_after_a_resume_the_steps_that_are_done_again_count():
    series = fed(line(step, loss=1.0) for step in range(1, 61))
    had = series.buckets()
    series.feed(line(step, loss=2.0, attempt=2) for step in range(51, 56))
    seen = SeenBefore(generation=had["generation"], width=had["width"], count=len(had["step"]))
    told = series.buckets(before=seen)
    assert (told["from"], told["step"]) == (0, list(range(1, 56))), "all of it is sent anew"
    assert told["figures"]["loss"]["mean"][49:51] == [1.0, 2.0]
    assert told["attempts"] == [[1, 1], [2, 51]]


def test_lines_that_are_none_are_passed_over():
    series = fed(
        ["", "{", "[1]", '{"kind": "step", "step": "7"}', line(1), '{"kind": "evaluation", "step": 1, "loss": 0.5}']
    )
    assert (list(series.steps), series.buckets()["evaluations"]) == ([1], [[1, 0.5]])


def test_the_time_of_a_rank_is_divided_as_everywhere():
    told = fed([line(1, ranks=[row(0), row(1, "pc2", wait_s=0.1, wait_others_s=0.0)])]).ranks.document()
    assert told["parts"] == ["compute_s", "data_s", "waits_s", "network_s", "rest_s"]
    assert told["means"][0] == pytest.approx([0.5, 0.1, 0.2, 0.1, 0.1])
    assert told["means"][1] == pytest.approx([0.5, 0.1, 0.0, 0.1, 0.3])
    assert (told["shares"], told["memory"]) == ([[2], [2]], [[100], [101]])


def test_one_rank_or_the_mean_of_all_of_them_is_drawn_over_the_steps():
    series = fed([line(1, ranks=[row(0, compute_s=0.2), row(1, "pc2", compute_s=0.4)])])
    assert series.ranks.document()["time"][0] == [pytest.approx(0.3)]
    assert series.ranks.document(rank=(1, "pc2"))["time"][0] == [0.4]


def test_of_a_long_run_the_ranks_of_every_n_th_step_are_kept():
    series = fed(line(step, ranks=[row(0), row(1)]) for step in range(1, 5001))
    told = series.ranks.document()
    assert told["every"] == 8
    assert len(told["step"]) <= 128
    assert told["step"][-1] > 4900
    assert MOST_RANK_ROWS * told["every"] >= 5000


def test_a_host_that_leaves_and_one_that_comes_keep_their_own_columns():
    first = [line(step, ranks=[row(0), row(1, "pc2")]) for step in range(1, 4)]
    later = [line(step, attempt=2, ranks=[row(0), row(1, "pc3")]) for step in range(4, 7)]
    told = fed(first + later).ranks.document()
    assert [each["host"] for each in told["ranks"]] == ["pc1", "pc2", "pc3"]
    assert told["shares"][1] == [2, 2, 2, None, None, None]
    assert told["shares"][2] == [None, None, None, 2, 2, 2]


def test_a_host_name_with_a_bracket_costs_no_step():
    series = fed(line(step, ranks=[row(0, "pc[1]")]) for step in range(1, 2 * MOST_RANK_ROWS))
    assert len(series.steps) == 2 * MOST_RANK_ROWS - 1
    assert not any(math.isnan(loss) for loss in series.columns["loss"])
