"""gangline: hitch the machines you have to one training run.

From Python (docs/python.md): `gangline.plan`, `gangline.train`, `gangline.Run`, `gangline.list_runs`. They are imported
when they are first used, so that `import gangline` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gangline.api import Curve, PlanAnswer, Run, list_runs, plan, train, untrained_model

__all__ = ["Curve", "PlanAnswer", "Run", "list_runs", "plan", "train", "untrained_model"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("gangline.api"), name)
