"""After how many minutes a run saves."""

from types import SimpleNamespace

import pytest
import torch

from gangline.runs.checkpoints import FIRST_MIN, LEAST_MIN
from gangline.runs.job import CheckpointJob
from gangline.worker import run_io as keep
from gangline.worker.checkpoint import Saver
from gangline.worker.progress import TrainingProgress
from gangline.worker.rank_files import StopFlag
from gangline.worker.run_io import CheckpointSchedule, RunIO


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(keep, "time", clock)
    return clock


def checkpoints(job, saver):
    session = SimpleNamespace(job=SimpleNamespace(checkpoint=job), order=SimpleNamespace(steps_per_epoch=1))
    return CheckpointSchedule(session, RunIO(recorder=None, saver=saver, stop=StopFlag()), TrainingProgress())


def saver(folder, job):
    description = {"attempt": 1, "hosts": ("pc1",), "num_ranks": 1, "fingerprints": {}}
    return Saver(folder, host="pc1", job=job, description=description)


def is_up_after(checkpoints, clock, minutes):
    begun, clock.now = clock.now, clock.now + 60 * minutes
    found, clock.now = checkpoints.minutes_are_up, begun
    return found


def test_minutes_of_the_job_count_on_every_rank(clock):
    each = checkpoints(CheckpointJob(every_minutes=3.0), None)
    assert (is_up_after(each, clock, 2.9), is_up_after(each, clock, 3.1)) == (False, True)


def test_without_minutes_they_are_never_up(clock):
    assert not is_up_after(checkpoints(CheckpointJob(every_minutes=None), None), clock, 1e6)


def test_left_to_us_it_follows_from_what_the_last_save_cost(tmp_path, clock):
    job = CheckpointJob(every_minutes="auto")
    each = saver(tmp_path, job)
    kept = checkpoints(job, each)
    assert (is_up_after(kept, clock, FIRST_MIN - 0.1), is_up_after(kept, clock, FIRST_MIN + 0.1)) == (False, True)
    each.save(1, {"weight": torch.zeros(3)}, {"step": 1}, wait=True)
    each.stall_s = 0.0
    assert (is_up_after(kept, clock, LEAST_MIN - 0.1), is_up_after(kept, clock, LEAST_MIN + 0.1)) == (False, True)
    each.stall_s = 2.0  # sqrt(2 * 2 s * 1 day) = 9.8 minutes
    assert (is_up_after(kept, clock, 9.7), is_up_after(kept, clock, 9.9)) == (False, True)


def test_a_rank_that_does_not_save_leaves_it_to_those_that_do(clock):
    assert not is_up_after(checkpoints(CheckpointJob(every_minutes="auto"), None), clock, 1e6)
