"""How far the start of a host's ranks has come, seen from outside: processes, what they have loaded, their sockets.

It works for any program, for nothing is asked of it; our own worker says more in its phase files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Set

from gangline.agent import processes, sockets
from gangline.agent.ranks import Ranks

TORCH = b"/libtorch"
"""In a process's maps once it has imported torch."""
ARRIVED = {"joined", "data", "compute", "exchange", "update", "evaluate", "save", "ended"}
"""Phases of a rank that has joined."""


class Signs:
    """Looks at the start of one part until all its ranks have joined.

    meet: [address, port] where the launchers meet; None: there is no such place.
    reports: the ranks write phase files.
    """

    def __init__(self, request: Dict[str, Any], ranks: Ranks) -> None:
        meet = request.get("meet")
        self._port: Optional[int] = int(meet[1]) if meet else None
        self._reports = request.get("program", "worker") == "worker"
        self._ranks = ranks
        self._wanted: Set[int] = set(request.get("ranks", ()))
        self._with_torch: Set[int] = set()
        self._connected: Set[int] = set()
        self._unanswered: Set[str] = set()
        self.joined = False
        self.seen: Dict[str, Any] = {"launcher": False, "met": self._port is None, "ranks": {}, "waits_for": []}

    def look(self, command: processes.Process) -> None:
        """Look once; costs a scan of /proc as long as the start lasts, and a few small reads afterwards."""
        phases = self._ranks.phases()
        if not self.joined:
            self._look_closely(command, phases)
        rows = {str(rank): self._row(rank, phases.get(rank)) for rank in sorted(self._ranks.processes)}
        self.joined = self.joined or self._all_joined(rows)
        self.seen["ranks"] = rows
        if self.joined:
            self.seen.update(launcher=True, met=True, waits_for=[])

    def _look_closely(self, command: processes.Process, phases: Dict[int, Dict[str, Any]]) -> None:
        family = [command.pid, *(process.pid for process in processes.descendants(command.pid))]
        ranks = {process.pid for process in self._ranks.processes.values()}
        launchers = [pid for pid in family if pid not in ranks]
        started = bool(ranks) or self._port is None
        self.seen["launcher"] = self.seen["launcher"] or started or any(map(_has_torch, launchers))
        table = sockets.sockets(sockets.ESTABLISHED, sockets.SYN_SENT, sockets.LISTEN)
        knocking = [each for each in sockets.of_processes(launchers, table) if each.remote[1] == self._port]
        self.seen["launcher"] = self.seen["launcher"] or bool(knocking)
        met = started or self._has_met(launchers, table)
        self.seen["met"] = self.seen["met"] or met
        waiting = [each for each in sockets.of_processes(family, table) if each.state == sockets.SYN_SENT]
        unanswered = {f"{each.remote[0]}:{each.remote[1]}" for each in waiting}
        # On a network that answers, a socket is in that state for less than a millisecond: twice seen is no accident.
        self.seen["waits_for"] = sorted(unanswered & self._unanswered)
        self._unanswered = unanswered
        for rank, process in self._ranks.processes.items():
            if rank not in self._with_torch and (_is_past_imports(phases.get(rank)) or _has_torch(process.pid)):
                self._with_torch.add(rank)
            if rank not in self._connected and self._has_met([process.pid], table):
                self._connected.add(rank)

    def _has_met(self, pids: Iterable[int], table: List[sockets.Socket]) -> bool:
        """Whether one of the processes is connected to where launchers meet, or is the place itself."""
        return any(
            self._port in ((each.local[1],) if each.state == sockets.LISTEN else (each.remote[1],))
            for each in sockets.of_processes(pids, table)
            if each.state != sockets.SYN_SENT
        )

    def _row(self, rank: int, phase: Optional[Dict[str, Any]]) -> Dict[str, Any]:
        row = {"torch": rank in self._with_torch, "met": rank in self._connected}
        return dict(row, phase=phase["phase"] if phase else None, step=phase["step"] if phase else None)

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
