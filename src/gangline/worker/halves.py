"""Which class trains by which strategy; imported when it is asked for."""

from __future__ import annotations

import importlib

from gangline.worker.strategy import Strategy

_HALVES = {
    "single": "single:Single",
    "ddp": "ddp:Ddp",
    "fsdp": "fsdp:Fsdp",
    "hsdp": "fsdp:Fsdp",
    "zero-1": "zero:Zero",
    "zero-2": "zero:Zero",
    "zero-3": "zero:Zero",
    "tp": "tensor_parallel:TensorParallel",
    "pipeline": "pipeline:Pipeline",
    "local-sgd": "local_sgd:LocalSgd",
}


def train_half(kind: str) -> type[Strategy]:
    """The torch half of a strategy."""
    module, _, name = _HALVES[kind].partition(":")
    half: type[Strategy] = getattr(importlib.import_module(f"gangline.strategies.{module}.train"), name)
    return half
