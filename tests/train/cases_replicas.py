"""What the ranks do in test_replicas: replicas that stay equal, drift, or are damaged."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist

from gangline.errors import GanglineError
from gangline.runs.job import StrategyJob
from gangline.worker import replicas
from gangline.worker.batch import collate
from gangline.worker.loop import Loop
from gangline.worker.loss import CausalLoss
from gangline.worker.model import load_model, trainable
from gangline.worker.progress import TrainingProgress
from gangline.worker.rank_files import StopFlag
from gangline.worker.replicas import Replicas, digest
from gangline.worker.run_io import RunIO
from tests.train.small import Captured, MemorySet, made, make_job, make_session, make_world


def gradients(shares, *, exchange: str):
    """The digest of the summed gradient on this rank, twice."""
    rank = dist.get_rank()
    job = make_job(precision="fp32", dropout=0.0, exchange=exchange)
    loss = CausalLoss(load_model(job), compute=torch.float32)
    ddp = made(loss, job, make_world(shares, rank=rank))
    rows, found = MemorySet(sum(shares), seed=9), []
    mine = range(sum(shares[:rank]), sum(shares[: rank + 1]))
    for _ in range(2):
        for row in mine:
            ddp.forward_backward(collate([rows.sample(row)]), scale=0.25, last=row == mine[-1])
        found.append(str(digest(parameter.grad for parameter in trainable(loss).values())))
    return found


def training(
    shares,
    *,
    flip: dict | None = None,
    kinds=None,
    drift: float = 0.0,
    rounds: bool = False,
    save_at=None,
    every=5,
    optimizer: str = "adamw",
):
    """Train 12 steps. flip: {"rank", "step", "bit"}: after that step one bit of one weight changes on that rank; the bit
    None: the weight is no number any more.

    kinds: of the ranks' machines. drift: every rank's weights are off by so much, relatively, at random, in each step.
    """
    rank = dist.get_rank()
    job = make_job(precision="fp32", steps=12, batch=sum(shares), dropout=0.0, optimizer=optimizer)
    world = make_world(shares, rank=rank)
    if rounds:
        job = replace(job, strategy=StrategyJob(kind="local-sgd", inner_steps=3))
        world = replace(world, gang=replace(world.gang, strategy="local-sgd"))
    job = replace(job, checkpoint=replace(job.checkpoint, every_steps=save_at))
    session = make_session(job, world, num_evaluation=0)
    saver, captured, progress = Kept(), Captured([], [], [], []), TrainingProgress()
    loop = Loop(session, RunIO(recorder=captured, saver=saver, stop=StopFlag()), progress)
    _harm(loop, session, progress, flip if flip and flip["rank"] == rank else None, drift=drift)
    kind = (kinds or ["same"] * len(shares))[rank]
    with patch.object(replicas, "EVERY", every), patch.object(replicas, "kind_of", lambda _device: kind):
        try:
            result, error = loop.run(), None
        except GanglineError as caught:
            result, error = "failed", caught.to_json()
    return {
        "result": result,
        "step": progress.step,
        "error": error,
        "saves": saver.steps,
        "events": [event for event in captured.events if event["event"] == "replicas-differ"],
    }


class Kept:
    """A saver that remembers which steps it was given."""

    failure = None
    busy = False

    def __init__(self) -> None:
        self.steps: list[int] = []

    def save(self, step, tensors, state, *, wait=False) -> None:
        self.steps.append(step)

    def wait(self) -> None:
        """Nothing is in flight."""


def _harm(loop, session, progress, flip, *, drift: float) -> None:
    """After the update of every step, before anybody looks."""
    stepper = loop._stepper
    look, dice = stepper._replicas.look, torch.Generator().manual_seed(dist.get_rank())

    def harm_and_look(*, step):
        for parameter in trainable(session.model).values() if drift else ():
            off = torch.randn(parameter.shape, generator=dice) * drift
            parameter.data.mul_(1 + off)
        if flip and progress.step == flip["step"]:
            _flip(next(iter(trainable(session.model).values())), flip["bit"])
        look(step=step)

    stepper._replicas.look = harm_and_look


def _flip(parameter, bit: int | None) -> None:
    if bit is None:
        parameter.data.fill_(float("nan"))
        return
    bits = parameter.data.view(torch.int32).view(-1)
    bits[3] ^= -(1 << 31) if bit == 31 else 1 << bit


def begins(shares, *, factor: float, kinds):
    """Rank 1 begins, at step 1000, with one weight that is `factor` times as large; how that is taken."""
    rank = dist.get_rank()
    session = make_session(make_job(precision="fp32"), make_world(shares, rank=rank), num_evaluation=0)
    if rank == 1:
        next(iter(trainable(session.model).values())).data.view(-1)[3] *= factor
    captured = Captured([], [], [], [])
    outlets = RunIO(recorder=captured, saver=None, stop=StopFlag())
    with patch.object(replicas, "kind_of", lambda _device: kinds[rank]):
        looking = Replicas(session, outlets)
        try:
            looking.begin(step=1000)
            looking.verify_replicas(step=1001)
        except GanglineError as error:
            return error.to_json()
    return None


def digests(bits):
    """Of a small tensor, and of the same with one bit changed, bit by bit; True where they differ."""
    tensor = torch.randn(7, 5)
    found = []
    for bit in bits:
        other = tensor.clone()
        _flip(other, bit)
        found.append(digest([tensor, tensor[0]]) != digest([other, tensor[0]]))
    return [found, digest([tensor[0], tensor[1]]) != digest([tensor[1], tensor[0]])]
