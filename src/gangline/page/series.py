"""The figures of a run as columns that grow, and as the buckets that a screen can show. Pure.

A run of 100,000 steps on 64 ranks has a gigabyte of metrics. Of every step the figures of the whole gang are kept;
those of its ranks only of every n-th step, where n doubles as the run gets longer.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangline.report.host_samples import seconds_of
from gangline.runs.files import json_object

FIGURES = ("loss", "learning_rate", "grad_norm", "tokens_per_s", "step_s", "mfu")
"""Of a step, by their names in metrics.jsonl."""
PARTS = ("compute_s", "data_s", "waits_s", "network_s", "rest_s")
"""Where the time of a rank goes; see `RankTime` in planner/outcome.py."""
MOST_BUCKETS = 1000
MOST_RANK_BUCKETS = 128
MOST_RANK_ROWS = 1024
"""Steps whose ranks are kept: with more, every second one goes."""
MOST_RANKS = 512
DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenBefore:
    """What a browser has already: buckets of so many steps, the first of them, in one generation of the columns."""

    generation: int
    width: int
    count: int


class RunSeries:
    """The figures of one run. Where a resumed run repeats a step, what was written of it and of later ones goes."""

    def __init__(self) -> None:
        self.generation = 0
        """Rises whenever steps went: what a browser has is no beginning of the columns any more."""
        self.total_steps: int | None = None
        self.attempt: int | None = None
        self.steps = array("q")
        self.times = array("d")
        self.columns = {name: array("d") for name in FIGURES}
        self.evaluations: dict[int, float] = {}
        self.attempts: dict[int, int] = {}
        """Attempt -> its first step."""
        self.ranks = RankSeries()

    def feed(self, lines: Iterable[str]) -> None:
        """Take in lines of metrics.jsonl; those that are none are passed over."""
        for line in lines:
            self._take(line)

    def losses(self) -> dict[int, float]:
        """Step -> loss, without those that are not finite."""
        pairs = zip(self.steps, self.columns["loss"], strict=True)
        return {step: loss for step, loss in pairs if math.isfinite(loss)}

    def _take(self, line: str) -> None:
        at = line.find('"ranks": [')
        record = None
        if at >= 0 and not self.ranks.wants():
            # rows of ranks are flat: the next bracket ends them. They are most of the line, and are not parsed
            record = json_object(line[:at] + '"ranks": [' + line[line.find("]", at) :])
        record = record or json_object(line)
        step = record.get("step") if record else None
        if record is None or type(step) is not int:
            return
        if record.get("kind") == "evaluation":
            self.evaluations[step] = _number(record.get("loss"))
        elif record.get("kind") == "step":
            self._take_step(step, record)

    def _take_step(self, step: int, record: Mapping[str, Any]) -> None:
        if self.steps and step <= self.steps[-1]:
            self._forget_from(step)
        attempt, total = record.get("attempt"), record.get("steps")
        if type(attempt) is int and attempt != self.attempt:
            self.attempt = attempt
            self.attempts[attempt] = step
        self.total_steps = total if type(total) is int else self.total_steps
        self.steps.append(step)
        self.times.append(seconds_of(record.get("time")) or math.nan)
        for name, column in self.columns.items():
            column.append(_number(record.get(name)))
        self.ranks.take(step, _number(record.get("step_s")), record.get("ranks"))

    def _forget_from(self, step: int) -> None:
        keep = bisect_left(self.steps, step)
        del self.steps[keep:], self.times[keep:]
        for column in self.columns.values():
            del column[keep:]
        self.evaluations = {at: loss for at, loss in self.evaluations.items() if at <= step}
        self.ranks.forget_from(step)
        self.generation += 1

    def last(self) -> dict[str, Any]:
        """The figures of the last step; nothing before the first."""
        if not self.steps:
            return {}
        figures = {name: _shown(column[-1]) for name, column in self.columns.items()}
        return {"step": self.steps[-1], "steps": self.total_steps, "time": _shown(self.times[-1], digits=14), **figures}

    def buckets(
        self, *, first: int | None = None, last: int | None = None, before: SeenBefore | None = None
    ) -> dict[str, Any]:
        """The figures between two steps, as least, mean and most of at most 1,000 buckets of as many steps each.

        before: what the browser has of the whole run; only what is new comes, from bucket `from` on.
        """
        begin = 0 if first is None else bisect_left(self.steps, first)
        end = len(self.steps) if last is None else bisect_left(self.steps, last + 1)
        width = 1
        while (end - begin) > MOST_BUCKETS * width:
            width *= 2
        begin -= begin % width
        known = 0
        if before is not None and (before.generation, before.width) == (self.generation, width):
            known = max(0, min(before.count - 1, end // width))  # the last one may have been incomplete
        edges = range(begin + known * width, end, width)
        return {
            "generation": self.generation,
            "width": width,
            "from": known,
            "step": [self.steps[min(at + width, end) - 1] for at in edges],
            "time": [_shown(self.times[min(at + width, end) - 1], digits=14) for at in edges],
            "figures": {
                name: _of_buckets(column, edges, min(width, end), end) for name, column in self.columns.items()
            },
            "evaluations": [[step, _shown(loss)] for step, loss in sorted(self.evaluations.items())][-MOST_BUCKETS:],
            "attempts": [[attempt, step] for attempt, step in self.attempts.items()][-200:],
        }


def _of_buckets(column: array[float], edges: Iterable[int], width: int, end: int) -> dict[str, Any]:
    """Least, mean and most of stretches of a column; None: no finite figure there."""
    lows, means, highs = [], [], []
    for at in edges:
        part: Sequence[float] = column[at : min(at + width, end)]
        total = sum(part)
        if not math.isfinite(total):  # a figure that is not finite makes the sum so
            part = [value for value in part if math.isfinite(value)]
            total = sum(part)
        means.append(_shown(total / len(part)) if part else None)
        if width > 1:
            lows.append(_shown(min(part)) if part else None)
            highs.append(_shown(max(part)) if part else None)
    return {"mean": means, "low": lows, "high": highs} if width > 1 else {"mean": means}


class RankSeries:
    """What each rank did, of every n-th step."""

    def __init__(self) -> None:
        self.every = 1
        """Of every how many steps the ranks are kept."""
        self.keys: list[tuple[int, str]] = []
        """(rank, host), in the order of the columns."""
        self._places: dict[tuple[int, str], int] = {}
        self._rows: list[tuple[int, array[float]]] = []
        self._count = 0

    def wants(self) -> bool:
        """Whether the ranks of the next step are kept."""
        return self._count % self.every == 0

    def take(self, step: int, step_s: float, rows: object) -> None:
        """Take in the rows of a step, or pass over it."""
        wanted = self.wants()
        self._count += 1
        if not wanted or not isinstance(rows, list) or not rows:
            return
        cells: dict[int, tuple[float, ...]] = {}
        for row in rows[:MOST_RANKS]:
            if isinstance(row, dict) and type(row.get("rank")) is int and isinstance(row.get("host"), str):
                place = self._place((row["rank"], row["host"][:80]))
                if place is not None:
                    cells[place] = _cells(row, step_s)
        flat = array("d", [math.nan]) * (len(self.keys) * CELLS)
        for place, values in cells.items():
            flat[place * CELLS : (place + 1) * CELLS] = array("d", values)
        self._rows.append((step, flat))
        if len(self._rows) > MOST_RANK_ROWS:
            del self._rows[1::2]
            self.every *= 2

    def _place(self, key: tuple[int, str]) -> int | None:
        if key not in self._places:
            if len(self.keys) >= 2 * MOST_RANKS:
                return None
            self._places[key] = len(self.keys)
            self.keys.append(key)
        return self._places[key]

    def forget_from(self, step: int) -> None:
        """Steps from this one on are written anew."""
        while self._rows and self._rows[-1][0] >= step:
            self._rows.pop()

    def document(
        self, *, first: int | None = None, last: int | None = None, rank: tuple[int, str] | None = None
    ) -> dict[str, Any]:
        """Between two steps: where the time of each rank went in the mean, and shares and memory over the steps.

        rank: only this one is in `parts`, the time over the steps; None: the mean of all of them.
        """
        rows = [row for row in self._rows if (first is None or row[0] >= first) and (last is None or row[0] <= last)]
        each = max(1, math.ceil(len(rows) / MOST_RANK_BUCKETS))
        groups = [rows[at : at + each] for at in range(0, len(rows), each)]
        keys = [place for place, _ in enumerate(self.keys) if any(_cell(row, place, 0) for row in rows)]
        chosen = keys if rank is None else [place for place in keys if self.keys[place] == rank]
        return {
            "every": self.every,
            "parts": list(PARTS),
            "ranks": [{"rank": self.keys[place][0], "host": self.keys[place][1]} for place in keys],
            "means": [[_mean(rows, [place], cell) for cell in range(len(PARTS))] for place in keys],
            "step": [group[-1][0] for group in groups],
            "time": [[_mean(group, chosen, cell) for group in groups] for cell in range(len(PARTS))],
            "shares": [[_mean(group, [place], SHARE) for group in groups] for place in keys],
            "memory": [[_most(group, place, MEMORY) for group in groups] for place in keys],
        }


CELLS = len(PARTS) + 2
SHARE, MEMORY = len(PARTS), len(PARTS) + 1


def _cells(row: Mapping[str, Any], step_s: float) -> tuple[float, ...]:
    compute, data, waited, others = (
        _number(row.get(name)) for name in ("compute_s", "data_s", "wait_s", "wait_others_s")
    )
    others = others if math.isfinite(others) else 0.0
    rest = max(0.0, step_s - compute - data - waited) if math.isfinite(step_s) else math.nan
    memory = _number(row.get("memory_bytes"))
    return (compute, data, others, max(0.0, waited - others), rest, _number(row.get("micro_batches")), memory)


def _cell(row: tuple[int, array[float]], place: int, cell: int) -> float | None:
    at = place * CELLS + cell
    value = row[1][at] if at < len(row[1]) else math.nan  # a rank that joined later
    return value if math.isfinite(value) else None


def _mean(rows: Sequence[tuple[int, array[float]]], places: Sequence[int], cell: int) -> float | None:
    values = [value for row in rows for place in places if (value := _cell(row, place, cell)) is not None]
    return _shown(sum(values) / len(values)) if values else None


def _most(rows: Sequence[tuple[int, array[float]]], place: int, cell: int) -> float | None:
    values = [value for row in rows if (value := _cell(row, place, cell)) is not None]
    return _shown(max(values)) if values else None


def _number(value: object) -> float:
    """A figure; not a number for anything else, such as the text "nan"."""
    return float(value) if type(value) in {int, float} else math.nan  # type: ignore[arg-type]


def _shown(value: float, *, digits: int = DIGITS) -> float | None:
    """A figure with so many digits; None where it is not finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
