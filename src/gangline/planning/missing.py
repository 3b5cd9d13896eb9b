"""Why gangline's own trainer does not do what the plan found best. Pure."""

from __future__ import annotations

from gangline.planning.option import Option, lacking


def why_not(option: Option) -> str:
    """One sentence of an option that is not built."""
    half = option.strategy.half
    if (missing := lacking(option.strategy, option.training, option.architecture)) is not None:
        return f"gangline train cannot do {missing.what} yet"
    return f"gangline train does {half.kind} only where the job asks for it, for {half.capabilities.asked_only}"
