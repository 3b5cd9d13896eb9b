"""The choice of kernels for a run: every rank tries each, and all take what works on all of them."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gangline.errors import UsageError
from gangline.kernel_table import KERNELS
from gangline.runs.job import Job
from gangline.worker.loss import CausalLoss
from gangline.worker.precision import Precision

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlace:
    """What a kernel is to be put into."""

    loss: CausalLoss
    """With the model, which may have a wrapper of peft; its weights may be on the meta device."""
    job: Job
    device: torch.device
    precision: Precision

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
            found.leave(name, obstacles[name] or "to work on all ranks; the log of another one says what it lacks")
        elif number := _module(name).put_in(place):
            found.taken[name] = number
        else:
            found.leave(name, f"a model that it fits; nothing in this one computes {KERNELS[name].replaces}")
    return found


def _module(name: str) -> Any:
    return importlib.import_module(KERNELS[name].place)


def _obstacle(name: str, place: KernelPlace) -> str:
    package = KERNELS[name].package
    if package and importlib.util.find_spec(package) is None:
        return f"the package {package}, which this environment lacks"
    return str(_module(name).obstacle(place))


def same_within(dtype: torch.dtype) -> float:
    """How far, relative to their norm, numbers may be apart that come of one formula: some roundings, no more."""
    return 1e-6 if dtype is torch.float32 else 1e-2


def triton_obstacle(place: KernelPlace) -> str:
    """The `obstacle` of kernels that are written in Triton."""
    if place.device.type != "cuda" and os.environ.get(INTERPRETER) != "1":
        return f"a GPU; ranks compute on {place.device.type}"
    if place.precision.compute is torch.float64:
        return "fp32, bf16 or fp16; this run computes in fp64"
    return ""


def _everywhere(flags: Iterable[bool], *, world_size: int) -> list[bool]:
    """What is true on all ranks."""
    found = torch.tensor([int(flag) for flag in flags])
    if world_size > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return [bool(each) for each in found.tolist()]
