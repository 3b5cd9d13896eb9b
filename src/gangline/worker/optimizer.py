"""AdamW in 32 or 8 bits, its state by parameter name, and the gradient norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from gangline.runs.job import OptimizerJob
from gangline.worker.adam8 import make_adam8
from gangline.worker.model import trainable


def make_optimizer(model: nn.Module, job: OptimizerJob) -> torch.optim.Optimizer:
    """The job's kind of AdamW over the trainable weights; no weight decay on vectors (norms, biases).

    The state is made at once, so that a checkpoint can be loaded into it and the first step needs no more memory
    than the others. Raises ModelError and UsageError as `make_adam8` does.
    """
    parameters = list(trainable(model).values())
    if job.kind != "adamw":
        return make_adam8(_groups(parameters, job), job)
    optimizer = adamw(parameters, job)
    for parameter in parameters:
        optimizer.state[parameter] = empty_state(parameter, fused=bool(optimizer.defaults["fused"]))
    return optimizer


def adamw(parameters: Sequence[nn.Parameter], job: OptimizerJob) -> torch.optim.AdamW:
    """AdamW of torch, fused where it has that, without a state so far."""
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    return torch.optim.AdamW(
        _groups(parameters, job),
        lr=job.learning_rate,
        betas=(job.beta1, job.beta2),
        eps=job.epsilon,
        fused=fused,
    )


def empty_state(parameter: torch.Tensor, *, fused: bool = True) -> dict[str, torch.Tensor]:
    """What AdamW keeps of a weight, before the first step."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


def _groups(parameters: Sequence[nn.Parameter], job: OptimizerJob) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": job.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything a checkpoint holds as tensors, by name: `model.<parameter>` and `optimizer.<parameter>.<state>`.

    The tensors are the live ones: loading into them in place restores the run.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in trainable(model).items():
        tensors[f"model.{name}"] = parameter.detach()
        for key, state in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = state
    return tensors


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def gradient_norm(parameters: Iterable[nn.Parameter], *, parts: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Global L2 norm of the gradients of these parameters; see `norm_of`."""
    return norm_of(gradients_of(parameters), parts=parts)


@torch.no_grad()
def norm_of(gradients: Sequence[torch.Tensor], *, parts: dist.ProcessGroup | None = None) -> torch.Tensor:
    """L2 norm of all of them together, a scalar. parts: the ranks that have a part of each, which is collective.

    On a CPU row by row, and the rows in fp64: its fp32 sums are off by 1e-4 at five million values, and fp64 over
    all values takes five times as long. A GPU sums in a tree.
    """
    if gradients[0].device.type == "cpu":
        norms = [torch.linalg.vector_norm(_row_norms(gradient), dtype=torch.float64) for gradient in gradients]
    else:
        norms = [norm.float() for norm in torch._foreach_norm(gradients)]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if parts is None:
        return norm
    square = norm.double().square()
    dist.all_reduce(square, group=parts)
    return square.sqrt()


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients there are, or this rank's parts of them; changes in place reach them."""
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    return [each.to_local() if isinstance(each, DTensor) else each for each in gradients]


def _row_norms(gradient: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, dim=-1, dtype=dtype)


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: torch.Tensor, *, maximum: float | None) -> None:
    """Scale gradients so that their global norm is `maximum` at most."""
    if maximum is None or not norm > maximum:
        return
    gradients = gradients_of(parameters)
    torch._foreach_mul_(gradients, (maximum / (norm + 1e-6)).to(gradients[0].dtype))
