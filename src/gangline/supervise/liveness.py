"""Which hosts answer, which host agents respond, and whether they report another supervisor. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gangline.launch.backend import HostStatus
from gangline.runs.state import iso

Event = tuple[str, dict[str, Any]]
"""The name of an event, and its details."""

NOTICE_S = 5.0
"""A connection that is back within this time is not reported."""
STALL_S = 60.0
"""A host agent counts up every second."""


class Liveness:
    """The hosts of an attempt that answer, and the heartbeats of their host agents."""

    def __init__(
        self, *, notice_s: float = NOTICE_S, stall_s: float = STALL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._notice_s = notice_s
        self._stall_s = stall_s
        self._clock = clock
        self._silent: dict[str, float] = {}
        """Hosts that do not answer, and since when, by our clock."""
        self._reported: set[str] = set()
        """Those with an event."""
        self._beats: dict[str, tuple[int, float | None]] = {}
        """The last beat of a host agent, and since when it is the same; None: the host has not answered meanwhile."""
        self._stalled: dict[str, float] = {}
        """Hosts whose host agent does not respond, and since when, in seconds after 1970."""

    def note(self, statuses: Sequence[HostStatus]) -> Iterator[Event]:
        """Take in the statuses; yields new events with their details."""
        for status in statuses:
            if status.phase == "unreachable":
                yield from self._note_silent(status)
            elif status.host in self._silent:
                seconds = round(self._clock() - self._silent.pop(status.host), 1)
                if status.host in self._reported:
                    self._reported.remove(status.host)
                    yield "reachable", {"host": status.host, "seconds": seconds}
            if status.phase == "running" and status.beat is not None:
                yield from self._note_beat(status.host, status.beat)

    def _note_silent(self, status: HostStatus) -> Iterator[Event]:
        if status.host in self._beats:
            self._beats[status.host] = self._beats[status.host][0], None
        silent_s = self._clock() - self._silent.setdefault(status.host, self._clock())
        if silent_s >= self._notice_s and status.host not in self._reported:
            self._reported.add(status.host)
            yield "unreachable", {"host": status.host, "since": iso(time.time() - silent_s), "why": status.why}

    def _note_beat(self, host: str, beat: int) -> Iterator[Event]:
        now = self._clock()
        last, since = self._beats.get(host, (None, None))
        if beat != last or since is None:
            self._beats[host] = beat, now
            if beat != last and self._stalled.pop(host, None) is not None:
                yield "recovered", {"host": host, "what": f"the gangline agent on {host} responds again"}
        elif now - since >= self._stall_s and host not in self._stalled:
            self._stalled[host] = time.time() - (now - since)
            yield "stalled", {"host": host, "what": f"the gangline agent on {host} does not respond"}

    @property
    def stalled(self) -> set[str]:
        """Hosts whose host agent does not respond."""
        return set(self._stalled)

    def silent(self) -> dict[str, float]:
        """Hosts that do not answer now, and for how many seconds."""
        return {host: self._clock() - since for host, since in self._silent.items()}

    def silence_s(self) -> float:
        """For how long all silent hosts have been silent; 0 if none is."""
        return min(self.silent().values(), default=0.0)

    def unknown_since(self, status: HostStatus, *, frozen_s: float) -> float | None:
        """Since when a host has no fresh data: it does not answer, or its beat has been the same for so long."""
        if status.phase == "unreachable":
            return self._silent[status.host]
        if status.phase != "running" or status.beat is None:
            return None
        _, since = self._beats[status.host]
        return since if since is not None and self._clock() - since >= frozen_s else None

    def frozen(self, statuses: Sequence[HostStatus], frozen_s: float) -> set[str]:
        """Hosts that answer, and whose host agents have reported nothing new for so long."""
        running = [status for status in statuses if status.phase == "running"]
        return {status.host for status in running if self.unknown_since(status, frozen_s=frozen_s) is not None}

    def as_evidence(self, error: Mapping[str, Any]) -> dict[str, Any]:
        """The same error (`GanglineError.to_json`), which also names the host agents that do not respond."""
        rows = [
            f"the gangline agent on {host} has not responded since {iso(since)}: look for a stopped process or a "
            "full disk there"
            for host, since in self._stalled.items()
        ]
        return {**error, "seen": "\n".join([*([error["seen"]] if error["seen"] else []), *rows])}


DOUBT_S = 15.0
"""The other hosts report it within seconds, if it is true."""
WITNESSES = 2


class EpochClaims:
    """Reports of a supervisor with a higher epoch. One host alone is believed only in a run of one host.

    num_hosts: of the attempt.
    """

    def __init__(
        self, *, num_hosts: int, doubt_s: float = DOUBT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.believed: int | None = None
        """The epoch of the other supervisor that is in charge; None: this one is."""
        self._needed = min(WITNESSES, num_hosts)
        self._doubt_s = doubt_s
        self._clock = clock
        self._since: dict[str, float] = {}
        self._told: set[str] = set()

    def note(self, statuses: Sequence[HostStatus], *, epoch: int) -> Iterator[Event]:
        """Take in the statuses; yields new events with their details. epoch: our own."""
        claims = {status.host: status.epoch for status in statuses if status.epoch is not None and status.epoch > epoch}
        ordered = sorted(claims.values(), reverse=True)
        self.believed = ordered[self._needed - 1] if len(ordered) >= self._needed else None
        self._since = {host: self._since.get(host, self._clock()) for host in claims}
        for host, since in self._since.items():
            if self.believed is None and self._clock() - since >= self._doubt_s and host not in self._told:
                self._told.add(host)
                what = (
                    f"it alone says that another supervisor (epoch {claims[host]}) is in charge; ignored, "
                    "because one host alone may be wrong"
                )
                yield "doubted", {"host": host, "epoch": claims[host], "what": what}
