"""Which hosts answer, and since when they do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gangline.launch.backend import HostStatus
from gangline.runs.events import iso

NOTICE_S = 5.0
"""A connection that was lost and is back within this time is no news."""


class Presence:
    """The hosts of an attempt, as they come and go."""

    def __init__(self, *, notice_s: float = NOTICE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._notice_s = notice_s
        self._clock = clock
        self._silent: dict[str, float] = {}
        """Since when, by our clock."""
        self._told: set[str] = set()

    def note(self, statuses: Sequence[HostStatus]) -> Iterator[tuple[str, dict[str, Any]]]:
        """What is new, as events with their details."""
        now = self._clock()
        for status in statuses:
            if status.phase == "unreachable":
                since = self._silent.setdefault(status.host, now)
                if now - since >= self._notice_s and status.host not in self._told:
                    self._told.add(status.host)
                    yield (
                        "unreachable",
                        {"host": status.host, "since": iso(time.time() - (now - since)), "why": status.why},
                    )
            elif status.host in self._silent:
                seconds = round(now - self._silent.pop(status.host), 1)
                if status.host in self._told:
                    self._told.remove(status.host)
                    yield "reachable", {"host": status.host, "seconds": seconds}

    def silent(self) -> dict[str, float]:
        """Hosts that do not answer now, and for how many seconds."""
        return {host: self._clock() - since for host, since in self._silent.items()}

    def silence_s(self) -> float:
        """How long all hosts that are silent now have been so; 0 if none is."""
        return self._clock() - max(self._silent.values()) if self._silent else 0.0
