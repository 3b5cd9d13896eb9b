"""The figures of a whole run, out of all lines of its metrics: what a summary draws, and what `diff` compares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gangline.planner.outcome import RankTime, is_amount, steps_told, timed_rows
from gangline.report.host_samples import seconds_of

FIGURES = ("loss", "learning_rate", "grad_norm", "tokens_per_s")
"""The figures of a step that are kept, by their names in metrics.jsonl."""


@dataclass(slots=True, kw_only=True)
class RunFigures:
    """Figures of all attempts. Where a resumed run repeats a step, the last line of the step counts in the curves;
    times and tokens are sums of all lines, since the repeated steps took time, too.
    """

    curves: dict[str, dict[int, float]] = field(default_factory=lambda: {name: {} for name in FIGURES})
    """Figure -> step -> value; values that are not finite are left out."""
    evaluations: dict[int, float] = field(default_factory=dict)
    """Step -> loss."""
    num_steps: int = 0
    """Optimizer steps, repeated ones counted again."""
    tokens: int = 0
    steps_s: float = 0.0
    """Seconds of all steps."""
    evaluations_s: float = 0.0
    ranks: dict[tuple[str, int], RankTime] = field(default_factory=dict)
    """(host, rank) -> where its time went, over all steps."""
    written: list[tuple[float, int]] = field(default_factory=list)
    """When each step was written, in seconds since 1970, and its number; in the order of the file."""
    memory_bytes: dict[tuple[str, int], int] = field(default_factory=dict)
    """(host, rank) -> the most that it reported."""
    micro_batches: dict[tuple[str, int], int] = field(default_factory=dict)
    """(host, rank) -> how many it computed, in the same steps as `ranks`."""
    skipped: int = 0
    """Lines of steps in which the loss or the gradient was not finite."""
    label_tokens: int | None = None
    """Tokens with a loss; None: no line tells it."""

    @property
    def tokens_per_s(self) -> float | None:
        """The mean over all steps; None without any."""
        return self.tokens / self.steps_s if self.steps_s else None

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in one line of metrics.jsonl; damaged lines and other kinds are passed over."""
        step = record.get("step")
        if type(step) is not int:
            return
        if record.get("kind") == "evaluation":
            if _is_finite(record.get("loss")):
                self.evaluations[step] = float(record["loss"])
            self.evaluations_s += _amount(record.get("duration_s"))
        elif record.get("kind") == "step":
            for name in FIGURES:
                self.curves[name].pop(step, None)
                if _is_finite(record.get(name)):
                    self.curves[name][step] = float(record[name])
            if (time := seconds_of(record.get("time"))) is not None:
                self.written.append((time, step))
            self._add_times(record)

    def _add_times(self, record: Mapping[str, Any]) -> None:
        try:
            num_steps = steps_told(record)
        except TypeError:
            return
        self.num_steps += num_steps
        self.skipped += record.get("skipped") is True
        if is_amount(record.get("label_tokens")):
            self.label_tokens = (self.label_tokens or 0) + int(record["label_tokens"])
        self.tokens += int(_amount(record.get("tokens")))
        self.steps_s += num_steps * _amount(record.get("step_s"))
        if (timed := timed_rows(record)) is None:
            return
        step_s, rows = timed
        exposed_s = min(waiting_s for *_, waiting_s in rows)
        for host, rank, compute_s, data_s, waiting_s in rows:
            before = self.ranks.get((host, rank)) or _nothing(host, rank)
            self.ranks[host, rank] = RankTime(
                host=host,
                rank=rank,
                compute_s=before.compute_s + compute_s,
                data_s=before.data_s + data_s,
                waits_s=before.waits_s + waiting_s - exposed_s,
                network_s=before.network_s + exposed_s,
                rest_s=before.rest_s + max(0.0, step_s - compute_s - data_s - waiting_s),
            )
        for row in record["ranks"]:
            place = row["host"], row["rank"]
            if is_amount(row.get("micro_batches")):
                self.micro_batches[place] = self.micro_batches.get(place, 0) + int(row["micro_batches"])
            if is_amount(row.get("memory_bytes")):
                self.memory_bytes[place] = max(self.memory_bytes.get(place, 0), int(row["memory_bytes"]))


def figures_of(records: Iterable[Mapping[str, Any]]) -> RunFigures:
    """The figures in all lines of metrics."""
    figures = RunFigures()
    for record in records:
        figures.add(record)
    return figures


def _nothing(host: str, rank: int) -> RankTime:
    return RankTime(host=host, rank=rank, compute_s=0.0, data_s=0.0, waits_s=0.0, network_s=0.0, rest_s=0.0)


def _is_finite(value: object) -> bool:
    return type(value) in {int, float} and math.isfinite(value)  # type: ignore[arg-type]


def _amount(value: object) -> float:
    return float(value) if is_amount(value) else 0.0  # type: ignore[arg-type]
