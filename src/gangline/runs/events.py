"""What happened in a run, one JSON line per event in events.jsonl; and the time as all our files write it."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

Source = Literal["worker", "supervisor"]


def now_iso() -> str:
    """The time in UTC, with milliseconds: 2026-11-21T06:14:13.042Z."""
    return iso(time.time())


def iso(seconds: float) -> str:
    """A time in seconds after 1970, as `now_iso` writes it."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def append_event(path: Path, event: str, *, source: Source, **details: Any) -> None:
    """Add one line to events.jsonl. Several processes may do so: one write() with O_APPEND keeps lines whole."""
    line = json.dumps({"kind": "event", "time": now_iso(), "source": source, "event": event, **details}) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_events(path: Path) -> list[dict[str, Any]]:
    """All whole lines of events.jsonl; [] where there is none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    whole, _, _ = data.rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]
