"""Steps that are finite and far off are skipped by all ranks, and not for ever."""

import pytest

from tests.train import cases_spikes


def test_a_step_that_is_far_off_moves_no_rank_and_its_samples_are_named(pool):
    found = pool(2).run(cases_spikes.far_off, shares=[3, 1], bad_steps=[16])
    for rank in found:
        assert rank["result"] == "finished"
        assert [event["step"] for event in rank["events"]] == [16]
        assert rank["events"][0]["samples"] == rank["order"][15]
        assert rank["events"][0]["loss"] > 10 * rank["events"][0]["usual_loss"]
        assert 16 not in rank["moved"]
        assert {15, 17} <= set(rank["moved"])


def test_more_of_them_in_a_row_than_allowed_end_the_attempt_and_what_it_holds_is_not_to_be_saved(pool):
    for rank in pool(2).run(cases_spikes.far_off, shares=[3, 1], bad_steps=[16, 17, 18, 19]):
        assert rank["error"]["kind"] == "BadState"
        assert "4 steps in a row, up to step 19" in rank["error"]["what"]
        assert "loss" in rank["error"]["seen"]


def test_before_enough_steps_were_seen_nothing_is_far_off(pool):
    found = pool(2).run(cases_spikes.far_off, shares=[3, 1], bad_steps=[10])
    assert [rank["events"] for rank in found] == [[], []]


@pytest.mark.parametrize(("seed", "learning_rate"), [(7, 3e-4), (8, 3e-3)])
def test_an_ordinary_run_has_none(pool, seed, learning_rate):
    found = pool(1).run(cases_spikes.ordinary, seed=seed, learning_rate=learning_rate, num_steps=150)[0]
    assert found["spikes"] == []
    assert min(found["losses"]) < found["losses"][0]
