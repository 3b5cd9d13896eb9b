"""Tables with aligned columns, and the lines of a run on the screen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from gangline.report.tail import History
from gangline.units import fold_names, format_bytes, format_duration, listed

if TYPE_CHECKING:
    from gangline.planner.outcome import RankTime, TimeReport

# An automatic restart, in one line.


MOST_NAMES = 3
"""More hosts are folded: pc[1-8]."""


def restart_line(record: Mapping[str, Any]) -> str:
    """Attempt 2 on pc1 and pc2: pc3 does not answer; going on from step 1,240 (1 step again)

    record: the supervisor's event `restarting`.
    """
    what = next(iter(str(record.get("what") or "").splitlines()), "")
    without = [name for name in _names(record.get("without")) if not _says(what, name)]
    hosts = _names(record.get("hosts"))
    where = f" on {in_words(hosts)}" if hosts else ""
    less = f", without {in_words(without)}" if without else ""
    missing = f"missing: {record['missing']}" if record.get("missing") else ""
    smaller = f" with micro_batch {record['micro_batch']}" if type(record.get("micro_batch")) is int else ""
    parts = [what, f"going on from {_step(record)}{smaller}", str(record.get("settings") or ""), missing]
    return f"attempt {started_attempt(record)}{where}{less}: {'; '.join(part for part in parts if part)}"


def started_attempt(record: Mapping[str, Any]) -> int | None:
    """The number of the attempt that an event `restarting` begins."""
    number = record.get("next")
    return number if type(number) is int else None


def in_words(names: Sequence[str]) -> str:
    """pc1, pc2 and pc3; many names are folded."""
    return fold_names(names) if len(names) > MOST_NAMES else listed(names)


def _step(record: Mapping[str, Any]) -> str:
    step, lost = record.get("step"), record.get("lost_steps")
    start = f"step {step:,}" if type(step) is int and step > 0 else "the beginning"
    if type(lost) is not int or lost < 1:
        return start
    return f"{start} ({lost:,} {'step' if lost == 1 else 'steps'} again)"


def _says(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text) is not None


def _names(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else []


# Text from hosts, models and data sets, without terminal control sequences.


_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, erase
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC, DCS, SOS, PM, APC up to their end: titles, clipboard, hyperlinks
    r"|\x1b[ -/]*[0-~]",  # all other escapes
    re.DOTALL,
)

# C0 and C1 controls but tab and newline; marks that reverse or hide text (bidirectional overrides, zero width)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def clean(text: str, *, keep_newlines: bool = False) -> str:
    """Without escape sequences and control characters; tabs become spaces, newlines too unless they are kept."""
    if text.isprintable():  # most lines of a large log: nothing below changes them
        return text
    text = _CONTROLS.sub("", _SEQUENCES.sub("", text)).replace("\t", "    ")
    return text if keep_newlines else text.replace("\n", " ")


MOST_INDENT = 32
"""A line that is wrapped goes on below its text; a label that is wider is not indented."""
_LABEL = re.compile(r"\s*\S+(?: \S+)*?\s{2,}(?=\S)|\s+")


def wrapped(line: str, width: int) -> list[str]:
    """A line in rows of at most `width` columns, broken between words; a word that is longer stays whole.

    The rows that follow begin below the text: behind the label and its blanks ("  fix   do this"), if there is one.
    """
    if len(line) <= width:
        return [line]
    label = _LABEL.match(line)
    indent = label.end() if label and label.end() <= min(MOST_INDENT, width // 2) else 0
    rows, row = [], line[:indent]
    for word in line[indent:].split(" "):
        if len(row) > indent and len(row) + 1 + len(word) > width:
            rows.append(row.rstrip())
            row = " " * indent + word
        else:
            row = f"{row} {word}" if len(row) > indent else row + word
    return [*rows, row.rstrip()]


def last_shown(line: str) -> str:
    """What a terminal would show in the end of a line that was written over, such as a progress bar."""
    return line.rstrip("\r").rpartition("\r")[2]


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
    """One event in a few words; None for events that other lines show."""
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
    "early-stopping": "early stopping",
    "failed": "no further attempt",
    "hanging": "stands still",
    "leaving": "",
    "memory-off": "memory",
    "not-ready": "",
    "preparing": "",
    "returned": "training again",
    "standing": "",
    "started": "gang started",
    "straggler": "slow",
    "straggler-over": "no longer slow",
    "trouble-over": "trouble over",
}
"""Event -> its words on the screen, where they differ from its name; "": none."""

_PARTS = {
    "failed": ("why",),
    "going on": ("what",),
    "hanging": ("what",),
    "leaving": ("what",),
    "memory-off": ("what",),
    "not-ready": ("what",),
    "preparing": ("what",),
    "returned": ("seconds",),
    "standing": ("what",),
    "straggler": ("step", "what"),
    "straggler-over": ("step", "what"),
    "trouble": ("what",),
    "trouble-over": ("what",),
}
"""The shown parts of an event, where they are not `_DETAILS`: `what` may name host, rank and step already."""

_TOLD = frozenset({"evaluated", "saving", "saved", "failing", "failed", "waiting", "joined", "exchange"})
"""Events that are not shown: the start has its board, an evaluation its own line, a save counts once it is committed, a
failure is shown with its restart, and how gradients are exchanged is for programs."""

ENDS = frozenset({"finished", "stopped"})
"""The last events of a run."""

_ECHOED = frozenset({"started", "stopping", "finished", "stopped", "failed"})
"""Events of rank 0 that the supervisor writes for the whole gang."""

_WORDS = {"what": "{}", "why": "{}", "seconds": "after {}"}
"""Parts that are not shown with their name."""

_DETAILS = ("step", "host", "rank", "reason", "what", "why", "duration_s")
"""The shown parts of an event; the rest stays in events.jsonl."""


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


# The time of a run, as a table of its ranks.


MOST_ROWS = 16
COLUMNS = ("computes", "data", "waits", "network", "rest")


def time_table(report: TimeReport) -> list[str]:
    """Parts of the time of all steps, by rank:

    time of 398 steps, 12 min 03 s (waits: for slower ranks)
    host  rank  computes  data  waits  network  rest
    pc1   0         82 %   0 %    9 %      4 %   5 %
    """
    head = f"time of {report.num_steps} steps, {format_duration(report.total_s)}"
    rows = [(each.host, str(each.rank), *_parts(each)) for each in report.ranks[:MOST_ROWS]]
    more = len(report.ranks) - MOST_ROWS
    return [
        f"{head} (waits: for slower ranks)",
        *table(("host", "rank", *COLUMNS), rows),
        *([f"and {more} ranks more, see times.json"] if more > 0 else []),
    ]


def _parts(rank: RankTime) -> list[str]:
    """Of the rank's own time, right-aligned below their names."""
    seconds = (rank.compute_s, rank.data_s, rank.waits_s, rank.network_s, rank.rest_s)
    whole_s = sum(seconds) or 1.0
    return [f"{100 * each / whole_s:.0f} %".rjust(len(name)) for each, name in zip(seconds, COLUMNS, strict=True)]
