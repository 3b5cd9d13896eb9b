"""What the ranks do in test_exact: the same step, run or evaluation on any split, against one process."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from gangline.worker.exchange import settle_exchange
from gangline.worker.loop import Synchronous, TrainingRun
from gangline.worker.model import trainable
from gangline.worker.progress import TrainingProgress
from gangline.worker.rank_files import StopFlag
from gangline.worker.record import evaluate
from gangline.worker.run_io import RunIO
from tests.train.small import make_job, make_session, make_world, model_folder, run_loop


def gradient(shares, *, method: str, precision: str):
    """Relative error of one step's gradient against a single process, and whether all ranks hold the same."""
    job = make_job(method=method, precision=precision)
    split = _step_gradient(job, make_world(shares, rank=dist.get_rank()))
    alone = _step_gradient(job, make_world([sum(shares)], rank=0))
    gathered = [torch.empty_like(split) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, split)
    return {
        "error": float((split - alone).norm() / alone.norm()),
        "norm": float(alone.norm()),
        "equal": all(torch.equal(split, other) for other in gathered),
    }


def _step_gradient(job, world, *, packed: bool = False) -> torch.Tensor:
    session = make_session(job, world, packed=packed)
    _stir(session)
    outlets, progress = RunIO(recorder=None, saver=None, stop=StopFlag()), TrainingProgress()
    buckets = session.strategy.buckets()
    if buckets is not None:
        buckets.begin(1 << 16)
    Synchronous(TrainingRun(session, outlets, progress)).accumulate(3)
    return torch.cat([whole(parameter.grad).flatten().double() for parameter in trainable(session.model).values()])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """What lies in parts on all ranks, put together; collective then."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _stir(session) -> None:
    """LoRA's B is 0 at the start, which would make every gradient of A zero and a comparison of it empty."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in trainable(session.model).values():
            noise = torch.randn(parameter.shape, dtype=parameter.dtype) * 0.02
            if isinstance(parameter, DTensor):
                noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements)
            parameter.add_(noise)


def losses(
    shares,
    *,
    method: str = "full",
    precision: str = "fp64",
    steps: int = 200,
    warmup: int = 5,
    strategy: str = "ddp",
    checkpointing: bool = False,
    packed: bool = False,
    rows=(10,),
    settings=(),
    **more,
):
    """Losses and evaluations of a whole run by rank 0, split and alone. Of pipelines `shares` are layers.

    settings: see `make_world`.
    """
    job = make_job(method=method, precision=precision, steps=steps, **more)
    if strategy == "pipeline":
        job = replace(job, model=replace(job.model, path=model_folder(layers=sum(shares) // len(rows))))
    job = replace(
        job,
        schedule=replace(job.schedule, warmup_steps=warmup),
        evaluation=replace(job.evaluation, every_steps=max(1, steps // 2)),
        activation_checkpointing=checkpointing,
    )
    world = make_world(shares, rank=dist.get_rank(), strategy=strategy, rows=rows, settings=settings)
    _, split = run_loop(make_session(job, world, packed=packed))
    if dist.get_rank() > 0:
        return None
    _, alone = run_loop(make_session(job, make_world([sum(shares)], rank=0), packed=packed))
    return {"split": split.steps, "alone": alone.steps, "evaluations": [split.evaluations, alone.evaluations]}


def evaluation(shares, *, precision: str):
    """The evaluation loss, split and alone."""
    found = []
    for world in (make_world(shares, rank=dist.get_rank()), make_world([sum(shares)], rank=0)):
        session = make_session(make_job(precision=precision, micro_batch=2), world)
        result = evaluate(session, shares=world.shares)
        found.append({"loss": result.loss, "label_tokens": result.label_tokens})
    return found


def audit(shares, *, num_samples: int, epochs: int):
    """Which samples this rank read, as (step, sample)."""
    job = make_job(steps=None, epochs=float(epochs), precision="fp32")
    session = make_session(job, make_world(shares, rank=dist.get_rank()), num_samples=num_samples, num_evaluation=0)
    read, progress = [], TrainingProgress()
    # reads a sample to see how long backward takes, which belongs to no step
    settle_exchange(session, progress, session.order.micro_batches(0)[0])
    plain = session.train_set.sample

    def sample(index):
        read.append((progress.step, int(index)))
        return plain(index)

    session.train_set.sample = sample
    run_loop(session, progress=progress)
    return read
