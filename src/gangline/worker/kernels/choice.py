"""The choice of kernels for a run: every rank tries each, and all take what works on all of them."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gangline.errors import UsageError
from gangline.kernel_table import KERNELS
from gangline.runs.job import Job
from gangline.worker.precision import Precision

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlace:
    """What a kernel is to be put into."""

    model: nn.Module
    """With or without a wrapper of peft; its weights may be on the meta device."""
    job: Job
    device: torch.device
    precision: Precision


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


def put_in_kernels(place: KernelPlace, *, world_size: int) -> Kernels:
    """Put the kernels that the job asks for into its model; collective where there are several ranks.

    Raises UsageError for one that is named and does not work on all ranks.
    """
    words = place.job.kernels
    found = Kernels(named=words not in (("auto",), NO_KERNELS))
    if words == NO_KERNELS:
        return found
    names = list(KERNELS) if words == ("auto",) else [name for name in KERNELS if name in words]
    modules = {name: importlib.import_module(KERNELS[name].place) for name in names}
    obstacles = {name: _obstacle(name, modules[name], place) for name in names}
    everywhere = _everywhere([not obstacles[name] for name in names], world_size=world_size)
    for name, works in zip(names, everywhere, strict=True):
        if not works:
            found.leave(name, obstacles[name] or "to work on all ranks; the log of another one says what it lacks")
        elif number := modules[name].put_in(place):
            found.taken[name] = number
        else:
            found.leave(name, f"a model that it fits; nothing in this one computes {KERNELS[name].replaces}")
    return found


def _obstacle(name: str, module: Any, place: KernelPlace) -> str:
    package = KERNELS[name].package
    if package and importlib.util.find_spec(package.replace("-", "_")) is None:
        return f"the package {package}, which this environment lacks"
    return str(module.obstacle(place))


def _everywhere(flags: Iterable[bool], *, world_size: int) -> list[bool]:
    """What is true on all ranks."""
    found = torch.tensor([int(flag) for flag in flags])
    if world_size > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return [bool(each) for each in found.tolist()]
