"""One live progress line on a terminal; a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TextIO

from gangline.watch.board import Board, board_lines, board_tick, gist, joined_line
from gangline.watch.follow import Update
from gangline.watch.history import History
from gangline.watch.restart import started_attempt
from gangline.watch.table import ENDS, evaluation_line, event_line, step_line
from gangline.watch.text import clean

PLAIN_EVERY_S = 5.0
"""Without a terminal: time between two progress lines."""


class Progress:
    """Shows updates of a run on a stream, and remembers its figures in `history`."""

    def __init__(
        self, stream: TextIO, *, live: bool, width: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.history = History()
        self._stream = stream
        self._live = live
        self._clock = clock
        self._width = width
        self._shown_at = float("-inf")
        self._pending: str | None = None
        self._attempt: int | None = None
        """The one that goes on."""
        self._again: set[int] = set()
        """Attempts that began by themselves: one line tells of their start."""
        self._all_joined = False
        self._gist = ""
        self._silent: str | None = None
        self._past: set[tuple[str, str]] = set()
        """(attempt, stage) before the first step, as in supervise/first_step.py, that is over."""
        self._end: str | None = None
        """How the run ended; the last line to show."""

    def skip(self, update: Update) -> None:
        """Take in what was before, without showing it but for the state it led to."""
        state = update.run.state
        self._note_attempt(update)
        self._all_joined = update.board is not None and bool(update.board["done"])
        for record in update.records:
            self._remember(record)
        if line := self._last_restart(update):
            self._line(line)
        if last := self.history.last_step:
            self._step(last)
        told = [record for record in update.records if record.get("event") == "beginning"]
        if told and update.run.phase == "running" and not self._is_past(told[-1]) and (line := event_line(told[-1])):
            self._line(line)
        if state is not None and update.run.phase == "running" and state.quiet_since is not None:
            self._line(f"quiet  no rank has printed anything since {state.quiet_since}")

    def show(self, update: Update) -> None:
        """Show what is new."""
        self._note_attempt(update)
        self._show_board(update.board)
        self._show_silence(update.run.silent)
        for record in update.records:
            self._remember(record)
            kind = record.get("kind")
            if kind == "step":
                self._step(record)
            elif kind == "evaluation":
                self._line(evaluation_line(record))
            elif kind == "event" and not self._is_told(record) and (line := event_line(record)):
                self._event(record, line)
        if update.last:
            self.finish()

    def _remember(self, record: dict[str, Any]) -> None:
        self.history.add(record)
        past = {"step": ("load", "evaluate", "step"), "evaluation": ("load", "evaluate")}
        self._past.update((str(record.get("attempt")), stage) for stage in past.get(str(record.get("kind")), ()))

    def _is_past(self, record: dict[str, Any]) -> bool:
        """Whether it tells late, as a guard looks once a second, what ranks do no more: figures came of it already."""
        return (
            record.get("event") == "beginning" and (str(record.get("attempt")), str(record.get("stage"))) in self._past
        )

    def _is_told(self, record: dict[str, Any]) -> bool:
        """Whether another line tells it: of an attempt that began by itself, the one that says why."""
        began = record.get("event") in {"started", "resumed"} and record.get("attempt") in self._again
        return began or self._is_past(record)

    def _last_restart(self, update: Update) -> str | None:
        """Why the attempt that goes on has begun, if it did so by itself: who comes back may not know of it."""
        if update.run.ended or self._attempt is None:
            return None
        restarts = [record for record in update.records if record.get("event") == "restarting"]
        is_now = bool(restarts) and (started_attempt(restarts[-1]) or 0) >= self._attempt
        return event_line(restarts[-1]) if is_now else None

    def _note_attempt(self, update: Update) -> None:
        """The next attempt has a start board of its own."""
        restarts = [record for record in update.records if record.get("event") == "restarting"]
        self._again.update(number for number in map(started_attempt, restarts) if number is not None)
        number = update.run.state.attempt if update.run.state else None
        if number != self._attempt and None not in (number, self._attempt):
            self._all_joined, self._gist = False, ""
        self._attempt = number

    def _show_board(self, board: Board | None) -> None:
        """While ranks join: who is where, and a sentence when somebody is behind. Then one line, once."""
        if board is None:
            return
        if board["done"]:
            self._gist = ""
            if not self._all_joined:
                self._all_joined = True
                if self._attempt in self._again:
                    return
                self._pending = None
                joined = clean(joined_line(board))
                self._write(f"\r\x1b[K{joined}\n" if self._live else f"{joined}\n")
            return
        if gist(board) not in {"", self._gist}:
            self._gist = gist(board)
            for line in (*board_lines(board), clean(board["sentence"])):
                self._line(line)
        if self._live and not self._all_joined:
            self._pending = board_tick(board)[: self._width() - 1]
            self._write(f"\r\x1b[K{self._pending}")

    def _show_silence(self, silent: str | None) -> None:
        """Say once that the keeper does not answer, and once that it does again."""
        if silent != self._silent:
            self._silent = silent
            self._line(clean(f"{silent}; the run goes on, this view waits" if silent else "it answers again"))

    def finish(self) -> None:
        """End the live line; without a terminal, show the last step if it was not. Then how the run ended."""
        if self._pending is not None:
            self._write("\n" if self._live else self._pending + "\n")
        if self._end is not None:
            self._write(self._end + "\n")
        self._pending = self._end = None

    def _event(self, record: dict[str, Any], line: str) -> None:
        if record.get("event") in ENDS:
            self._end = line  # metrics are another file, whose last lines may be read only after this
        else:
            self._line(line)

    def _step(self, record: dict[str, Any]) -> None:
        # a line as wide as the terminal would wrap and could not be overwritten
        width = self._width() - 1 if self._live else None
        line = clean(step_line(record, remaining_s=self.history.remaining_s(), width=width))
        self._pending = line
        if self._live:
            self._write(f"\r\x1b[K{line}")
        elif self._clock() - self._shown_at >= PLAIN_EVERY_S:
            self._shown_at = self._clock()
            self._pending = None
            self._write(line + "\n")

    def _line(self, line: str) -> None:
        line = clean(line)  # figures are what a host wrote
        if self._live and self._pending is not None:
            self._write(f"\r\x1b[K{line}\n{self._pending}")
        else:
            self._write(line + "\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
