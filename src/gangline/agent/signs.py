"""How far the start of a host's ranks has come, seen from outside: processes, what they have loaded, their sockets.

It works for any program, for nothing is asked of it; our own worker says more in its phase files, also later on: where
each rank is, and for how long.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

from gangline.agent import processes, sockets
from gangline.agent.ranks import Ranks

TORCH = b"/libtorch"
"""In a process's maps once it has imported torch."""
ARRIVED = {"joined", "data", "compute", "exchange", "update", "evaluate", "save", "ended"}
"""Phases of a rank that has joined."""
OWN_PORTS = 1024
"""From here on: ports of gloo, NCCL and torch. What a program wants of a port below, as of a web service, is its own
affair."""


class Signs:
    """Looks at the start of one part until all its ranks have joined, and then at their phases.

    Ranks that do not report may turn out not to have joined after all: NCCL connects them at the first collective,
    which may be much later. A connection that gets no answer tells.

    meet: [address, port] where the launchers meet, or where each is alone, the ranks; None: there is no such place.
    reports: the ranks write phase files.
    """

    def __init__(self, request: Dict[str, Any], ranks: Ranks, *, clock: Callable[[], float] = time.monotonic) -> None:
        meet = request.get("meet")
        self._port: Optional[int] = int(meet[1]) if meet else None
        self._is_alone = bool(request.get("alone"))
        self._clock = clock
        self._same: Dict[int, Tuple[Any, float]] = {}
        """What the phase file of a rank said the last time, and since when."""
        self._reports = request.get("program", "worker") == "worker"
        self._ranks = ranks
        self._wanted: Set[int] = set(request.get("ranks", ()))
        self._with_torch: Set[int] = set()
        self._connected: Set[int] = set()
        self._waiting: Set[int] = set()
        """Ranks that wait for an answer to a connection."""
        self._unanswered: Set[int] = set()
        """Sockets that had no answer when we looked the last time."""
        self.joined = False
        self.seen: Dict[str, Any] = {"launcher": False, "met": self._port is None, "ranks": {}, "waits_for": []}

    def look(self, command: processes.Process) -> None:
        """Look once; costs a scan of /proc as long as the start lasts, and a few small reads afterwards."""
        phases = self._ranks.phases()
        if not self.joined or self._is_calling():
            self._look_closely(command, phases)
        rows = {str(rank): self._row(rank, phases.get(rank)) for rank in sorted(self._ranks.processes)}
        self.joined = (self._reports and self.joined) or self._all_joined(rows)
        self.seen["ranks"] = rows
        if self.joined:
            self.seen.update(launcher=True, met=True, waits_for=[])

    def _is_calling(self) -> bool:
        """Whether anybody on this host waits for an answer, where ranks do not say themselves how they are."""
        if not self._reports and sockets.sockets(sockets.SYN_SENT):
            return True
        self._unanswered = set()
        return False

    def _look_closely(self, command: processes.Process, phases: Dict[int, Dict[str, Any]]) -> None:
        family = [command.pid, *(process.pid for process in processes.descendants(command.pid))]
        ranks = {process.pid for process in self._ranks.processes.values()}
        launchers = [pid for pid in family if pid not in ranks]
        started = bool(ranks) or self._port is None
        self.seen["launcher"] = self.seen["launcher"] or started or any(map(_has_torch, launchers))
        table = sockets.sockets(sockets.ESTABLISHED, sockets.SYN_SENT, sockets.LISTEN)
        knocking = [each for each in sockets.of_processes(launchers, table) if each.remote[1] == self._port]
        self.seen["launcher"] = self.seen["launcher"] or bool(knocking)
        met = started or self._has_met(launchers, table) or (self._is_alone and self.seen["launcher"])
        self.seen["met"] = self.seen["met"] or met
        everybody = {*family, *ranks}
        calling = [each for each in sockets.of_processes(everybody, table) if each.state == sockets.SYN_SENT]
        # On a network that answers, a socket is in that state for less than a millisecond: twice seen is no accident.
        stuck = [each for each in calling if each.inode in self._unanswered]
        self.seen["waits_for"] = sorted({f"{each.remote[0]}:{each.remote[1]}" for each in stuck})
        self._unanswered = {each.inode for each in calling}
        self._waiting = self._ranks_of(stuck if self.joined else calling)
        for rank, process in self._ranks.processes.items():
            if rank not in self._with_torch and (_is_past_imports(phases.get(rank)) or _has_torch(process.pid)):
                self._with_torch.add(rank)
            if rank not in self._connected and self._has_met([process.pid], table):
                self._connected.add(rank)

    def _ranks_of(self, calling: List[sockets.Socket]) -> Set[int]:
        """The ranks that want one of these connections to another rank."""
        wanted = [each for each in calling if each.remote[1] >= OWN_PORTS]
        ranks = self._ranks.processes.items() if wanted else ()
        return {rank for rank, process in ranks if sockets.of_processes([process.pid], wanted)}

    def _has_met(self, pids: Iterable[int], table: List[sockets.Socket]) -> bool:
        """Whether one of the processes is connected to where launchers meet, or is the place itself."""
        return any(
            self._port in ((each.local[1],) if each.state == sockets.LISTEN else (each.remote[1],))
            for each in sockets.of_processes(pids, table)
            if each.state != sockets.SYN_SENT
        )

    def _row(self, rank: int, phase: Optional[Dict[str, Any]]) -> Dict[str, Any]:
        row = {"torch": rank in self._with_torch, "met": rank in self._connected - self._waiting}
        told = {name: phase[name] if phase else None for name in ("phase", "step", "collectives")}
        return dict(row, **told, same_s=self._same_s(rank, phase))

    def _same_s(self, rank: int, phase: Optional[Dict[str, Any]]) -> Optional[float]:
        """For how many seconds its phase file has said the very same, its time included."""
        if phase is None:
            self._same.pop(rank, None)
            return None
        now = self._clock()
        said, since = self._same.get(rank, (None, now))
        if said != phase:
            since = now
            self._same[rank] = (phase, now)
        return round(now - since, 1)

    def _all_joined(self, rows: Dict[str, Dict[str, Any]]) -> bool:
        if not self._wanted or {int(rank) for rank in rows} != self._wanted:
            return False
        if self._reports:
            return all(row["phase"] in ARRIVED for row in rows.values())
        return all(row["torch"] and row["met"] for row in rows.values())


def _is_past_imports(phase: Optional[Dict[str, Any]]) -> bool:
    return phase is not None and phase["phase"] != "importing"


def _has_torch(pid: int) -> bool:
    try:
        return TORCH in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False
