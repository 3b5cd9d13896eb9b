"""The terminal: data on stdout, messages on stderr, live lines only on a terminal."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from gangline.cli.signals import exit_code_of
from gangline.errors import HostUnreachable, RecordError
from gangline.report.follow import Update, View, raise_failure
from gangline.report.live import speaks_braille, summary, terminal_width, watch_run
from gangline.report.tail import Tail
from gangline.report.text_table import clean, last_shown, table, wrapped
from gangline.runs.layout import RunLayout


def print_data(lines: Iterable[str]) -> None:
    """Print lines on stdout, without control sequences from hosts, and not behind a progress line."""
    for line in lines:
        Terminal.clear_all()
        sys.stdout.write(clean(line, keep_newlines=True) + "\n")
    sys.stdout.flush()


def print_json(value: dict[str, Any]) -> None:
    """One JSON document with its `schema_version`."""
    sys.stdout.write(json.dumps({"schema_version": 1, **value}, indent=2) + "\n")


def print_answer(value: dict[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """The same answer for programs or for people."""
    if as_json:
        print_json(value)
    else:
        print_data(between_words(lines))


def is_live() -> bool:
    """Whether stderr is a terminal that can overwrite a line."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def between_words(lines: Iterable[str]) -> Iterable[str]:
    """Lines for stdout: on a terminal they are broken between words."""
    if not sys.stdout.isatty():
        return lines
    return [row for text in lines for line in text.split("\n") for row in wrapped(line, terminal_width())]


def fitted(text: str) -> str:
    """Text for stderr: on a terminal its lines are broken between words."""
    if not is_live():
        return text
    return "\n".join(row for line in text.split("\n") for row in wrapped(line, terminal_width()))


def process_age_s() -> float | None:
    """The time since this process was started, imports included; None where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None


class Terminal:
    """A `Console` on stderr; `quiet` shows only the progress line of a live terminal."""

    _shown: ClassVar[Terminal | None] = None
    """The one that shows a progress line now."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = is_live()
        self._ticking = False

    def report(self, line: str) -> None:
        """A line that stays."""
        self.clear()
        if not self._quiet:
            sys.stderr.write(fitted(clean(line)) + "\n")
            sys.stderr.flush()

    def commands(self, title: str, *commands: str) -> None:
        """Commands to paste, below a title: a line each, which only the terminal itself breaks."""
        self.report(title)
        sys.stderr.writelines(f"  {clean(each)}\n" for each in commands if not self._quiet)

    def progress(self, line: str) -> None:
        """A line that the next one overwrites; nothing where stderr is a file."""
        if self._live:
            sys.stderr.write(f"\r\x1b[K{clean(line)[: terminal_width() - 1]}")
            sys.stderr.flush()
            self._ticking = True
            Terminal._shown = self

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows in columns that stay."""
        for line in table(header, rows):
            self.report(line)

    def ask(self, question: str) -> str | None:
        """The answer of the user; None without a terminal, or at the end of its input."""
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return None
        self.clear()
        sys.stderr.write(f"{clean(question)} ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
        return answer.strip() if answer else None

    def secret(self, question: str) -> str | None:
        """What the user types without being shown it; None without a terminal, or at the end of its input."""
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return None
        self.clear()
        try:
            return getpass.getpass(f"{clean(question)} ")
        except EOFError:
            return None

    def clear(self) -> None:
        """Remove the progress line."""
        if self._ticking:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._ticking = False

    @staticmethod
    def clear_all() -> None:
        """Remove the progress line, whichever object shows it."""
        if Terminal._shown is not None:
            Terminal._shown.clear()
            Terminal._shown = None


def print_started(layout: RunLayout, *, follow: bool, from_start: bool = True) -> None:
    """Print the id of a run that has been started, then follow it to its end if asked to."""
    print_data([layout.run_id])
    if follow:
        # what leads runs costs 0.2 s, which verbs that only print do not pay
        from gangline.control.supervision import open_run

        follow_through_queue(layout)
        with open_run(layout.run_id, home=layout.root) as run:
            follow_to_the_end(run.view(), from_start=from_start)


def follow_through_queue(layout: RunLayout) -> None:
    """Where a run waits for Slurm, tell how it stands until it has begun; raises RunFailed where it never does."""
    from gangline.control.slurm_job import wait_until_begun

    run_id = layout.run_id
    try:
        wait_until_begun(layout, Terminal())
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"left {run_id}; Slurm keeps it. gangline attach {run_id} · gangline stop {run_id}\n")
        raise SystemExit(exit_code_of(interrupt)) from None


def follow_to_the_end(view: View, *, from_start: bool = True) -> None:
    """Follow a run until it ends, then print a summary; raises its error if it failed.

    Ctrl-C leaves: the run goes on, and the exit code is 130.
    """
    from gangline.control.user_command import CommandRecord

    run_id = view.layout.run_id
    if not view.record().ended:
        sys.stderr.write(f"safe to leave. Come back: gangline attach {run_id}. End it: gangline stop {run_id}\n")
    if (own := CommandRecord.of(view.layout)) is not None:
        sys.stderr.write(f"the output of rank 0 follows; of all ranks: gangline logs {run_id} -f\n")
    shown = OwnOutput(view, from_start=from_start).show if own is not None else _nothing
    try:
        watched = watch_run(view, sys.stderr, live=is_live(), from_start=from_start, on_update=shown)
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"left {run_id}; it continues. gangline attach {run_id} · gangline stop {run_id}\n")
        raise SystemExit(exit_code_of(interrupt)) from None
    plain = not speaks_braille(sys.stderr)
    can_resume = own is None or own.resume_words is not None
    rows = summary(view, watched, width=terminal_width(), plain=plain, is_job=own is None, can_resume=can_resume)
    for line in rows:
        sys.stderr.write(fitted(clean(line)) + "\n")
    sys.stderr.flush()
    raise_failure(watched.run)


def _nothing(update: Update) -> None:
    """Of a job the figures are shown, not the logs."""


class OwnOutput:
    """What rank 0 of the user's own program prints, on stdout as it comes.

    from_start: also what it has printed already.
    """

    def __init__(self, view: View, *, from_start: bool) -> None:
        self._view = view
        self._skips = not from_start
        self._attempt: int | None = None
        self._tail: Tail | None = None

    def show(self, update: Update) -> None:
        """Print what is new."""
        attempt = update.run.state.attempt if update.run.state else None
        if attempt is not None and attempt != self._attempt:
            self._attempt, view = attempt, self._view.at(attempt)
            self._tail = Tail(view.head, view.head_layout.attempt(attempt) / "rank-0.log")
        if self._tail is None:
            return
        with contextlib.suppress(HostUnreachable, RecordError):  # the view itself says so
            lines = [clean(last_shown(line)) for line in self._tail.stream()]
            if lines and not self._skips:
                sys.stderr.write("\r\x1b[K" if is_live() else "")
                sys.stderr.flush()
                print_data(lines)
        self._skips = False
