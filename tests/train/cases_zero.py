"""What the ranks do in test_zero."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from gangline.errors import GanglineError
from gangline.runs.job import ModelJob, StrategyJob
from gangline.strategies.zero.train import clear, load_deepspeed, require_room
from gangline.worker import session as building
from gangline.worker.loop import Synchronous, TrainingRun
from gangline.worker.loss import CausalLoss
from gangline.worker.model import load_model, trainable
from gangline.worker.optimizer import norm_of
from gangline.worker.progress import TrainingProgress
from gangline.worker.quantised import num_weights
from gangline.worker.rank_files import StopFlag
from gangline.worker.run_io import RunIO
from gangline.worker.spikes import Spike, Spikes
from tests.train.cases_fsdp import _saved_model
from tests.train.small import make_job, make_session, make_world, mixture_folder, model_folder, run_loop


def gradient(shares, *, strategy: str, method: str, precision: str = "fp32", offload=(), mixture=False):
    """One step's gradient and its norm against a single process, and what of the model this rank has."""
    from deepspeed.utils import safe_get_full_grad

    dropout = 0.0 if mixture else 0.1  # adapters of experts take none
    job = _job(strategy, method=method, precision=precision, offload=offload, dropout=dropout)
    if mixture:
        job = replace(job, model=replace(job.model, path=mixture_folder()))
    alone = make_session(job, make_world([sum(shares)], rank=0), num_evaluation=0)
    weights = _stirred(alone)
    for name, parameter in trainable(alone.model).items():
        parameter.data.copy_(weights[name])
    _stepper(alone).accumulate(3)
    wanted = {name: parameter.grad for name, parameter in trainable(alone.model).items()}
    session = make_session(job, make_world(shares, rank=dist.get_rank(), strategy=strategy), num_evaluation=0)
    session.strategy.state_loader()({f"model.{name}": weight for name, weight in weights.items()})
    session.strategy.loaded()
    _stepper(session).accumulate(3)
    ours = trainable(session.model)
    norm = norm_of(session.strategy.gradients(list(ours.values())), parts=session.strategy.shard_group)
    found = {name: safe_get_full_grad(parameter) for name, parameter in ours.items()}
    expected = torch.cat([wanted[name].flatten().double() for name in wanted])
    split = torch.cat([found[name].flatten().double() for name in wanted])
    engine = session.strategy.engine
    return {
        "error": float((split - expected).norm() / expected.norm()),
        "norm_error": abs(float(norm / expected.norm()) - 1),
        "stage": int(engine.zero_optimization_stage()),
        "states": sum(part.numel() for part in engine.optimizer.optimizer.state),
        "trained": len(expected),
        "weights": [num_weights(session.model), num_weights(alone.model)],
        "held": sum(parameter.numel() for parameter in session.model.parameters()),
    }


def read_by_parts(folder: str, *, shares, mixture: bool = False, tied: bool = False, **words):
    """What of a model that is read by parts is not what is in its folder, and what of it this rank has whole."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    job = _job("zero-3", dropout=0.0 if mixture else 0.1, **words)
    path = _saved_model(Path(folder), experts=6 if mixture else 0, tie_word_embeddings=tied)
    job = replace(job, model=ModelJob(path=path))
    world = make_world(shares, rank=dist.get_rank(), strategy="zero-3")
    with mock.patch.object(building, "load_model", side_effect=AssertionError("a rank loads all of it")):
        session = make_session(job, world, num_evaluation=0)
    whole = load_model(job, compute=session.precision.compute)
    ours, expected = dict(session.model.named_parameters()), dict(whole.named_parameters())
    assert ours.keys() == expected.keys()
    found = dict(session.model.named_buffers())
    held = sum(parameter.numel() for parameter in ours.values())
    for name, parameter in ours.items():
        with GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
        if parameter.requires_grad:  # what is saved; with bf16 the others follow from it
            assert torch.equal(found[name], expected[name].to(found[name].dtype))
            found[name] = safe_get_full_fp32_param(parameter)
    expected |= dict(whole.named_buffers())
    return {
        "differing": [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])],
        "held": held,
        "fused": [session.loss.fused, CausalLoss(whole, compute=session.precision.compute).fused],
    }


def _job(strategy: str, *, offload=(), **words):
    return replace(make_job(**words), strategy=StrategyJob(kind=strategy, offload=tuple(offload)))


def _stirred(session) -> dict[str, torch.Tensor]:
    """LoRA's B is 0 at the start, which would make every gradient of A zero and a comparison of it empty."""
    torch.manual_seed(3)
    return {
        name: parameter.detach() + torch.randn_like(parameter) * 0.02
        for name, parameter in trainable(session.model).items()
    }


def _stepper(session):
    outlets, progress = RunIO(recorder=None, saver=None, stop=StopFlag()), TrainingProgress()
    return Synchronous(TrainingRun(session, outlets, progress))


def losses(shares, *, strategy: str, skipped: str = "", deepspeed=None, **words):
    """Losses and gradient norms of a run by rank 0, split and alone, and what was told. Every step is clipped, and so
    far by its gradient (the epsilon is large), which AdamW else makes nothing of.

    skipped: what is bad about the third step: a gradient that is no number, or one that is far off.
    """
    job = _job(strategy, **words)
    job = replace(job, optimizer=replace(job.optimizer, clip_norm=0.1, epsilon=1.0, learning_rate=2.0))
    if deepspeed is not None:
        job = replace(job, strategy=replace(job.strategy, deepspeed=deepspeed))
    found = []
    for world in (make_world(shares, rank=dist.get_rank(), strategy=strategy), make_world([sum(shares)], rank=0)):
        if world.size == 1 and dist.get_rank():
            return None
        session, progress = make_session(job, world), TrainingProgress()
        with _spoilt(session, progress, skipped):
            _, captured = run_loop(session, progress=progress)
        told = [[event["event"], event.get("step")] for event in captured.events]
        found.append({"steps": captured.steps, "evaluations": captured.evaluations, "told": told})
    return found


@contextlib.contextmanager
def _spoilt(session, progress, how: str):
    plain, judge = session.strategy.forward_backward, Spikes.judge

    def forward_backward(batch, *, scale, last):
        bad = how == "no number" and progress.step == 2 and session.world.is_head
        return plain(batch, scale=scale * float("inf") if bad else scale, last=last)

    def judged(self, loss, norm, *, step):
        if how == "far off" and step == 2:
            return Spike(loss=loss, usual_loss=0.0, norm=norm, usual_norm=0.0)
        return judge(self, loss, norm, step=step)

    session.strategy.forward_backward, Spikes.judge = forward_backward, judged
    try:
        yield
    finally:
        Spikes.judge = judge


def on_disk(folder: str, *, shares):
    """Losses with the optimizer's states on a disk and alone; whether they come back from a checkpoint as they were;
    and what lies on the disk. The third step is skipped.
    """
    job = _job("zero-3", precision="fp32", steps=4, offload=("optimizer",))
    groups = {"zero_optimization": {"sub_group_size": 300_000, "stage3_param_persistence_threshold": 0}}
    job = replace(job, strategy=replace(job.strategy, offload_to=folder, deepspeed=groups))
    job = replace(job, model=replace(job.model, path=model_folder(hidden_size=256, intermediate_size=512)))
    found = []
    for world in (make_world(shares, rank=dist.get_rank(), strategy="zero-3"), make_world([sum(shares)], rank=0)):
        if world.size == 1 and dist.get_rank():
            break
        session, progress = make_session(job, world, num_evaluation=0), TrainingProgress()
        with _spoilt(session, progress, "far off"):
            _, captured = run_loop(session, progress=progress)
        found.append(captured.steps)
        if world.size > 1:
            strategy = session.strategy
            away = [not len(part) for part in strategy.engine.optimizer.fp32_partitioned_groups_flat]
            saved = strategy.full_state(strategy.state_tensors(), wanted=True)
            strategy.state_loader()({name: torch.randn(tensor.shape) for name, tensor in saved.items()})
            strategy.state_loader()(saved)
            strategy.loaded()
            again = strategy.full_state(strategy.state_tensors(), wanted=True)
            differing = [name for name in saved if not torch.equal(saved[name], again[name])]
            files = len(list(Path(folder).rglob(f"rank{world.rank}/exp_avg_sq-*.swp")))
            clear(job, world)
    dist.barrier()
    left = [str(each) for each in Path(folder).iterdir()]
    return {"found": found, "differing": differing, "files": files, "away": sum(away), "left": left}


def disk_refused(folder: str, *, how: str):
    """Why states cannot lie on a disk: no operator, no folder, no room."""
    deepspeed = load_deepspeed(torch.device("cpu"))
    job = _job("zero-3", precision="fp32", offload=("optimizer",))
    job = replace(job, strategy=replace(job.strategy, offload_to=f"{folder}{'/none' if how == 'folder' else ''}"))
    world = make_world([5, 5], rank=dist.get_rank(), strategy="zero-3")
    try:
        if how == "operator":
            with mock.patch.object(deepspeed.ops.op_builder.AsyncIOBuilder, "is_compatible", return_value=False):
                make_session(job, world)
        require_room(job, world, num_trained=1 << 44)
    except GanglineError as error:
        return str(error)
    return "it was built"


def refused(*, strategy: str, zero=None, **words):
    """Why such a session cannot be built."""
    job = _job(strategy, **words)
    if zero is not None:
        job = replace(job, strategy=replace(job.strategy, deepspeed={"zero_optimization": zero}))
    try:
        make_session(job, make_world([5, 5], rank=dist.get_rank(), strategy=strategy))
    except GanglineError as error:
        return str(error)
    return "it was built"
