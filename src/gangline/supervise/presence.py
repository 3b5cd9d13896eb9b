"""Which hosts answer, and which guards get on: a guard that stands still ends nothing, whatever it is ordered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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


STALL_S = 60.0
"""A guard counts up every second."""


class Heartbeats:
    """The guards of an attempt, as their beats are seen."""

    def __init__(self, *, stall_s: float = STALL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._last: dict[str, tuple[int, float | None]] = {}
        """Beat, and since when it is the same; None: the host has not answered meanwhile."""
        self._stalled: dict[str, float] = {}
        """Since when, in seconds after 1970."""

    @property
    def stalled(self) -> set[str]:
        """Hosts whose guard does not get on."""
        return set(self._stalled)

    def note(self, statuses: Sequence[HostStatus]) -> Iterator[tuple[str, dict[str, Any]]]:
        """What is new, as events with their details."""
        now = self._clock()
        for status in statuses:
            beat, since = self._last.get(status.host, (None, None))
            if status.phase == "unreachable" and beat is not None:
                self._last[status.host] = beat, None
            if status.phase != "running" or status.beat is None:
                continue
            if status.beat != beat:
                self._last[status.host] = status.beat, now
                if self._stalled.pop(status.host, None) is not None:
                    yield "recovered", {"host": status.host, "what": f"the guard on {status.host} gets on again"}
            elif since is None:
                self._last[status.host] = beat, now
            elif now - since >= self._stall_s and status.host not in self._stalled:
                self._stalled[status.host] = time.time() - (now - since)
                yield "stalled", {"host": status.host, "what": f"the guard on {status.host} does not get on"}

    def as_evidence(self, error: Mapping[str, Any]) -> dict[str, Any]:
        """An error, as `GanglineError.to_json`, that tells of guards which stand still, too."""
        rows = [
            f"the guard on {host} does not get on since {iso(since)}: was it stopped, or is its disk full?"
            for host, since in self._stalled.items()
        ]
        return {**error, "seen": "\n".join([*([error["seen"]] if error["seen"] else []), *rows])}
