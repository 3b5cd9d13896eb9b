"""What the ranks do in test_spikes: whole runs in which some steps are far off."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch.distributed as dist

from gangline.errors import GanglineError
from gangline.worker import spikes
from gangline.worker.model import trainable
from gangline.worker.progress import TrainingProgress
from gangline.worker.replicas import digest
from tests.train.small import make_job, make_session, make_world, run_loop


def far_off(shares, *, bad_steps, num_steps: int = 24, window: int = 12):
    """Train with steps (1-based) whose loss and gradient are 30 times as large as they are; judged after `window`."""
    job = make_job(precision="fp32", steps=num_steps, batch=sum(shares))
    session = make_session(job, make_world(shares, rank=dist.get_rank()), num_evaluation=0)
    progress = TrainingProgress()
    weights = _note_weights(session, progress, bad_steps)
    with patch.object(spikes, "WINDOW", window):
        try:
            result, captured = run_loop(session, progress=progress)
        except GanglineError as error:
            return {"error": error.to_json()}
    return {
        "result": result,
        "events": [event for event in captured.events if event["event"] == "spike"],
        "moved": [step for step in range(1, num_steps) if weights[step] != weights[step - 1]],
        "order": [[int(each) for each in session.order.samples(step)] for step in range(num_steps)],
    }


def _note_weights(session, progress, bad_steps) -> dict[int, int]:
    """The weights that every step begins with, by steps done; in bad ones this rank's part is 30 times as large."""
    plain, weights = session.strategy.forward_backward, {}

    def forward_backward(batch, *, scale, last):
        weights.setdefault(progress.step, digest(trainable(session.model).values()))
        factor = 30.0 if progress.step + 1 in bad_steps else 1.0
        return plain(batch, scale=scale * factor, last=last) * factor

    session.strategy.forward_backward = forward_backward
    return weights


def ordinary(*, seed: int, learning_rate: float, num_steps: int):
    """Spikes in a run of one rank to which nothing happens."""
    job = make_job(precision="fp32", steps=num_steps, batch=4, seed=seed)
    job = replace(job, optimizer=replace(job.optimizer, learning_rate=learning_rate))
    session = make_session(job, make_world([4], rank=0), num_evaluation=0)
    _, captured = run_loop(session)
    losses = [loss for _, loss, _ in captured.steps]
    return {"spikes": [each for each in captured.events if each["event"] == "spike"], "losses": losses}
