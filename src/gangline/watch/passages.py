"""Events as rows of a story: each with its time by the clock of who wrote it, the same in a row folded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]

MOST_ROWS = 24

_NAMES = {
    "started": "gang started",
    "joined": "all ranks have joined",
    "committed": "checkpoint",
    "stopping": "told to end",
    "failing": "a part has failed, the rest is ended",
    "unreachable": "does not answer",
    "reachable": "answers again",
    "leaving": "leaves",
    "hanging": "stands still",
    "going on": "goes on",
    "returned": "training again",
    "save-failed": "a save failed",
    "step-skipped": "step skipped: not finite",
    "host-left-out": "left out",
    "replicas-differ": "replicas differ",
}
"""What events are called where that is not their name."""

_ELSEWHERE = frozenset({"restarting", "beginning", "exchange", "shares", "saving", "resumed", "straggler-over"})
"""Told by another line, or of no use to who looks for a cause."""

_OF_THE_GANG = frozenset({"started", "stopping", "finished", "stopped", "failed"})
"""Of rank 0: what the supervisor says for the whole gang."""


def event_rows(events: Iterable[Event], *, cause: str = "") -> list[str]:
    """What the supervisor wrote, in its order. cause: words that stand above them already."""
    return _rows([event for event in events if event.get("event") not in _ELSEWHERE], cause)


def told_rows(events: Iterable[Event]) -> list[str]:
    """What rank 0 wrote that may tell of a cause, in its order."""
    return _rows([event for event in events if event.get("event") not in _ELSEWHERE | _OF_THE_GANG], "")


def _rows(events: Sequence[Event], cause: str) -> list[str]:
    groups = [list(group) for _, group in itertools.groupby(events, key=lambda event: event.get("event"))]
    rows = [_row(group, cause) for group in groups]
    if len(rows) <= MOST_ROWS:
        return rows
    first = MOST_ROWS // 3
    last = MOST_ROWS - first - 1
    return [*rows[:first], f"... {len(rows) - first - last} more ...", *rows[-last:]]


def _row(group: Sequence[Event], cause: str) -> str:
    """Events of one name in a row: the last of them."""
    event = group[-1]
    times = f" ({len(group)} times)" if len(group) > 1 else ""
    return f"{_clock(event.get('time'))}  {_words(event, cause)}{times}"


def _words(event: Event, cause: str) -> str:
    name = str(event.get("event", ""))
    said = _NAMES.get(name, name.replace("-", " "))
    what = str(event.get("what") or event.get("why") or "")
    if what:
        host = str(event.get("host") or "")
        who = f"{host} " if host and host not in what else ""
        return said if what == cause else f"{who}{said}: {what}"
    hosts = event.get("hosts") if name == "started" else None
    parts = [
        _at(event),
        said,
        f"on {', '.join(map(str, hosts))}" if isinstance(hosts, list) else "",
        f"of step {event['step']}" if event.get("step") is not None else "",
        str(event.get("order") or ""),
        f"after {event['seconds']:.1f} s" if isinstance(event.get("seconds"), (int, float)) else "",
    ]
    return " ".join(part for part in parts if part)


def _at(event: Event) -> str:
    rank = f"rank {event['rank']} on " if event.get("rank") is not None else ""
    return f"{rank}{event['host']}" if event.get("host") is not None else ""


def _clock(time: object) -> str:
    """14:02:07 of an ISO time."""
    text = str(time)
    return text[11:19] if len(text) >= len("2026-11-21T14:02:07") and text[10] == "T" else "--:--:--"
