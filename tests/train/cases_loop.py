"""What the ranks do in test_loop and test_strategies: bad numbers, orders, saves that fail, strategies."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gangline.callbacks import CALLBACKS, Action, Callback, Callbacks
from gangline.errors import CheckpointError, GanglineError
from gangline.exporters import ExportedRun
from gangline.runs.job import EarlyStoppingJob
from gangline.worker.batch import collate
from gangline.worker.loop import Loop
from gangline.worker.loss import CausalLoss
from gangline.worker.model import load_model, trainable
from gangline.worker.optimizer import gradient_norm
from gangline.worker.precision import agree_precision
from gangline.worker.progress import TrainingProgress
from gangline.worker.rank_files import StopFlag
from gangline.worker.run_io import RunIO
from gangline.worker.strategy import agree_weights
from tests.train.small import Captured, MemorySet, made, make_job, make_session, make_world, mixture_folder, run_loop


def poisoned(shares, *, bad_samples: int, precision: str = "fp32"):
    """Train on samples of which some give a loss that is not a number."""
    job = make_job(precision=precision, steps=6, batch=4)
    session = make_session(job, make_world(shares, rank=dist.get_rank()), num_samples=24, num_evaluation=0)
    order = [int(sample) for step in range(6) for sample in session.order.samples(step)]
    poison = set(order[4 : 4 + bad_samples])
    plain = session.train_set.sample
    session.train_set.sample = lambda index: _with_token(plain(index), 95) if int(index) in poison else plain(index)
    with torch.no_grad():
        session.model.get_input_embeddings().weight[95] = float("nan")
    before = _flat(session.model)
    try:
        result, captured = run_loop(session)
    except GanglineError as error:
        return {"error": error.to_json(), "poison": sorted(poison)}
    finite = torch.isfinite(_flat(session.model)[torch.isfinite(before)])
    return {
        "result": result,
        "events": captured.events,
        "losses": [loss for _, loss, _ in captured.steps],
        "finite": bool(finite.all()),
        "poison": sorted(poison),
    }


def _with_token(sample, token: int):
    tokens = sample.input_ids.copy()
    tokens[0] = token
    return SimpleNamespace(input_ids=tokens, targets=sample.targets, position_ids=sample.position_ids)


def _flat(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainable(model).values()])


class FailingSaver:
    """A saver whose disk is full at the second save."""

    busy = False

    def __init__(self) -> None:
        self.failure: CheckpointError | None = None
        self.saves: list[int] = []

    def save(self, step, tensors, state, *, wait=False) -> None:
        self.saves.append(step)
        if len(self.saves) == 2:
            self.failure = CheckpointError("no room", seen="0 bytes", fix="make room")
        else:
            self.failure = None

    def wait(self) -> None:
        """Nothing is in flight."""


def full_disk(shares, *, on_failure: str):
    """Save every 3 of 12 steps; rank 1's second save fails."""
    job = make_job(precision="fp32", steps=12)
    job = replace(job, checkpoint=replace(job.checkpoint, every_steps=3, on_failure=on_failure))
    session = make_session(job, make_world(shares, rank=dist.get_rank()), num_evaluation=0)
    saver = FailingSaver() if dist.get_rank() == 1 else None
    try:
        result, captured = run_loop(session, saver=saver)
    except CheckpointError as error:
        return {"error": error.to_json(), "saves": saver.saves}
    return {
        "result": result,
        "steps": len(captured.steps),
        "saves": saver.saves if saver else None,
        "failed_saves": [
            [event["step"], event["what"]] for event in captured.events if event["event"] == "save-failed"
        ],
    }


class ListingSaver:
    """A saver that only remembers what it was given."""

    failure = None
    busy = False

    def __init__(self) -> None:
        self.saves: list[list] = []

    def save(self, step, tensors, state, *, wait=False) -> None:
        self.saves.append([step, state["evaluation_loss"]])

    def wait(self) -> None:
        """Nothing is in flight."""


def saves_of_the_best(*, keep_best: bool, learning_rate: float):
    """Evaluate every 4 of 14 steps and save nowhere else but at the end; saves and evaluations."""
    job = make_job(precision="fp32", steps=14, dropout=0.0)
    job = replace(
        job,
        optimizer=replace(job.optimizer, learning_rate=learning_rate),
        evaluation=replace(job.evaluation, every_steps=4),
        checkpoint=replace(job.checkpoint, keep_best=keep_best),
    )
    saver = ListingSaver()
    _, captured = run_loop(make_session(job, make_world([10], rank=0)), saver=saver)
    return {"saves": saver.saves, "evaluations": [list(entry) for entry in captured.evaluations]}


def marks_of_epochs(*, evaluate: float, save: float):
    """The steps of evaluations and saves of three epochs of four steps each."""
    job = make_job(precision="fp32", steps=None, epochs=3.0, micro_batch=10)
    job = replace(
        job,
        evaluation=replace(job.evaluation, every_epochs=evaluate, at_start=False),
        checkpoint=replace(job.checkpoint, every_epochs=save, keep_best=False),
    )
    saver = ListingSaver()
    session = make_session(job, make_world([1], rank=0), num_samples=37, num_evaluation=2)
    _, captured = run_loop(session, saver=saver)
    return {"saves": [step for step, _ in saver.saves], "evaluations": [step for step, _ in captured.evaluations]}


def stops_early(shares, *, strategy: str = "ddp", patience: int = 3, stop_after: int | None = None, **words):
    """Weights do not move: evaluated every 2 of 20 steps. The steps of each attempt of this rank, and its words.

    stop_after: the step of a stop, after which a second attempt takes over what a checkpoint says.
    """
    job = make_job(precision="fp32", steps=20, dropout=0.0)
    job = replace(
        job,
        optimizer=replace(job.optimizer, learning_rate=1e-30),
        evaluation=replace(job.evaluation, every_steps=2),
        early_stopping=EarlyStoppingJob(patience=patience, **words),
    )
    world = make_world(shares, rank=dist.get_rank(), strategy=strategy)
    progress, attempts = TrainingProgress(), []
    for stop in [stop_after, None] if stop_after else [None]:
        result, captured = run_loop(make_session(job, world), progress=progress, stop_after=stop)
        attempts.append([result, progress.step, [step for step, _ in captured.evaluations]])
        told = [event["what"] for event in captured.events if event["event"] == "early-stopping"]
        progress = TrainingProgress(**json.loads(json.dumps(dataclasses.asdict(progress))))
    return {"attempts": attempts, "told": told}


def evaluations_since(losses, *, min_improvement: float):
    """The count of evaluations without an improvement, after each of these losses."""
    progress, found = TrainingProgress(), []
    for loss in losses:
        progress.step += 1
        progress.evaluated(loss, min_improvement=min_improvement)
        found.append(progress.evaluations_since)
    return found


def one_rank_is_asked_to_leave(shares, *, asked: int):
    """Only rank `asked` gets the signal; the step at which each rank left."""
    job = make_job(precision="fp32", steps=30)
    session = make_session(job, make_world(shares, rank=dist.get_rank()), num_evaluation=0)
    result, captured = run_loop(session, stop_after=8 if dist.get_rank() == asked else None)
    return [result, len(captured.steps)]


def contract(shares, *, method: str, strategy: str, mixture: bool = False):
    """Error of a strategy's gradient against plain autograd over all rows at once; twice, to see leftovers."""
    rank = dist.get_rank()
    job = make_job(method=method, dropout=0.0)
    if mixture:  # torch multiplies groups of rows in fp32 at the most
        job = replace(job, model=replace(job.model, path=mixture_folder()), precision="fp32")
    precision = agree_precision(job, torch.device("cpu"), world_size=1)
    loss = CausalLoss(load_model(job, compute=precision.compute), compute=precision.compute)
    world = make_world(shares, rank=rank, strategy=strategy)
    split = made(loss, job, world, precision=precision)
    rows = MemorySet(sum(shares), seed=9)
    start = sum(shares[:rank])
    mine = range(start, start + shares[rank])
    reference = CausalLoss(load_model(job, compute=precision.compute), compute=precision.compute)
    for _ in range(2):
        for parameter in trainable(loss).values():
            parameter.grad = None
        empty = max(shares) - len(mine) if split.lockstep else int(not mine)
        summed = [
            float(split.forward_backward(collate([rows.sample(row)]), scale=0.25, last=row == mine[-1] and not empty))
            for row in mine
        ]
        for number in range(empty):
            split.join(last=number == empty - 1)
    total = sum(reference(*collate([rows.sample(row)]).tensors) for row in range(sum(shares)))
    (total * 0.25).backward()
    ours, wanted = _gradient(loss), _gradient(reference)
    norm = gradient_norm(trainable(loss).values(), parts=split.shard_group)
    return {
        "error": float((ours - wanted).norm() / wanted.norm()),
        "norm_error": float(abs(norm - wanted.norm()) / wanted.norm()),
        "loss": sum(summed),
        "divided": sum(type(module).__name__.startswith("FSDP") for module in loss.modules()),
        "held": sum(parameter.to_local().numel() for parameter in loss.parameters() if isinstance(parameter, DTensor)),
        "all": sum(parameter.numel() for parameter in loss.parameters() if isinstance(parameter, DTensor)),
    }


def _gradient(loss) -> torch.Tensor:
    gradients = [parameter.grad for parameter in trainable(loss).values()]
    return torch.cat([(each.full_tensor() if isinstance(each, DTensor) else each).flatten() for each in gradients])


def weights_agree():
    """Ranks start with other weights; after `agree_weights` all have those of rank 0."""
    torch.manual_seed(0)
    job = make_job(precision="fp32")
    loss = CausalLoss(load_model(job), compute=torch.float32)
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(iter(trainable(loss).values()))[0, 0] += 1e-7
    before = float(_flat(loss).double().sum())
    agree_weights(trainable(loss).values())
    return [before, float(_flat(loss).double().sum())]


def with_callback(shares, *, finish_after: int):
    """Train for 6 steps with a callback in rank 0 that asks for a save after the first, and for the end later."""
    world = make_world(shares, rank=dist.get_rank())
    session = make_session(make_job(steps=6, batch=4), world, num_samples=24, num_evaluation=0)
    callbacks, captured = None, Captured([], [], [], [])
    if world.is_head:
        CALLBACKS.built_in = {"asker": Callback(open=lambda _options, _run: _Asker(finish_after))}
        run = ExportedRun(run_id="calm-otter-7", attempt=1, folder=Path(), job={})
        callbacks = Callbacks({"asker": {}}, run, on_failure=lambda *what: None)
        plain = captured.step

        def step(report, *, step, **figures):
            plain(report, step=step, **figures)
            callbacks.on_step(step, {"train/loss": figures["loss"]})

        captured.step = step
    saves = []
    loop = Loop(
        session,
        RunIO(recorder=captured, saver=None, stop=StopFlag(), callbacks=callbacks),
        TrainingProgress(),
    )

    def save(*, wait):
        saves.append((loop.progress.step, wait))
        loop._checkpoints._waits = False

    loop._checkpoints.save = save
    return {
        "result": loop.run(),
        "step": loop.progress.step,
        "saves": saves,
        "asked": [(each["step"], each["asks"]) for each in captured.events if each["event"] == "callback"],
        "losses": [loss for _, loss, _ in captured.steps],
    }


class _Asker:
    def __init__(self, finish_after):
        self._finish_after = finish_after

    def on_step(self, step, _values):
        if step == 1:
            return Action.save
        return Action.finish if step == self._finish_after else None
