"""How often a run saves, where the job leaves that to us."""

import pytest

from gangline.runs.checkpoints import LEAST_MIN, MOST_MIN, minutes_between


def test_what_costs_nothing_is_saved_every_minute():
    assert minutes_between(0.0, 0.0) == LEAST_MIN


def test_a_save_that_holds_training_up_comes_as_young_says():
    assert minutes_between(2.0, 5.0) == pytest.approx((2 * 2.0 * 86400) ** 0.5 / 60)
    assert minutes_between(8.0, 5.0) == pytest.approx(2 * minutes_between(2.0, 5.0))


def test_a_disk_writes_a_twentieth_of_the_time_at_the_most():
    assert minutes_between(0.01, 30.0) == pytest.approx(10.0)


def test_however_long_it_takes_half_an_hour_is_the_most():
    assert minutes_between(600.0, 900.0) == MOST_MIN
