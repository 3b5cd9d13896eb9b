"""Rows of text in aligned columns, and the lines of figures that people read while a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from gangline.units import format_bytes, format_duration
from gangline.watch.history import History
from gangline.watch.restart import restart_line
from gangline.watch.text import clean


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns two spaces apart; texts are cleaned of control characters."""
    texts = [[clean(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in texts) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]


def step_line(record: dict[str, Any], *, remaining_s: float | None, width: int | None = None) -> str:
    """One optimizer step: "step 120/400  loss 2.113  lr 1.8e-04  4 510 tok/s  ...".

    Where it would be wider than `width`, memory goes first, then the time per step, then the learning rate.
    """
    memory = max((rank.get("memory_bytes") or 0 for rank in record.get("ranks") or []), default=0)
    parts = [
        f"step {record['step']}/{record.get('steps', '?')}",
        "skipped: loss or gradient not finite" if record.get("skipped") else _figure("loss", record.get("loss"), ".4g"),
        _figure("lr", record.get("learning_rate"), ".1e"),
        f"{round(record['tokens_per_s']):,} tok/s".replace(",", " ") if record.get("tokens_per_s") else "",
        f"{record['step_s']:.2f} s/step" if record.get("step_s") is not None else "",
        f"mem {format_bytes(memory)}" if memory else "",
        f"eta {format_duration(remaining_s)}" if remaining_s is not None else "",
    ]
    for expendable in (5, 4, 2):
        if width is not None and len(_joined(parts)) > width:
            parts[expendable] = ""
    return _joined(parts)[:width]


def evaluation_line(record: dict[str, Any]) -> str:
    """One evaluation: "evaluation at step 120  loss 2.254  perplexity 9.53"."""
    parts = [
        f"evaluation at step {record['step']}",
        _figure("loss", record.get("loss"), ".4g"),
        _figure("perplexity", record.get("perplexity"), ".4g"),
    ]
    return _joined(parts)


def event_line(record: dict[str, Any]) -> str | None:
    """One event in a few words; None for events that the other lines tell already."""
    event = str(record.get("event", ""))
    if not event or _is_told(event, record):
        return None
    if event == "restarting":
        return clean(restart_line(record))
    parts = _PARTS.get(event, _DETAILS)
    shown = [(key, _detail(key, value)) for key, value in record.items() if key in parts and value is not None]
    details = [_WORDS.get(key, f"{key} {{}}").format(value) for key, value in shown]
    name = _NAMES.get(event, event)
    return clean(_joined([name, *details]))


def _is_told(event: str, record: dict[str, Any]) -> bool:
    if event == "failed" and record.get("why"):
        return record.get("source") == "worker"
    return event in _TOLD or (record.get("source") == "worker" and event in _ECHOED)


_NAMES = {
    "beginning": "",
    "committed": "checkpoint committed",
    "failed": "no further attempt",
    "hanging": "stands still",
    "leaving": "",
    "memory-off": "memory",
    "returned": "training again",
    "started": "gang started",
    "straggler": "slow",
    "straggler-over": "no longer slow",
}
"""What events are called where that is not their name; "": the rest says it."""

_PARTS = {
    "failed": ("why",),
    "going on": ("what",),
    "hanging": ("what",),
    "leaving": ("what",),
    "memory-off": ("what",),
    "returned": ("seconds",),
    "straggler": ("step", "what"),
    "straggler-over": ("step", "what"),
}
"""Parts of events that help a reader, where these are other ones than in general: `what` may name host, rank and step
already."""

_TOLD = frozenset({"evaluated", "saving", "saved", "failing", "failed", "waiting", "joined", "exchange"})
"""The start has its board, an evaluation its own line, a save counts once it is committed, a failure is told with what
follows it, and how gradients are exchanged is for programs."""

ENDS = frozenset({"finished", "stopped"})
"""Events after which nothing comes."""

_ECHOED = frozenset({"started", "stopping", "finished", "stopped", "failed"})
"""Said by the supervisor for the whole gang."""

_WORDS = {"what": "{}", "why": "{}", "seconds": "after {}"}
"""Parts that are shown otherwise than with their name."""

_DETAILS = ("step", "host", "rank", "reason", "what", "why", "duration_s")
"""Parts of an event that help a reader; the rest stays in events.jsonl."""


def final_losses(history: History) -> list[str]:
    """First and last losses of training and evaluation."""
    named = (("training loss", history.losses()), ("evaluation loss", history.evaluation_losses()))
    return [f"{name:<16} {_from_to(points)}" for name, points in named if points]


def _from_to(points: Sequence[tuple[float, float]]) -> str:
    ends = [points[0], points[-1]][: len(points)]
    return " -> ".join(f"{loss:.4g} at step {step:g}" for step, loss in ends)


def age(time: str, *, now: datetime) -> str:
    """How long ago an ISO time was: "3 min ago"; "" for what is no time."""
    try:
        passed_s = (now - datetime.fromisoformat(time.replace("Z", "+00:00"))).total_seconds()
    except ValueError:
        return ""
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed_s >= size_s:
            return f"{passed_s // size_s:.0f} {unit} ago"
    return f"{max(0.0, passed_s):.0f} s ago"


def _joined(parts: Sequence[str]) -> str:
    return "  ".join(part for part in parts if part)


def _figure(name: str, value: object, style: str) -> str:
    return f"{name} {value:{style}}" if isinstance(value, (int, float)) else ""


def _detail(key: str, value: object) -> str:
    if key == "seconds" and isinstance(value, (int, float)):
        return format_duration(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)
