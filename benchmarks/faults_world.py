"""A run of the real trainer on three lab hosts, at random moments of which something is done to it (faults.py)."""

from __future__ import annotations

import json
import random
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults_planted import PYTHON, plant
from tests.lab.hosts import Lab, lab_folders
from tests.lab.machine import LabHost
from tests.lab.user import NewUser

JOB = """\
name: plug
model: ./model
data: {train: fox.txt, sequence_length: 64}
method: full
precision: fp32
batch: 12
micro_batch: 2
steps: 1000000
seed: 1
optimizer: {learning_rate: 1e-4}
schedule: constant
evaluation: {at_start: false}
checkpoint: {every_steps: 20, every_minutes: none, keep_last: 2}
failures: {restarts: 6, wait: 15s}
"""
BACK_S = 150.0
"""How long a run may take to do its next step."""
MOMENT_S = 4.0
"""A fault comes within so many seconds, at a random phase of a step, a save or a commit."""


class NotBack(AssertionError):
    """The run did not do another step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Where a run stands, as its own files say."""

    step: int
    trained: int
    """The last attempt that has done a step."""
    attempt: int
    """The one that state.json names; it may not have begun to train yet."""
    phase: str
    error: str


class World:
    """Three hosts, a user, and a run.

    keep: who looks after it: "head" or "desk". job: what is trained. planted: hosts are given what `faults_planted.py`
    lists, and small disks.
    """

    def __init__(self, model: Path, *, keep: str, seed: str, job: str = JOB, planted: bool = False) -> None:
        self.chance = random.Random(seed)
        disk = "1g" if planted else "4g"
        self.lab = Lab(3, meshed=keep == "head", binds=lab_folders(), disk=disk, shm="1g", ttl_s=3600)
        self.keep = keep
        self.job = job
        self.planted = planted
        self._model = model
        self.run_id = ""

    def __enter__(self) -> World:
        self.lab.__enter__()
        try:
            self._begin()
        except BaseException:
            self.lab.close()
            raise
        return self

    def _begin(self) -> None:
        for host in self.lab.hosts if self.planted else ():
            plant(host)
        self.user = NewUser(self.lab.user)
        self.user.brings(self._model, job=self.job)
        python = PYTHON if self.planted else sys.executable
        self.user.describes(*(host.name for host in self.lab.hosts), python=python)
        self.run_id = self.user.types("train", "job.yaml", "--detach", timeout_s=300).stdout.strip()
        self.until(lambda seen: seen.step > 10, "it trains", timeout_s=300)

    def __exit__(self, *problem: object) -> None:
        self.lab.__exit__(*problem)

    @property
    def keeper(self) -> LabHost:
        """Where the records of the run lie."""
        return self.lab.hosts[0] if self.keep == "head" else self.lab.user

    @property
    def living(self) -> list[LabHost]:
        """Hosts that are on."""
        return [host for host in self.lab.hosts if host.is_alive]

    def folder(self, host: LabHost) -> str:
        """The run's folder there."""
        return f"{'.local/state/gangline' if host is self.lab.user else 'gangline'}/runs/{self.run_id}"

    def record(self, host: LabHost, name: str) -> Any:
        """A JSON document of the run; raises OSError or ValueError."""
        return json.loads(host.read(f"{self.folder(host)}/{name}"))

    def state(self) -> dict[str, Any]:
        """state.json."""
        found: dict[str, Any] = self.record(self.keeper, "state.json")
        return found

    def events(self) -> list[dict[str, Any]]:
        """What the supervisor has written so far."""
        lines = self.keeper.read(f"{self.folder(self.keeper)}/events.jsonl").decode().splitlines()
        return [event for event in map(json.loads, lines) if event.get("source") == "supervisor"]

    def told(self) -> list[dict[str, Any]]:
        """What rank 0 has written so far, whichever host it was on; of each host in order."""
        found = []
        for host in self.living:
            lines = host.run(["cat", f"{self.folder(host)}/events.jsonl"]).stdout.splitlines()
            for line in lines:
                with suppress(ValueError):
                    found.append(json.loads(line))
        return [event for event in found if event.get("source") == "worker"]

    def explained(self) -> dict[str, Any]:
        """What `gangline explain` says of the run."""
        found: dict[str, Any] = json.loads(self.user.types("explain", self.run_id, "--json").stdout)
        return found

    def hosts(self) -> list[str]:
        """Who takes part in the attempt that runs."""
        request = self.record(self.keeper, f"attempts/{self.state()['attempt']}/request.json")
        return [part["host"] for part in request["hosts"]]

    def save_evidence(self, folder: Path) -> None:
        """Keep what was written down of the run, without its checkpoints and data."""
        folder.mkdir(parents=True, exist_ok=True)
        for host in {self.keeper, *self.living}:
            words = ["tar", "-cz", "--exclude=checkpoints", "--exclude=*.npy", self.folder(host)]
            with (folder / f"{host.name}.tgz").open("wb") as stream, host.popen(words, stdout=stream) as process:
                process.wait(timeout=60)

    def seen(self) -> Seen:
        """Where it stands now."""
        state, (step, trained) = self.state(), self._step()
        return Seen(
            step=step,
            trained=trained,
            attempt=state["attempt"],
            phase=state["phase"],
            error=(state["error"] or {}).get("what", ""),
        )

    def _step(self) -> tuple[int, int]:
        """The last step that a head has written, whoever it was; and the last attempt that has done one."""
        found = [(0, 0)]
        for host in self.living:
            said = host.run(["tail", "-n", "3", f"{self.folder(host)}/metrics.jsonl"]).stdout
            for line in said.splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    row = json.loads(line)
                    found.append((int(row["step"]), int(row["attempt"])))
        return max(step for step, _ in found), max(attempt for _, attempt in found)

    def until(self, condition: Callable[[Seen], bool], what: str, *, timeout_s: float = BACK_S) -> Seen:
        """Look until it is so; raises NotBack."""
        deadline = time.monotonic() + timeout_s
        seen = None
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError, KeyError):
                seen = self.seen()
                if condition(seen):
                    return seen
                if seen.phase in {"failed", "stopped", "finished"}:
                    raise NotBack(f"it has {seen.phase} before {what}: {seen.error}")
            time.sleep(0.1)
        raise NotBack(f"waited {timeout_s:g} s in vain until {what}: {seen}")

    def rank_pid(self, host: LabHost) -> int:
        """The process of the rank on a host (one each)."""
        attempt = self.state()["attempt"]
        return int(self.record(host, f"attempts/{attempt}/rank-{self._rank(host, attempt)}.pid")["pid"])

    def _rank(self, host: LabHost, attempt: int) -> int:
        """The number of the rank there."""
        request = self.record(self.keeper, f"attempts/{attempt}/request.json")
        (rank,) = next(part["ranks"] for part in request["hosts"] if part["host"] == host.name)
        return int(rank)

    def clock(self, host: LabHost) -> float:
        """The time that the rank on a host wrote last (Unix, s)."""
        attempt = self.state()["attempt"]
        data = host.read(f"{self.folder(host)}/attempts/{attempt}/rank-{self._rank(host, attempt)}.phase")
        return float(struct.unpack_from("<qqqd", data)[3])

    def host_agent(self, host: LabHost) -> dict[str, Any]:
        """What the host agent on a host says of itself."""
        found: dict[str, Any] = self.record(host, f"attempts/{self.state()['attempt']}/{host.name}/agent.json")
        return found
