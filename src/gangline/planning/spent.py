"""Where the time of an attempt went, rank by rank, out of the lines of metrics.jsonl. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gangline.planning.observed import LEAST_STEPS, NUM_WARM_UP, is_amount, steps_told
from gangline.runs.decode import build

SCHEMA_VERSION = 1
MOST_RANKS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """Seconds of one rank over all steps used."""

    host: str
    rank: int
    compute_s: float
    data_s: float
    waits_s: float
    """For slower ranks."""
    network_s: float
    """For the exchange, after the last rank was ready: the wait of the rank that waited least, step by step."""
    rest_s: float
    """The update of the weights, and what is measured nowhere else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeReport:
    """times.json: one attempt of a run. Evaluations and saves are not in it."""

    run: str
    attempt: int
    num_steps: int
    total_s: float
    """Of the steps used: all that were read but the first two, where enough are left."""
    ranks: tuple[RankTime, ...]
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """Plain data for times.json."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Any) -> TimeReport:
        """What `to_json` wrote; raises LookupError, TypeError, ValueError or AttributeError for anything else."""
        report = build(TimeReport, data)
        texts = [report.run, *(each.host for each in report.ranks)]
        numbers = [report.total_s, *(value for each in report.ranks for value in _seconds(each))]
        counts = [report.attempt, report.num_steps, *(each.rank for each in report.ranks)]
        if not report.ranks or not all(isinstance(text, str) for text in texts):
            raise TypeError("no report of a run's time")
        if not all(map(is_amount, numbers)) or not all(type(count) is int for count in counts):
            raise ValueError("a report of times that are none")
        return report


def spent(records: Iterable[Mapping[str, Any]], *, run_id: str, attempt: int) -> TimeReport | None:
    """Add up the steps of an attempt; None where there are none. Damaged lines are passed over."""
    steps = [step for record in records if (step := _step(record, attempt)) is not None]
    if not steps:
        return None
    names = [(host, rank) for host, rank, *_ in steps[-1][1]]
    steps = [step for step in steps if [(host, rank) for host, rank, *_ in step[1]] == names]
    used = steps[NUM_WARM_UP:] if len(steps) >= NUM_WARM_UP + LEAST_STEPS else steps
    ranks = []
    for place, (host, rank) in enumerate(names):
        compute_s = data_s = waits_s = network_s = rest_s = 0.0
        for step_s, rows in used:
            exposed_s = min(row[4] for row in rows)
            _, _, computing_s, reading_s, waiting_s = rows[place]
            compute_s, data_s = compute_s + computing_s, data_s + reading_s
            waits_s, network_s = waits_s + waiting_s - exposed_s, network_s + exposed_s
            rest_s += max(0.0, step_s - computing_s - reading_s - waiting_s)
        found = {"compute_s": compute_s, "data_s": data_s, "waits_s": waits_s, "network_s": network_s, "rest_s": rest_s}
        ranks.append(RankTime(host=host, rank=rank, **{name: round(seconds, 3) for name, seconds in found.items()}))
    total_s = round(sum(step_s for step_s, _ in used), 3)
    return TimeReport(run=run_id, attempt=attempt, num_steps=len(used), total_s=total_s, ranks=tuple(ranks))


_Row = tuple[str, int, float, float, float]
"""Host, rank, and seconds of computing, reading and waiting."""


def _step(record: Mapping[str, Any], attempt: int) -> tuple[float, list[_Row]] | None:
    """Seconds and rows of a step; None for what is none of this attempt, or damaged."""
    if record.get("kind") != "step" or record.get("attempt") != attempt:
        return None
    try:
        num_steps = steps_told(record)
        rows = [
            (row["host"], row["rank"], *(num_steps * row[name] for name in ("compute_s", "data_s", "wait_s")))
            for row in record["ranks"][:MOST_RANKS]
        ]
        step_s = num_steps * record["step_s"]
    except (LookupError, TypeError):
        return None
    texts = all(isinstance(host, str) and type(rank) is int for host, rank, *_ in rows)
    amounts = all(is_amount(value) for _, _, *values in rows for value in values)
    return (step_s, rows) if rows and texts and amounts and is_amount(step_s) else None


def _seconds(rank: RankTime) -> tuple[float, ...]:
    return rank.compute_s, rank.data_s, rank.waits_s, rank.network_s, rank.rest_s
