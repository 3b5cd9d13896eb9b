"""Half an hour with a fault every 30 seconds: how much of the time is training, and what grows?

    python -m benchmarks.soak --out soak.jsonl --minutes 30      # as root, for the lab; about 45 minutes in all

Three lab hosts with real sshd, real torchrun and gloo, gangline's own trainer with a small model on the processor.
Every forward pass takes 0.1 s longer, asleep, as on a GPU: three ranks share the processors of one machine. After a
minute without faults, by which a step is measured, one of these comes every 30 s, on a random host, all equally often:

    rank, process, host agent, launcher    kill -9 of a rank; of the process it was forked from; of a host agent; of
    torchrun flap                              the cable of a host is out for five seconds
    ssh                               all ssh connections to a host are cut
    supervisor                        kill -9 of the supervisor, on the head

(not a stopped rank, or a host that is lost: noticing alone takes 30 s of the 30 s). A fault that the run has not come
back from is not followed by another one; the next comes at the next 30 s. Just before each, processes, file handles and
memory on all hosts are counted.

Goodput: steps that count (those that were done again count once) x the median time of a step in the minute without
faults / time of the wall. Then the same job runs without faults, and without the 0.1 s, to the same step: losses are
compared step by step. Growth: medians of the first and the last quarter, by host and kind of process.

JSON lines: "begin", "fault", "sample", "end" and "losses"; a soak that has an end is not played again. Exit code 1 if
goodput is under 80 %, the last losses differ by more than 1 % or were not compared, something grows, or a fault ends
otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.faults_world import Seen
from benchmarks.hangs import FAILURES
from benchmarks.hangs_world import HangWorld, Line, Tail, intervals
from benchmarks.plan_time import read
from benchmarks.scaling import commit
from benchmarks.soak_report import report
from tests.lab.machine import LabHost
from tests.lab.user import make_model

JOB = """\
name: soak
model: ./model
data: {{train: fox.txt, sequence_length: 64}}
method: full
precision: fp32
batch: 12
micro_batch: 2
steps: {steps}
seed: 1
optimizer: {{learning_rate: 1e-4}}
schedule: constant
evaluation: {{at_start: false}}
checkpoint: {{every_steps: 20, every_minutes: none, keep_last: 2}}
failures: {{restarts: 1000, wait: 15s}}
"""
ENDLESS = 1000000
EVERY = 20
"""Steps between two checkpoints."""
PACE_S = 0.1
EVERY_S, CALM_S, BACK_S, CLEAN_S = 30.0, 60.0, 150.0, 1800.0
KINDS = ("rank", "process", "host-agent", "launcher", "flap", "ssh", "supervisor")
HARMLESS = {"flap", "ssh", "supervisor"}
"""The ranks go on, and nobody needs another attempt."""
COMPARED = 100
"""The last steps, whose losses must be as without faults."""
LOOK = Path(__file__).with_name("soak_look.py")


class Soak:
    """One run under faults."""

    def __init__(self, world: HangWorld, out: Path, *, seed: int) -> None:
        self.world = world
        self._out = out
        self._words = {"seed": seed, "commit": commit()}
        self._wrong: list[str] = []

    def write(self, kind: str, **words: Any) -> None:
        """One line."""
        with self._out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"kind": kind, **self._words, **words}) + "\n")

    def play(self, minutes: float) -> int:
        """All of it; the step that it came to."""
        world, kinds = self.world, self._kinds()
        calm = self._calm()
        first, begun = world.seen().step, time.monotonic()
        ticks, num_faults = int(60 * minutes / EVERY_S), 0
        for tick in range(ticks):
            wait_s = begun + tick * EVERY_S - time.monotonic()
            if wait_s < -1.0:  # the one before has taken its turn
                continue
            time.sleep(max(0.0, wait_s))
            self._sample(time.monotonic() - begun)
            num_faults += 1
            if not self._fault(tick, next(kinds), time.monotonic() - begun):
                break  # it stands: the rest of the time is lost
        else:
            time.sleep(max(0.0, begun + 60 * minutes - time.monotonic()))
        last, wall_s = world.seen().step, max(time.monotonic() - begun, 60 * minutes)
        self._sample(wall_s)
        goodput = (last - first) * calm["step_s"] / wall_s
        done = {"seconds": round(wall_s, 1), "ticks": ticks, "faults": num_faults, "steps": last - first, **calm}
        self.write("end", **done, goodput=round(goodput, 4), wrong=self._wrong)
        return last

    def _calm(self) -> Line:
        """A minute without faults: the median time of a step in it, and steps per second with all that is between."""
        tail = self._figures()
        tail.lines()
        time.sleep(CALM_S)
        lines = tail.lines()
        return {"step_s": statistics.median(intervals(lines)), "calm_steps_per_s": round(len(lines) / CALM_S, 3)}

    def _figures(self) -> Tail:
        head = self.world.lab.hosts[0]
        return Tail(head, f"{self.world.folder(head)}/metrics.jsonl")

    def _kinds(self) -> Iterator[str]:
        """All of them, in a random order, again and again."""
        while True:
            yield from self.world.chance.sample(KINDS, len(KINDS))

    def _fault(self, number: int, kind: str, at_s: float) -> bool:
        """One fault; whether the run has come back."""
        world = self.world
        victim = world.keeper if kind == "supervisor" else world.chance.choice(world.lab.hosts)
        num_events, line = len(world.events()), {"number": number, "fault": kind, "victim": victim.name}
        line |= {"at_s": round(at_s, 1), "load": os.getloadavg()[0], "back_s": None}
        try:
            seen = world.seen()
            before = world.until(lambda now: now.phase == "running" and now.step > seen.step, "it trains")
            begun = time.monotonic()
            strike(world, kind, victim)
            after = world.until(lambda seen: _is_back(seen, before, kind), "it goes on", timeout_s=BACK_S)
            line |= {"back_s": round(time.monotonic() - begun, 1), "attempts": after.attempt - before.attempt}
            told = [event for event in world.events()[num_events:] if event["event"] == "restarting"]
            lost = max((event["lost_steps"] or 0 for event in told), default=0)
            line |= {"lost_steps": lost, "what": [event["what"] for event in told]}
            line["wrong"] = [f"{lost} steps were lost"] if lost > EVERY + 1 else []
        except FAILURES as error:
            line["wrong"] = [f"{type(error).__name__}: {error}"]
        self._wrong += [f"{number} {kind}: {each}" for each in line["wrong"]]
        self.write("fault", **line)
        shown = ("number", "fault", "victim", "at_s", "back_s", "attempts", "what", "wrong")
        print(*(line.get(name) for name in shown), flush=True)
        return not any(each.startswith("NotBack") for each in line["wrong"])

    def _sample(self, at_s: float) -> None:
        """What runs on all hosts."""
        hosts = {}
        for host in self.world.living:
            words = ["/usr/bin/python3", "-", str(host.home / "gangline" / "runs"), host.name]
            with suppress(ValueError, subprocess.TimeoutExpired):
                hosts[host.name] = json.loads(host.run(words, stdin=LOOK.read_text(), as_root=True).stdout)
        if len(hosts) < len(self.world.living):
            self._wrong.append(f"at {at_s:.0f} s a host could not be looked at")
        self.write("sample", at_s=round(at_s, 1), step=self.world.seen().step, load=os.getloadavg()[0], hosts=hosts)

    def compare(self, last: int) -> None:
        """The losses up to a step beside those of the same job without faults."""
        world = self.world
        lines = [line for line in self._figures().lines() if line["kind"] == "step"]
        world.user.types("stop", world.run_id, "--now")
        soaked = {line["step"]: line["loss"] for line in lines}  # of a step that was done again the last one counts
        begun = time.monotonic()
        world.set_pace(0.0)
        world.train(JOB.format(steps=last))
        while world.state()["phase"] == "running" and time.monotonic() < begun + CLEAN_S:
            time.sleep(2.0)
        clean = {line["step"]: line["loss"] for line in self._figures().lines() if line["kind"] == "step"}
        both = sorted(soaked.keys() & clean.keys())
        off = {step: abs(soaked[step] / clean[step] - 1) for step in both}
        words: Line = {
            "last_step": last,
            "steps_again": len(lines) - len(soaked),
            "missing_steps": sorted(set(range(1, last + 1)) - set(both))[:20],
            "loss": [soaked.get(last), clean.get(last)],
            "loss_off_last": off.get(last),
            "loss_off_end": max((off[step] for step in both[-COMPARED:]), default=None),
            "loss_off_most": max(off.values(), default=None),
            "clean_s": round(time.monotonic() - begun, 1),
        }
        self.write("losses", **words)


def _is_back(seen: Seen, before: Seen, kind: str) -> bool:
    """Beyond where it stood; where another attempt is needed, in that."""
    return seen.step > before.step + 2 and (kind in HARMLESS or seen.attempt > before.attempt)


def strike(world: HangWorld, kind: str, victim: LabHost) -> None:
    """Do it."""
    if kind == "flap":
        victim.faults.unplug()
        time.sleep(5)
        victim.faults.heal()
    elif kind == "ssh":
        victim.run(["pkill", "-9", "-f", "sshd: .*[@]notty"], as_root=True)
    elif kind == "supervisor":
        _kill(victim, int(world.state()["supervisor"]["pid"]))
    elif kind == "host-agent":
        _kill(victim, int(world.host_agent(victim)["pid"]))
    elif kind == "launcher":
        _kill(victim, int(world.host_agent(victim)["torchrun_pid"]))
    elif kind == "process":
        _kill(victim, int(victim.check(["ps", "-o", "ppid=", "-p", str(world.rank_pid(victim))])))
    else:
        _kill(victim, world.rank_pid(victim))


def _kill(host: LabHost, pid: int) -> None:
    host.check(["kill", "-9", str(pid)], as_root=True)


def main() -> int:
    """Play what the file does not have yet, and sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, added to if it exists")
    parser.add_argument("--keep", type=Path, help="a folder for what hosts have of the soak")
    arguments = parser.parse_args()
    ended = {line["seed"] for line in read(arguments.out) if line["kind"] == "end"}
    if arguments.seed not in ended:
        with tempfile.TemporaryDirectory() as folder:
            play(arguments, make_model(Path(folder) / "model"))
    return report(read(arguments.out))


def play(arguments: argparse.Namespace, model: Path) -> None:
    """One soak."""
    ttl_s = int(arguments.minutes * 60 * 2 + 1800)
    job, seed = JOB.format(steps=ENDLESS), f"{arguments.seed} soak"
    with HangWorld(model, seed=seed, job=job, pace_s=PACE_S, ttl_s=ttl_s) as world:
        soak = Soak(world, arguments.out, seed=arguments.seed)
        soak.write("begin", minutes=arguments.minutes)
        try:
            last = soak.play(arguments.minutes)
        finally:
            if arguments.keep:
                world.save_evidence(arguments.keep / f"soak-{arguments.seed}")
        soak.compare(last)


if __name__ == "__main__":
    sys.exit(main())
