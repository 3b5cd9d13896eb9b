"""What the files of a host's ranks tell: who runs, who failed, and with what."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Set, Tuple

from gangline.agent.names import PHASES
from gangline.agent.processes import Process, find, is_alive, send

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
    stand_by: they are children of processes that stand by, which say how they ended, and are there before them.
    """

    def __init__(self, folder: Path, wanted: Set[int], *, stand_by: bool = False) -> None:
        self.folder = folder
        self.wanted = wanted
        self.processes: Dict[int, Process] = {}
        self.ended: Dict[int, Dict[str, Any]] = {}
        """rank -> what is known of its end, in the order in which the ends were seen."""
        self._stand_by = stand_by
        self._gone: Dict[int, Tuple[float, bool]] = {}
        """When a rank without an exit code was first seen to be gone, and whether an order was out."""
        self._pids: Dict[int, Set[int]] = {}
        """Every pid that a rank has had, and that of the process that stands by for it."""
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
        phases = [_bytes(self.folder / f"rank-{rank}.phase") for rank in sorted(self.processes)]
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
        if known is not None and not self._stand_by:
            return
        record = _json(self.folder / f"rank-{rank}.pid")
        if record is None or (known is not None and known.pid == int(record["pid"])):
            return
        process = Process(int(record["pid"]), int(record["start_ticks"]), 0, "R")
        self.processes[rank] = process
        self._gone.pop(rank, None)
        pids = self._pids.setdefault(rank, set())
        pids.add(process.pid)
        running = find(process.pid) if self._stand_by else None
        if running is not None:
            pids.add(running.parent)

    def _note_error(self, rank: int, ordered: bool) -> bool:
        path = self.folder / f"rank-{rank}.error.json"
        if self.ended.get(rank, {}).get("error") is not None:
            return False
        error = _json(path)
        if error is None:
            return False
        entry = self._entry(rank, ordered)
        entry["error"] = error
        entry["time"] = min(entry["time"], path.stat().st_mtime)
        return True

    def _note_exit(self, rank: int, ordered: bool) -> bool:
        if not self._stand_by or self.ended.get(rank, {}).get("exit") is not None:
            return False
        record = _json(self.folder / f"rank-{rank}.exit.json")
        if record is None:
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
        if self._stand_by and not last and time.monotonic() - since < EXIT_S:
            return False
        self._entry(rank, ordered)
        return self._stand_by

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
    except FileNotFoundError:
        return []


def _phase(path: Path) -> Optional[Dict[str, Any]]:
    data = _bytes(path)
    if len(data) != PHASE_RECORD.size:
        return None
    step, phase, collectives, when = PHASE_RECORD.unpack(data)
    name = PHASES[phase] if 0 <= phase < len(PHASES) else None
    return {"phase": name, "step": step, "collectives": collectives, "time": when}


def _json(path: Path) -> Optional[Dict[str, Any]]:
    """A JSON object, or None while it is not there or not whole."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _sizes(folder: Path, pattern: str) -> List[int]:
    try:
        return [path.stat().st_size for path in sorted(folder.glob(pattern))]
    except OSError:  # one has just been renamed, or removed: that is a change, too
        return []
