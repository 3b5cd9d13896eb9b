"""How long the others of a run stand still when a lost host joins again (promise: less than a step beside the restart).

    python -m benchmarks.joining --out joining.jsonl                   # as root, for the lab; five times
    python -m benchmarks.joining --out joining.jsonl --loops 4         # the same with four busy loops on the machine

Three lab hosts with real sshd, real torchrun and gloo, gangline's own trainer with a tiny Llama on the processor, all
on this machine's cores. The cable of the last host is pulled and all that the run has there is killed, as by a power
cut; the other two go on; then the cable is plugged in again, and the host comes with nothing in memory. From
metrics.jsonl of the head: the time between the last step without the host and the first step with it, beside the
median time of a step. From the cable to the first step with the host is what the newcomer itself took. One JSON line
per return; a file that has lines already is continued.
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
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.faults_world import JOB, NotBack
from benchmarks.lab_runs import OwnWorld
from benchmarks.plan_time import read
from benchmarks.scaling import commit
from tests.lab.machine import LabHost
from tests.lab.user import make_model, processes_of_runs

JOINS_S = 400.0
"""How long a host that is back may take to be part of the run: it imports torch, beside busy loops perhaps."""
STEPS = 20
"""So many steps before and after tell how long a step takes."""
LOOP = "while True:\n    pass\n"
Line = dict[str, Any]


class Joining(OwnWorld):
    """A run on three hosts, the last of which goes and comes."""

    def __init__(self, model: Path, *, seed: str) -> None:
        super().__init__(model, keep="desk", seed=seed, job=JOB.replace("wait: 15s", "wait: 3s"))

    def _begin(self) -> None:
        self.bring()
        self.run_id = self.user.types("train", "job.yaml", "--detach", timeout_s=300).stdout.strip()
        self.until(lambda seen: seen.step > STEPS, "it trains", timeout_s=300)

    def trains_on(self, hosts: list[LabHost], attempt: int, *, timeout_s: float) -> int:
        """The first attempt after `attempt` that trains on just these hosts, once it has done some steps."""
        names = [host.name for host in hosts]
        found = self.until(
            lambda seen: seen.trained > attempt and seen.trained == seen.attempt and self.hosts() == names,
            f"{names} train",
            timeout_s=timeout_s,
        )
        first = found.step
        self.until(lambda seen: seen.step > first + STEPS, f"{names} go on")
        return found.attempt


def returns(world: Joining) -> Line:
    """Lose the last host, and take it back."""
    victim = world.lab.hosts[-1]
    attempt = world.state()["attempt"]
    victim.faults.unplug()
    pids = [line.split()[0] for line in processes_of_runs(victim)]
    victim.run(["kill", "-9", *pids], as_root=True)
    attempt = world.trains_on(world.lab.hosts[:-1], attempt, timeout_s=JOINS_S)
    victim.faults.heal()
    plugged = time.time()
    attempt = world.trains_on(world.lab.hosts, attempt, timeout_s=JOINS_S)
    steps = world.steps()
    before = [each for each in steps if each["attempt"] == attempt - 1]
    after = [each for each in steps if each["attempt"] == attempt]
    begun = _time(after[0])
    return {
        "still_s": round(begun - _time(before[-1]), 2),
        "step_s": round(statistics.median(each["step_s"] for each in [*before[-STEPS:], *after[1:STEPS]]), 3),
        "joined_s": round(begun - plugged, 1),
        "again": before[-1]["step"] + 1 - after[0]["step"],
    }


def _time(record: Line) -> float:
    return datetime.fromisoformat(record["time"].replace("Z", "+00:00")).timestamp()


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Other programs that want the processors."""
    made = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(loops)]
    try:
        yield
    finally:
        for each in made:
            each.kill()
            each.wait()


def report(lines: list[Line]) -> int:
    """A table."""
    print("\n| commit | busy loops | returns | the others without a step, s | a step, s | from the cable on, s |")
    print("|---|---|---|---|---|---|")
    for key in sorted({(line["commit"], line["loops"]) for line in lines}):
        mine = [line for line in lines if (line["commit"], line["loops"]) == key]
        parts = [[line[name] for line in mine] for name in ("still_s", "step_s", "joined_s")]
        words = " | ".join(f"{statistics.median(part):.2f} (worst {max(part):.2f})" for part in parts)
        print(f"| {key[0][:8]} | {key[1]} | {len(mine)} | {words} |")
    return 0


def main() -> int:
    """Measure what is missing, then report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--returns", type=int, default=5)
    parser.add_argument("--loops", type=int, default=0, help="busy loops on this machine meanwhile")
    arguments = parser.parse_args()
    now = commit()
    lines = read(arguments.out)
    missing = arguments.returns - sum((line["commit"], line["loops"]) == (now, arguments.loops) for line in lines)
    if missing > 0:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder) / "model")
            with Joining(model, seed=f"joining {missing}") as world, busy(arguments.loops):
                for _ in range(missing):
                    try:
                        line = returns(world)
                    except NotBack:
                        world.save_evidence(arguments.out.with_suffix(""))
                        raise
                    line |= {"loops": arguments.loops, "load": round(os.getloadavg()[0], 1), "commit": now}
                    with arguments.out.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps(line) + "\n")
                    print(json.dumps(line), flush=True)
    return report(read(arguments.out))


if __name__ == "__main__":
    sys.exit(main())
