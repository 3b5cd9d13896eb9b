"""Why gangline's own trainer does not do what the plan finds best, in words. Pure."""

from __future__ import annotations

from gangline.planning.option import BUILT_STRATEGIES, Option, builds_method, lacking
from gangline.planning.unfit import unpackable
from gangline.runs.job import ZERO


def why_not(option: Option, named: str) -> str:
    """One sentence of an option that is not built. named: its strategy, as people read it."""
    kind = option.strategy.kind
    if kind == "local-sgd":
        return "gangline train does local-sgd only for strategy: local-sgd in the job, for its numbers are others"
    missing = lacking(option.strategy, option.training, option.architecture)
    if kind in ZERO and not option.strategy.asked and not missing:
        return f"gangline train does {kind} only where the job asks for it, for it is DeepSpeed's"
    if kind in BUILT_STRATEGIES:
        return f"gangline train cannot do {missing or f'{kind} with optimizer.kind: {option.training.optimizer}'} yet"
    method = f" and {option.training.method} of {unpackable(option.architecture)}"
    built = builds_method(option.training, option.architecture)
    return f"gangline train cannot do {named}{'' if built else method} yet"
