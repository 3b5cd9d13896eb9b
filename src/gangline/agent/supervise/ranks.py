"""What the files of a host's ranks tell: who runs, who failed, and with what."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

from gangline.agent.host_files import PHASES, read_bytes, read_record
from gangline.agent.supervise import processes
from gangline.agent.supervise.processes import Process, find, is_alive, send
from gangline.agent.supervise.work import StarvedTime, WorkWatch, load_per_core

RANK_FILE = re.compile(r"rank-(\d+)\.(pid|error\.json|exit\.json)")
# The summary that torchrun prints for a failed rank: "exitcode  : -9 (pid: 4711)".
EXIT_LINE = re.compile(rb"exitcode\s*:\s*(-?\d+)\s*\(pid:\s*(\d+)\)")
PHASE_RECORD = struct.Struct("<qqqd")
"""As the worker writes its phase file: step, phase, collectives entered, time."""
TAIL_LINES = 40
TAIL_BYTES = 1 << 16
EXIT_S = 1.0
"""How long after its end the exit code of a rank may still come."""


class Ranks:
    """The ranks of this host, watched through their files.

    folder: where rank-<r>.pid, rank-<r>.error.json, rank-<r>.exit.json and rank-<r>.log appear.
    wanted: global ranks of this host; empty: every one whose files appear.
    preforked: they are children of prefork processes, which say how they ended, and are there before them.
    """

    def __init__(self, folder: Path, wanted: Set[int], *, preforked: bool = False) -> None:
        self.folder = folder
        self.wanted = wanted
        self.processes: Dict[int, Process] = {}
        self.ended: Dict[int, Dict[str, Any]] = {}
        """rank -> what is known of its end, in the order in which the ends were seen."""
        self._preforked = preforked
        self._gone: Dict[int, Tuple[float, bool]] = {}
        """When a rank without an exit code was first seen to be gone, and whether an order was out."""
        self._pids: Dict[int, Set[int]] = {}
        """Every pid that a rank has had, and that of its prefork process."""
        self._signalled: Set[Tuple[int, int]] = set()
        """pid and signal."""

    def scan(self, *, ordered: bool, last: bool = False) -> bool:
        """Look once; True if there is news of a bad end.

        ordered: an order to end is already out, so ends are no news. last: nothing more will come.
        """
        found = self._names()
        for rank in sorted(rank for rank, kind in found if kind == "pid"):
            self._note_pid(rank)
        news = [
            self._note_error(rank, ordered) for rank in sorted(rank for rank, kind in found if kind == "error.json")
        ]
        news += [self._note_exit(rank, ordered) for rank in sorted(rank for rank, kind in found if kind == "exit.json")]
        news += [self._note_gone(rank, ordered, last) for rank in list(self.processes)]
        return any(news)

    @property
    def are_gone(self) -> bool:
        """Whether all of them have ended, as far as can be seen. One that has told its error may still save."""
        return bool(self.wanted) and all(map(self._is_gone, self.wanted))

    @property
    def codes(self) -> Optional[List[int]]:
        """How all of them ended, in the order seen; None as long as not all have said so."""
        codes = [entry["exit"] for rank, entry in self.ended.items() if rank in self.wanted]
        return codes if self.are_gone and None not in codes else None

    def terminate(self, number: int) -> None:
        """Send a signal to every rank that has not had it; ranks that appear later get theirs at the next call."""
        for process in self.processes.values():
            if (process.pid, number) not in self._signalled:
                self._signalled.add((process.pid, number))
                send(process, number)

    def end_stopped(self) -> None:
        """Kill those that are stopped: nothing else reaches them."""
        for process in self.processes.values():
            found = find(process.pid)
            if found is not None and found.start_ticks == process.start_ticks and found.state == "T":
                send(process, signal.SIGKILL)

    def signs(self, *, logs: bool) -> Tuple[List[bytes], List[int], List[int]]:
        """What changes as long as something gets on: the ranks' phase files, and the sizes of what is being saved.

        logs: those of the ranks' logs, too; it is all that a program of the user's own shows.
        """
        phases = [read_bytes(self.folder / f"rank-{rank}.phase") for rank in sorted(self.processes)]
        saved = _sizes(self.folder.parent.parent / "checkpoints", "step-*/part-*.tmp/**/*")
        return phases, saved, _sizes(self.folder, "rank-*.log") if logs else []

    def phases(self) -> Dict[int, Dict[str, Any]]:
        """Where every rank is that says so: {"phase", "step", "collectives", "time"}."""
        found = {rank: _phase(self.folder / f"rank-{rank}.phase") for rank in self.processes}
        return {rank: phase for rank, phase in found.items() if phase is not None}

    def failures(self, exits: Dict[int, int]) -> List[Dict[str, Any]]:
        """Every rank that ended badly, in the order seen. `exits`: exit code by pid, as far as known."""
        bad = []
        for rank, entry in self.ended.items():
            code = entry["exit"]
            if code is None:
                code = next((exits[pid] for pid in self._pids.get(rank, ()) if pid in exits), None)
            if entry["error"] is None and code == 0:
                continue
            bad.append(dict(entry, exit=code, log_tail=tail(Path(entry["log"]))))
        return bad

    def _names(self) -> List[Tuple[int, str]]:
        try:
            names = [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        matches = [match for match in map(RANK_FILE.fullmatch, names) if match]
        found = [(int(match.group(1)), match.group(2)) for match in matches]
        return [(rank, kind) for rank, kind in found if not self.wanted or rank in self.wanted]

    def _note_pid(self, rank: int) -> None:
        known = self.processes.get(rank)
        if known is not None and not self._preforked:
            return
        record = read_record(self.folder / f"rank-{rank}.pid")
        if not record or (known is not None and known.pid == int(record["pid"])):
            return
        process = Process(int(record["pid"]), int(record["start_ticks"]), 0, "R")
        self.processes[rank] = process
        self._gone.pop(rank, None)
        pids = self._pids.setdefault(rank, set())
        pids.add(process.pid)
        running = find(process.pid) if self._preforked else None
        if running is not None:
            pids.add(running.parent)

    def _note_error(self, rank: int, ordered: bool) -> bool:
        path = self.folder / f"rank-{rank}.error.json"
        if self.ended.get(rank, {}).get("error") is not None:
            return False
        error = read_record(path)
        if not error:
            return False
        entry = self._entry(rank, ordered)
        entry["error"] = error
        entry["time"] = min(entry["time"], path.stat().st_mtime)
        return True

    def _note_exit(self, rank: int, ordered: bool) -> bool:
        if not self._preforked or self.ended.get(rank, {}).get("exit") is not None:
            return False
        record = read_record(self.folder / f"rank-{rank}.exit.json")
        if not record:
            return False
        entry = self._entry(rank, self._gone.get(rank, (0.0, ordered))[1])
        code = int(record["code"])
        entry.update(pid=int(record["pid"]), exit=code)
        return code != 0

    def _note_gone(self, rank: int, ordered: bool, last: bool) -> bool:
        process = self.processes[rank]
        if rank in self.ended or is_alive(process.pid, process.start_ticks):
            return False
        since, ordered = self._gone.setdefault(rank, (time.monotonic(), ordered))
        if self._preforked and not last and time.monotonic() - since < EXIT_S:
            return False
        self._entry(rank, ordered)
        return self._preforked

    def _is_gone(self, rank: int) -> bool:
        entry, process = self.ended.get(rank), self.processes.get(rank)
        if entry is None or entry["exit"] is not None or process is None:
            return entry is not None
        return not is_alive(process.pid, process.start_ticks)

    def _entry(self, rank: int, ordered: bool) -> Dict[str, Any]:
        process = self.processes.get(rank)
        fresh = {
            "rank": rank,
            "pid": process.pid if process else None,
            "time": time.time(),
            "ordered": ordered,
            "error": None,
            "exit": None,
            "log": str(self.folder / f"rank-{rank}.log"),
        }
        return self.ended.setdefault(rank, fresh)


def reported_exits(console: Path) -> Dict[int, int]:
    """Exit code by pid, as torchrun's summary at the end of console.log gives it.

    Only torchrun, their parent, ever learns how its ranks ended; this print is the one place where it says so.
    """
    text = os.fsencode("\n".join(tail(console, num_lines=2000, num_bytes=1 << 18)))
    return {int(pid): int(code) for code, pid in EXIT_LINE.findall(text)}


def tail(path: Path, *, num_lines: int = TAIL_LINES, num_bytes: int = TAIL_BYTES) -> List[str]:
    """The last lines of a text file; [] where there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - num_bytes))
            return stream.read().decode("utf-8", "replace").splitlines()[-num_lines:]
    except OSError:
        return []


def _phase(path: Path) -> Optional[Dict[str, Any]]:
    data = read_bytes(path)
    if len(data) != PHASE_RECORD.size:
        return None
    step, phase, collectives, when = PHASE_RECORD.unpack(data)
    name = PHASES[phase] if 0 <= phase < len(PHASES) else None
    return {"phase": name, "step": step, "collectives": collectives, "time": when}


def _sizes(folder: Path, pattern: str) -> List[int]:
    try:
        return [path.stat().st_size for path in sorted(folder.glob(pattern))]
    except OSError:  # one has just been renamed, or removed: that is a change, too
        return []


# How far the start of a host's ranks has come, seen from outside: processes, what they have loaded, their sockets.


TORCH = b"/libtorch"
"""In a process's maps once it has imported torch."""
ARRIVED = {"joined", "compile", "data", "compute", "exchange", "update", "evaluate", "save", "ended"}
"""Phases of a rank that has joined."""
STAYS_S = 2.0
"""A rank that moves on sooner is not looked at more closely."""
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
        self._starved: Dict[int, StarvedTime] = {}
        """Of ranks that have been in one place for a while."""
        self._work: Dict[Optional[int], WorkWatch] = {}
        """Rank -> the work of its processes; None -> of the launcher and whatever else was started."""
        self.joined = False
        self.seen: Dict[str, Any] = {"launcher": False, "met": self._port is None, "ranks": {}, "waits_for": []}

    @property
    def idle_s(self) -> float:
        """For how long nothing that was started here has worked."""
        return min((work.idle_s for work in self._work.values()), default=0.0)

    def look(self, command: processes.Process) -> None:
        """Look once; costs a scan of /proc as long as the start lasts, and a few small reads afterwards."""
        phases = self._ranks.phases()
        if not self.joined or self._is_calling():
            self._look_closely(command, phases)
        rows = {str(rank): self._row(rank, phases.get(rank)) for rank in sorted(self._ranks.processes)}
        self.joined = (self._reports and self.joined) or self._all_joined(rows)
        if self.joined:
            self._work.clear()
            rows = {rank: dict(row, work=None) for rank, row in rows.items()}
            self.seen.update(launcher=True, met=True, waits_for=[], work=None, load=None)
        self.seen["ranks"] = rows

    def _is_calling(self) -> bool:
        """Whether anybody on this host waits for an answer, where ranks do not say themselves how they are."""
        if not self._reports and processes.sockets(processes.SYN_SENT):
            return True
        self._unanswered = set()
        return False

    def _look_closely(self, command: processes.Process, phases: Dict[int, Dict[str, Any]]) -> None:
        below = processes.descendants(command.pid)
        family = [command.pid, *(process.pid for process in below)]
        ranks = {process.pid for process in self._ranks.processes.values()}
        launchers = [pid for pid in family if pid not in ranks]
        self._look_at_work(command, below)
        started = bool(ranks) or self._port is None
        self.seen["launcher"] = self.seen["launcher"] or started or any(map(_has_torch, launchers))
        table = processes.sockets(processes.ESTABLISHED, processes.SYN_SENT, processes.LISTEN)
        knocking = [each for each in processes.of_processes(launchers, table) if each.remote[1] == self._port]
        self.seen["launcher"] = self.seen["launcher"] or bool(knocking)
        met = started or self._has_met(launchers, table) or (self._is_alone and self.seen["launcher"])
        self.seen["met"] = self.seen["met"] or met
        self.seen["knocks"] = bool(knocking)
        everybody = {*family, *ranks}
        calling = [each for each in processes.of_processes(everybody, table) if each.state == processes.SYN_SENT]
        # On a network that answers, a socket is in that state for less than a millisecond: twice seen is no accident.
        stuck = [each for each in calling if each.inode in self._unanswered]
        self.seen["waits_for"] = sorted({f"{each.remote[0]}:{each.remote[1]}" for each in stuck})
        self._unanswered = {each.inode for each in calling}
        self._waiting = self._ranks_of(stuck if self.joined else calling)
        for rank, process in self._ranks.processes.items():
            if rank not in self._with_torch and self._has_imported(process, phases.get(rank)):
                self._with_torch.add(rank)
            if rank not in self._connected and self._has_met([process.pid], table):
                self._connected.add(rank)

    def _has_imported(self, process: Process, phase: Optional[Dict[str, Any]]) -> bool:
        """Whether a rank has its imports behind it. torch's library is mapped long before: a rank that reports says it
        itself.
        """
        return _is_past_imports(phase) if self._reports else _has_torch(process.pid)

    def _look_at_work(self, command: Process, below: List[Process]) -> None:
        """See whether the processes of each rank, and all others, work."""
        parents = {process.pid: process.parent for process in below}
        ranks = {process.pid: rank for rank, process in self._ranks.processes.items()}
        groups: Dict[Optional[int], List[int]] = {None: [command.pid], **{rank: [] for rank in ranks.values()}}
        for pid in {*parents, *ranks}:
            above: Optional[int] = pid
            while above is not None and above not in ranks:
                above = parents.get(above)
            groups[None if above is None else ranks[above]].append(pid)
        for rank, pids in groups.items():
            self._work.setdefault(rank, WorkWatch(clock=self._clock)).look(pids)
        self.seen.update(work=self._work[None].row(), load=load_per_core())

    def _ranks_of(self, calling: List[processes.Socket]) -> Set[int]:
        """The ranks that want one of these connections to another rank."""
        wanted = [each for each in calling if each.remote[1] >= OWN_PORTS]
        ranks = self._ranks.processes.items() if wanted else ()
        return {rank for rank, process in ranks if processes.of_processes([process.pid], wanted)}

    def _has_met(self, pids: Iterable[int], table: List[processes.Socket]) -> bool:
        """Whether one of the processes is connected to where launchers meet, or is the place itself."""
        return any(
            self._port in ((each.local[1],) if each.state == processes.LISTEN else (each.remote[1],))
            for each in processes.of_processes(pids, table)
            if each.state != processes.SYN_SENT
        )

    def _row(self, rank: int, phase: Optional[Dict[str, Any]]) -> Dict[str, Any]:
        row = {"torch": rank in self._with_torch, "met": rank in self._connected - self._waiting}
        told = {name: phase[name] if phase else None for name in ("phase", "step", "collectives")}
        work, same_s = self._work.get(rank), self._same_s(rank, phase)
        starved_s = self._starved_s(rank, same_s)
        return dict(row, **told, same_s=same_s, starved_s=starved_s, work=None if work is None else work.row())

    def _starved_s(self, rank: int, same_s: Optional[float]) -> Optional[float]:
        """For how many seconds in all it wanted to go on and could not, counted only while it stays in one place."""
        if same_s is None:
            return None
        starved = self._starved.setdefault(rank, StarvedTime(clock=self._clock))
        if self.joined and same_s >= STAYS_S:
            starved.look(self._ranks.processes[rank].pid)
        return round(starved.seconds, 1)

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
    return TORCH in read_bytes(Path(f"/proc/{pid}/maps"))


# How long each rank of the user's own program has printed nothing: its log is all that such a program shows of
# itself.


LINE_AFTER_S = 5.0
"""The last line of a log is read once nothing has come for so long: not after every line."""
LINE_BYTES = 4096
LINE_LETTERS = 200


class Silence:
    """The logs of this host's ranks, to be looked at about once a second.

    Ranks of our own worker tell more themselves: of them nothing is seen here.
    """

    def __init__(self, request: Dict[str, Any], ranks: Ranks, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_wanted = request.get("program") == "command"
        self._ranks = ranks
        self._clock = clock
        self._logs: Dict[int, "_Log"] = {}
        self.seen: Dict[str, Dict[str, Any]] = {}
        """rank -> whole seconds without output and since it was first seen, whether it has printed, its last line."""

    def look(self) -> None:
        """Look once."""
        if not self._is_wanted:
            return
        now = self._clock()
        for rank in self._ranks.processes:
            log = self._logs.setdefault(rank, _Log(self._ranks.folder / "rank-{}.log".format(rank), now))
            log.look(now)
        self.seen = {str(rank): self._logs[rank].row(now) for rank in sorted(self._logs)}


class _Log:
    """The log of one rank, first seen at `now`."""

    def __init__(self, path: Path, now: float) -> None:
        self._path = path
        self._since = self._changed_at = now
        self._size = 0
        self._stepped = 0
        """When the rank reported its last step, or its optimizer did one, in nanoseconds; 0: never."""
        self._line: Optional[str] = ""
        """The last line; None: not read since it changed."""

    def look(self, now: float) -> None:
        """See whether it has grown."""
        size, stepped = self._size_now(), self._stepped_now()
        if (size, stepped) != (self._size, self._stepped):
            self._line = None if size != self._size else self._line
            self._size, self._stepped, self._changed_at = size, stepped, now
        if self._line is None and now - self._changed_at >= LINE_AFTER_S:
            self._line = self._last_line()

    def row(self, now: float) -> Dict[str, Any]:
        """What there is to say of it; whole seconds."""
        return {
            "silent_s": int(now - self._changed_at),
            "age_s": int(now - self._since),
            "printed": self._size > 0 or self._stepped > 0,
            "line": self._line or "",
        }

    def _size_now(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:  # it was taken away: that is no output
            return self._size

    def _stepped_now(self) -> int:
        for suffix in (".step", ".count"):  # of script_hooks.py, of rank_stacks.py
            with contextlib.suppress(OSError):
                return self._path.with_suffix(suffix).stat().st_mtime_ns
        return self._stepped

    def _last_line(self) -> str:
        lines = tail(self._path, num_bytes=LINE_BYTES)
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:LINE_LETTERS]
