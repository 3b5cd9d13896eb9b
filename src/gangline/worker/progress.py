"""The few numbers of a run that are not arithmetic on the step, and how a checkpoint brings them back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gangline.runs.checkpoints import find_parts
from gangline.worker.buckets import named_buckets, receive_tensors, send_tensors
from gangline.worker.process_group import ProcessGroup
from gangline.worker.restore import empty_bucket, give, giver, lacks_state, load_parts, receive, receivers
from gangline.worker.session import Session


@dataclass(slots=True)
class TrainingProgress:
    """Where a run stands. Schedule, sample order and randomness follow from `step`; nothing else needs saving."""

    step: int = 0
    """Optimizer steps done."""
    skipped: int = 0
    skipped_in_a_row: int = 0
    evaluation_loss: float | None = None
    """The last one, of step `evaluated_step`."""
    evaluated_step: int = -1
    best_loss: float | None = None
    """The lowest evaluation loss after the first step."""
    best_step: int = -1
    evaluations_since: int = 0
    """How many there were since the last one that improved; see `EarlyStoppingJob`."""
    bucket_bytes: int | None = None
    """Of a bucket of gradients, with `bucket_ranks` ranks: the place in a bucket decides the order of sums, so the size
    that was measured once stays as long as there are as many ranks."""
    bucket_ranks: int = 0

    def evaluated(self, loss: float, *, min_improvement: float = 0.0) -> None:
        """Take in the evaluation of this step; one that is no number is never the best, and no improvement.

        The loss before the first step is compared with none. min_improvement: see `EarlyStoppingJob`.
        """
        self.evaluation_loss, self.evaluated_step = loss if math.isfinite(loss) else None, self.step
        if self.step == 0:
            return
        lowest = math.inf if self.best_loss is None else self.best_loss
        self.evaluations_since = 0 if loss < lowest - min_improvement else self.evaluations_since + 1
        if loss < lowest:
            self.best_loss, self.best_step = loss, self.step

    @property
    def is_best(self) -> bool:
        """Whether this very step was evaluated, and better than all before it."""
        return self.best_step == self.step

    def to_json(self, scaler: torch.amp.GradScaler | None) -> dict[str, Any]:
        """The state that is saved beside the tensors."""
        # retention compares it: the loss of another step's weights would make the wrong checkpoint the best
        loss = self.evaluation_loss if self.evaluated_step == self.step else None
        scale = scaler.state_dict() if scaler is not None else None
        return {**dataclasses.asdict(self), "evaluation_loss": loss, "scaler": scale}


def restore(session: Session, checkpoints: Path) -> TrainingProgress:
    """Load the checkpoint that the controller chose for this attempt, if any; collective where hosts lack it.

    Raises CheckpointError.
    """
    step = session.world.gang.resume_step
    if step is None:
        return TrainingProgress()
    strategy, world = session.strategy, session.world
    tensors = strategy.as_shards(session.state_tensors())
    remote = strategy.remote_names(tensors)
    load = strategy.state_loader()
    if load is not None:
        state = _load_in_buckets(load, tensors, checkpoints, world)
        strategy.loaded()
    elif lacks_state(world):
        state = receive(tensors, world)
    else:
        state = load_parts(find_parts(checkpoints, step, host=world.host), tensors, elsewhere=remote)
        give(tensors, state, world)
    scaler = state.pop("scaler")
    if session.scaler is not None and scaler:
        session.scaler.load_state_dict(scaler)
    return TrainingProgress(**state)


def _load_in_buckets(
    load: Callable[[Mapping[str, torch.Tensor]], None],
    tensors: Mapping[str, torch.Tensor],
    checkpoints: Path,
    world: ProcessGroup,
) -> dict[str, Any]:
    """For shards that are no rows of a tensor: one bucket of whole tensors at a time is there, and divided."""
    if lacks_state(world):
        for bucket in named_buckets(tensors):
            received = empty_bucket(bucket)
            receive_tensors(received.values(), giver(world))
            load(received)
        return receive({}, world)

    def take(bucket: dict[str, torch.Tensor]) -> None:
        if lacking := receivers(world):
            send_tensors(bucket.values(), lacking)
        load(bucket)

    assert world.gang.resume_step is not None
    state = load_parts(find_parts(checkpoints, world.gang.resume_step, host=world.host), tensors, take=take)
    give({}, state, world)
    return state
