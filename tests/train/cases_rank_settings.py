"""What the ranks do in test_rank_settings: steps whose ranks compute in ways of their own, against one process."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist

from gangline.errors import GanglineError
from gangline.worker import model as worker_model
from gangline.worker.loop import Synchronous, TrainingRun
from gangline.worker.progress import TrainingProgress
from gangline.worker.rank_files import StopFlag
from gangline.worker.run_io import RunIO
from tests.train.cases_exact import _step_gradient, whole
from tests.train.cases_moving import _run
from tests.train.small import make_job, make_session, make_world, mixture_folder, model_folder, run_loop

BATCH = 24


def _job(**changes):
    return make_job(**{"batch": BATCH, "draws": "sample", **changes})


def gradient(
    shares,
    settings,
    *,
    precision: str,
    method: str = "full",
    strategy: str = "ddp",
    packed: bool = False,
    attention: str = "auto",
    mixture: bool = False,
    **more,
):
    """Relative error of one step's gradient against a single process that takes one sample at a time.

    mixture: a model of experts. more: of the model's configuration.
    """
    job = _job(method=method, precision=precision)
    path = mixture_folder() if mixture else model_folder(**more)
    job = replace(job, model=replace(job.model, path=path, attention=attention))
    split = _step_gradient(
        job, make_world(shares, rank=dist.get_rank(), settings=settings, strategy=strategy), packed=packed
    )
    alone = _step_gradient(job, make_world([BATCH], rank=0), packed=packed)
    return {"error": float((split - alone).norm() / alone.norm()), "norm": float(alone.norm())}


def passes(shares, settings):
    """Samples of every pass of a step, whether this rank computes activations again, and the inputs that it moves."""
    session = make_session(_job(), make_world(shares, rank=dist.get_rank(), settings=settings), num_evaluation=0)
    rows, plain = [], session.loss.forward

    def forward(input_ids, *more):
        rows.append(len(input_ids))
        return plain(input_ids, *more)

    session.loss.forward = forward
    stepper = Synchronous(TrainingRun(session, RunIO(recorder=None, saver=None, stop=StopFlag()), TrainingProgress()))
    session.strategy.begin(1 << 20)
    rows.clear()
    with patch.object(worker_model, "to_ram", wraps=worker_model.to_ram) as moves:
        stepper.accumulate(0)
    again = sum(bool(getattr(module, "gradient_checkpointing", False)) for module in session.model.modules())
    return {"passes": rows, "recomputing": again > 0, "moved": moves.call_count}


def losses(
    shares,
    settings,
    *,
    precision: str = "fp64",
    steps: int = 12,
    moving: bool = False,
    strategy: str = "ddp",
    **more,
):
    """Losses and evaluations of a whole run, split in ways of their own and alone. moving: shares by scripted times."""
    job = _job(precision=precision, steps=steps, **more)
    job = replace(job, evaluation=replace(job.evaluation, every_steps=max(1, steps // 2)))
    world = make_world(shares, rank=dist.get_rank(), settings=settings, strategy=strategy)
    world = replace(world, gang=replace(world.gang, moving_shares=moving))
    session = make_session(job, world)
    split, shares = _run(session) if moving else (run_loop(session)[1], [])
    weights = torch.cat([whole(each.detach()).flatten() for each in session.model.parameters()]).double()
    both = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(both, weights)
    if dist.get_rank() > 0:
        return None
    _, alone = run_loop(make_session(job, make_world([BATCH], rank=0, settings=[[12 if moving else 1, False]])))
    return {
        "split": split.steps,
        "alone": alone.steps,
        "evaluations": [split.evaluations, alone.evaluations],
        "shares": shares,
        "equal": all(torch.equal(weights, other) for other in both),
    }


def rounds(shares, settings, **more):
    """Losses and weights of a run of local SGD, whose hosts have settings of their own or take one sample at a time."""
    job = _job(steps=12)
    path = model_folder(**more)
    job = replace(job, model=replace(job.model, path=path), strategy=replace(job.strategy, inner_steps=3))
    found = []
    for own in (settings, [[1, False]] * len(shares)):
        world = make_world(shares, rank=dist.get_rank(), settings=own, strategy="local-sgd")
        session = make_session(job, world)
        _, captured = run_loop(session)
        weights = torch.cat([each.detach().flatten() for each in session.model.parameters()])
        found.append((captured.steps, captured.evaluations, weights))
    (steps, evaluations, weights), (plain, plain_evaluations, plain_weights) = found
    return {
        "split": steps,
        "alone": plain,
        "evaluations": [evaluations, plain_evaluations],
        "moved": float((weights - plain_weights).abs().max() / plain_weights.abs().max()),
    }


def refused(shares, settings, *, strategy: str, dropout: float = 0.0):
    """The error with which a gang of such ranks does not start in a run whose dropout belongs to micro-batches."""
    try:
        make_session(
            _job(method="lora", precision="fp32", dropout=dropout, draws="micro_batch"),
            make_world(shares, rank=dist.get_rank(), settings=settings, strategy=strategy),
        )
    except GanglineError as error:
        return error.to_json()
    return None
