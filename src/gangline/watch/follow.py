"""Following a run through its files: the reader can come and go, the run does not notice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from gangline.errors import HostKeyRefused, HostUnreachable
from gangline.remote.transport import Transport
from gangline.runs.layout import RunLayout
from gangline.runs.manifest import COMMIT_FILE
from gangline.runs.registry import RunRecord, read_record
from gangline.watch.board import Board, read_board
from gangline.watch.tail import JsonTail

POLL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Where one run is read: its record on the controller, its figures on the head."""

    layout: RunLayout
    head: Transport
    head_layout: RunLayout
    read: Callable[[], RunRecord] | None = None
    """Says where the run stands; None: the records on this computer do."""

    def record(self) -> RunRecord:
        """Where the run stands now."""
        return read_record(self.layout) if self.read is None else self.read()

    def board(self, run: RunRecord) -> Board | None:
        """The start board of the attempt."""
        return read_board(self.layout, run.state.attempt) if run.state else None

    def committed_steps(self) -> list[int]:
        """Steps with a commit record on the head, as kept now."""
        folder = self.head_layout.checkpoints
        names = [name for name in self.head.names(folder) if name.startswith("step-")]
        return [int(name[5:]) for name in names if COMMIT_FILE in self.head.names(folder / name)]

    def tails(self) -> list[JsonTail]:
        """The files with metrics and events; events of the supervisor may lie apart from those of rank 0."""
        tails = [JsonTail(self.head, self.head_layout.metrics), JsonTail(self.head, self.head_layout.events)]
        if self.layout.root != self.head_layout.root:
            tails.append(JsonTail(_Here(), self.layout.events))
        return tails


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What is new since the last one."""

    records: tuple[dict[str, Any], ...]
    """Lines of metrics and events, in the order of their files."""
    run: RunRecord
    board: Board | None = None
    """How far the start of this attempt has come, where that is known."""
    more: bool = False
    """There is more to read already."""

    @property
    def last(self) -> bool:
        """Nothing more comes after this one."""
        return self.run.ended and not self.more


def follow(view: View, *, wait: Callable[[float], None] = time.sleep) -> Iterator[Update]:
    """Yield what there is, then what comes, until the run has ended; the last update says how."""
    tails = view.tails()
    while True:
        # read before the files: what was written before the end is then part of the last update
        run = view.record()
        records = _new(tails)
        more = any(tail.is_behind for tail in tails)
        update = Update(records=records, run=run, board=view.board(run), more=more)
        yield update
        if update.last:
            return
        if not more:
            wait(POLL_S)


def _new(tails: list[JsonTail]) -> tuple[dict[str, Any], ...]:
    """What has come since; nothing while the head does not answer: the files wait. Raises HostKeyRefused."""
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
        with Path(path).open("rb") as stream:
            stream.seek(offset)
            return stream.read(limit)
