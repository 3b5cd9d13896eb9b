"""Full disks and dead file servers of the hosts: told once each, and named in the error of a run that fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from gangline.errors import GanglineError
from gangline.launch.backend import HostRequest, HostStatus, HostTrouble, LaunchRequest
from gangline.launch.poll import read_troubles
from gangline.supervise.background import Background
from gangline.supervise.liveness import Event
from gangline.transport.ssh_options import NONSENSE
from gangline.transport.transport import AGENT, Transport

FROZEN_S = 3.0
"""A host agent that has written nothing for so long may have no room to write: its host is asked."""
ASK_EVERY_S = 8.0
TIMEOUT_S = 20.0


class HostTroubles:
    """What is wrong with file systems of the hosts of an attempt, as far as is known now."""

    def __init__(
        self,
        request: LaunchRequest,
        transports: Mapping[str, Transport],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts = {part.host: part for part in request.hosts}
        self._transports = transports
        self._clock = clock
        self._asking = Background[tuple[HostTrouble, ...] | None]()
        self._asked_at: dict[str, float] = {}
        self._known: dict[str, tuple[HostTrouble, ...]] = {}

    def note(self, statuses: Sequence[HostStatus], *, frozen: Collection[str]) -> Iterator[Event]:
        """Take in the statuses; yields new events. frozen: hosts that answer, and whose agents report nothing new."""
        found = {host: said for host, said in self._asking.results().items() if said is not None}
        told = {status.host: status.troubles for status in statuses if status.phase == "running"}
        found |= {host: said for host, said in told.items() if host not in frozen}
        for host, troubles in found.items():
            yield from self._news(host, troubles)
        for host in frozen:
            if self._clock() >= self._asked_at.get(host, float("-inf")) + ASK_EVERY_S:
                self._asked_at[host] = self._clock()
                self._asking.start(host, partial(self._ask, self._parts[host]))

    def as_evidence(self, error: Mapping[str, Any]) -> dict[str, Any]:
        """The same error (`GanglineError.to_json`), which also names these troubles."""
        rows = [f"{host}: {trouble.words}" for host, troubles in self._known.items() for trouble in troubles]
        if not rows:
            return dict(error)
        full = [host for host, troubles in self._known.items() if any(each.kind != "silent" for each in troubles)]
        fix = [f"free some space on {' and '.join(full)}"] if full else ["bring the file server back"]
        return {
            **error,
            "seen": "\n".join([*([error["seen"]] if error["seen"] else []), *rows]),
            "fix": "; ".join([*fix, *([error["fix"]] if error["fix"] else [])]),
        }

    def _news(self, host: str, troubles: Sequence[HostTrouble]) -> Iterator[Event]:
        before = {each.key for each in self._known.get(host, ())}
        now = {each.key for each in troubles}
        for each in troubles:
            if each.key not in before:
                yield "trouble", {"host": host, "what": f"{host}: {each.words}"}
        for each in self._known.get(host, ()):
            if each.key not in now:
                again = "answers again" if each.kind == "silent" else "has room again"
                yield "trouble-over", {"host": host, "what": f"{host}: {each.point} {again}"}
        self._known[host] = tuple(troubles)

    def _ask(self, part: HostRequest) -> tuple[HostTrouble, ...] | None:
        """The answer of a host; None if there is none."""
        stdin = json.dumps({"request": asdict(part)}).encode()
        try:
            result = self._transports[part.host].run((AGENT, "room"), stdin=stdin, timeout_s=TIMEOUT_S)
            return read_troubles(json.loads(result.stdout)["troubles"])
        except (GanglineError, OSError, *NONSENSE):
            return None
