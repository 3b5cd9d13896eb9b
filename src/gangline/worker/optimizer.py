"""What moves the trained weights, its state by parameter name, and the gradient norm.

Under AdamW with 8 bits (bitsandbytes) the two moments
take 2 bytes for each trained number in place of 8: 256 numbers share a scale in fp32. A tensor of fewer than 4,096
numbers keeps its moments in fp32; that is bitsandbytes' own rule. A GPU's driver moves paged moments to the machine's
memory while the GPU has no room; on a CPU they are as any others.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from gangline.runs.job import OptimizerJob
from gangline.worker import compat
from gangline.worker.model import base_of, saved_weights, trainable
from gangline.worker.quantised import require_library
from gangline.worker.update_rules import Adafactor, Lion, Muon, Together, is_matrix


def make_optimizer(model: nn.Module, job: OptimizerJob) -> torch.optim.Optimizer:
    """The job's kind of optimizer over the trainable weights; no weight decay on vectors (norms, biases).

    The state is made at once, so that a checkpoint can be loaded into it and the first step needs no more memory
    than the others. Raises ModelError as `make_adam8` does.
    """
    parameters = list(trainable(model).values())
    if job.kind == "muon":
        return _muon(model, parameters, job)
    if job.kind == "adamw":
        return _ready_adamw(parameters, job)
    groups = _groups(parameters, job)
    if job.kind == "sgd":
        return _sgd(groups, job)
    if job.kind == "lion":
        return Lion(groups, rate=job.learning_rate, betas=(job.beta1, job.beta2))
    if job.kind == "adafactor":
        return Adafactor(groups, rate=job.learning_rate, epsilon=job.epsilon)
    return make_adam8(groups, job)


def _ready_adamw(parameters: Sequence[nn.Parameter], job: OptimizerJob) -> torch.optim.AdamW:
    optimizer = adamw(parameters, job)
    for parameter in parameters:
        optimizer.state[parameter] = empty_state(parameter, fused=bool(optimizer.defaults["fused"]))
    return optimizer


def _sgd(groups: Sequence[dict[str, Any]], job: OptimizerJob) -> torch.optim.SGD:
    """torch's; weight after weight, for all at once it would copy all gradients where there is a weight decay."""
    optimizer = torch.optim.SGD(
        list(groups), lr=job.learning_rate, momentum=job.momentum, nesterov=job.nesterov, foreach=False
    )
    for group in groups if job.momentum else ():
        for parameter in group["params"]:
            # its first step would begin with the gradient, which is what a sum of nothing becomes, too
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _muon(model: nn.Module, parameters: Sequence[nn.Parameter], job: OptimizerJob) -> torch.optim.Optimizer:
    """Muon for the matrices of layers; AdamW for tables, the output head and vectors, as its authors have it."""
    core: Any = base_of(model)
    ends = [core.get_input_embeddings(), core.get_output_embeddings()]
    ends += [module for module in core.modules() if isinstance(module, nn.Embedding)]
    around = {id(parameter) for module in ends if module is not None for parameter in module.parameters()}
    matrices = [each for each in parameters if is_matrix(each) and id(each) not in around]
    chosen = set(map(id, matrices))
    others = [each for each in parameters if id(each) not in chosen]
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        groups = _groups(matrices, job)
        parts.append(
            Muon(groups, rate=job.learning_rate, momentum=job.momentum, nesterov=job.nesterov, scale=job.scale)
        )
    if others:
        parts.append(_ready_adamw(others, job))
    return Together(*parts)


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
    for name, parameter in saved_weights(model).items():
        tensors[f"model.{name}"] = parameter.detach()
        for key, state in optimizer.state[parameter].items() if parameter.requires_grad else ():
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
    all values takes five times as long. A GPU sums in a tree; numbers of 16 bits in fp32, each tensor by itself.
    """
    if gradients[0].device.type == "cpu":
        norms = [torch.linalg.vector_norm(_row_norms(gradient), dtype=torch.float64) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
    elif all(gradient.dtype is torch.float32 for gradient in gradients):
        norm = get_total_norm(gradients)
    else:
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
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
    """Scale gradients so that their global norm is `maximum` at most.

    norm: on the processor, where a GPU must not be waited for.
    """
    if maximum is None or not norm > maximum:
        return
    factor = maximum / (norm + 1e-6)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients_of(parameters):
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, gradients in by_dtype.items():
        compat.SCALE_ALL.get()(gradients, float(factor.to(dtype)))


def update_once(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], *, maximum: float | None) -> None:
    """Norm, clipping and step, for measurements: a step of the loop has them apart."""
    clip(parameters, gradient_norm(parameters), maximum=maximum)
    optimizer.step()


log = logging.getLogger(__name__)


def make_adam8(groups: Sequence[dict[str, Any]], job: OptimizerJob) -> torch.optim.Optimizer:
    """The library's optimizer with all its states made, each of them a tensor.

    groups: `params` and `weight_decay`. Raises ModelError where bitsandbytes is not there.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    require_library(f"optimizer.kind: {job.kind}")
    optimizer: Any = _counting(_class_of(job.kind, parameters))(
        list(groups), lr=job.learning_rate, betas=(job.beta1, job.beta2), eps=job.epsilon
    )
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, index, place)
            optimizer.state[parameter]["step"] = torch.zeros((), dtype=torch.int64)
    # its first step would move states to the parameters' devices: they are there, and the counters stay on the CPU
    optimizer.initialized = True
    made: torch.optim.Optimizer = optimizer
    return made


def _class_of(kind: str, parameters: Iterable[nn.Parameter]) -> Any:
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    if kind != "paged-adamw-8bit":
        return AdamW8bit
    if any(parameter.device.type == "cuda" for parameter in parameters):
        return PagedAdamW8bit
    log.info("optimizer.kind: %s on a CPU: moments have 8 bits and are not paged", kind)
    return AdamW8bit


def _counting(kind: Any) -> Any:
    """A kind of optimizer whose count of steps is a tensor between two steps, so that a checkpoint can hold it.

    bitsandbytes has a number of Python there, one for each parameter.
    """

    class Counting(kind):  # type: ignore[misc]
        def update_step(self, group: Any, p: nn.Parameter, gindex: int, pindex: int) -> None:
            state = self.state[p]
            count = state["step"]
            state["step"] = int(count)
            try:
                super().update_step(group, p, gindex, pindex)
                count.fill_(state["step"])
            finally:
                state["step"] = count

    return Counting
