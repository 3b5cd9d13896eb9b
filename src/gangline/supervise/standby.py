"""Hosts that are to join a run get ready beside it: nobody waits while they start processes and import torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from gangline.errors import GanglineError
from gangline.launch.backend import HostRequest, HostStatus
from gangline.supervise.background import Background
from gangline.supervise.liveness import Event

LOOK_S = 1.0
END_S, PAUSE_IN_END_S = 15.0, 0.05
"""How long the end of a run waits for a host that is just beginning to get ready; what began unseen ends by itself."""
READY_S = 600.0
"""A host that is not ready after so long is ended there, and begins again after a pause."""
PAUSE_S, LONGEST_PAUSE_S = 30.0, 1800.0
"""The pause after the first try that failed, and the longest; each is twice as long as the one before."""


@dataclass(slots=True, kw_only=True)
class _Candidate:
    """One host that gets ready, or tries to."""

    part: HostRequest | None = None
    """What waits there; None: nothing does, as far as is known."""
    begun_at: float = 0.0
    is_ready: bool = False
    is_told: bool = False
    num_failed: int = 0
    begins_at: float = float("-inf")
    """The next try is not made before."""
    looked_at: float = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What is done on a host; all three may take long, and are called in the background."""

    begin: Callable[[str], HostRequest]
    """Have the host of that name get ready; what waits there then. Raises GanglineError, OSError."""
    look: Callable[[HostRequest], HostStatus]
    """How that stands."""
    end: Callable[[HostRequest], object]
    """End it, whatever it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What came of one piece of work; one of these is not None."""

    part: HostRequest | None = None
    status: HostStatus | None = None
    problem: Exception | None = None


class Standbys:
    """The hosts that get ready beside an attempt."""

    def __init__(self, steps: Steps, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps = steps
        self._clock = clock
        self._candidates: dict[str, _Candidate] = {}
        self._work = Background[_Seen]()
        self._ending = Background[None]()
        self.parts: dict[str, HostRequest] = {}
        """What may wait on each host."""

    def ready(self) -> list[str]:
        """Hosts of which ranks could begin at once."""
        return [host for host, each in self._candidates.items() if each.is_ready]

    def look(self, hosts: Collection[str]) -> Iterator[Event]:
        """Go on with the hosts that are to join; yields new events with their details. One that is not among them for a
        while begins anew, and finds what still waits there.
        """
        for host, candidate in self._candidates.items():
            if host not in hosts and candidate.part is not None:
                candidate.part, candidate.is_ready, candidate.begins_at = None, False, float("-inf")
        for host, seen in self._work.results().items():
            if host in self._candidates:
                yield from self._take_in(host, self._candidates[host], seen)
        for host in hosts:
            yield from self._go_on(host, self._candidates.setdefault(host, _Candidate()))
        self._ending.results()

    def forget(self, hosts: Collection[str]) -> None:
        """These hosts have joined: what waited there serves them now."""
        for host in hosts:
            self._candidates.pop(host, None)
            self.parts.pop(host, None)

    def end(self) -> list[HostRequest]:
        """Nobody joins any more; what may still wait on hosts."""
        deadline = self._clock() + END_S
        while self._work.is_busy and self._clock() < deadline:
            for host, seen in self._work.results().items():
                if seen.part is not None:
                    self.parts[host] = seen.part
            time.sleep(PAUSE_IN_END_S)
        parts = list(self.parts.values())
        self._candidates.clear()
        self.parts.clear()
        return parts

    def _go_on(self, host: str, candidate: _Candidate) -> Iterator[Event]:
        now = self._clock()
        if candidate.part is not None:
            if now >= candidate.looked_at + LOOK_S:
                candidate.looked_at = now
                self._work.start(host, partial(self._looked, candidate.part))
        elif now >= candidate.begins_at:
            if not candidate.is_told:
                candidate.is_told = True
                yield "preparing", {"host": host, "what": f"{host} gets ready beside the run"}
            if self._work.start(host, partial(self._begun, host)):  # else a look of before it was silent still runs
                candidate.begun_at, candidate.begins_at = now, float("inf")

    def _take_in(self, host: str, candidate: _Candidate, seen: _Seen) -> Iterator[Event]:
        if seen.part is not None:
            candidate.part = self.parts[host] = seen.part
            return
        if seen.status is not None and candidate.part is None:
            return  # of before it was silent
        candidate.is_ready = seen.status is not None and seen.status.ready
        why = _why_not(seen)
        if not why and not candidate.is_ready and self._clock() > candidate.begun_at + READY_S:
            why = f"it was not ready after {READY_S:.0f} s"
        if why:
            yield from self._fail(host, candidate, why)

    def _fail(self, host: str, candidate: _Candidate, why: str) -> Iterator[Event]:
        """Tell it the first time, and try again later."""
        if candidate.part is not None:
            self._ending.start(f"{host} {candidate.num_failed}", partial(self._ended, candidate.part))
        if not candidate.num_failed:
            what = f"{host} does not get ready, and the run goes on without it: {why}"
            yield "not-ready", {"host": host, "what": what}
        pause_s = min(LONGEST_PAUSE_S, PAUSE_S * 2.0**candidate.num_failed)
        candidate.part, candidate.is_ready = None, False
        candidate.num_failed += 1
        candidate.begins_at = self._clock() + pause_s

    def _begun(self, host: str) -> _Seen:
        try:
            return _Seen(part=self._steps.begin(host))
        except Exception as problem:  # noqa: BLE001  (whatever it is, the run goes on without that host)
            return _Seen(problem=problem)

    def _looked(self, part: HostRequest) -> _Seen:
        try:
            return _Seen(status=self._steps.look(part))
        except Exception as problem:  # noqa: BLE001  (as above)
            return _Seen(problem=problem)

    def _ended(self, part: HostRequest) -> None:
        with suppress(GanglineError, OSError):  # it ends by itself after a while
            self._steps.end(part)


def _why_not(seen: _Seen) -> str:
    """Why a host will not get ready by itself; "": it may."""
    if seen.problem is not None:
        problem = seen.problem
        return problem.what if isinstance(problem, GanglineError) else str(problem) or type(problem).__name__
    status = seen.status
    if status is None or status.phase in {"unreachable", "starting", "running"} or status.rests:
        return ""
    said = [line.strip() for line in status.console_tail if line.strip()]
    return said[-1][:200] if said else f"its gangline agent has ended ({status.reason or status.phase})"
