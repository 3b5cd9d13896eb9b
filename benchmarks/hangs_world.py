"""Three lab hosts whose ranks can be told to hang, or to take long (hangs.py, hangs_healthy.py, soak.py)."""

from __future__ import annotations

import itertools
import json
import struct
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.faults_world import World
from tests.lab.hosts import Lab, lab_folders
from tests.lab.machine import LabHost
from tests.lab.user import NewUser

FOLDER = "hang"
"""In the home of every host: what its ranks are told (hangs_in_rank.py)."""
IN_RANK = Path(__file__).with_name("hangs_in_rank.py")
WRAPPER = """\
#!/bin/sh
PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}} exec {python} "$@"
"""
PHASES = ("importing", "joining", "joined", "data", "compute", "exchange", "update", "evaluate", "save", "ended")
PHASE_RECORD = struct.Struct("<qqqd")
"""As a rank writes its phase file: step, phase, collectives entered, time. Read here without the product's reader."""
Line = dict[str, Any]


class HangWorld(World):
    """A world of which every rank looks for orders. The run is kept by the head. pace_s: seconds that every forward
    pass takes longer, asleep: three ranks share the processors of one machine.
    """

    def __init__(self, model: Path, *, seed: str, job: str, pace_s: float = 0.0, ttl_s: int = 3600) -> None:
        super().__init__(model, keep="head", seed=seed, job=job)
        self.lab = Lab(3, meshed=True, binds=lab_folders(), disk="4g", shm="1g", ttl_s=ttl_s)
        self._pace_s = pace_s

    def _begin(self) -> None:
        self.user = NewUser(self.lab.user)
        self.user.brings(self._model, job=self.job)
        for host in self.lab.hosts:
            folder = host.home / FOLDER
            host.write(f"{FOLDER}/sitecustomize.py", IN_RANK.read_bytes())
            host.write(f"{FOLDER}/python", WRAPPER.format(folder=folder, python=sys.executable), mode=0o755)
        python = self.lab.hosts[0].home / FOLDER / "python"
        self.user.describes(*(host.name for host in self.lab.hosts), python=python)
        if self._pace_s:
            self.set_pace(self._pace_s)
        self.train(self.job)

    def train(self, job: str) -> None:
        """Start a run, and wait until it trains."""
        self.user.desk.write("job.yaml", job)
        self.run_id = self.user.types("train", "job.yaml", "--detach").stdout.strip()
        self.until(lambda seen: seen.step > 10, "it trains", timeout_s=150)

    def set_pace(self, seconds: float) -> None:
        """For ranks that are started from now on."""
        for host in self.lab.hosts:
            host.write(f"{FOLDER}/pace", f"{seconds}\n")

    def events(self) -> list[dict[str, Any]]:
        """What the supervisor has written so far; a line that is being written is left out."""
        text = self.keeper.read(f"{self.folder(self.keeper)}/events.jsonl").decode()
        events = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
        return [event for event in events if event.get("source") == "supervisor"]

    def order(self, host: LabHost, kind: str, words: str = "now") -> None:
        """Tell the rank on a host."""
        host.run(["rm", "-f", f"{FOLDER}/began.json", f"{FOLDER}/ended.json"])
        # not `write`, which looks at the file once more: it may be taken away at once
        host.check(["sh", "-c", 'printf "%s\\n" "$2" > "$1"', "order", f"{FOLDER}/{kind}", words])

    def said(self, host: LabHost, name: str) -> Line | None:
        """What it told of an order ("began" or "ended"); None as long as it has not."""
        try:
            found: Line = json.loads(host.read(f"{FOLDER}/{name}.json"))
        except FileNotFoundError:
            return None
        return found

    def rank_of(self, host: LabHost, attempt: int) -> int:
        """The number of the rank on a host (one each)."""
        request = self.record(self.keeper, f"attempts/{attempt}/request.json")
        (rank,) = next(part["ranks"] for part in request["hosts"] if part["host"] == host.name)
        return int(rank)

    def phase_of(self, host: LabHost, attempt: int) -> tuple[str, int]:
        """The phase and the step in which the rank on a host is, by its own file."""
        data = host.read(f"{self.folder(host)}/attempts/{attempt}/rank-{self.rank_of(host, attempt)}.phase")
        step, phase, _, _ = PHASE_RECORD.unpack(data)
        return PHASES[phase], step

    def steps_s(self, num: int) -> list[float]:
        """How long the last steps took, as far as they belong to one attempt: from one line of figures to the next."""
        said = self.lab.hosts[0].run(["tail", "-n", str(num + 1), f"{self.folder(self.lab.hosts[0])}/metrics.jsonl"])
        return intervals([json.loads(line) for line in said.stdout.splitlines() if line.endswith("}")])


class Tail:
    """The new whole lines of a file of JSON lines on a host."""

    def __init__(self, host: LabHost, path: str) -> None:
        self._host = host
        self._path = path
        self._num_bytes = 0

    def lines(self) -> list[Line]:
        """Those since the last call."""
        said = self._host.run(["tail", "-c", f"+{self._num_bytes + 1}", self._path], timeout_s=120).stdout
        whole = said[: said.rfind("\n") + 1]
        self._num_bytes += len(whole.encode())
        return [json.loads(line) for line in whole.splitlines()]


def seconds_of(line: Line) -> float:
    """When a line of figures was written, in seconds after 1970."""
    return datetime.fromisoformat(line["time"].replace("Z", "+00:00")).timestamp()


def intervals(lines: list[Line]) -> list[float]:
    """Seconds between steps that follow each other in one attempt."""
    steps = [line for line in lines if line.get("kind") == "step"]
    return [
        seconds_of(after) - seconds_of(before)
        for before, after in itertools.pairwise(steps)
        if before["attempt"] == after["attempt"] and before["step"] + 1 == after["step"]
    ]
