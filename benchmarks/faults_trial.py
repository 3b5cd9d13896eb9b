"""Three lab hosts with torchrun and faults_plain.py, and what is seen of them (faults_torchrun.py)."""

from __future__ import annotations

import random
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults_planted import PYTHON, plant
from tests.lab.hosts import Lab, lab_folders
from tests.lab.machine import LabHost

SCRIPT = Path(__file__).with_name("faults_plain.py")
PID, STEPS = "/dev/shm/plug-pid", "/dev/shm/plug-steps"
"""As faults_plain.py has them."""
PORT = 29500
FIRST_STEP_S = 240.0
TRAINED = 45
"""Steps before a fault: two saves, and a part of the next interval."""
TELLING = re.compile(
    r"exitcode +:|error +:|Signal \d+|Rendezvous\w*Error|RendezvousGracefulExit|Connection (reset|closed)|No space|"
    r"ValueError|Timed out|timed out|no heartbeat|No route|Broken pipe|SIGKILL|lost|failed"
)
NOISE = re.compile(r"hostname of the client socket cannot be retrieved|CHILD PROCESS FAILED WITH NO ERROR_FILE")
MOST_LINES, MOST_LETTERS = 6, 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The last step of a host, as its rank wrote it."""

    host: str
    pid: int
    ranks: int
    step: int
    loss: str
    digest: str


class Trial:
    """A training under torchrun; left to itself from its first steps on."""

    def __init__(self, *, seed: str) -> None:
        self.chance = random.Random(seed)
        self.lab = Lab(3, binds=lab_folders(), disk="1g", shm="1g", ttl_s=900)
        self._sessions: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Trial:
        self.lab.__enter__()
        try:
            for host in self.lab.hosts:
                plant(host)
            for host in self.lab.hosts:
                self._start(host)
            self._await_training()
        except BaseException:
            self.lab.close()
            raise
        return self

    def __exit__(self, *problem: object) -> None:
        self.lab.__exit__(*problem)

    @property
    def living(self) -> list[LabHost]:
        """Hosts that are on."""
        return [host for host in self.lab.hosts if host.is_alive]

    def _start(self, host: LabHost) -> None:
        """As by hand: an ssh session per host, its output in a file there."""
        head = self.lab.hosts[0]
        rendezvous = {
            "join_timeout": 120,
            "last_call_timeout": 5,
            "read_timeout": 60,
            "is_host": int(host is head),
        }
        options = {
            "--nnodes": "2:3",
            "--nproc-per-node": 1,
            "--max-restarts": 6,
            "--monitor-interval": 0.1,
            "--shutdown-timeout": 10,
            "--rdzv-id": "plug",
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": f"{head.address}:{PORT}",
            "--rdzv-conf": ",".join(f"{name}={value}" for name, value in rendezvous.items()),
            "--local-addr": host.address,
        }
        words = [PYTHON, "-m", "torch.distributed.run", *(str(word) for pair in options.items() for word in pair)]
        env = "OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0"
        command = f"{env} {' '.join(words)} {SCRIPT} > plug/log 2>&1 < /dev/null & echo $! > plug/torchrun; wait $!"
        line = f"mkdir -p plug; {command}; echo $? > plug/ended"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._sessions.append(self.lab.user.popen(["ssh", "-n", host.name, line], **quiet))

    def _await_training(self) -> None:
        deadline = time.monotonic() + FIRST_STEP_S
        while len(marks := self.marks()) < 3 or min(mark.step for mark in marks.values()) < TRAINED:
            assert time.monotonic() < deadline, f"it does not train: {marks} {self.said()}"
            time.sleep(0.5)

    def rank_pid(self, host: LabHost) -> int:
        """Of the rank there."""
        return int(host.read(PID))

    def host_agent(self, host: LabHost) -> dict[str, Any]:
        """Of torchrun there."""
        return {"torchrun_pid": int(host.read("plug/torchrun"))}

    def marks(self) -> dict[str, Mark]:
        """Where each host stands that has done a step."""
        return {host.name: mark for host in self.living if (mark := self._mark(host)) is not None}

    def _mark(self, host: LabHost) -> Mark | None:
        rows = self._rows(host, ["tail", "-n", "1", STEPS])
        return rows[-1] if rows else None

    def _rows(self, host: LabHost, words: list[str]) -> list[Mark]:
        found = []
        for line in host.run(words).stdout.splitlines():
            with suppress(ValueError):
                pid, ranks, step, loss, digest = line.split()
                found.append(
                    Mark(host=host.name, pid=int(pid), ranks=int(ranks), step=int(step), loss=loss, digest=digest)
                )
        return found

    def first_step(self, mark: Mark) -> int:
        """The first step that this rank did."""
        host = next(host for host in self.living if host.name == mark.host)
        return self._rows(host, ["grep", "-m", "1", f"^{mark.pid} ", STEPS])[0].step

    def oddities(self) -> Iterator[str]:
        """What is wrong with the numbers, and nobody says."""
        rows = {host.name: self._rows(host, ["tail", "-n", "20", STEPS]) for host in self.living}
        if any(row.loss == "nan" for each in rows.values() for row in each):
            yield "every loss is nan, and nobody says so"
            return
        common = set.intersection(*({row.step for row in each} for each in rows.values()))
        digests = {row.digest for each in rows.values() for row in each if row.step == max(common, default=-1)}
        if len(digests) > 1:
            yield "the weights of the hosts differ, and nobody says so"

    def launchers(self) -> Iterator[str]:
        """Which torchruns have ended."""
        for host in self.lab.hosts:
            if not host.is_alive:
                continue
            code = host.run(["cat", "plug/ended"]).stdout.strip()
            running = host.run(["kill", "-0", str(self.host_agent(host)["torchrun_pid"])]).returncode == 0
            if code:
                yield f"torchrun on {host.name} has ended with {code}"
            elif not running:
                yield f"torchrun on {host.name} is gone"

    def said(self) -> dict[str, list[str]]:
        """The last telling lines of each torchrun and its rank."""
        found = {}
        for host in self.living:
            lines = host.run(["tail", "-n", "400", "plug/log"]).stdout.splitlines()
            telling = [line.strip()[:MOST_LETTERS] for line in lines if TELLING.search(line) and not NOISE.search(line)]
            found[host.name] = list(dict.fromkeys(telling))[-MOST_LINES:]
        return found
