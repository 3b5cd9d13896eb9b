"""What the ranks do in test_moving: whole runs whose shares move again and again, against one process."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch.distributed as dist

from gangline.runs.checkpoints import part_folder
from gangline.runs.manifest import PART_FILE, commit_record
from gangline.worker.agree import RankTimes, StepReport, agree
from gangline.worker.balance import LoadBalancer
from gangline.worker.batch import pick
from gangline.worker.checkpoint import Saver
from gangline.worker.loop import Loop
from gangline.worker.pace import SLOWDOWN, TokenSpeed
from gangline.worker.progress import TrainingProgress, restore
from gangline.worker.rank_files import StopFlag
from gangline.worker.run_io import RunIO
from tests.saved import place_commit
from tests.train.small import Captured, make_job, make_session, make_world, scratch

SPEEDS = ((1.0, 0.55, 0.45), (0.4, 0.55, 0.45), (0.4, 0.55, 1.3), (1.0, 0.2, 0.45))
"""Of three machines, each for PHASE steps, and then again from the beginning."""
PHASE = 15


class ScriptedDealer(LoadBalancer):
    """Is told times by the clock of SPEEDS instead of those that were measured."""

    def __init__(self, shares, progress: TrainingProgress) -> None:
        super().__init__(shares, moving=True)
        self._progress = progress

    def begin(self, seconds):
        return super().begin([1 / speed for speed in self._now(self._progress.step)])

    def learn(self, times, work):
        speeds = self._now(self._progress.step - 1)
        work_split = self.split_work(len(work))
        said = [sum(work[index] for index in mine) / speed for mine, speed in zip(work_split, speeds, strict=True)]
        return super().learn([SimpleNamespace(data_s=0.0, compute_s=each) for each in said], work)

    @staticmethod
    def _now(step: int):
        return SPEEDS[step // PHASE % len(SPEEDS)]


def _moving(world):
    return replace(world, gang=replace(world.gang, moving_shares=True))


def _run(session, *, progress=None, saver=None, stop_at=None):
    """A run of which `samples` holds (step, sample) of what this rank read; scripted where shares move."""
    progress = progress or TrainingProgress()
    captured, stop = Captured([], [], [], []), StopFlag()
    shares = []

    def step(report, *, step, **figures):
        captured.steps.append((step, figures["loss"], figures["grad_norm"]))
        shares.append(list(figures["shares"]))
        stop.raised = step + 1 == stop_at  # the next step is the last

    captured.step = step
    loop = Loop(session, RunIO(recorder=captured, saver=saver, stop=stop), progress)
    if session.world.gang.moving_shares:
        loop._stepper._balancer = ScriptedDealer(session.world.shares, progress)
    plain = session.train_set.sample

    def sample(index):
        captured.samples.append((progress.step, int(index)))
        return plain(index)

    begin = loop._stepper.begin

    def begin_unseen():
        begin()
        captured.samples.clear()  # what is measured before the first step is no training

    loop._stepper.begin = begin_unseen
    session.train_set.sample = sample
    loop.run()
    return captured, shares


def losses(*, method: str, precision: str, warmup: int, pieces: bool, steps: int):
    """Losses of steps whose shares move and of one process; what was read, and how shares moved.

    pieces: the one process does the same micro-batches, with dropout; else the whole batch at once.
    """
    job = make_job(method=method, precision=precision, steps=steps, batch=6, dropout=0.1 if pieces else 0.0)
    job = replace(job, schedule=replace(job.schedule, warmup_steps=warmup))
    split, shares = _run(make_session(job, _moving(make_world([2, 2, 2], rank=dist.get_rank())), num_evaluation=0))
    told = {"read": split.samples, "shares": shares}
    if dist.get_rank() > 0:
        return told
    job = replace(job, micro_batch=1 if pieces else 6)
    alone, _ = _run(make_session(job, make_world([job.batch // job.micro_batch], rank=0), num_evaluation=0))
    return told | {"split": split.steps, "alone": alone.steps, "whole": alone.samples, "events": split.events}


def interrupted(*, folder: str, stop_at: int):
    """Losses of a run whose shares move: to its end, and stopped, saved and gone on with, from the planned shares."""
    rank = dist.get_rank()
    job = make_job(precision="fp64", steps=40, batch=6)
    world = _moving(make_world([2, 2, 2], rank=rank, hosts=["pc", "pc", "pc"]))
    through, _ = _run(make_session(job, world, num_evaluation=0))
    checkpoints = scratch(folder)
    description = {"attempt": 1, "hosts": ("pc",), "num_ranks": 3, "fingerprints": {"train": "t"}}
    saver = Saver(checkpoints, host="pc", job=job.checkpoint, description=description) if rank == 0 else None
    first, before = _run(make_session(job, world, num_evaluation=0), saver=saver, stop_at=stop_at)
    if rank == 0:
        part = (part_folder(checkpoints, stop_at, "pc") / PART_FILE).read_bytes()
        place_commit(checkpoints, commit_record({"pc": part}))
    dist.barrier()
    session = make_session(job, replace(world, gang=replace(world.gang, resume_step=stop_at)), num_evaluation=0)
    second, after = _run(session, progress=restore(session, checkpoints))
    return {
        "through": through.steps,
        "pieces": [*first.steps, *second.steps],
        "shares": [before, after],
    }


class Clock:
    """Time that passes only where somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


TOKEN_S = 0.001


def _clocked(slowdown: float):
    """A rank alone, slowed, whose strategy takes TOKEN_S for every token; its pace, and the clock."""
    world = make_world([5], rank=0)
    session = make_session(make_job(precision="fp32"), world, num_evaluation=0)
    clock = Clock()
    plain = session.strategy.forward_backward

    def forward_backward(batch, *, scale, last):
        clock.sleep(TOKEN_S * batch.input_ids.numel() * (5 if clock.now_s == 0 else 1))  # the first pass is slow
        return plain(batch, scale=scale, last=last)

    session.strategy.forward_backward = forward_backward
    with patch.dict(os.environ, {SLOWDOWN: str(slowdown)}):
        return session, TokenSpeed(session), clock


def paced(*, slowdown: float, counts):
    """Compute seconds per token of steps with so many micro-batches, as the loop measures them."""
    session, pace, clock = _clocked(slowdown)
    found = []
    with patch("gangline.worker.pace.time", clock):
        for step, count in enumerate(counts):
            started, tokens = clock.now_s, 0
            for samples in session.order.micro_batches(step)[:count]:
                batch = pick(samples, session.train_set)
                pace.simulate_slowness(batch)
                session.strategy.forward_backward(batch, scale=1.0, last=False)
                tokens += batch.input_ids.numel()
            pace.took(clock.now_s - started)
            found.append((clock.now_s - started) / tokens if tokens else None)
    return found


def probed(*, slowdown: float):
    """Seconds per token that the probe finds, how often it went through the model, and the gradient that it left."""
    session, pace, clock = _clocked(slowdown)
    micro_batches = session.order.micro_batches(0)
    with patch("gangline.worker.pace.time", clock):
        (seconds,) = pace.probe(micro_batches)
    left = sum(float(each.grad.abs().sum()) for each in session.model.parameters() if each.grad is not None)
    tokens = len(session.train_set.sample(int(micro_batches[0][0])).input_ids)
    return {"token_s": seconds / tokens, "took_s": clock.now_s, "tokens": tokens, "left": left}


def reports():
    """What this rank knows of all ranks' times after each of 50 steps, of times that no two ranks measured alike."""
    world = make_world([4, 3, 3], rank=dist.get_rank())
    dice = random.Random(dist.get_rank())
    found = []
    for _ in range(50):
        data_s, compute_s, wait_s = (dice.lognormvariate(0, 8) for _ in range(3))
        own = RankTimes(data_s=data_s, compute_s=compute_s, wait_s=wait_s, memory_bytes=dice.getrandbits(40))
        agreed = agree(StepReport(loss_sum=dice.random(), times=(own,)), world)
        found.append({"own": data_s + compute_s, "all": [each.data_s + each.compute_s for each in agreed.times]})
    return found
