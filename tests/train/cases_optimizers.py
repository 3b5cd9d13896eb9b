"""What the ranks do in test_optimizers: steps beside a reference implementation, states, refusals."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from transformers.optimization import Adafactor

from gangline.errors import GanglineError
from gangline.optimizers import OPTIMIZERS
from gangline.runs.job import OptimizerJob
from gangline.worker.model import trainable
from gangline.worker.optimizer import make_optimizer, state_tensors
from gangline.worker.update_rules import Together, is_matrix, orthogonal
from tests.train.small import make_job, make_session, make_world, run_loop


class PaperLion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. (2023), line by line."""

    def step(self):
        for group in self.param_groups:
            rate, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                mean = state.get("m", torch.zeros_like(weight))
                c = beta1 * mean + (1 - beta1) * weight.grad
                weight.data = weight.data - rate * (torch.sign(c) + decay * weight.data)
                state["m"] = beta2 * mean + (1 - beta2) * weight.grad


def reference(model: nn.Module, job: OptimizerJob) -> torch.optim.Optimizer:
    """The published implementation, over the same weights and weight decays."""
    parameters = list(trainable(model).values())

    def groups(chosen):
        made = ((True, job.weight_decay), (False, 0.0))
        return [
            {"params": [each for each in chosen if (each.ndim >= 2) is big], "weight_decay": decay}
            for big, decay in made
            if any((each.ndim >= 2) is big for each in chosen)
        ]

    rate = job.learning_rate
    if job.kind == "sgd":
        return torch.optim.SGD(groups(parameters), lr=rate, momentum=job.momentum, nesterov=job.nesterov)
    if job.kind == "lion":
        return PaperLion(groups(parameters), {"lr": rate, "betas": (job.beta1, job.beta2), "weight_decay": 0.0})
    if job.kind == "adafactor":
        return Adafactor(groups(parameters), lr=rate, scale_parameter=False, relative_step=False)
    inside = [each for name, each in trainable(model).items() if each.ndim == 2 and ".layers." in f".{name}"]
    others = [each for each in parameters if all(each is not one for one in inside)]
    adjust = {"match-adamw": "match_rms_adamw", "original": "original"}[job.scale]
    words = {"momentum": job.momentum, "nesterov": job.nesterov, "adjust_lr_fn": adjust}
    matrices = torch.optim.Muon(inside, lr=rate, weight_decay=job.weight_decay, **words)
    if not others:
        return matrices
    adam = torch.optim.AdamW(groups(others), lr=rate, betas=(job.beta1, job.beta2), eps=job.epsilon, fused=True)
    return Together(matrices, adam)


def job_of(kind: str, *, rate: float, precision: str = "fp64", method: str = "full", micro_batch: int = 1, **words):
    """20 steps of 6 samples by it; words: of the optimizer, over its defaults."""
    job = make_job(precision=precision, steps=20, method=method, batch=6, micro_batch=micro_batch)
    numbers = {**OPTIMIZERS[kind].keys, "weight_decay": 0.01, **words}
    return replace(job, optimizer=OptimizerJob(kind=kind, learning_rate=rate, **numbers))


def beside_reference(*, kind: str, rate: float, precision: str, words: dict, method: str = "full"):
    """20 steps of one rank, by ours and by the reference: how far weights are apart, over how far they have moved."""
    job = job_of(kind, rate=rate, precision=precision, method=method, micro_batch=6, **words)
    weights, losses = [], []
    for make in (make_optimizer, reference):
        session = make_session(job, make_world([1], rank=0), num_evaluation=0)
        before = _flat(session.model)
        _, captured = run_loop(dataclasses.replace(session, optimizer=make(session.model, session.job.optimizer)))
        weights.append(_flat(session.model))
        losses.append([loss for _, loss, _ in captured.steps])
    ours, theirs = weights
    far = torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs - before)
    return {"far": float(far), "losses": losses}


def split_and_alone(shares, *, kind: str, rate: float, strategy: str, words: dict):
    """Losses and norms by rank 0, split and by one process all at once. Of pipelines `shares` are layers."""
    job = job_of(kind, rate=rate, **words)
    world = make_world(shares, rank=dist.get_rank(), strategy=strategy, rows=(6,))
    _, split = run_loop(make_session(job, world, num_evaluation=0))
    if dist.get_rank() > 0:
        return None
    job = replace(job, micro_batch=6)
    _, alone = run_loop(make_session(job, make_world([1], rank=0), num_evaluation=0))
    return {"split": split.steps, "alone": alone.steps}


def states(*, asked):
    """Of jobs (kind, words, method): numbers of the states for each trained number, and the names of states."""
    found = []
    for kind, words, method in asked:
        job = job_of(kind, rate=1e-3, method=method, **words)
        session = make_session(job, make_world([6], rank=0), num_evaluation=0)
        tensors = state_tensors(session.model, session.optimizer)
        trained = sum(each.numel() for each in trainable(session.model).values())
        kept = {name: each for name, each in tensors.items() if name.startswith("optimizer.")}
        names = sorted({name.rpartition(".")[2] for name in kept})
        found.append([sum(each.numel() for each in kept.values() if each.ndim) / trained, names])
    return found


def refused(shares, *, kind: str, method: str):
    """What a rank of fsdp says of it."""
    job = job_of(kind, rate=1e-3, precision="fp32", method=method)
    try:
        make_session(job, make_world(shares, rank=dist.get_rank(), strategy="fsdp"))
    except GanglineError as error:
        return str(error)
    return "it trains"


def stacks():
    """Singular values of an orthogonal matrix, and whether a stack is moved matrix by matrix."""
    torch.manual_seed(1)
    stack = torch.randn(3, 8, 5, dtype=torch.float64)
    found = orthogonal(stack)
    values = torch.linalg.svdvals(found)
    alike = all(torch.equal(found[index], orthogonal(stack[index])) for index in range(3))
    shapes = [(4,), (4, 3), (2, 4, 3), (6, 1, 4), (2, 2, 2, 2)]
    chosen = [is_matrix(torch.zeros(shape)) for shape in shapes]
    return {"least": float(values.min()), "most": float(values.max()), "alike": alike, "matrices": chosen}


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().double().flatten() for each in trainable(model).values()])
