"""Start a gang on three hosts, do something to it at a random moment, stop it, and look at what is left (promise 5).

    python -m benchmarks.cycles --out cycles.jsonl --cycles 100
    python -m benchmarks.cycles --out cycles.jsonl --cycles 100 --minutes 20     # go on another time

Hosts are namespaces with real sshd (tests/lab); launchers and ranks are tests/lab/fake_gang.py, everything else is
ours and real. What is done to the gang:

    stop, kill      nothing: it is ordered to end
    controller      kill -9 of the supervisor on the user's computer, then stop
    head            the same with the supervisor on the head, asked and ordered from afar
    host agent           kill -9 of the host agent on one host
    launcher        kill -9 of what stands for torchrun on one host
    rank            kill -9 of one rank
    ssh             all ssh connections to one host are cut
    partition       one host is cut off for some seconds, then stop
    two             a second run on the same hosts; the first is stopped, and the second must not notice

Afterwards no process, no port and no lease may be left on any host, and what the supervisor wrote must say so. One JSON
line per cycle; a file that has lines already is continued. Exit status 1 if anything was left or went wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.lab.gang import RANKS, Gang, left_on
from tests.lab.hosts import Lab
from tests.lab.namespaces import LabFailed

KINDS = ("stop", "controller", "host-agent", "launcher", "rank", "ssh", "partition", "head", "two", "kill")
FAILING = {"host-agent", "launcher", "rank"}
"""What ends the gang by itself."""
LAB_S = 3600
OUTAGE_S = 8.0
CONNECTION_S = 75.0
"""A connection that was cut off is given up on the host when nobody has spoken on it for a minute."""


class Cycle:
    """One gang from its start to its end."""

    def __init__(self, lab: Lab, number: int, seed: int) -> None:
        self.lab = lab
        self.kind = KINDS[number % len(KINDS)]
        self.chance = random.Random(f"{seed} {number}")
        keep = "head" if self.kind == "head" else "desk"
        self.gang = Gang(lab, run_id=f"cycle-{number}", keep=keep)
        self.victim = self.chance.choice(lab.hosts)
        self.moment_s = self.chance.choice((0.0, self.chance.uniform(0.0, 4.0)))
        """After the start; at once: while the ranks still look for each other."""
        self.wrong: list[str] = []

    def run(self) -> dict[str, Any]:
        """Start, disturb, stop, look."""
        began = time.monotonic()
        self.gang.begin()
        time.sleep(self.moment_s)
        getattr(self, f"_do_{self.kind.replace('-', '_')}", lambda: None)()
        if self.kind not in FAILING:
            self.gang.order("kill" if self.kind == "kill" else "stop")
        outcome = self.gang.outcome(timeout_s=90)
        self.judge(outcome)
        left = {
            host.name: left_on(host, folder=self.gang.folder, within_s=CONNECTION_S if self.kind == "partition" else 20)
            for host in [*self.lab.hosts, self.lab.user]
        }
        return {
            "kind": self.kind,
            "victim": self.victim.name,
            "moment_s": round(self.moment_s, 2),
            "result": outcome["result"],
            "error": (outcome["error"] or {}).get("what"),
            "left": {name: words for name, words in left.items() if words},
            "wrong": self.wrong,
            "seconds": round(time.monotonic() - began, 1),
        }

    def judge(self, outcome: dict[str, Any]) -> None:
        """What the supervisor wrote down has to be what was done."""
        expected = "failed" if self.kind in FAILING else "stopped"
        if outcome["result"] != expected:
            error = (outcome["error"] or {}).get("what")
            self.wrong.append(f"expected {expected}, saw {outcome['result']}: {error}")
        if outcome["left"] or outcome["unverified"]:
            self.wrong.append(f"left {outcome['left']}, not verified {outcome['unverified']}")
        if self.kind in FAILING and self.victim.name not in (outcome["error"] or {}).get("what", ""):
            self.wrong.append(f"{self.victim.name} is not named")

    def _do_controller(self) -> None:
        self.gang.lab.user.call("tests.lab.cases_launch:kill_supervisor", run_id=self.gang.run_id)

    def _do_head(self) -> None:
        state = self.gang.look()["state"]
        self.lab.hosts[0].check(["kill", "-9", str(state["supervisor"]["pid"])])

    def _do_host_agent(self) -> None:
        self._kill(f"{self.victim.name}/agent.json", "pid")

    def _do_launcher(self) -> None:
        self._kill(f"{self.victim.name}/agent.json", "torchrun_pid")

    def _do_rank(self) -> None:
        first = sum(RANKS[host.name] for host in self.lab.hosts[: self.lab.hosts.index(self.victim)])
        self._kill(f"rank-{first + self.chance.randrange(RANKS[self.victim.name])}.pid", "pid")

    def _kill(self, name: str, field: str) -> None:
        """End a process that a file names, with kill -9, once the file is there."""
        deadline = time.monotonic() + 30
        while True:
            try:
                pid = self.gang.record(self.victim, name)[field]
                break
            except (FileNotFoundError, ValueError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self.victim.check(["kill", "-9", str(pid)])

    def _do_ssh(self) -> None:
        self.victim.run(["pkill", "-9", "-f", "sshd: .*[@]notty"], as_root=True)

    def _do_partition(self) -> None:
        self.victim.faults.unplug()
        time.sleep(OUTAGE_S)
        self.victim.faults.heal()

    def _do_two(self) -> None:
        other = Gang(self.lab, run_id=f"{self.gang.run_id}-other", workdir="other")
        other.begin(port=29600)
        other.joined()
        self.gang.order("stop")
        self.gang.outcome()
        if not other.goes_on():
            self.wrong.append("the other run does not go on")
        other.order("stop")
        if (outcome := other.outcome())["result"] != "stopped":
            self.wrong.append(f"the other run has {outcome['result']}: {(outcome['error'] or {}).get('what')}")


def cycle(lab: Lab, number: int, seed: int) -> dict[str, Any]:
    """One line of the results; whatever goes wrong is in it."""
    try:
        line = Cycle(lab, number, seed).run()
    except (AssertionError, LabFailed, OSError, ValueError) as error:
        line = {"kind": KINDS[number % len(KINDS)], "wrong": [f"{type(error).__name__}: {error}"], "left": {}}
    return {"number": number, "seed": seed, **line}


def report(lines: list[dict[str, Any]]) -> int:
    """Print the sum; 1 if anything was left or wrong."""
    bad = [line for line in lines if line["left"] or line["wrong"]]
    for line in bad:
        print(json.dumps(line))
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(Counter(line["kind"] for line in lines).items()))
    print(f"{len(lines)} cycles ({kinds}): {len(bad)} bad")
    return 1 if bad else 0


def main() -> int:
    """Run the cycles that the results file does not have yet, and sum up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cycle after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, continued if it exists")
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    done = {(line["number"], line["seed"]) for line in lines}
    open_numbers = [number for number in range(arguments.cycles) if (number, arguments.seed) not in done]
    deadline = time.monotonic() + arguments.minutes * 60
    while open_numbers and time.monotonic() < deadline:
        with Lab(len(RANKS), meshed=True, ttl_s=LAB_S) as lab:
            lab_deadline = min(deadline, time.monotonic() + LAB_S - 600)
            while open_numbers and time.monotonic() < lab_deadline:
                line = cycle(lab, open_numbers.pop(0), arguments.seed)
                with arguments.out.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line) + "\n")
                problems = " ".join([*line["wrong"], *map(str, line["left"].items())])
                print(f"{line['number']:4} {line['kind']:10} {line.get('seconds', '')} {problems}", flush=True)
                if line["wrong"] or line["left"]:
                    break  # the next one shall not suffer from it
    return report([json.loads(line) for line in arguments.out.read_text().splitlines()])


if __name__ == "__main__":
    sys.exit(main())
