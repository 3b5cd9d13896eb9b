"""The loss on the evaluation set: the same number on any number of ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gangline.worker.batch import deal, empty_batch, pick
from gangline.worker.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Loss per trained token over the whole set."""

    loss: float
    label_tokens: int
    duration_s: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(session: Session, *, shares: Sequence[int], beat: Callable[[], None] = lambda: None) -> Evaluation:
    """Mean loss over all trained tokens of the evaluation set, or of its first `evaluation.max_samples` samples.

    Micro-batches are the same on any number of ranks and are only dealt differently, by `shares`; sums are in fp64;
    every sample counts once, for nothing is padded to equal counts. beat: called before every micro-batch, for an
    evaluation is long, and no hang.
    """
    started = time.perf_counter()
    source, loss, world = session.evaluation_set, session.loss, session.world
    assert source is not None, "nothing to evaluate on"
    micro_batch = session.job.micro_batch
    num_samples = min(len(source), session.job.evaluation.max_samples or len(source))
    starts = range(0, num_samples, micro_batch)
    sums = torch.zeros(2, dtype=torch.float64)
    was_training = loss.training
    loss.eval()
    strategy = session.strategy
    dealt = deal(len(starts), shares, world.gang.crews)
    for index in dealt[world.rank]:
        beat()
        batch = pick(range(starts[index], min(starts[index] + micro_batch, num_samples)), source)
        sums[0] += strategy.evaluate(batch.to(world.device)).double().cpu()
        sums[1] += strategy.counts_loss * float(
            source.label_counts[starts[index] : starts[index] + len(batch.input_ids)].sum()
        )
    for _ in range(max(map(len, dealt)) - len(dealt[world.rank]) if strategy.lockstep else 0):
        beat()
        strategy.evaluate(empty_batch().to(world.device))
    strategy.reshard()
    loss.train(was_training)
    if world.size > 1:
        dist.all_reduce(sums)
    total, tokens = sums.tolist()
    return Evaluation(loss=total / max(1.0, tokens), label_tokens=int(tokens), duration_s=time.perf_counter() - started)
