"""Runs in the lab that are looked at closely: for controllers.py, all_lost.py and lost_host.py."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.faults_world import JOB, World
from tests.lab.hosts import ROOT, Lab, LabHost, lab_folders
from tests.lab.namespaces import end
from tests.lab.user import NewUser, processes_of_runs

STEP = re.compile(r"step (\d+)/")
SUPERVISOR = "gangline.supervise"
KEPT_BYTES = 1 << 16
"""So much of what a terminal showed is remembered."""


class OwnLab(Lab):
    """A lab whose user runs the gangline that lies beside this file, whatever is installed."""

    def _build(self) -> None:
        super()._build()
        self.user.env["PYTHONPATH"] = str(ROOT / "src")


class OwnWorld(World):
    """A run on three hosts of such a lab. kind: more of what the hosts have (`tests.lab.settings.HostKind`)."""

    def __init__(self, model: Path, *, keep: str, seed: str, job: str = JOB, **kind: Any) -> None:
        super().__init__(model, keep=keep, seed=seed, job=job)
        words = {"binds": lab_folders(), "disk": "4g", "shm": "1g", **kind}
        self.lab = OwnLab(3, meshed=keep == "head", ttl_s=3600, **words)

    def bring(self, *, words: str = "") -> None:
        """Everything up to `gangline train`. words: more lines for every host of the cluster file."""
        self.user = NewUser(self.lab.user)
        self.user.brings(self._model, job=self.job)
        self.user.describes(*(host.name for host in self.lab.hosts), words=words)

    def gang(self) -> Gang:
        """What of the run is on the hosts now."""
        found = {host.name: processes_of_runs(host) for host in self.living}
        return Gang(
            attempt=self.state()["attempt"],
            ranks={host.name: self.rank_pid(host) for host in self.living},
            processes={name: _pids(lines, supervisors=False) for name, lines in found.items()},
            leases={host.name: self._leases(host) for host in self.living},
        )

    def supervisors(self) -> list[str]:
        """Supervisors of any run, wherever they are: "host pid"."""
        machines = [*self.living, self.lab.user]
        found = {host.name: _pids(processes_of_runs(host), supervisors=True) for host in machines}
        return [f"{name} {pid}" for name, pids in found.items() for pid in sorted(pids)]

    def _leases(self, host: LabHost) -> str:
        script = 'for each in gangline/leases/*/*-*; do echo "$each $(cat "$each")"; done'
        return host.check(["sh", "-c", script])

    def steps(self, *, num_bytes: int = 1 << 20) -> list[dict[str, Any]]:
        """The last lines of metrics.jsonl on the head."""
        said = self.living[0].check(["tail", "-c", str(num_bytes), f"{self.folder(self.living[0])}/metrics.jsonl"])
        records = []
        for line in said.splitlines():
            with suppress(ValueError):
                records.append(json.loads(line))
        return [record for record in records if isinstance(record, dict) and record.get("kind") == "step"]


def _pids(lines: list[str], *, supervisors: bool) -> frozenset[int]:
    split = [line.split() for line in lines]
    return frozenset(int(words[0]) for words in split if (SUPERVISOR in words) is supervisors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """What of a run is on its hosts, at one moment."""

    attempt: int
    ranks: dict[str, int]
    """Host -> pid of its rank."""
    processes: dict[str, frozenset[int]]
    """Host -> all that carry the mark of a run, but for supervisors."""
    leases: dict[str, str]
    """Host -> who has its slots, as the leases say."""

    def changes(self, after: Gang) -> list[str]:
        """What is another than before: nothing, if nobody was harmed and nothing was started twice."""
        rows = [f"attempt {self.attempt} became {after.attempt}"] if self.attempt != after.attempt else []
        for name, pid in self.ranks.items():
            if after.ranks.get(name) != pid:
                rows.append(f"the rank on {name} was {pid} and is {after.ranks.get(name)}")
            if pid not in after.processes.get(name, ()):
                rows.append(f"the rank on {name}, {pid}, does not run")
            if after.processes.get(name) != self.processes[name]:
                rows.append(f"{name} ran {sorted(self.processes[name])}, runs {sorted(after.processes.get(name, ()))}")
            if after.leases.get(name) != self.leases[name]:
                rows.append(f"leases on {name} were {self.leases[name]}, are {after.leases.get(name)}")
        return rows


def longest_gap_s(records: list[dict[str, Any]]) -> float:
    """The longest time between two steps of one attempt, by the clock of the host that wrote them."""
    times = [datetime.fromisoformat(record["time"].replace("Z", "+00:00")) for record in records]
    return max((later - one).total_seconds() for one, later in itertools.pairwise(times))


class Terminal:
    """A command that somebody at the desk has typed, in front of a terminal, and what it shows."""

    def __init__(self, desk: LabHost, *words: str) -> None:
        self._near, far = os.openpty()
        self._shown = b""
        look = {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        self._before = Counter(desk.processes())
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell; who types has Ctrl-C
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._desk = desk
        self._process = desk.popen(["gangline", *words], stdin=far, stdout=far, stderr=far, env=look)
        os.close(far)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # nobody holds the other end any more
            while piece := os.read(self._near, 1 << 16):
                self._shown = (self._shown + piece)[-KEPT_BYTES:]

    @property
    def text(self) -> str:
        """The end of what it showed."""
        return self._shown.decode("utf-8", "replace")

    @property
    def step(self) -> int:
        """The last step that it showed; 0: none."""
        shown = STEP.findall(self.text)
        return int(shown[-1]) if shown else 0

    @property
    def code(self) -> int | None:
        """How it ended; None: it goes on."""
        return self._process.poll()

    def until(self, condition: Callable[[Terminal], object], *, timeout_s: float = 60.0) -> bool:
        """Whether it came to that, before it ended or the time was up."""
        deadline = time.monotonic() + timeout_s
        while not condition(self):
            if self.code is not None or time.monotonic() > deadline:
                return bool(condition(self))
            time.sleep(0.05)
        return True

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal the command itself, and nobody else."""
        for pid in _children(self._process.pid):
            os.kill(pid, number)
        self._process.wait(30)

    def leftovers(self, *, within_s: float = 15.0) -> list[str]:
        """What runs at the desk now and did not before it was typed, once that is nothing or the time is up."""
        deadline = time.monotonic() + within_s
        while (more := Counter(self._desk.processes()) - self._before) and time.monotonic() < deadline:
            time.sleep(0.25)
        return sorted(more)

    def close(self) -> None:
        """Take it away; again: nothing."""
        if self._near >= 0:
            end(self._process)
            self._reader.join(5)
            os.close(self._near)
            self._near = -1


def _children(parent: int) -> list[int]:
    """Processes that `nsenter` has started in a host."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found
