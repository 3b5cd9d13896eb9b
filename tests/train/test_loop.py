"""The loop: bad numbers are never hidden, orders are agreed by all ranks, a failed save is not success."""

import math

import pytest

from tests.train import cases_loop


def test_a_step_whose_loss_is_no_number_is_skipped_by_all_ranks_and_its_samples_are_named(pool):
    for rank in pool(2).run(cases_loop.poisoned, shares=[3, 1], bad_samples=1):
        assert rank["result"] == "finished"
        assert rank["finite"]
        skips = [event for event in rank["events"] if event["event"] == "step-skipped"]
        assert len(skips) == 1
        assert skips[0]["step"] == 2
        assert set(rank["poison"]) <= set(skips[0]["samples"])
        assert len(skips[0]["samples"]) == 4
        # the figure of that step says so, too
        assert [math.isnan(loss) for loss in rank["losses"]] == [False, True, False, False, False, False]


def test_more_skips_in_a_row_than_allowed_stop_the_run_with_the_samples(pool):
    for rank in pool(2).run(cases_loop.poisoned, shares=[3, 1], bad_samples=16):
        error = rank["error"]
        assert error["kind"] == "BadState"
        assert error["exit_code"] == 5
        assert "4 steps in a row" in error["what"]
        assert "nan" in error["seen"]
        assert "learning_rate" in error["fix"]


def test_fp16_counts_a_loss_that_is_no_number_but_not_the_search_for_a_scale(pool):
    assert "error" in pool(1).run(cases_loop.poisoned, shares=[4], bad_samples=16, precision="fp16")[0]
    assert pool(1).run(cases_loop.poisoned, shares=[4], bad_samples=0, precision="fp16")[0]["result"] == "finished"


def test_a_full_disk_on_one_host_stops_every_rank(pool):
    other, failing = pool(2).run(cases_loop.full_disk, shares=[5, 5], on_failure="stop")
    assert failing["error"]["what"] == "no room"
    assert failing["saves"] == [3, 6]
    assert other == {"result": "failed", "steps": 7, "saves": None, "failed_saves": [[7, "rank 1 on pc1: no room"]]}


def test_a_job_may_go_on_without_a_save_that_failed(pool):
    other, failing = pool(2).run(cases_loop.full_disk, shares=[5, 5], on_failure="continue")
    assert (failing["result"], failing["steps"], failing["saves"]) == ("finished", 12, [3, 6, 9, 12])
    assert other["result"] == "finished"
    assert other["failed_saves"] == [[7, "rank 1 on pc1: no room"]]


def test_fractions_of_an_epoch_evaluate_and_save_at_the_first_step_that_has_read_so_much(pool):
    found = pool(1).run(cases_loop.marks_of_epochs, evaluate=0.4, save=1.5)[0]
    assert found == {"evaluations": [2, 4, 5, 7, 8, 10, 12], "saves": [6, 12]}


def test_a_run_ends_when_the_evaluation_loss_falls_no_more_and_all_ranks_at_the_same_step(pool):
    for rank in pool(3).run(cases_loop.stops_early, shares=[5, 3, 2], min_improvement=0.1):
        assert rank["attempts"] == [["finished", 8, [0, 2, 4, 6, 8]]]
        assert "has not improved by more than 0.1 in 3 evaluations: the lowest is" in rank["told"][0]
        assert "of step 2" in rank["told"][0]


@pytest.mark.parametrize(("stop_after", "before", "after"), [(5, [0, 2, 4], [6, 8]), (6, [0, 2, 4], [6, 8])])
def test_early_stopping_survives_a_stop_even_one_between_a_step_and_its_evaluation(pool, stop_after, before, after):
    found = pool(1).run(cases_loop.stops_early, shares=[10], stop_after=stop_after)[0]
    assert found["attempts"] == [["stopped", stop_after, before], ["finished", 8, after]]
    assert pool(1).run(cases_loop.stops_early, shares=[10], patience=99)[0]["told"] == []


@pytest.mark.parametrize(
    ("losses", "least", "counts"),
    [
        ([3.0, 2.0, 2.0, 1.9, 2.1, 1.8], 0.0, [0, 0, 1, 0, 1, 0]),
        ([3.0, 2.8, 2.6, 2.0, math.nan, 1.9], 0.5, [0, 1, 2, 0, 1, 2]),
        ([math.nan, 3.0], 0.5, [1, 0]),
    ],
)
def test_an_evaluation_improves_by_more_than_the_least_below_the_lowest(pool, losses, least, counts):
    assert pool(1).run(cases_loop.evaluations_since, losses=losses, min_improvement=least) == [counts]


@pytest.mark.parametrize("asked", [0, 2])
def test_when_one_rank_is_asked_to_leave_all_leave_at_the_same_step(pool, asked):
    shares = [5, 3, 2]
    assert pool(3).run(cases_loop.one_rank_is_asked_to_leave, shares=shares, asked=asked) == [["stopped", 8]] * 3


def test_the_best_evaluation_always_has_a_checkpoint_with_its_own_loss(pool):
    found = pool(1).run(cases_loop.saves_of_the_best, keep_best=True, learning_rate=3e-3)[0]
    losses = dict(map(tuple, found["evaluations"]))
    assert list(losses) == [0, 4, 8, 12, 14]
    assert losses[0] > losses[4] > losses[8] > losses[12]
    assert found["saves"] == [[step, losses[step]] for step in (4, 8, 12, 14)]


def test_an_evaluation_that_is_no_better_is_no_reason_to_save(pool):
    found = pool(1).run(cases_loop.saves_of_the_best, keep_best=True, learning_rate=1e-30)[0]
    losses = dict(map(tuple, found["evaluations"]))
    assert losses[4] == losses[8] == losses[12]
    assert [step for step, _ in found["saves"]] == [4, 14]


def test_without_keep_best_evaluations_save_nothing(pool):
    found = pool(1).run(cases_loop.saves_of_the_best, keep_best=False, learning_rate=3e-3)[0]
    assert [step for step, _ in found["saves"]] == [14]


def test_what_a_callback_of_rank_0_asks_for_is_done_by_all_ranks_and_changes_no_number(pool):
    whole = pool(2).run(cases_loop.with_callback, shares=[3, 1], finish_after=99)
    short = pool(2).run(cases_loop.with_callback, shares=[3, 1], finish_after=3)
    assert [(rank["result"], rank["step"]) for rank in whole] == [("finished", 6)] * 2
    assert [(rank["result"], rank["step"]) for rank in short] == [("finished", 4)] * 2
    for rank in whole:
        assert rank["saves"] == [[2, False], [6, True]]
    for rank in short:
        assert rank["saves"] == [[2, False], [4, True]]
    assert short[0]["asked"] == [[1, "save"], [3, "finish"]]
    assert short[0]["losses"] == whole[0]["losses"][:4]
