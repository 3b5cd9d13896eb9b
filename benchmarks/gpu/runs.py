"""Runs cases one after another, and survives each of them: a failure, a hang, a crash, and its own end.

Lines of the results file, JSON: `begin` before a case, `end` after it. A case with an end is done. One that began twice
without an end took the machine or this program with it both times, and is not tried again.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case

ROOT = Path(__file__).parents[2]
MOST_BEGINS = 2
TAIL_LINES = 15
DONE = ("passed", "failed", "hung", "crashed")
MPS = "nvidia-cuda-mps-control"
_PR_SET_CHILD_SUBREAPER = 36
_PROBE = (
    "import json, torch;"
    "n = torch.cuda.device_count() if torch.cuda.is_available() else 0;"
    "print(json.dumps({'gpus': [torch.cuda.get_device_name(i) for i in range(n)], 'torch': torch.__version__}))"
)


@dataclass(slots=True, kw_only=True)
class Results:
    """The file of lines, which only grows."""

    path: Path
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    begins: dict[str, int] = field(default_factory=dict)
    """How often a case has begun since its last end."""

    @classmethod
    def read(cls, path: Path) -> Results:
        """The lines that are there; half a line at the end is one that was cut off."""
        found = cls(path=path)
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            with suppress(ValueError, KeyError, TypeError):
                found._count(json.loads(text))
        return found

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line, on the disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as stream:
            if stream.tell() and not self.path.read_bytes().endswith(b"\n"):
                stream.write(b"\n")
            stream.write(json.dumps(line).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        self._count(line)

    def _count(self, line: Mapping[str, Any]) -> None:
        case = line["case"]
        if line["event"] == "begin":
            self.begins[case] = self.begins.get(case, 0) + 1
        elif line["event"] == "end" and line["result"] in DONE:
            self.ends[case] = dict(line)
        else:  # no time was left, all its tests were skipped, or it is wanted again
            self.begins[case] = 0
            self.ends.pop(case, None)

    def state(self, case: Case) -> str:
        """`to do`, a result, or `crashed` for one that took this program with it."""
        if case.name in self.ends:
            return str(self.ends[case.name]["result"])
        return "crashed" if self.begins.get(case.name, 0) >= MOST_BEGINS else "to do"


def probe(python: str = sys.executable, *, limit_s: float = 180.0) -> dict[str, Any]:
    """The GPUs that torch sees, its version, and why there are none."""
    try:
        asked = subprocess.run([python, "-c", _PROBE], capture_output=True, timeout=limit_s, check=False)
        if asked.returncode == 0:
            found: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
            return found if found["gpus"] else {**found, "why": f"torch {found['torch']} sees no GPU"}
        why = asked.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {asked.returncode}"]
        return {"gpus": [], "why": f"torch cannot be asked: {why[0]}"}
    except subprocess.TimeoutExpired:
        return {"gpus": [], "why": f"torch did not answer within {limit_s:g} s: does the driver hang?"}


def run_all(
    cases: Sequence[Case],
    results: Results,
    *,
    minutes: float,
    device: Mapping[str, Any],
    tell: Callable[[str], None] = print,
) -> None:
    """Run what is not done and fits, in the order of the table; returns when nothing more does."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a case leaves behind becomes a child of this process
    until = time.monotonic() + 60 * minutes
    num_gpus = len(device["gpus"])
    for case in cases:
        state, left_s = results.state(case), until - time.monotonic()
        if state != "to do":
            tell(f"done     {case.name}: {state}")
        elif num_gpus < case.num_gpus:
            tell(f"skipped  {case.name}: {device.get('why') or f'it needs {case.num_gpus} GPUs; here: {num_gpus}'}")
        elif left_s < case.expected_s:
            tell(f"left     {case.name}: it takes about {case.expected_s:.0f} s; {max(0.0, left_s):.0f} s are left")
        else:
            results.add({"event": "begin", "case": case.name, "time": _now()})
            line = run_case(case, results.path.parent, left_s=left_s)
            results.add({"event": "end", "case": case.name, **line, "device": dict(device), "time": _now()})
            tell(f"{line['result']:8} {case.name}: {line['seconds']:.0f} s; {line['log']}")
            for row in line["tail"] if line["result"] != "passed" else []:
                tell(f"         | {row}")


def run_case(case: Case, folder: Path, *, left_s: float) -> dict[str, Any]:
    """Run one case; what came of it. Nothing that it has started is there afterwards."""
    with tempfile.TemporaryDirectory(prefix="gangline-mps-") as place:
        sharing = _mps(Path(place)) if case.at_once else {}
        line = _run(case, folder, environment={**os.environ, **sharing}, left_s=left_s)
    return {**line, "mps": bool(sharing)} if case.at_once else line


def _mps(place: Path) -> dict[str, str]:
    """Variables with which processes share a card by CUDA's MPS; {} where its daemon is missing or does not start.

    The daemon is the case's own, with its pipe in `place`. It changes no setting of the card, and ends with the case,
    as everything does that a case has started.
    """
    program, words = shutil.which(MPS), dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), str(place))
    if program is None:
        return {}
    with suppress(OSError, subprocess.TimeoutExpired):
        words_of_it = {**os.environ, **words}
        begun = subprocess.run([program, "-d"], env=words_of_it, stdin=subprocess.DEVNULL, timeout=20, check=False)
        return words if begun.returncode == 0 else {}
    return {}


def _run(case: Case, folder: Path, *, environment: Mapping[str, str], left_s: float) -> dict[str, Any]:
    log = folder / f"{case.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    words = {"python": sys.executable, "out": str(folder)}
    limit_s, started = min(case.limit_s, left_s), time.monotonic()
    with log.open("wb") as stream:
        try:
            process = subprocess.Popen(
                [word.format_map(words) for word in case.argv],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            stream.write(str(error).encode())
            process = None
    try:
        code = process.wait(limit_s) if process else 127
        result = "crashed" if code < 0 else "failed" if code else "passed"
    except subprocess.TimeoutExpired:
        code, result = None, "hung" if limit_s >= case.limit_s else "cut off"
    finally:
        _end(process)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    if result == "passed" and lines and re.search(r"\d+ skipped", lines[-1]) and "passed" not in lines[-1]:
        result = "skipped"
    name = signal.Signals(-code).name if code is not None and code < 0 else None
    seconds = round(time.monotonic() - started, 1)
    tail = [row[:300] for row in lines[-TAIL_LINES:]]
    return {"result": result, "code": code, "signal": name, "seconds": seconds, "log": str(log), "tail": tail}


def _end(process: subprocess.Popen[bytes] | None) -> None:
    """Kill the case's group, and then whatever of it went into groups of its own."""
    if process is None:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while (left := list(_descendants(os.getpid()))) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _descendants(pid: int) -> Iterator[int]:
    """Children of a process first, then theirs: each becomes a child of this one once its parent is gone."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
