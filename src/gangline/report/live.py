"""The view of one run in a terminal until its end, and the summary."""

from __future__ import annotations

import itertools
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from gangline.report.follow import BoardRecord, Update, View, board_line, board_lines, board_news, follow, joined_line
from gangline.report.tail import History
from gangline.report.text_table import (
    ENDS,
    clean,
    evaluation_line,
    event_line,
    final_losses,
    started_attempt,
    step_line,
    time_table,
    wrapped,
)
from gangline.runs.record_versions import load_record
from gangline.runs.registry import RunRecord
from gangline.transport.ssh_options import NONSENSE

# One live progress line on a terminal; a plain line now and then elsewhere.


PLAIN_EVERY_S = 5.0
"""Without a terminal: time between two progress lines."""


class ProgressLine:
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
        """The current one."""
        self._again: set[int] = set()
        """Automatic restarts: one line reports their start."""
        self._all_joined = False
        self._news = ""
        self._silent: str | None = None
        self._past: set[tuple[str, str]] = set()
        """(attempt, stage) before the first step (supervise/gang_view.py) that is complete."""
        self._end: str | None = None
        """How the run ended; the last line to show."""

    def skip(self, update: Update) -> None:
        """Take in the past, and show only the current state."""
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
        self._show_silence(update.run)
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
        past = {"step": ("load", "evaluate", "compile", "step"), "evaluation": ("load", "evaluate")}
        self._past.update((str(record.get("attempt")), stage) for stage in past.get(str(record.get("kind")), ()))

    def _is_past(self, record: dict[str, Any]) -> bool:
        """Whether it reports a stage that is complete already: host agents report once a second."""
        return (
            record.get("event") == "beginning" and (str(record.get("attempt")), str(record.get("stage"))) in self._past
        )

    def _is_told(self, record: dict[str, Any]) -> bool:
        """Whether another line shows it: that of the automatic restart."""
        began = record.get("event") in {"started", "resumed"} and record.get("attempt") in self._again
        return began or self._is_past(record)

    def _last_restart(self, update: Update) -> str | None:
        """The reason of the current attempt if it is an automatic restart, for a user who comes back."""
        if update.run.ended or self._attempt is None:
            return None
        restarts = [record for record in update.records if record.get("event") == "restarting"]
        is_now = bool(restarts) and (started_attempt(restarts[-1]) or 0) >= self._attempt
        return event_line(restarts[-1]) if is_now else None

    def _note_attempt(self, update: Update) -> None:
        """Reset the start board at the next attempt."""
        restarts = [record for record in update.records if record.get("event") == "restarting"]
        self._again.update(number for number in map(started_attempt, restarts) if number is not None)
        number = update.run.state.attempt if update.run.state else None
        if number != self._attempt and None not in (number, self._attempt):
            self._all_joined, self._news = False, ""
        self._attempt = number

    def _show_board(self, board: BoardRecord | None) -> None:
        """While ranks join: the stage of each host, and a sentence when one is behind, with a table before the first.
        Then one line, once.
        """
        if board is None:
            return
        if board["done"]:
            self._news = ""
            if not self._all_joined:
                self._all_joined = True
                if self._attempt in self._again:
                    return
                self._pending = None
                joined = clean(joined_line(board))
                self._write(f"\r\x1b[K{joined}\n" if self._live else f"{joined}\n")
            return
        if board_news(board) not in {"", self._news}:
            table = () if self._news else board_lines(board)
            self._news = board_news(board)
            for line in (*table, clean(board["sentence"])):
                self._line(line)
        if self._live and not self._all_joined:
            self._pending = board_line(board)[: self._width() - 1]
            self._write(f"\r\x1b[K{self._pending}")

    def _show_silence(self, run: RunRecord) -> None:
        """Report once that the supervisor's host does not answer, and once that it does again."""
        if run.silent == self._silent:
            return
        self._silent = run.silent
        if run.silent is None:
            self._line("it answers again")
        elif run.suspended is not None:
            self._line(clean(f"{run.silent}; this view waits until it goes on"))
        elif run.silent_host is None:
            self._line(clean(f"{run.silent}; the run goes on, this view waits"))
        else:
            self._line(clean(f"{run.silent}; whether the run goes on cannot be seen from here, this view waits"))
            self._line(
                clean(f"if {run.silent_host} is off: Ctrl-C, then gangline resume {run.id} --without {run.silent_host}")
            )

    def finish(self) -> None:
        """End the live line; without a terminal, show the last step if it was not. Then how the run ended."""
        if self._pending is not None:
            self._write("\n" if self._live else self._pending + "\n")
        if self._end is not None:
            self._write(self._end + "\n")
        self._pending = self._end = None

    def _event(self, record: dict[str, Any], line: str) -> None:
        if record.get("event") in ENDS:
            self._end = line  # last lines of metrics, in another file, may be read after this
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
        line = clean(line)  # figures come from a host
        if self._live:
            line = "\n".join(wrapped(line, self._width()))
        if self._live and self._pending is not None:
            self._write(f"\r\x1b[K{line}\n{self._pending}")
        else:
            self._write(line + "\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


# A loss curve in the terminal: braille dots where the terminal knows them, else plain characters.


CurvePoint = tuple[float, float]

# bit of a braille cell by (row, column) of its 4 x 2 dots, Unicode block 2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def curve(
    points: Sequence[CurvePoint],
    *,
    marks: Sequence[CurvePoint] = (),
    width: int = 72,
    height: int = 10,
    plain: bool = False,
) -> list[str]:
    """Lines of a chart of (step, loss) points with axes, at most `width` columns.

    `marks` (evaluations) are drawn as "o" over the curve. Points that are not finite are left out. [] where there
    is nothing to draw.
    """
    points = [point for point in points if math.isfinite(point[1])]
    marks = [mark for mark in marks if math.isfinite(mark[1])]
    if not points:
        return []
    canvas = _Canvas(points, marks, columns=max(10, width - 10), rows=max(3, height))
    cells = canvas.plain() if plain else canvas.braille()
    for column, row in canvas.mark_cells():
        cells[row][column] = "o"
    return [*_with_labels(cells, canvas, plain=plain), _footer(canvas)]


class _Canvas:
    """Where points fall: `columns` x `rows` character cells over the range of all values."""

    def __init__(self, points: Sequence[CurvePoint], marks: Sequence[CurvePoint], *, columns: int, rows: int) -> None:
        both = [*points, *marks]
        self.columns, self.rows = columns, rows
        self.points, self.marks = points, marks
        self.left, self.right = min(x for x, _ in both), max(x for x, _ in both)
        self.low, self.high = min(y for _, y in both), max(y for _, y in both)

    def position(self, point: CurvePoint, columns: int, rows: int) -> tuple[int, int]:
        """(column, row from the top) of a point on a grid of this size."""
        x, y = point
        across = (x - self.left) / (self.right - self.left) if self.right > self.left else 0.0
        down = (self.high - y) / (self.high - self.low) if self.high > self.low else 0.5
        return round(across * (columns - 1)), round(down * (rows - 1))

    def _dots(self, columns: int, rows: int) -> list[tuple[int, int]]:
        """One dot per grid column that has points: their mean, and a line to the next one."""
        groups: dict[int, list[float]] = {}
        for point in self.points:
            groups.setdefault(self.position(point, columns, rows)[0], []).append(point[1])
        ends = [
            (column, self.position((self.left, sum(values) / len(values)), columns, rows)[1])
            for column, values in sorted(groups.items())
        ]
        dots = ends[:1]
        for start, end in itertools.pairwise(ends):
            dots += _line(start, end)
        return dots

    def braille(self) -> list[list[str]]:
        """Cells of 2 x 4 dots each."""
        bits = [[0] * self.columns for _ in range(self.rows)]
        for column, row in self._dots(2 * self.columns, 4 * self.rows):
            bits[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
        return [[chr(0x2800 + value) if value else " " for value in line] for line in bits]

    def plain(self) -> list[list[str]]:
        """Cells with an asterisk where the curve passes."""
        cells = [[" "] * self.columns for _ in range(self.rows)]
        for column, row in self._dots(self.columns, self.rows):
            cells[row][column] = "*"
        return cells

    def mark_cells(self) -> list[tuple[int, int]]:
        """Cells of the marks."""
        return [self.position(mark, self.columns, self.rows) for mark in self.marks]


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Grid points from `start` (left out) to `end`, close enough to look joined."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (
            round(start[0] + (end[0] - start[0]) * index / steps),
            round(start[1] + (end[1] - start[1]) * index / steps),
        )
        for index in range(1, steps + 1)
    ]


def _with_labels(cells: list[list[str]], canvas: _Canvas, *, plain: bool) -> list[str]:
    labels = {0: canvas.high, canvas.rows // 2: (canvas.high + canvas.low) / 2, canvas.rows - 1: canvas.low}
    bar = "|" if plain else "│"
    return [
        f"{f'{labels[row]:.4g}' if row in labels else '':>8} {bar}{''.join(line)}".rstrip()
        for row, line in enumerate(cells)
    ]


def _footer(canvas: _Canvas) -> str:
    left, right = f"{canvas.left:g}", f"step {canvas.right:g}"
    gap = " " * max(1, canvas.columns - len(left) - len(right))
    return f"{'':>10}{left}{gap}{right}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The history of a run that was watched until its end."""

    run: RunRecord
    history: History


def watch_run(
    view: View,
    stream: TextIO,
    *,
    live: bool,
    from_start: bool = True,
    on_update: Callable[[Update], None] = lambda _update: None,
) -> Watched:
    """Show a run's progress until it has ended. `from_start=False`: what happened before is only counted.

    `on_update` sees every update after it was shown. KeyboardInterrupt passes through once the live line is ended;
    the run does not notice.
    """
    progress = ProgressLine(stream, live=live, width=terminal_width)
    run = None
    try:
        for update in follow(view):
            if run is None and not from_start:
                progress.skip(update)
            else:
                progress.show(update)
            run = update.run
            on_update(update)
    finally:
        progress.finish()
    assert run is not None
    return Watched(run=run, history=progress.history)


def summary(
    view: View, watched: Watched, *, width: int, plain: bool, is_job: bool = True, can_resume: bool = True
) -> list[str]:
    """The summary of a run: loss curve, losses, checkpoints, folders and next commands.

    is_job: it is not the user's own command, which has logs only.
    """
    history, run_id, state = watched.history, view.layout.run_id, watched.run.state
    view = view.at(state.attempt) if state else view
    chart = curve(history.losses(), marks=history.evaluation_losses(), width=min(width, 100), plain=plain)
    kept = view.committed_steps()
    rows = [
        *final_losses(history),
        *_measured(view, watched.run),
        *([f"{'checkpoints':<16} {_listed(kept) if kept else 'none'}"] if is_job else []),
        f"{'run directory':<16} {view.layout.folder}",
    ]
    if view.head_layout.root != view.layout.root:
        rows.append(f"{'on the head':<16} {view.head_layout.folder}")
    again = can_resume and watched.run.phase != "finished"
    meaning = "go on from the newest checkpoint" if is_job else "start it again, with the words of --resume-flag"
    commands = [(f"gangline resume {run_id}", meaning)] if again else []
    times = _times(view, watched.run)
    blocks = [chart, rows, times, _next_commands(run_id, commands, kept)]
    return [line for block in blocks if block for line in ["", *block]][1:]


def _measured(view: View, run: RunRecord) -> list[str]:
    """The plan compared with the measurements of this attempt, where that is known."""
    from gangline.planner.outcome import Comparison  # here, as only the end of a run needs the planner

    try:
        comparison = load_record(view.layout.comparison, Comparison)
    except (OSError, *NONSENSE):
        return []
    if run.state is None or comparison.attempt != run.state.attempt:
        return []
    return [f"{'measured':<16} {clean(comparison.line)}"]


def _times(view: View, run: RunRecord) -> list[str]:
    """The time of each rank in this attempt, where that is known."""
    from gangline.planner.outcome import TimeReport

    try:
        return time_table(load_record(view.layout.times(run.state.attempt), TimeReport)) if run.state else []
    except (OSError, *NONSENSE):
        return []


def terminal_width(default: int = 80) -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((default, 24)).columns


def speaks_braille(stream: TextIO = sys.stdout) -> bool:
    """Whether the stream's encoding has braille characters."""
    return (stream.encoding or "").lower().replace("-", "").startswith("utf")


def _listed(steps: Sequence[int]) -> str:
    return "steps " + ", ".join(str(step) for step in steps) if len(steps) > 1 else f"step {steps[0]}"


def _next_commands(run_id: str, commands: Sequence[tuple[str, str]], kept: Sequence[int]) -> list[str]:
    model = [
        (f"gangline chat {run_id}", "talk to the model"),
        (f"gangline export {run_id}", "write it in the format of transformers or peft"),
    ]
    shown = [*commands, *(model if kept else []), (f"gangline logs {run_id}", "what every rank wrote")]
    width = max(len(command) for command, _ in shown)
    return [f"{command:<{width}}   # {meaning}" for command, meaning in shown]
