"""What the files of a host's ranks tell: who runs, who failed, and with what."""

from __future__ import annotations

import json
import os
import re
import struct
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Set, Tuple

from gangline.agent.processes import Process, is_alive, send

RANK_FILE = re.compile(r"rank-(\d+)\.(pid|error\.json)")
# The summary that torchrun prints for a failed rank: "exitcode  : -9 (pid: 4711)".
EXIT_LINE = re.compile(rb"exitcode\s*:\s*(-?\d+)\s*\(pid:\s*(\d+)\)")
PHASES = (
    "importing",
    "joining",
    "joined",
    "data",
    "compute",
    "exchange",
    "update",
    "evaluate",
    "save",
    "ended",
)
PHASE_RECORD = struct.Struct("<qqqd")
"""As the worker writes its phase file: step, phase, collectives entered, time."""
TAIL_LINES = 40
TAIL_BYTES = 1 << 16


class Ranks:
    """The ranks of this host, watched through their files.

    folder: where rank-<r>.pid, rank-<r>.error.json and rank-<r>.log appear.
    wanted: global ranks of this host; empty: every one whose files appear.
    """

    def __init__(self, folder: Path, wanted: Set[int]) -> None:
        self.folder = folder
        self.wanted = wanted
        self.processes: Dict[int, Process] = {}
        self.ended: Dict[int, Dict[str, Any]] = {}
        """rank -> what is known of its end, in the order in which the ends were seen."""
        self._signalled: Set[int] = set()

    def scan(self, *, ordered: bool) -> bool:
        """Look once; True if a new error was seen. `ordered`: an order to end is already out, so ends are no news."""
        found = self._names()
        for rank in sorted(rank for rank, kind in found if kind == "pid"):
            self._note_pid(rank)
        news = [self._note_error(rank, ordered) for rank in sorted(rank for rank, kind in found if kind != "pid")]
        for rank, process in self.processes.items():
            if rank not in self.ended and not is_alive(process.pid, process.start_ticks):
                self._entry(rank, ordered)
        return any(news)

    def terminate(self, number: int) -> None:
        """Send a signal to every rank that has not had it; ranks that appear later get theirs at the next call."""
        for rank, process in self.processes.items():
            if rank not in self._signalled:
                self._signalled.add(rank)
                send(process, number)

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
        for entry in self.ended.values():
            code = exits.get(entry["pid"]) if entry["pid"] is not None else None
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
        if rank in self.processes:
            return
        record = _json(self.folder / f"rank-{rank}.pid")
        if record is not None:
            self.processes[rank] = Process(int(record["pid"]), int(record["start_ticks"]), 0, "R")

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

    def _entry(self, rank: int, ordered: bool) -> Dict[str, Any]:
        process = self.processes.get(rank)
        fresh = {
            "rank": rank,
            "pid": process.pid if process else None,
            "time": time.time(),
            "ordered": ordered,
            "error": None,
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
