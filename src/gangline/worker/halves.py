"""The torch half of a strategy, imported when a rank asks for it by the kind that its gang names."""

from __future__ import annotations

import importlib

from gangline.strategies.table import STRATEGIES, plan_half
from gangline.worker.strategy import Strategy


def train_half(kind: str) -> type[Strategy]:
    """The torch half of a strategy. Raises UsageError for an unknown kind, PluginError for a plug-in without one."""
    module, _, name = plan_half(kind).train.partition(":")
    with STRATEGIES.guard(kind):
        half: type[Strategy] = getattr(importlib.import_module(module), name)
    return half
