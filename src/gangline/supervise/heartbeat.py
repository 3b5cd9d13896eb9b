"""Which guards get on: a guard that stands still ends nothing, whatever it is ordered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gangline.launch.backend import HostStatus
from gangline.runs.events import iso

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
