"""Kill supervisor and controller while a run trains: it is unharmed, nothing is launched twice (promise 6).

    python -m benchmarks.controllers --out controllers.jsonl                  # 100 kills; as root, for the lab
    python -m benchmarks.controllers --out controllers.jsonl --minutes 10     # go on another time

Three lab hosts with real sshd, real torchrun and gloo, gangline's own trainer with a small model. The supervisor lives
on the head (hosts may log in to each other) or on the user's computer; the controller is `gangline train` or `gangline
attach` in front of a terminal. Either gets kill -9 at a random moment, 25 times per place:

    supervisor, head    the head's host agent starts another one; after each within so many seconds
    supervisor, desk    nobody is there to start one (docs/decisions/0010): `resume` refuses to launch the run a second
                        time, and `attach` starts a supervisor that takes the attempt over as it runs
    controller          nobody else is touched, and of the connections that it had nothing stays

After every kill: the same attempt, the same processes and ranks on every host and no other, the same leases; steps
one after the other, without a gap of more than three seconds, or three times the longest of the seconds before; in the
end one supervisor and no more; and `gangline attach` shows the step at which the run stands. One JSON line per kill; a
file that has lines already is continued. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults_world import MOMENT_S, NotBack
from benchmarks.lab_runs import Gang, OwnWorld, Terminal, longest_gap_s
from benchmarks.plan_time import read
from benchmarks.scaling import commit
from tests.lab.namespaces import LabFailed
from tests.lab.user import make_model

KINDS = ("controller", "supervisor")
PLACES = ("head", "desk")
IN_A_WORLD = {"head": 8, "desk": 50}
"""Kills in one world. The head's host agent waits longer before each next supervisor if they die one after the other,
as it shall; the first four times less than half a minute."""
BACK_S = 120.0
GAP_S, TIMES_USUAL = 3.0, 3.0
BEFORE_S = 10.0
Line = dict[str, Any]


class Watched(OwnWorld):
    """A run that was started by `gangline train` in front of a terminal, which stays there."""

    def _begin(self) -> None:
        self.bring()
        self.command = "train"
        self.terminal = Terminal(self.lab.user, "train", "job.yaml")
        assert self.terminal.until(lambda shown: shown.step > 10, timeout_s=600), self.terminal.text
        found = re.search(r"gangline attach (\S+) comes back", self.terminal.text)
        assert found, self.terminal.text
        self.run_id = found[1]

    def attach(self) -> Terminal:
        """Type `gangline attach`."""
        self.command = "attach"
        self.terminal = Terminal(self.lab.user, "attach", self.run_id)
        return self.terminal

    def supervisor_pid(self) -> int:
        """As state.json says."""
        return int(self.state()["supervisor"]["pid"])

    def runs(self, pid: int) -> bool:
        """Whether a process of the computer that keeps the run goes on."""
        return f"{self.keeper.name} {pid}" in self.supervisors()


class Kill:
    """One kill, and what is seen then."""

    def __init__(self, world: Watched, kind: str) -> None:
        self.world = world
        self.kind = kind
        self.wrong: list[str] = []

    def play(self) -> Line:
        """Do it, and look."""
        world = self.world
        start = world.seen().step
        world.until(lambda seen: seen.step > start + 5, "it trains")
        time.sleep(world.chance.uniform(0.0, MOMENT_S))
        gang, before, pid = world.gang(), world.seen(), world.supervisor_pid()
        line = self._supervisor(pid) if self.kind == "supervisor" else self._controller(pid)
        resumed = world.seen().step
        world.until(lambda seen: seen.step > resumed + 10, "it trains on")
        line |= self._steps(before.step)
        line["step_shown"] = self._attach()
        self.wrong += gang.changes(self._settled(gang))
        if len(left := world.supervisors()) != 1 or left != [f"{world.keeper.name} {world.supervisor_pid()}"]:
            self.wrong.append(f"supervisors: {left}, state.json says {world.supervisor_pid()}")
        return {"before": before.step, **line, "wrong": self.wrong}

    def _controller(self, supervisor: int) -> Line:
        world = self.world
        command, terminal = world.command, world.terminal
        if terminal.code is not None:
            self.wrong.append(f"{command} had ended before: {terminal.code}: {terminal.text[-300:]}")
        else:
            terminal.kill()
        left = terminal.leftovers() if command == "attach" else []  # what `train` has started shall stay
        terminal.close()
        if left:
            self.wrong.append(f"left at the desk: {left}")
        if world.supervisor_pid() != supervisor:
            self.wrong.append("the supervisor is another one")
        return {"command": command}

    def _supervisor(self, pid: int) -> Line:
        world = self.world
        epoch, begun = world.state()["epoch"], time.monotonic()
        world.keeper.check(["kill", "-9", str(pid)])
        line = self._without_one(pid) if world.keep == "desk" else {}
        back_s = self._await_another(pid, begun)
        if (now := world.state()["epoch"]) != epoch + 1:
            self.wrong.append(f"the epoch was {epoch} and is {now}")
        line["watcher"] = self._watcher()
        return {"back_s": back_s, **line}

    def _without_one(self, pid: int) -> Line:
        """Nobody looks after it: a second launch is refused, and attach sees to it that somebody does."""
        world = self.world
        if (again := world.user.types("resume", world.run_id, code=None)).returncode != 2:
            self.wrong.append(f"resume: {again.returncode}: {again.stderr[-300:]}")
        if world.supervisor_pid() != pid or world.supervisors():
            self.wrong.append("a supervisor has come by itself")
        followed = world.terminal
        followed.until(lambda terminal: terminal.code is not None, timeout_s=5)
        if "is lost" not in followed.text:
            self.wrong.append(f"who followed the run is not told: {followed.text[-300:]}")
        self._leave(followed)
        world.attach()
        return {"refused": again.returncode, "told": followed.code}

    def _await_another(self, pid: int, begun: float) -> float | None:
        world = self.world
        while time.monotonic() < begun + BACK_S:
            now = world.supervisor_pid()
            if now != pid and world.runs(now):
                return round(time.monotonic() - begun, 1)
            time.sleep(0.2)
        self.wrong.append(f"no other supervisor within {BACK_S:g} s")
        return None

    def _watcher(self) -> str:
        """What became of the terminal in which somebody followed the run."""
        terminal = self.world.terminal
        if terminal.code is None:
            return "goes on"
        self.wrong.append(f"who followed the run was left: {terminal.code}: {terminal.text[-400:]}")
        return f"ended: {terminal.code}"

    def _steps(self, before: int) -> Line:
        """Steps since the kill, and before it."""
        records = self.world.steps()
        numbers = [record["step"] for record in records]
        if any(later != one + 1 for one, later in itertools.pairwise(numbers)):
            self.wrong.append(f"steps are missing or done again between {numbers[0]} and {numbers[-1]}")
        earlier = [record for record in records if record["step"] <= before]
        later = [record for record in records if record["step"] >= before]
        usual_s, gap_s = longest_gap_s(_last(earlier)), longest_gap_s(later)
        if gap_s > max(GAP_S, TIMES_USUAL * usual_s):
            self.wrong.append(f"no step for {gap_s:.1f} s; before, for {usual_s:.1f} s at the most")
        return {"steps": numbers[-1] - before, "gap_s": round(gap_s, 2), "usual_gap_s": round(usual_s, 2)}

    def _attach(self) -> int | None:
        """The step that a new `gangline attach` shows, once that is where the run stands now."""
        world = self.world
        self._leave(world.terminal)
        step = world.seen().step
        shown = world.attach()
        if not shown.until(lambda terminal: terminal.step >= step):
            self.wrong.append(f"attach shows {shown.step}, and not {step}: {shown.code}: {shown.text[-400:]}")
            return None
        return shown.step

    def _leave(self, terminal: Terminal) -> None:
        """Press Ctrl-C there, if it goes on."""
        if terminal.code is None:
            terminal.kill(signal.SIGINT)
            if terminal.code != 130:
                self.wrong.append(f"Ctrl-C: {terminal.code}: {terminal.text[-300:]}")
        terminal.close()

    def _settled(self, gang: Gang) -> Gang:
        """How it is, once what comes and goes (a look of a host agent) has gone."""
        for _ in range(5):
            after = self.world.gang()
            if not gang.changes(after):
                break
            time.sleep(0.5)
        return after


def _last(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the last seconds, by how long the steps took."""
    seconds, found = 0.0, []
    for record in reversed(records):
        found.append(record)
        seconds += record["step_s"]
        if seconds > BEFORE_S:
            break
    return found[::-1]


def place_of(number: int, cases: int) -> str:
    """Where the supervisor lives: the first half of cases on the head."""
    return PLACES[number >= cases // 2]


def measure(numbers: Sequence[int], arguments: argparse.Namespace, *, model: Path, deadline: float) -> None:
    """Kills by number, several in a world."""
    queue = list(numbers)
    while queue and time.monotonic() < deadline:
        keep = place_of(queue[0], arguments.cases)
        with Watched(model, keep=keep, seed=f"{arguments.seed} {queue[0]}") as world:
            for _ in range(IN_A_WORLD[keep]):
                if not queue or place_of(queue[0], arguments.cases) != keep or time.monotonic() > deadline:
                    break
                number = queue.pop(0)
                kind = KINDS[number % len(KINDS)]
                line = {"number": number, "seed": arguments.seed, "kind": kind, "keep": keep, "commit": commit()}
                line |= _play(world, kind)
                with arguments.out.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line) + "\n")
                print(number, kind, keep, line.get("back_s"), line.get("gap_s"), line["wrong"], flush=True)
                if line["wrong"]:
                    world.save_evidence(arguments.out.with_suffix("") / str(number))
                    break  # the next one shall not suffer from it


def _play(world: Watched, kind: str) -> Line:
    try:
        return Kill(world, kind).play()
    except (NotBack, AssertionError, LabFailed, OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
        return {"wrong": [f"{type(error).__name__}: {error}"]}


def report(lines: Sequence[Line]) -> int:
    """A table; 1 if anything is wrong."""
    head = "| killed | supervisor on | times | unharmed | seconds to another supervisor, median (worst) | longest gap |"
    print(f"\n{head}\n|---|---|---|---|---|---|")
    for kind, keep in itertools.product(KINDS, PLACES):
        mine = [line for line in lines if (line["kind"], line["keep"]) == (kind, keep)]
        back = [line["back_s"] for line in mine if line.get("back_s") is not None]
        times = f"{statistics.median(back):.1f} ({max(back):.1f})" if back else ""
        gap_s = max((line.get("gap_s", 0.0) for line in mine), default=0.0)
        good = sum(not line["wrong"] for line in mine)
        print(f"| {kind} | {keep} | {len(mine)} | {good} | {times} | {gap_s:.1f} s |")
    bad = [line for line in lines if line["wrong"]]
    for line in bad:
        print(json.dumps(line))
    print(f"\n{len(lines)} kills, {len(bad)} with something wrong")
    return 1 if bad else 0


def main() -> int:
    """Do what the file does not have yet, and sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument(
        "--keep", nargs="*", choices=PLACES, default=PLACES, help="only where the supervisor lives there"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, continued if it exists")
    arguments = parser.parse_args()
    done = {(line["number"], line["seed"]) for line in read(arguments.out)}
    mine = [number for number in range(arguments.cases) if place_of(number, arguments.cases) in arguments.keep]
    wanted = [number for number in mine if (number, arguments.seed) not in done]
    deadline = time.monotonic() + arguments.minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        measure(wanted, arguments, model=make_model(Path(folder) / "model"), deadline=deadline)
    return report(read(arguments.out))


if __name__ == "__main__":
    sys.exit(main())
