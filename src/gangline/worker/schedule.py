"""The learning rate as a function of the optimizer step. Stateless: resuming is arithmetic."""

from __future__ import annotations

import math

from gangline.runs.job import ScheduleJob


def learning_rate(step: int, total: int, *, peak: float, schedule: ScheduleJob) -> float:
    """Rate of 0-based optimizer step `step` of `total`.

    Warm-up is linear and its first step has peak / warmup_steps, so that no step is lost to a rate of 0. After it,
    `linear` and `cosine` fall to final_ratio * peak, which they would reach at the step after the last: the last step
    itself is not wasted on a rate of 0.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    span = max(1, total - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    fall = 1 - progress if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * fall)
