"""What happens at which optimizer step: the warm-up, evaluations, saves, and the learning rate of every step.

A job counts in steps or in epochs, or gives the warm-up as a part of the run. What that is in steps is known once
samples are counted. Pure arithmetic, which the plan that tells it and the ranks that do it have in common.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from gangline.runs.job import ScheduleJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """Something that is due again and again. Mark k (1, 2, ...) is the first step at or after k times the period."""

    period: Fraction | None
    """In optimizer steps, which need not be whole; None: there are no marks."""

    def passed(self, step: int) -> int:
        """Marks up to and with the one of 1-based step `step`."""
        return 0 if self.period is None else math.floor(step / self.period)

    def is_due(self, step: int, *, before: int) -> bool:
        """Whether there is a mark among the steps behind `before` up to and with `step`."""
        return self.passed(step) > self.passed(before)

    def steps(self, total: int) -> Iterator[int]:
        """The marks of a run of so many steps, each step once."""
        step = 0
        while self.period is not None:
            step = max(step + 1, math.ceil((self.passed(step) + 1) * self.period))
            if step > total:
                return
            yield step


def cadence(every_steps: int | None, every_epochs: float | None, *, steps_per_epoch: int) -> Cadence:
    """The marks of a job, which has one of the two words or none.

    A number of epochs is taken as it is written in decimals: three times 0.1 epochs are 0.3 epochs, to the step.
    """
    if every_steps is not None:
        return Cadence(period=Fraction(every_steps))
    if every_epochs is not None:
        return Cadence(period=Fraction(repr(every_epochs)) * steps_per_epoch)
    return Cadence(period=None)


def marks_in_words(marks: Cadence, total: int) -> str:
    """The steps themselves, for people: `steps 3, 5, 8, 10 ... 40`."""
    first = list(itertools.islice(marks.steps(total), 5))
    if len(first) < 5:
        return f"step{'s' if len(first) > 1 else ''} {', '.join(map(str, first))}" if first else "no step of this run"
    *_, last = marks.steps(total)
    return f"steps {', '.join(map(str, first[:4]))} ... {last}"


def warmup_steps(schedule: ScheduleJob, total: int) -> int:
    """Optimizer steps of the warm-up in a run of `total` steps; see `part_of`."""
    return schedule.warmup_steps if schedule.warmup_ratio is None else part_of(total, schedule.warmup_ratio)


def decay_steps(schedule: ScheduleJob, total: int) -> int:
    """Optimizer steps in which `wsd` falls: at the most all that are left behind the warm-up, at least one."""
    asked = part_of(total, schedule.decay_ratio) if schedule.decay_steps is None else schedule.decay_steps
    return max(1, min(asked, total - warmup_steps(schedule, total)))


def part_of(total: int, ratio: float) -> int:
    """That part of the steps of a run, rounded up, in floating point as transformers does it.

    0.07 of 100 steps are 8, for their product is a little more than 7.
    """
    return math.ceil(total * ratio)


def in_steps(schedule: ScheduleJob, total: int) -> ScheduleJob:
    """The same schedule for a run of `total` steps, with whatever was a part of the run in steps."""
    warmup = warmup_steps(schedule, total)
    decay = decay_steps(schedule, total) if schedule.kind == "wsd" else None
    return dataclasses.replace(schedule, warmup_steps=warmup, warmup_ratio=None, decay_steps=decay)


def learning_rate(step: int, total: int, *, peak: float, schedule: ScheduleJob) -> float:
    """Rate of 0-based optimizer step `step` of `total`.

    Warm-up is linear. Its first step has peak / warmup_steps, so that no step is lost to a rate of 0, and its last one
    the peak; `warmup_from_zero` counts as transformers does, where the first step of a warm-up has a rate of 0 and the
    step behind it the peak. After it a schedule falls to final_ratio * peak, which it would reach at the step after the
    last: the last step itself is not wasted on a rate of 0.
    """
    warmup = warmup_steps(schedule, total)
    if step < warmup:
        return peak * (step + (not schedule.warmup_from_zero)) / warmup
    if schedule.kind == "inverse-sqrt":
        return peak * _inverse_sqrt(step, warmup, schedule)
    fall = _fall(_progress(step, total, warmup, schedule), schedule)
    return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * fall)


def _progress(step: int, total: int, warmup: int, schedule: ScheduleJob) -> float:
    """From 0 where the rate begins to fall to 1 at the step after the last."""
    span = decay_steps(schedule, total) if schedule.kind == "wsd" else max(1, total - warmup)
    return max(0.0, min(1.0, (step - total + span) / span))


def _inverse_sqrt(step: int, warmup: int, schedule: ScheduleJob) -> float:
    """One over the square root of steps (Zhai et al., Scaling Vision Transformers, 2021, as big_vision has it)."""
    timescale = schedule.timescale or warmup or TIMESCALE
    return math.sqrt(timescale / (step + timescale - warmup))


TIMESCALE = 10_000
"""Steps of `inverse-sqrt` without a warm-up; with one it is the warm-up's."""


def _fall(progress: float, schedule: ScheduleJob) -> float:
    """From 1 to 0 while progress goes from 0 to 1.

    Source of `wsd` and its shapes: Haegele et al., Scaling Laws Beyond Fixed Training Durations (2024).
    """
    shape = schedule.decay if schedule.kind == "wsd" else schedule.kind
    if shape in ("cosine", "cosine-restarts"):
        cycles = schedule.cycles if shape == "cosine-restarts" else 1
        return 0.5 * (1 + math.cos(math.pi * (cycles * progress % 1.0)))
    if shape == "1-sqrt":
        return 1 - math.sqrt(progress)
    if shape == "polynomial":
        return float((1 - progress) ** schedule.power)
    return 1.0 if shape == "constant" else 1 - progress
