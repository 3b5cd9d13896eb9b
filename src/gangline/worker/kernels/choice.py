"""The choice of kernels for a run: every rank tries each, and all take what works on all of them."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gangline.errors import UsageError, error_summary
from gangline.kernel_table import CROSS_ENTROPY, KERNELS
from gangline.runs.job import Job
from gangline.worker.loss import CausalLoss
from gangline.worker.model import base_of, output_head
from gangline.worker.precision import Precision

log = logging.getLogger(__name__)

Steps = Callable[..., Any]
"""Tensors -> a tensor, or several."""
Undo = Callable[[], None]
"""Takes a kernel out of one place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlace:
    """What a kernel is to be put into."""

    loss: CausalLoss
    """With the model, which may have a wrapper of peft; its weights may be on the meta device."""
    job: Job
    device: torch.device
    precision: Precision
    by_module: bool = False
    """See `strategies.base.Capabilities.weights_by_module`."""
    failures: list[str] = field(default_factory=list)
    """What was raised while kernels were tried."""

    @property
    def model(self) -> nn.Module:
        """The model in the loss."""
        return self.loss.model


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The kernels of a run."""

    named: bool
    """Whether the job names them, so that none may be missing."""
    taken: dict[str, int] = field(default_factory=dict)
    """Name -> in how many places."""
    left: dict[str, str] = field(default_factory=dict)
    """Name -> why it is not taken."""

    def leave(self, name: str, reason: str) -> None:
        """Do without a kernel. Raises UsageError where the job names it."""
        self.taken.pop(name, None)
        self.left[name] = reason
        if self.named:
            raise UsageError(
                f"kernels: {name} cannot be had",
                seen=f"it needs {reason}",
                fix="write kernels: auto, which takes what works",
            )

    def tell(self) -> None:
        """Write into the log which are taken, and why others are not."""
        for name, number in self.taken.items():
            log.info("kernel %s: %s, in %d places", name, KERNELS[name].replaces, number)
        for name, reason in self.left.items():
            log.info("kernel %s is not taken: it needs %s", name, reason)


NO_KERNELS = ("torch",)
NOT_ALL_RANKS = "to work on all ranks; the log of another one says what it lacks"
INTERPRETER = "TRITON_INTERPRET"
"""The variable of Triton that makes it compute on a processor, operation by operation; tests set it."""


def put_in_kernels(place: KernelPlace, *, world_size: int) -> Kernels:
    """Put the kernels that the job asks for into its model; collective where there are several ranks.

    Raises UsageError for one that is named and does not work on all ranks.
    """
    words = place.job.kernels
    found = Kernels(named=words not in (("auto",), NO_KERNELS))
    if words == NO_KERNELS:
        return found
    names = list(KERNELS) if words == ("auto",) else [name for name in KERNELS if name in words]
    obstacles = {name: _obstacle(name, place) for name in names}
    everywhere = _everywhere([not obstacles[name] for name in names], world_size=world_size)
    for name, works in zip(names, everywhere, strict=True):
        if not works:
            found.leave(name, obstacles[name] or NOT_ALL_RANKS)
            continue
        place.failures.clear()
        undo = _module(name).put_in(place)
        failure = f"to work here, but trying it failed: {place.failures[0]}" if place.failures else ""
        if not _everywhere([not failure], world_size=world_size)[0]:
            for each in undo:
                each()
            found.leave(name, failure or NOT_ALL_RANKS)
        elif undo:
            found.taken[name] = len(undo)
        else:
            found.leave(name, f"a model that it fits; nothing here has the numbers of {KERNELS[name].replaces}")
    return found


def leave_unused(kernels: Kernels, place: KernelPlace, *, world_size: int) -> None:
    """Do without cross-entropy where no rank computes its loss in chunks; collective where there are several ranks.

    That is known once the weights are there. Raises UsageError where the job names it.
    """
    if place.job.kernels != ("auto",) and CROSS_ENTROPY not in place.job.kernels:
        return
    loss = place.loss
    in_chunks = loss.fused and output_head(base_of(loss.model)).bias is None
    if _everywhere([not in_chunks], world_size=world_size)[0] and CROSS_ENTROPY in kernels.taken:
        loss.rows_loss = None
        kernels.leave(CROSS_ENTROPY, "logits that are the product with a head without bias, and nothing more")


def _module(name: str) -> Any:
    return importlib.import_module(KERNELS[name].place)


def _obstacle(name: str, place: KernelPlace) -> str:
    package = KERNELS[name].package
    if package and importlib.util.find_spec(package) is None:
        return f"the package {package}, which this environment lacks"
    try:
        module = _module(name)
    except (ImportError, OSError, RuntimeError) as error:
        return f"the package {package}, which cannot be imported: {error_summary(error)}"
    return str(module.obstacle(place))


def same_numbers(place: KernelPlace, one: Steps, two: Steps, leaves: Sequence[torch.Tensor]) -> bool:
    """Whether two functions have the same outputs and gradients on these tensors, but for rounding.

    The first is a kernel: what it raises is kept in `place.failures` and is no sameness. The second is what it would
    stand for: where that raises it is nothing of the kind.
    """
    try:
        expected = _numbers(two, leaves)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError, AttributeError, ValueError, IndexError, KeyError):
        return False
    try:
        found = _numbers(one, leaves)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - compilers for cards raise whatever they like, and torch can do without
        place.failures.append(error_summary(error))
        return False
    within = 1e-5 if leaves[0].dtype is torch.float32 else 2e-2
    return all(
        mine.shape == own.shape and mine.dtype == own.dtype and distance(mine, own) < within
        for mine, own in zip(found, expected, strict=True)
    )


def distance(one: torch.Tensor, two: torch.Tensor) -> float:
    """The norm of the difference over the norm of the second."""
    return float((one.float() - two.float()).norm() / two.float().norm().clamp_min(1e-30))


def _numbers(function: Steps, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.enable_grad():
        given = [each.detach().clone().requires_grad_() for each in leaves]
        made = function(*given)
        outputs = [made] if isinstance(made, torch.Tensor) else list(made)
        gradients = torch.autograd.grad(sum((each.float() * each.float()).sum() for each in outputs), given)
    return [each.detach() for each in [*outputs, *gradients]]


def replace_forward(module: nn.Module, function: Callable[..., Any]) -> Undo:
    """Give this very module another `forward`; what puts its own back."""
    module.forward = MethodType(function, module)  # type: ignore[method-assign]
    return lambda: delattr(module, "forward")


def triton_obstacle(place: KernelPlace) -> str:
    """The `obstacle` of kernels that are written in Triton."""
    if place.device.type != "cuda" and os.environ.get(INTERPRETER) != "1":
        return f"a GPU; ranks compute on {place.device.type}"
    if place.precision.compute is torch.float64:
        return "fp32, bf16 or fp16; this run computes in fp64"
    return ""


def _everywhere(flags: Iterable[bool], *, world_size: int) -> list[bool]:
    """What is true on all ranks."""
    if world_size == 1:  # a trace has no numbers in its tensors
        return list(flags)
    found = torch.tensor([int(flag) for flag in flags])
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return [bool(each) for each in found.tolist()]
