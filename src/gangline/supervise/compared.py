"""What was planned beside what came of it, and where time went, read at the end of an attempt: where the figures lie,
and not all of them.

A long run has gigabytes of figures; the last ones say as much about its pace as all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

from gangline.runs.cluster import Cluster
from gangline.runs.layout import RunLayout
from gangline.runs.versions import load_record

MOST_BYTES = 8 << 20
"""Of figures that are read: the last thousand steps of 64 ranks, or more of fewer."""
BLOCK_BYTES = 1 << 20
LARGEST_BYTES = 1 << 50
"""A file that has no end, as far as its host says, is looked at no further."""


class Readable(Protocol):
    """What is needed of a Transport."""

    def read(self, path: PurePath, *, offset: int = 0, limit: int = 1 << 22) -> bytes:
        """See `Transport.read`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LookBack:
    """What is written down when an attempt has ended."""

    times: dict[str, Any] | None = None
    """The content of times.json; None where there were no steps."""
    comparison: dict[str, Any] | None = None
    """The content of comparison.json; None where nothing was foreseen, or there were too few steps."""
    problem: str | None = None
    """Why there is no comparison, where that is not as it should be."""


def look_back(layout: RunLayout, attempt: int, *, cluster: Cluster, head: Readable) -> LookBack:
    """Read the figures of an attempt; raises whatever comes of a host that does not answer."""
    from gangline.planning.spent import spent

    try:
        records = last_records(head, RunLayout(Path(cluster.head.workdir), layout.run_id).metrics)
    except FileNotFoundError:
        return LookBack()
    report = spent(records, run_id=layout.run_id, attempt=attempt)
    times = report.to_json() if report is not None else None
    try:
        return LookBack(times=times, comparison=compared(layout, attempt, records))
    except Exception as error:  # noqa: BLE001  (a damaged plan, of another version perhaps)
        return LookBack(times=times, problem=f"{type(error).__name__}: {error}")


def compared(layout: RunLayout, attempt: int, records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The content of comparison.json; None where nothing was foreseen, or there were too few steps, or none.

    Raises whatever comes of a damaged plan.
    """
    # not before the end: nobody else in a supervisor needs to plan
    from gangline.planning.observed import observe
    from gangline.planning.outcome import compare
    from gangline.planning.plan import Plan

    try:
        plan = load_record(layout.plan, Plan)
        if plan.forecast is None:
            return None
    except FileNotFoundError:
        return None
    observed = observe(records, attempt=attempt, batch=plan.batch, num_ranks=len(plan.ranks))
    comparison = compare(plan, observed, run_id=layout.run_id, attempt=attempt)
    return None if comparison is None else comparison.to_json()


def last_records(head: Readable, path: PurePath) -> list[dict[str, Any]]:
    """The objects in the last 8 MiB of a file of JSON lines; raises FileNotFoundError."""
    begin = max(0, _end(head, path) - MOST_BYTES)
    data = b""
    while len(data) < MOST_BYTES and (piece := head.read(path, offset=begin + len(data), limit=BLOCK_BYTES)):
        data += piece
    lines = data.split(b"\n")
    values = map(_object, lines[1:] if begin else lines)  # the first of them is a part
    return [value for value in values if value is not None]


def _object(line: bytes) -> dict[str, Any] | None:
    """None for what was torn by a crash."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _end(head: Readable, path: PurePath) -> int:
    """Where a file ends, rounded up to whole MiB: a Transport does not tell sizes, but reads nothing beyond."""
    low, high = 0, MOST_BYTES
    while high < LARGEST_BYTES and head.read(path, offset=high, limit=1):
        low, high = high, 2 * high
    while low and high - low > BLOCK_BYTES:
        middle = (low + high) // 2 // BLOCK_BYTES * BLOCK_BYTES
        low, high = (middle, high) if head.read(path, offset=middle, limit=1) else (low, middle)
    return high
