"""Where sync tells what it does: lines that stay, and one line of progress for bytes on their way to several hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from gangline.units import format_bytes, format_duration

INTERVAL_S = 0.25
SETTLE_S = 2.0
"""So long the time left is not told: the first seconds say nothing about the rate."""


class Console(Protocol):
    """The user's terminal, or a stand-in for it."""

    def report(self, line: str) -> None:
        """A line that stays."""
        ...

    def progress(self, line: str) -> None:
        """The progress of a long step; the next line takes its place."""
        ...


class SilentConsole:
    """A console that prints nothing."""

    def report(self, line: str) -> None:
        """See `Console.report`."""

    def progress(self, line: str) -> None:
        """See `Tell.progress`."""


SILENT = SilentConsole()


class Ticks:
    """Passes on how a step is getting on, and keeps the lines that stay to itself: somebody else says them."""

    def __init__(self, console: Console) -> None:
        self.progress = console.progress

    def report(self, line: str) -> None:
        """See `Console.report`."""


def shown(text: str) -> str:
    """Text from a host or a file name, fit for a terminal: no control characters, not too long."""
    plain = "".join(char if char.isprintable() else "?" for char in text)
    return plain if len(plain) <= 300 else plain[:297] + "..."


class Meter:
    """Bytes of one thing on their way to several places at once: `model to pc2 pc3: 62 % of 14.2 GiB, 40.0 s left`."""

    def __init__(self, console: Console, what: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._what = what
        self._clock = clock
        self._begun_s = clock()
        self._told_s = float("-inf")
        self._done: dict[str, int] = {}
        self._totals: dict[str, int] = {}
        self._lock = threading.Lock()

    def expect(self, place: str, total_bytes: int) -> None:
        """So much has to get there."""
        with self._lock:
            self._totals[place] = total_bytes
            self._done.setdefault(place, 0)

    def at(self, place: str, done_bytes: int) -> None:
        """So much is there. Told four times a second at most."""
        with self._lock:
            self._done[place] = min(done_bytes, self._totals.get(place, done_bytes))
            now_s = self._clock()
            if now_s - self._told_s < INTERVAL_S and self._done != self._totals:
                return
            self._told_s = now_s
            line = self._line()
        self._console.progress(line)

    def whole(self, place: str) -> None:
        """Everything is there."""
        self.at(place, self._totals.get(place, 0))

    def _line(self) -> str:
        done, total = sum(self._done.values()), sum(self._totals.values())
        under_way = [place for place in self._totals if self._done[place] < self._totals[place]]
        places = " ".join(under_way) or " ".join(self._totals)
        line = f"{self._what} to {places}: {100 * done // max(1, total)} % of {format_bytes(total)}"
        passed_s = self._clock() - self._begun_s
        if passed_s < SETTLE_S or not 0 < done < total:
            return line
        return f"{line}, {format_duration(passed_s * (total - done) / done)} left"
