"""What the ranks do in test_contract: the same for every strategy, through the protocol alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from gangline.errors import UsageError
from gangline.plugins import Plugin
from gangline.runs.checkpoints import part_folder
from gangline.runs.gang import held_by
from gangline.runs.job import Job, OuterJob, StrategyJob
from gangline.runs.manifest import PART_FILE, commit_record
from gangline.strategies.base import PlanHalf
from gangline.worker.batch import begin_draws, micro_batch_seed, pick, split_work
from gangline.worker.checkpoint import Saver
from gangline.worker.model import trainable
from gangline.worker.optimizer import norm_of
from gangline.worker.precision import agree_precision
from gangline.worker.process_group import ProcessGroup
from gangline.worker.progress import TrainingProgress, restore
from gangline.worker.session import make_strategy
from gangline.worker.strategy import Strategy, StrategySetup
from tests.saved import place_commit
from tests.train.small import make_job, make_session, make_world, run_loop

LARGE_IN_PARTS = {"zero_optimization": {"stage3_param_persistence_threshold": 600}}
"""zero-3: in parts are weights of more numbers than this. Each such tensor takes messages in every pass."""
OUTER = StrategyJob(inner_steps=1, payload="fp32", outer=OuterJob(learning_rate=1.0, momentum=0.0))
"""Rounds that move one host to where its own steps have got."""


def _job(**changes):
    return make_job(dropout=0.0, strategy=OUTER, batch=5, **changes)


def _alone(job, *, device: str = "cpu", **more):
    return make_session(job, make_world([5], rank=0, strategy="single", device=device), **more)


def _accumulate(session, step: int) -> float:
    """One step's passes, as the protocol has them; this rank's part of the summed loss."""
    world, strategy = session.world, session.strategy
    micro_batches = session.order.micro_batches(step)
    work_split = split_work(len(micro_batches), world.shares, world.gang.replica_groups)
    mine = work_split[world.rank]
    empty = max(map(len, work_split)) - len(mine) if strategy.lockstep else int(not mine)
    loss = 0.0
    for index in mine:
        batch = pick(micro_batches[index], session.train_set).to(world.device)
        begin_draws(micro_batch_seed(session.job.seed, step, index), world.device)
        loss += float(strategy.forward_backward(batch, scale=0.25, last=index == mine[-1] and not empty))
    for number in range(empty):
        strategy.join(last=number == empty - 1)
    return loss


def gradient(gang: dict, precision: str):
    """Of two steps after each other, to see what the first leaves behind: errors of the second against one process."""
    job = _job(precision=precision)
    world = make_world(rank=dist.get_rank(), **gang)
    split, alone = make_session(job, world), _alone(job, device=world.device.type)
    for step in (0, 3):
        alone.optimizer.zero_grad()
        split.optimizer.zero_grad(set_to_none=not split.strategy.keeps_gradients)
        loss, wanted_loss = torch.tensor(_accumulate(split, step), dtype=torch.float64), _accumulate(alone, step)
    dist.all_reduce(loss)
    wanted = {name: each.grad for name, each in trainable(alone.model).items()}
    wanted_norm = torch.cat([each.flatten() for each in wanted.values()]).norm()
    parameters = trainable(split.model)
    norm = norm_of(split.strategy.gradients(list(parameters.values())), parts=split.strategy.shard_group)
    found = {"loss": abs(float(loss) / wanted_loss - 1), "norm": abs(float(norm) / float(wanted_norm) - 1)}
    if split.strategy.state_loader() is None:  # else `.grad` is not where the gradient is
        gradients = {f"model.{name}": each.grad for name, each in parameters.items()}
        whole = split.strategy.full_state(gradients, wanted=True)
        found["error"] = max(
            float((whole[f"model.{name}"].cpu() - each.cpu()).norm() / float(wanted_norm))
            for name, each in wanted.items()
        )
    return found


def steps(gang: dict, method: str, precision: str):
    """Losses, norms and evaluations of 20 packed steps, with all kernels that work there."""
    world, job = make_world(rank=dist.get_rank(), **gang), replace(_steps_job(method, precision), kernels=("auto",))
    if world.gang.strategy == "zero-3":
        job = replace(job, strategy=replace(job.strategy, deepspeed=LARGE_IN_PARTS))
    _, split = run_loop(make_session(job, world, packed=True, num_evaluation=7))
    return [split.steps, split.evaluations]


def steps_alone(method: str, precision: str, device: str):
    """Those of one process by torch's own operators."""
    job = replace(_steps_job(method, precision), kernels=("torch",))
    _, alone = run_loop(_alone(job, device=device, packed=True, num_evaluation=7))
    return [alone.steps, alone.evaluations]


def _steps_job(method: str, precision: str):
    job = _job(method=method, precision=precision, steps=20, activation_checkpointing=method == "full")
    if method == "lora":  # a linear that tp splits by columns, and one by rows
        job = replace(job, method=replace(job.method, targets=("q_proj", "down_proj")))
    job = replace(job, schedule=replace(job.schedule, warmup_steps=50 if precision == "fp32" else 5))
    return replace(job, evaluation=replace(job.evaluation, every_steps=10))


def _resumed_job(method: str, precision: str):
    job = _job(method=method, precision=precision, steps=8)
    return replace(job, schedule=replace(job.schedule, warmup_steps=50 if precision == "fp32" else 5))


def save(gang: dict, folder: str, method: str, precision: str):
    """The first 6 of 8 steps, and a checkpoint of them."""
    return save_steps(make_world(rank=dist.get_rank(), **gang), _resumed_job(method, precision), Path(folder), step=6)


def save_steps(world: ProcessGroup, job: Job, folder: Path, *, step: int):
    """The first steps of a job, and a checkpoint of them; collective."""
    session = make_session(job, world, num_evaluation=0)
    description = {"attempt": 1, "hosts": world.gang.hosts, "num_ranks": world.size, "fingerprints": {}}
    description["held"] = held_by(world.gang)
    saver = Saver(folder, host=world.host, job=job.checkpoint, description=description)
    progress = TrainingProgress()
    result, captured = run_loop(
        session, saver=saver if world.is_first_of_host else None, progress=progress, stop_after=step
    )
    saver.wait()
    dist.barrier()
    if world.is_head:
        parts = {host: (part_folder(folder, step, host) / PART_FILE).read_bytes() for host in world.gang.hosts}
        place_commit(folder, commit_record(parts))
    dist.barrier()
    return {"result": result, "step": progress.step, "losses": captured.steps}


def resume(gang: dict, folder: str, method: str, precision: str):
    """The last two of 8 steps, from a checkpoint."""
    world = make_world(rank=dist.get_rank(), resume_step=6, **gang)
    session = make_session(_resumed_job(method, precision), world, num_evaluation=0)
    _, captured = run_loop(session, progress=restore(session, Path(folder)))
    return captured.steps


def resumed_alone(method: str, precision: str, device: str):
    """The last two of 8 steps of one process that was never stopped."""
    _, captured = run_loop(_alone(_resumed_job(method, precision), device=device, num_evaluation=0))
    return captured.steps[6:]


def refusal(gang: dict, changes: dict, shares_gpus: bool):
    """What the strategy says to a job that it does not train; None: it takes it."""
    world = make_world(rank=dist.get_rank(), **gang)
    world = replace(world, gang=replace(world.gang, shares_gpus=shares_gpus))
    job = make_job(**changes)
    precision = agree_precision(job, world.device, world_size=world.size)
    try:
        make_strategy(StrategySetup(job=job, world=world, precision=precision))
    except UsageError as error:
        return error.to_json()
    return None


class Averaging(Strategy):
    """Every rank takes a step of its own, and all go on from the mean of the weights."""

    def after_update(self) -> None:
        for parameter in trainable(self.loss).values():
            dist.all_reduce(parameter.data)
            parameter.data /= self.world.size


class AveragingPlan(PlanHalf):
    """The entry point of a plug-in names one: importable without torch, in a package of its own."""

    kind = "averaging"
    train = "tests.train.cases_contract:Averaging"
    meaning = "every rank takes steps of its own, and weights are averaged after each"


AVERAGING = AveragingPlan()


def averaging():
    """Train with a strategy that gangline does not know, found by its entry point."""
    plugin = Plugin(
        group="gangline.strategies",
        name="averaging",
        value="tests.train.cases_contract:AVERAGING",
        package="averaging",
        version="1",
    )
    with mock.patch("gangline.plugins.find_plugins", return_value=(plugin,)):
        session = make_session(
            _job(precision="fp32"), make_world([3, 2], rank=dist.get_rank(), strategy="averaging"), num_evaluation=0
        )
        _, captured = run_loop(session)
    weights = torch.cat([each.detach().flatten() for each in trainable(session.model).values()])
    return {
        "kind": type(session.strategy).__name__,
        "losses": captured.steps and [loss for _, loss, _ in captured.steps],
        "digest": str(torch.hash_tensor(weights).item()),
    }
