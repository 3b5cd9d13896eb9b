"""The host of a supervisor is lost, and the others elect another one: how long it takes, and what a referee finds.

    python -m benchmarks.lost_head --out lost_head.jsonl --cases 10           # as root, for the lab
    python -m benchmarks.lost_head --out lost_head.jsonl --minutes 20         # go on another time
    python -m benchmarks.lost_head --out lost_head.jsonl --witness            # two hosts; the third one only votes

Three lab hosts with real sshd, real torchrun and gloo, gangline's own trainer with a tiny model, a checkpoint every 10
steps; they share the processors of one computer, whose load stands in each line. At a random moment something happens
to the head:

    off       it loses power: nobody hears anything more, not even a reset
    cut       its cable is pulled; it is plugged in again once the others train
    frozen    everything on it stops (SIGSTOP), and goes on once the others train
    asleep    everything on it stops for 10 s: it is not to be deposed
    killed    its supervisor alone gets SIGKILL: its host agent starts another one, and it is not to be deposed

One JSON line per case; a file that has lines already is continued. The referee (tests/lab/referee.py) reads the records
of all hosts: leaders of each term, attempts that two have begun, steps done twice or by two attempts at once; then the
run is stopped, and nothing of it may be left on any host. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.lab_runs import OwnLab
from tests.lab.hosts import lab_folders
from tests.lab.limits import processes_of
from tests.lab.machine import LabHost
from tests.lab.referee import Records, ranks_left
from tests.lab.user import JOB, NewUser, make_model

KINDS = ("off", "cut", "frozen", "asleep", "killed")
EVERY = 10
"""Steps between two checkpoints."""
PATIENCE_S = 240.0
MOMENT_S = 4.0
ASLEEP_S = 10.0


class LostHead:
    """One case."""

    def __init__(self, kind: str, model: Path, seed: str, *, witness: bool = False) -> None:
        self.kind = kind
        self.witness = witness
        self.chance = random.Random(seed)
        self.lab = OwnLab(3, meshed=True, ttl_s=1800, binds=lab_folders(), disk="4g", shm="1g")
        self.model = model

    def play(self) -> dict[str, Any]:
        """Let it happen, and see what becomes of the run."""
        with self.lab:
            user, run = self._start()
            others = self.hosts[1:]
            time.sleep(self.chance.uniform(0.0, MOMENT_S))
            before = Records().take(self.hosts, run)
            moment = time.time()
            mend = self._happens(run)
            stays = self.kind in {"asleep", "killed"}
            line = self._stays(before, run, moment) if stays else self._moves(before, run, moment, mend)
            living = others if self.kind == "off" else self.hosts
            user.types("stop", run)
            left = ranks_left(living)
            wrong = [*line.pop("wrong"), *before.take(living, run).judge(), *left]
            voters = {"witness": True} if self.witness else {}
            return {"kind": self.kind, **voters, "load": round(os.getloadavg()[0], 1), **line, "wrong": wrong}

    @property
    def hosts(self) -> list[LabHost]:
        """Those that train."""
        return self.lab.hosts[:2] if self.witness else self.lab.hosts

    def _start(self) -> tuple[NewUser, str]:
        user = NewUser(self.lab.user)
        job = JOB.replace("every_steps: 50", f"every_steps: {EVERY}").replace("steps: 400", "steps: 1000000")
        user.brings(self.model, job=job)
        more = "\ntakeover: votes\n"
        if self.witness:
            more += f"witness: {{name: {self.lab.hosts[2].name}, address: {self.lab.hosts[2].address}}}\n"
        user.describes(*(host.name for host in self.hosts), more=more)
        user.types("init", "--pin", "cluster.yaml", "--yes")
        run = user.types("train", "job.yaml", "--detach").stdout.strip()
        user.awaits(run, lambda row: (row["step"] or 0) > 2 * EVERY, "it trains", patience_s=PATIENCE_S)
        return user, run

    def _happens(self, run: str) -> Callable[[], None]:
        """What mends it, if anything."""
        head = self.lab.hosts[0]
        if self.kind == "off":
            head.power_off()
        elif self.kind == "cut":
            head.faults.unplug()
            return head.faults.heal
        elif self.kind == "killed":
            head.check(
                ["kill", "-9", str(json.loads(head.read(f"gangline/runs/{run}/state.json"))["supervisor"]["pid"])]
            )
        else:
            _signal_all(head.pid, signal.SIGSTOP)
            if self.kind == "frozen":
                return lambda: _signal_all(head.pid, signal.SIGCONT)
            time.sleep(ASLEEP_S)
            _signal_all(head.pid, signal.SIGCONT)
        return lambda: None

    def _stays(self, records: Records, run: str, moment: float) -> dict[str, Any]:
        hosts = self.hosts
        last = _last_step(records, 1)
        _until(lambda: _last_step(records.take(hosts, run), 1) > last + 3, "it goes on")
        time.sleep(2 * ASLEEP_S)
        records.take(hosts, run)
        leaders = {name for names in records.leaders.values() for name in names}
        attempts = {record["attempt"] for _, record in records.lines("metrics.jsonl") if record["kind"] == "step"}
        wrong = [] if leaders == {"h0"} and attempts == {1} else [f"leaders {leaders}, attempts {attempts}"]
        return {"seconds": round(time.time() - moment, 1), "wrong": wrong}

    def _moves(self, records: Records, run: str, moment: float, mend: Callable[[], None]) -> dict[str, Any]:
        others = self.hosts[1:]
        _until(lambda: _first_step(records.take(others, run), 2) is not None, "the others go on")
        events = [record for _, record in records.lines("events.jsonl")]
        elected = min(_seconds(record) for record in events if record["event"] == "elected")
        begun = min(_seconds(record) for record in events if record["event"] == "started" and record["attempt"] == 2)
        first = _first_step(records, 2)
        assert first is not None
        mend()
        if self.kind != "off":
            _until(lambda: _state(self.lab.hosts[0], run)["phase"] == "failed", "the old head gives up")
        done, again = _last_step(records, 1), first["step"] - 1
        wrong = [f"{done - again} steps are lost"] if done - again > EVERY + 2 else []
        return {
            "elected_s": round(elected - moment, 1),
            "started_s": round(begun - moment, 1),
            "step_s": round(_seconds(first) - moment, 1),
            "last": done,
            "from": again,
            "wrong": wrong,
        }


def _signal_all(pid: int, number: int) -> None:
    for each in processes_of(pid):
        os.kill(each, number)


def _state(host: Any, run: str) -> dict[str, Any]:
    return json.loads(host.read(f"gangline/runs/{run}/state.json"))


def _steps(records: Records, attempt: int) -> list[dict[str, Any]]:
    lines = [record for _, record in records.lines("metrics.jsonl")]
    return [record for record in lines if record["kind"] == "step" and record["attempt"] == attempt]


def _last_step(records: Records, attempt: int) -> int:
    return max((record["step"] for record in _steps(records, attempt)), default=0)


def _first_step(records: Records, attempt: int) -> dict[str, Any] | None:
    return min(_steps(records, attempt), key=lambda record: record["step"], default=None)


def _seconds(record: dict[str, Any]) -> float:
    return datetime.fromisoformat(record["time"].replace("Z", "+00:00")).timestamp()


def _until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.5)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--witness", action="store_true")
    asked = parser.parse_args()
    done = asked.out.read_text().splitlines() if asked.out.exists() else []
    end = time.monotonic() + 60 * asked.minutes
    bad = sum(bool(json.loads(line)["wrong"]) for line in done)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        for number in range(len(done), asked.cases):
            if time.monotonic() > end:
                break
            kind = KINDS[number % len(KINDS)]
            try:
                line = LostHead(kind, model, f"lost head {number}", witness=asked.witness).play()
            except (AssertionError, TimeoutError, OSError) as error:
                line = {"kind": kind, "load": round(os.getloadavg()[0], 1), "wrong": [str(error)[:500]]}
            bad += bool(line["wrong"])
            with asked.out.open("a") as out:
                out.write(json.dumps({"case": number, **line}) + "\n")
            sys.stdout.write(json.dumps(line) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
