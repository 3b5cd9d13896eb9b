"""The table of strategies: the plan half of every kind, imported when it is asked for.

A plug-in's entry point in the group `gangline.strategies` names an object of a subclass of `PlanHalf`, in a module that
can be imported without torch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from gangline.plugins import Table, instance_of
from gangline.strategies.base import PlanHalf


class _Halves(Mapping[str, PlanHalf]):
    """Kind -> plan half, by "module:object"; each is imported when it is asked for."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def __getitem__(self, kind: str) -> PlanHalf:
        module, _, name = self._places[kind].partition(":")
        half: PlanHalf = getattr(importlib.import_module(module), name)
        return half

    def __contains__(self, kind: object) -> bool:
        return kind in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _read(name: str, found: Any) -> PlanHalf:
    """A plug-in's row."""
    half = instance_of(PlanHalf)(name, found)
    if getattr(half, "kind", None) != name:
        raise ValueError(f"expected kind = {name!r}, as its entry point, found {getattr(half, 'kind', None)!r}")
    if ":" not in getattr(half, "train", ""):
        raise ValueError('expected train = "module:Class" of its torch half')
    if not getattr(half, "meaning", ""):
        raise ValueError("expected a meaning: how ranks share the work, in a line")
    return half


STRATEGIES: Table[PlanHalf] = Table(
    "gangline.strategies",
    _Halves(
        {
            "single": "gangline.strategies.single.plan:SINGLE",
            "ddp": "gangline.strategies.ddp.plan:DDP",
            "zero-1": "gangline.strategies.zero.plan:ZERO_1",
            "zero-2": "gangline.strategies.zero.plan:ZERO_2",
            "fsdp": "gangline.strategies.fsdp.plan:FSDP",
            "hsdp": "gangline.strategies.fsdp.plan:HSDP",
            "zero-3": "gangline.strategies.zero.plan:ZERO_3",
            "tp": "gangline.strategies.tensor_parallel.plan:TENSOR_PARALLEL",
            "pipeline": "gangline.strategies.pipeline.plan:PIPELINE",
            "local-sgd": "gangline.strategies.local_sgd.plan:LOCAL_SGD",
        }
    ),
    read=_read,
)
"""The simplest first: of two that are as fast, a plan takes the one that stands before the other."""

ALONE = "single"
"""The strategy of one rank."""
DEFAULT = "ddp"
"""What ranks do where the job leaves it open and nothing is known of the model, or no other strategy applies."""


@functools.cache
def plan_half(kind: str) -> PlanHalf:
    """The plan half of a strategy. Raises UsageError for an unknown kind, PluginError for a plug-in without one."""
    return STRATEGIES[kind]


def strategy_keys() -> Mapping[str, tuple[str, ...]]:
    """Key of a job's section `strategy` -> the kinds that it is for."""
    found: dict[str, tuple[str, ...]] = {}
    for kind in STRATEGIES.built_in:
        for key in plan_half(kind).capabilities.keys:
            found[key] = (*found.get(key, ()), kind)
    return found
