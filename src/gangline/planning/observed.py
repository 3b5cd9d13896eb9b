"""The steps of a run that a plan is held against, out of the lines of metrics.jsonl. Pure.

Only calm steps count: full ones that were not skipped, without the first two of the attempt, and without those right
after an evaluation or a save, if enough others are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

NUM_WARM_UP = 2
LEAST_STEPS = 5
MOST = 1e18
_OF_RANKS = ("micro_batches", "compute_s", "wait_s", "memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """One step; what ranks say is by global rank."""

    number: int
    time: str
    """When it was written, in ISO format."""
    step_s: float
    tokens_per_sample: float
    micro_batches: tuple[int, ...]
    """Of this step: shares may move while a run goes on."""
    compute_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One attempt."""

    steps: tuple[ObservedStep, ...]
    """All full ones, but for the first two of the attempt."""
    evaluated: frozenset[int]
    """Steps after which there was an evaluation."""

    def calm(self, save_every: int | None) -> tuple[ObservedStep, ...]:
        """Those that nothing else has made longer; all, where fewer than five are so.

        save_every: steps between checkpoints, where they are counted in steps.
        """

        def is_calm(step: ObservedStep) -> bool:
            before = step.number - 1
            return before not in self.evaluated and not (save_every and before % save_every == 0)

        calm = tuple(filter(is_calm, self.steps))
        return calm if len(calm) >= LEAST_STEPS else self.steps


def observe(records: Iterable[Mapping[str, Any]], *, attempt: int, batch: int, num_ranks: int) -> Observed:
    """The lines of metrics.jsonl, of which those of other attempts and damaged ones are passed over.

    batch: samples of a full step.
    """
    steps: list[ObservedStep] = []
    evaluated: set[int] = set()
    first: int | None = None
    for record in records:
        number = record.get("step")
        if record.get("attempt") != attempt or type(number) is not int:
            continue
        if record.get("kind") == "evaluation":
            evaluated.add(number)
        elif record.get("kind") == "step":
            first = number if first is None else first
            if number >= first + NUM_WARM_UP and (step := _step(record, batch=batch, num_ranks=num_ranks)) is not None:
                steps.append(step)
    return Observed(steps=tuple(steps), evaluated=frozenset(evaluated))


def _step(record: Mapping[str, Any], *, batch: int, num_ranks: int) -> ObservedStep | None:
    """One line; None where it is no full step, was skipped, or is damaged."""
    try:
        rows = sorted(record["ranks"], key=lambda row: row["rank"])
        shares, compute, wait, memory = ([row[name] for row in rows] for name in _OF_RANKS)
        step_s, tokens, time = record["step_s"], record["tokens"], record["time"]
        num_steps = steps_told(record)
        full = record["samples"] == batch * num_steps and not record.get("skipped")
        if not full or [row["rank"] for row in rows] != [*range(num_ranks)]:
            return None
    except (LookupError, TypeError, AttributeError):
        return None
    if not isinstance(time, str) or not all(map(is_amount, (step_s, tokens, *shares, *compute, *wait, *memory))):
        return None
    if not step_s or not tokens:
        return None
    return ObservedStep(
        number=record["step"],
        time=time,
        step_s=step_s,
        tokens_per_sample=tokens / (batch * num_steps),
        micro_batches=tuple(round(share / num_steps) for share in shares),
        compute_s=tuple(compute),
        wait_s=tuple(wait),
        memory_bytes=tuple(map(int, memory)),
    )


def steps_told(record: Mapping[str, Any]) -> int:
    """Optimizer steps that one line tells of: with local-sgd those of a round; its seconds are of one of them.

    Raises TypeError for what is no such number.
    """
    num_steps = record.get("round_steps", 1)
    if type(num_steps) is not int or not 1 <= num_steps < MOST:
        raise TypeError("no number of steps")
    return num_steps


def is_amount(value: object) -> bool:
    """Whether it is a number, of seconds, bytes or tokens, as there may be; a truth value is none."""
    return type(value) in {int, float} and 0 <= value < MOST  # type: ignore[operator]
