"""What was planned beside what came of it, read at the end of an attempt: where the figures lie, and not all of them.

A long run has gigabytes of figures; the last ones say as much about its pace as all.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import Any, Protocol

from gangline.runs.cluster import Cluster
from gangline.runs.files import read_json
from gangline.runs.layout import RunLayout

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


def compared(layout: RunLayout, attempt: int, *, cluster: Cluster, head: Readable) -> dict[str, Any] | None:
    """The content of comparison.json; None where nothing was foreseen, or there were too few steps, or none.

    Raises whatever comes of a damaged file, and of a host that does not answer.
    """
    # not before the end: nobody else in a supervisor needs to plan
    from gangline.planning.observed import observe
    from gangline.planning.outcome import compare
    from gangline.planning.plan import Plan

    try:
        plan = Plan.from_json(read_json(layout.plan))
        if plan.forecast is None:
            return None
        records = last_records(head, RunLayout(Path(cluster.head.workdir), layout.run_id).metrics)
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
