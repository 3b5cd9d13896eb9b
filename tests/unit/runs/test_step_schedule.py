"""What happens at which step: marks of every so many steps or epochs, and the warm-up as a part of the run."""

import pytest

from gangline.runs.job import ScheduleJob
from gangline.runs.step_schedule import cadence, in_steps, learning_rate, marks_in_words, warmup_steps


def marks(total, *, steps=None, epochs=None, per_epoch=10):
    found = cadence(steps, epochs, steps_per_epoch=per_epoch)
    listed = list(found.steps(total))
    assert listed == [step for step in range(1, total + 1) if found.is_due(step, before=step - 1)]
    return listed


def test_every_so_many_steps():
    assert marks(10, steps=3) == [3, 6, 9]
    assert marks(10) == []


@pytest.mark.parametrize(
    ("epochs", "steps"),
    [
        (1.0, [10, 20, 30]),
        (0.5, [5, 10, 15, 20, 25, 30]),
        (0.25, [3, 5, 8, 10, 13, 15, 18, 20, 23, 25, 28, 30]),
        (1.5, [15, 30]),
        (0.3, [3, 6, 9, 12, 15, 18, 21, 24, 27, 30]),  # 3 * 0.3 is more than 0.9 in floating point
        (0.01, list(range(1, 31))),
        (4.0, []),
    ],
)
def test_a_fraction_of_an_epoch_is_due_at_the_first_step_that_has_read_so_much(epochs, steps):
    assert marks(30, epochs=epochs) == steps


def test_several_steps_at_once_see_the_marks_among_them():
    found = cadence(None, 0.25, steps_per_epoch=10)
    assert [found.is_due(step, before=step - 4) for step in (4, 8, 12)] == [True, True, True]
    assert not cadence(None, 1.0, steps_per_epoch=10).is_due(8, before=4)


def test_marks_are_told_by_their_steps():
    quarters = cadence(None, 0.25, steps_per_epoch=10)
    assert marks_in_words(quarters, 40) == "steps 3, 5, 8, 10 ... 40"
    assert marks_in_words(quarters, 9) == "steps 3, 5, 8"
    assert marks_in_words(quarters, 4) == "step 3"
    assert marks_in_words(quarters, 2) == "no step of this run"


@pytest.mark.parametrize(("ratio", "total", "steps"), [(0.1, 105, 11), (0.03, 100, 3), (0.07, 100, 8), (0.0, 9, 0)])
def test_a_warm_up_that_is_a_part_of_the_run_is_rounded_up_as_transformers_does(ratio, total, steps):
    schedule = ScheduleJob(kind="linear", warmup_ratio=ratio)
    assert warmup_steps(schedule, total) == steps
    assert in_steps(schedule, total) == ScheduleJob(kind="linear", warmup_steps=steps)
    alike = [learning_rate(step, total, peak=2.0, schedule=schedule) for step in range(total)]
    assert alike == [learning_rate(step, total, peak=2.0, schedule=in_steps(schedule, total)) for step in range(total)]


def rates(total, **words):
    return [round(learning_rate(step, total, peak=1.0, schedule=ScheduleJob(**words)), 4) for step in range(total)]


def test_a_rate_that_stays_falls_in_the_last_steps_only():
    assert rates(10, kind="wsd", decay_steps=4, decay="linear") == [1] * 7 + [0.75, 0.5, 0.25]
    assert rates(10, kind="wsd", decay_ratio=0.31, decay="linear", final_ratio=0.5) == [1] * 7 + [0.875, 0.75, 0.625]


def test_a_decay_that_is_longer_than_what_is_left_begins_behind_the_warm_up():
    assert rates(4, kind="wsd", decay_steps=99, decay="linear", warmup_steps=2) == [0.5, 1, 1, 0.5]
    assert in_steps(ScheduleJob(kind="wsd", warmup_ratio=0.5), 10) == ScheduleJob(
        kind="wsd", warmup_steps=5, decay_steps=1
    )


def test_restarts_begin_at_the_full_rate_again():
    found = rates(10, kind="cosine-restarts", cycles=2, final_ratio=0.2)
    assert found[:5] == found[5:] == rates(5, kind="cosine", final_ratio=0.2)


def test_warm_up_may_begin_with_a_step_at_zero():
    assert rates(5, kind="constant", warmup_steps=4, warmup_from_zero=True) == [0, 0.25, 0.5, 0.75, 1]
