"""Following a run through its files, without any effect on the run."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from gangline.errors import GanglineError, HostKeyRefused, HostUnreachable, RunFailed
from gangline.report.tail import JsonTail
from gangline.report.text_table import clean, table
from gangline.runs.layout import RunLayout
from gangline.runs.manifest import COMMIT_FILE
from gangline.runs.record_versions import damaged, load_record
from gangline.runs.registry import RunRecord, read_record
from gangline.transport.transport import Transport

# The start board on the screen: the stage of each host, and the hosts that are behind.


BoardRecord = Mapping[str, Any]


def read_board(layout: RunLayout, attempt: int) -> BoardRecord | None:
    """The board of an attempt; None where there is none yet."""
    try:
        return load_record(layout.board(attempt), checked_board)
    except (FileNotFoundError, ValueError):
        return None


def checked_board(data: Any) -> BoardRecord:
    """A board of another host, if it can be shown; raises LookupError, TypeError or ValueError."""
    sentence, news = data["sentence"], data.get("news")
    if not isinstance(data["done"], bool) or not isinstance(sentence, str | None) or not isinstance(news, str | None):
        raise TypeError("a board that is none")
    joined_line(data)
    board_line(data)
    board_lines(data)
    return {**data}


def board_line(board: BoardRecord) -> str:
    """One line: "starting, 8 s: pc1 joined · pc2 torch imported · pc3 connected"."""
    hosts = " · ".join(f"{row['host']} {_stage(row, board['order'])}" for row in board["hosts"])
    return clean(f"starting, {board['seconds']:.0f} s: {hosts}")


def board_lines(board: BoardRecord) -> list[str]:
    """The board as a table: seconds after which each host had reached each stage."""
    stages = board["order"]
    rows = [
        [row["host"], *(_seconds(row["stages"].get(stage)) for stage in stages), f"{row['joined']} of {row['ranks']}"]
        for row in board["hosts"]
    ]
    return table(["host", *stages, "ranks"], rows)


def joined_line(board: BoardRecord) -> str:
    """One line once all have joined, such as: all 5 ranks have joined after 12.3 s."""
    ranks = "the rank has" if board["ranks"] == 1 else f"all {board['ranks']} ranks have"
    return f"{ranks} joined after {board['seconds']:.1f} s"


def board_news(board: BoardRecord) -> str:
    """The sentence without its figures: it is shown again only when this changes."""
    return (board["sentence"] and (board.get("news") or re.sub(r"after \d+ s", "", board["sentence"]))) or ""


_REACHED = {
    "ssh": "answers",
    "agent": "agent up",
    "launcher": "torchrun up",
    "port": "connected",
    "python": "ranks started",
    "torch": "torch imported",
}
"""Stage -> words for a host that has reached it, where they differ from its name."""


def _stage(row: Mapping[str, Any], order: Sequence[str]) -> str:
    """The last stage that a host has reached."""
    reached = [stage for stage in order if row["stages"].get(stage) is not None]
    return _REACHED.get(reached[-1], reached[-1]) if reached else "-"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


POLL_S = 0.25
NO_SUPERVISOR = "its supervisor is gone, and another one is about to start"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Where one run is read: its record on the controller, its figures on the head."""

    layout: RunLayout
    head: Transport
    head_layout: RunLayout
    read: Callable[[], RunRecord] | None = None
    """Reads the state of the run; None: from the records on this computer."""
    head_of: Callable[[int], tuple[Transport, RunLayout]] | None = None
    """The head of an attempt; None: it is always the same."""
    patience_s: float = 0.0
    """How long a run without a supervisor may take to get a new one, before it counts as lost."""

    def at(self, attempt: int) -> View:
        """The view of an attempt: after a failure another host may be the head."""
        if self.head_of is None:
            return self
        head, layout = self.head_of(attempt)
        return replace(self, head=head, head_layout=layout)

    def record(self) -> RunRecord:
        """Where the run stands now."""
        return read_record(self.layout) if self.read is None else self.read()

    def board(self, run: RunRecord) -> BoardRecord | None:
        """The start board of the attempt."""
        return read_board(self.layout, run.state.attempt) if run.state else None

    def committed_steps(self) -> list[int]:
        """Steps with a commit record on the head, as kept now."""
        folder = self.head_layout.checkpoints
        names = [name for name in self.head.names(folder) if name.startswith("step-")]
        return [int(name[5:]) for name in names if COMMIT_FILE in self.head.names(folder / name)]

    def tails(self) -> list[JsonTail]:
        """The files with metrics and events; events of the supervisor may lie apart from those of rank 0."""
        return [*self.tails_of_head(), *self.tails_here()]

    def tails_of_head(self) -> list[JsonTail]:
        """Metrics, then events, on the head."""
        return [JsonTail(self.head, self.head_layout.metrics), JsonTail(self.head, self.head_layout.events)]

    def tails_here(self) -> list[JsonTail]:
        """Events of a supervisor that writes apart from rank 0."""
        return [JsonTail(_Here(), self.layout.events)] if self.layout.root != self.head_layout.root else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What is new since the last one."""

    records: tuple[dict[str, Any], ...]
    """Lines of metrics and events, in the order of their files."""
    run: RunRecord
    board: BoardRecord | None = None
    """How far the start of this attempt has come, where that is known."""
    more: bool = False
    """There is more to read already."""

    @property
    def last(self) -> bool:
        """Nothing more comes after this one."""
        return self.run.ended and not self.more


def follow(
    view: View, *, wait: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic
) -> Iterator[Update]:
    """Yield past and new records, over all attempts, until the run has ended; the last update has its end."""
    reader, patience = _Reader(view), Patience(view.patience_s, clock)
    while True:
        # read before the files, so that the last update has everything from before the end
        run = patience.judge(view.record())
        records = reader.new(run.state.attempt if run.state else None)
        more = reader.is_behind
        update = Update(records=records, run=run, board=view.board(run), more=more)
        yield update
        if update.last:
            return
        if not more:
            wait(POLL_S)


def raise_failure(run: RunRecord) -> None:
    """Raise what ended a run, if it ended badly."""
    if run.phase == "failed" and run.state and run.state.error:
        raise GanglineError.from_json(run.state.error)
    if run.phase == "lost":
        raise RunFailed(
            f"{run.id} is lost",
            seen="its supervisor died; its ranks may still run",
            fix=f"start a new supervisor: gangline attach {run.id}; "
            f"or save and end its ranks: gangline stop {run.id}, then: gangline resume {run.id}",
        )
    if run.phase in {"failed", "unknown"}:
        what = "has failed" if run.phase == "failed" else "has no readable state"
        raise RunFailed(f"{run.id} {what}", seen="its state.json names no error", fix=f"gangline logs {run.id}")


class Patience:
    """Whether a run without a supervisor is lost, or about to get another one."""

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._since: float | None = None

    def judge(self, run: RunRecord) -> RunRecord:
        """The record to show and to go by."""
        if not run.lost:
            self._since = None
            return run
        now = self._clock()
        self._since = now if self._since is None else self._since
        return run if now - self._since >= self._patience_s else replace(run, lost=False, silent=NO_SUPERVISOR)


class _Reader:
    """Reads the files of a run as they grow, on whatever host its head is."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._head, self._here = view.tails_of_head(), view.tails_here()
        self._attempt: int | None = None
        self._since = 0
        """The first attempt on this head; records of earlier ones came from the head before."""

    @property
    def is_behind(self) -> bool:
        """Whether there is more to read already."""
        return any(tail.is_behind for tail in (*self._head, *self._here))

    def new(self, attempt: int | None) -> tuple[dict[str, Any], ...]:
        """New records. attempt: the current one."""
        last = self._move(attempt) if attempt is not None and attempt != self._attempt else ()
        return (*last, *self._of_head(), *_new(self._here))

    def _move(self, attempt: int) -> tuple[dict[str, Any], ...]:
        """Switch to the head of an attempt; the last records of the head before."""
        is_first, self._attempt = self._attempt is None, attempt
        before, view = self._view, self._view.at(attempt)
        if (view.head.host, view.head_layout) == (before.head.host, before.head_layout):
            return ()
        last = () if is_first else self._of_head()
        self._here = view.tails_here() if is_first else self._here or self._head[1:]
        self._view, self._head = view, view.tails_of_head()
        self._since = 0 if is_first else attempt
        return last

    def _of_head(self) -> tuple[dict[str, Any], ...]:
        return tuple(record for record in _new(self._head) if not self._since or _attempt(record) >= self._since)


def _attempt(record: dict[str, Any]) -> int:
    number = record.get("attempt")
    return number if type(number) is int else 0


def _new(tails: list[JsonTail]) -> tuple[dict[str, Any], ...]:
    """New records; none while the head does not answer. Raises HostKeyRefused."""
    found: list[dict[str, Any]] = []
    for tail in tails:
        try:
            found += tail.objects()
        except HostKeyRefused:
            raise
        except HostUnreachable:
            continue
    return tuple(found)


class _Here:
    """Reading on this computer."""

    def read(self, path: PurePath, *, offset: int = 0, limit: int = 1 << 22) -> bytes:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise damaged(str(path), "expected a regular file, found a folder, pipe, socket or device")
            stream.seek(offset)
            return stream.read(limit)
