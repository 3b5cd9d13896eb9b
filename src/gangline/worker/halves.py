"""The torch half of every strategy, by kind: a row each, and a module that is imported when it is asked for.

A plug-in's entry point in the group `gangline.strategies` names an object that can be imported without torch; its
attribute `train` says where its torch half is, as "module:Class". The class is a `worker.strategy.Strategy`.
"""

from __future__ import annotations

import importlib
from typing import Any

from gangline.plugins import Table
from gangline.worker.strategy import Strategy


def _read(_name: str, found: Any) -> str:
    train = getattr(found, "train", None)
    if not isinstance(train, str) or ":" not in train:
        raise TypeError(f'expected an attribute train with "module:Class" of the torch half, found {train!r}')
    return train


HALVES: Table[str] = Table(
    "gangline.strategies",
    {
        "single": "gangline.strategies.single.train:Single",
        "ddp": "gangline.strategies.ddp.train:Ddp",
        "fsdp": "gangline.strategies.fsdp.train:Fsdp",
        "hsdp": "gangline.strategies.fsdp.train:Fsdp",
        "zero-1": "gangline.strategies.zero.train:Zero",
        "zero-2": "gangline.strategies.zero.train:Zero",
        "zero-3": "gangline.strategies.zero.train:Zero",
        "tp": "gangline.strategies.tensor_parallel.train:TensorParallel",
        "pipeline": "gangline.strategies.pipeline.train:Pipeline",
        "local-sgd": "gangline.strategies.local_sgd.train:LocalSgd",
    },
    read=_read,
)


def train_half(kind: str) -> type[Strategy]:
    """The torch half of a strategy. Raises UsageError for an unknown kind, PluginError for a plug-in without one."""
    module, _, name = HALVES[kind].partition(":")
    with HALVES.guard(kind):
        half: type[Strategy] = getattr(importlib.import_module(module), name)
    return half
