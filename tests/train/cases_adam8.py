"""What the ranks do in test_adam8."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gangline.errors import GanglineError
from gangline.runs.job import OptimizerJob
from gangline.runs.manifest import PART_FILE, digest_of
from gangline.worker.checkpoint import Saver
from gangline.worker.model import load_model, trainable
from gangline.worker.optimizer import make_optimizer, state_tensors
from gangline.worker.replicas import digest
from gangline.worker.trace.line import trace
from gangline.worker.trace.order import TraceOrder
from tests.train.parts import load_part
from tests.train.small import make_job, make_session, make_world, run_loop


def states(kind: str, *, method: str):
    """What states there are, by whether a tensor is large, and whether two steps leave them where they are."""
    job = make_job(method=method, precision="fp32", optimizer=kind)
    model = load_model(job)
    optimizer = make_optimizer(model, job.optimizer)
    before = state_tensors(model, optimizer)
    places, start = {name: tensor.data_ptr() for name, tensor in before.items()}, digest(before.values())
    for _ in range(2):
        _step(model, optimizer)
    after = state_tensors(model, optimizer)
    parameters = trainable(model).values()
    return {
        "in place": places == {name: tensor.data_ptr() for name, tensor in after.items()},
        "moved": digest(after.values()) != start,
        "steps": sorted({int(tensor) for name, tensor in after.items() if name.endswith(".step")}),
        "names": sorted({(each.numel() >= 4096, *sorted(optimizer.state[each])) for each in parameters}),
        "formats": sorted({(each.numel() >= 4096, str(optimizer.state[each]["state1"].dtype)) for each in parameters}),
        "decay": {
            str(group["weight_decay"]): sorted({each.ndim for each in group["params"]})
            for group in optimizer.param_groups
        },
    }


def as_the_library():
    """Whether five steps have the bits of bitsandbytes' own class; half of the weights have no gradient in two."""
    from bitsandbytes.optim import AdamW8bit

    job, found = make_job(precision="fp32", optimizer="adamw-8bit"), []
    for own in (False, True):
        model = load_model(job)
        optimizer = make_optimizer(model, job.optimizer)
        if own:
            groups = [{key: each[key] for key in ("params", "weight_decay")} for each in optimizer.param_groups]
            optimizer = AdamW8bit(groups, lr=job.optimizer.learning_rate, betas=(0.9, 0.999), eps=1e-8)
        for number in range(5):
            _step(model, optimizer, every=2 if number in (1, 2) else 1)
        found.append([digest([each]) for each in trainable(model).values()])
    return found[0] == found[1]


def without_library():
    """What is said where bitsandbytes is not installed."""
    sys.modules["bitsandbytes"] = None
    try:
        make_optimizer(load_model(make_job(optimizer="adamw-8bit")), OptimizerJob(kind="adamw-8bit"))
    except GanglineError as error:
        return str(error)
    return "it was made"


def refused(*, shares, strategy: str, precision: str):
    """Why a session with moments of 8 bits, where all weights are trained, cannot be built."""
    job = make_job(precision=precision, optimizer="adamw-8bit")
    try:
        make_session(job, make_world(shares, rank=dist.get_rank() if len(shares) > 1 else 0, strategy=strategy))
    except GanglineError as error:
        return str(error)
    return "it was made"


def loaded_as(folder: str, *, saved: str, wanted: str):
    """What is said to a checkpoint of another kind; whether one of the same states is loaded to the bit."""
    job = make_job(precision="fp32", optimizer="adamw-8bit")
    models = [load_model(job), load_model(job)]
    kinds = zip(models, (saved, wanted), strict=True)
    optimizers = [make_optimizer(model, replace(job.optimizer, kind=kind)) for model, kind in kinds]
    _step(models[0], optimizers[0])
    try:
        return _through_a_checkpoint(folder, *(state_tensors(*each) for each in zip(models, optimizers, strict=True)))
    except GanglineError as error:
        return str(error)


def losses(shares, *, method: str, strategy: str, steps: int):
    """Losses of a whole run by rank 0: split, alone, and alone with AdamW of 32 bits."""
    job = make_job(method=method, precision="fp32", steps=steps, optimizer="adamw-8bit")
    world = make_world(shares, rank=dist.get_rank(), strategy=strategy)
    _, split = run_loop(make_session(job, world, num_evaluation=0))
    if dist.get_rank() > 0:
        return None
    alone = make_world([sum(shares)], rank=0)
    plain = replace(job, optimizer=replace(job.optimizer, kind="adamw"))
    return {
        "split": split.steps,
        "alone": run_loop(make_session(job, alone, num_evaluation=0))[1].steps,
        "32 bits": run_loop(make_session(plain, alone, num_evaluation=0))[1].steps,
    }


def traced(order: dict, *, kinds):
    """Bytes of the optimizer's states by kind, as a trace counts them."""
    return [trace(TraceOrder.from_json({**order, "optimizer": {"kind": kind}}))["optimizer_bytes"] for kind in kinds]


def paged_on_a_gpu(folder: str):
    """A run on a GPU that goes on from a checkpoint, against the one that was not interrupted."""
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 16)).cuda()
        models.append(model)
        optimizers.append(make_optimizer(model, OptimizerJob(kind="paged-adamw-8bit")))
    for _ in range(3):
        _step(models[0], optimizers[0])
    tensors = [state_tensors(*each) for each in zip(models, optimizers, strict=True)]
    same = _through_a_checkpoint(folder, *tensors)
    for model, optimizer in zip(models, optimizers, strict=True):
        _step(model, optimizer)
    states = optimizers[1].state
    return {
        "loaded": same,
        "went on": digest(tensors[0].values()) == digest(tensors[1].values()),
        "paged": [bool(getattr(states[each]["state1"], "is_paged", False)) for each in models[1].parameters()],
    }


def _through_a_checkpoint(folder: str, tensors, others) -> bool:
    """Save some tensors, and load them in the place of others; whether these are the same then."""
    description = {"attempt": 1, "hosts": ["pc0"], "num_ranks": 1, "fingerprints": {}}
    saver = Saver(Path(folder), host="pc0", job=make_job().checkpoint, description=description)
    saver.save(1, tensors, {"step": 1}, wait=True)
    part = saver.saved.folder
    load_part(part, others, digest=digest_of((part / PART_FILE).read_bytes()))
    return digest(others.values()) == digest(tensors.values())


def _step(model, optimizer, *, every: int = 1) -> None:
    """A step over drawn gradients, of which each second weight, or each, has one."""
    torch.manual_seed(5)
    for number, parameter in enumerate(trainable(model).values()):
        parameter.grad = torch.randn_like(parameter) if number % every == 0 else None
    optimizer.step()
