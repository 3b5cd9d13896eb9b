"""Ranks that hang, of four kinds: are they noticed in time, and is the right one named? And is nobody accused in a
healthy run?

    python -m benchmarks.hangs --out hangs.jsonl --cases 40                 # as root, for the lab; about 40 minutes
    python -m benchmarks.hangs --out hangs.jsonl --cases 40 --minutes 15    # go on another time
    python -m benchmarks.hangs --out healthy.jsonl --healthy 30             # a healthy run of so many minutes

Three lab hosts with real sshd, real torchrun and gloo, gangline's own trainer with a small model on the processor. One
run goes through many hangs; at a random moment of its steps, on a random host,

    stopped    the rank is stopped (SIGSTOP)
    data       it sleeps for ever in the reading of a micro-batch
    busy       it computes for ever, in Python, in a forward pass
    native     in backward, as gradients are handed to the exchange, it waits for ever in a call of a C library that
               holds the interpreter's lock: no line of Python runs in this process any more, in no thread

(hangs_in_rank.py). When it hung is told by the rank itself, and by its phase file, read by the bench; by the monotonic
clock, which all processes of one machine have in common. Per hang: after how many seconds the product noticed that the
run stands (event "hanging") and named somebody for it ("failing"), which host and rank it names, in which phase and
step, at which function and line (for a stopped rank: that it is stopped), and how long until the next step by itself.
Noticed in time: within max(30 s, 3 x the slowest of the last 20 steps) + 5 s. Of a hang that is not noticed, nothing is
right. One JSON line per hang; a file that has lines already is continued. Exit code 1 if one was not noticed in time or
did not come back, or if host and rank, phase or place are right in less than 95 of 100.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import hangs_healthy
from benchmarks.faults_world import JOB, MOMENT_S, NotBack
from benchmarks.hangs_world import HangWorld, Line
from benchmarks.plan_time import read
from benchmarks.scaling import commit
from tests.lab.machine import LabHost
from tests.lab.namespaces import LabFailed
from tests.lab.user import make_model

KINDS = ("stopped", "data", "busy", "native")
"""In this order again and again."""
STEP_S, TIMES, WINDOW, SLACK_S = 30.0, 3.0, 20, 5.0
"""What the product promises: max(STEP_S, TIMES x the slowest of WINDOW steps), and how much later it may be seen."""
SETTLED = 40
"""Steps of an attempt before the next hang."""
PATIENCE_S = 120.0
"""For the product to end what hangs."""
RIGHT = 0.95
WORLD_S = 2400.0
"""No lab lives longer than an hour."""
FAILURES = (AssertionError, LabFailed, OSError, ValueError, LookupError, TypeError, subprocess.SubprocessError)


class Hang:
    """One rank that hangs."""

    def __init__(self, world: HangWorld, kind: str) -> None:
        self.world = world
        self.kind = kind
        self.victim: LabHost = world.chance.choice(world.lab.hosts)
        self.truth: Line = {}

    def play(self) -> Line:
        """Let it hang, and see what the product says and does."""
        world, begun = self.world, self.world.seen()
        steady = world.until(
            lambda seen: seen.phase == "running" and seen.step > begun.step + SETTLED, "it trains", timeout_s=240
        )
        time.sleep(world.chance.uniform(0.0, MOMENT_S))
        num_events, limit_s = len(world.events()), max(STEP_S, TIMES * max(world.steps_s(WINDOW), default=0.0))
        self._hang(steady.attempt)
        at, before = self.truth.pop("at"), world.seen()
        told = self._watch(num_events, lambda: time.monotonic() - at)
        line = {"victim": self.victim.name, **self.truth, "limit_s": round(limit_s, 1), **told, "back_s": None}
        error = self._error(steady.attempt)
        line |= {"what": error["what"], "named": [error.get("host"), error.get("rank")], **self._judged(error)}
        world.until(lambda seen: seen.step > before.step + 2 and seen.attempt > before.attempt, "it goes on")
        line["back_s"] = round(time.monotonic() - at, 1)
        line["in_time"] = line["noticed_s"] <= limit_s + SLACK_S
        wrong = [name for name in ("in_time", "who", "phase_right", "place_right") if not line[name]]
        return {**line, "wrong": wrong, **({"error": json.dumps(error)[:4000]} if wrong else {})}

    def _hang(self, attempt: int) -> None:
        """Begin, and note what is true of it."""
        world, victim = self.world, self.victim
        rank = world.rank_of(victim, attempt)
        if self.kind == "stopped":
            pid = world.rank_pid(victim)
            self.truth = {"at": time.monotonic(), "rank": rank}
            victim.check(["kill", "-STOP", str(pid)], as_root=True)
        else:
            world.order(victim, self.kind)
            said = _soon(lambda: world.said(victim, "began"))
            assert said["rank"] == rank, f"rank {said['rank']} hangs, not {rank}"
            self.truth = {name: said[name] for name in ("at", "rank", "function", "file", "lines")}
        self.truth["phase"], self.truth["step"] = world.phase_of(victim, attempt)

    def _watch(self, num_events: int, passed_s: Callable[[], float]) -> Line:
        """When the product notices, when it names somebody, and what it said; raises NotBack."""
        noticed_s, first = None, ""
        while passed_s() < PATIENCE_S:
            for event in self.world.events()[num_events:]:
                if event["event"] == "hanging" and noticed_s is None:
                    noticed_s, first = passed_s(), event["what"]
                if event["event"] == "failing" and noticed_s is None:
                    raise NotBack(f"it failed for another reason: {event['what']}")
                if event["event"] == "failing" and noticed_s is not None:
                    return {"noticed_s": round(noticed_s, 1), "named_s": round(passed_s(), 1), "first": first}
            time.sleep(0.1)
        raise NotBack(f"not ended within {PATIENCE_S:g} s; noticed after {noticed_s} s: {first}")

    def _error(self, attempt: int) -> dict[str, Any]:
        """Why the attempt was ended, once that is written."""
        world = self.world

        def look() -> Line | None:
            try:
                outcome: Line = world.record(world.keeper, f"attempts/{attempt}/outcome.json")
            except (OSError, ValueError):
                return None
            return outcome

        found: dict[str, Any] = _soon(look, PATIENCE_S)["error"]
        return found

    def _judged(self, error: dict[str, Any]) -> Line:
        """What of it is right. The sentence that the user reads counts, and names nobody else before the semicolon."""
        truth, victim = self.truth, self.victim
        accused = error["what"].split(";")[0]
        others = [host.name for host in self.world.lab.hosts if host is not victim]
        is_named = f"rank {truth['rank']} on {victim.name} " in accused and not any(name in accused for name in others)
        row = next((each for each in error.get("stacks", ()) if each["rank"] == truth["rank"]), {})
        is_phase = f"`{truth['phase']}` of step {truth['step']} " in accused
        where = str(row.get("where", ""))
        return {
            "who": is_named and (error.get("host"), error.get("rank")) == (victim.name, truth["rank"]),
            "phase_right": is_phase and (row.get("phase"), row.get("step")) == (truth["phase"], truth["step"]),
            "where": where or row.get("state", ""),
            "place_right": "(SIGSTOP)" in accused if self.kind == "stopped" else self._is_there(where, accused),
        }

    def _is_there(self, where: str, accused: str) -> bool:
        """Whether it is a line of the function in which the rank hangs, and the user is told."""
        truth = self.truth
        first, last = truth["lines"]
        places = {f"{truth['function']} ({truth['file']}:{line})" for line in range(first, last + 1)}
        return where in places and f", at {where}" in accused


def _soon(look: Callable[[], Line | None], seconds: float = 20.0) -> Line:
    """What comes within so many seconds; raises NotBack."""
    deadline = time.monotonic() + seconds
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise NotBack(f"nothing came within {seconds:g} s")
        time.sleep(0.02)
    return found


def measure(numbers: Sequence[int], arguments: argparse.Namespace, *, model: Path, deadline: float) -> None:
    """Hangs by number, in as few worlds as can be."""
    queue = list(numbers)
    while queue and time.monotonic() < deadline:
        with HangWorld(model, seed=f"{arguments.seed} {queue[0]}", job=JOB) as world:
            until = min(deadline, time.monotonic() + WORLD_S)
            while queue and time.monotonic() < until:
                number = queue.pop(0)
                line = _play(world, KINDS[number % len(KINDS)])
                line = {"number": number, "seed": arguments.seed, "commit": commit(), **line}
                with arguments.out.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line) + "\n")
                shown = ("kind", "victim", "phase", "noticed_s", "named_s", "back_s", "what", "wrong")
                print(number, *(line.get(name) for name in shown), flush=True)
                if line["wrong"] and arguments.keep:
                    world.save_evidence(arguments.keep / f"hang-{arguments.seed}-{number}")
                if line["back_s"] is None:
                    break  # the next one shall not suffer from it


def _play(world: HangWorld, kind: str) -> Line:
    hang = Hang(world, kind)
    try:
        return {"kind": kind, **hang.play()}
    except FAILURES as error:
        known = {name: value for name, value in hang.truth.items() if name != "at"}
        wrong = [f"{type(error).__name__}: {error}"]
        return {"kind": kind, "victim": hang.victim.name, **known, "back_s": None, "wrong": wrong}


def report(lines: Sequence[Line]) -> int:
    """A table; 1 if a bar is missed."""
    print(
        "\n| hang | times | noticed in time | rank and host right | phase right | place or state right "
        "| noticed after, median (worst) | somebody named | next step |\n|" + "---|" * 9
    )
    for kind in KINDS:
        mine = [line for line in lines if line["kind"] == kind]
        if mine:
            counts = [_count(mine, name) for name in ("in_time", "who", "phase_right", "place_right")]
            times = [_times(mine, name) for name in ("noticed_s", "named_s", "back_s")]
            print(f"| {kind} | {len(mine)} | " + " | ".join([*map(str, counts), *times]) + " |")
    for line in lines:
        if line["wrong"]:
            print(json.dumps(line))
    missed = []
    num = len(lines)
    if not num or _count(lines, "in_time") < num:
        missed.append("not all were noticed in time")
    if any(line["back_s"] is None for line in lines):
        missed.append("not all came back by themselves")
    counts = {name: _count(lines, name) for name in ("who", "phase_right", "place_right")}
    missed += [f"{name}: {count} of {num}" for name, count in counts.items() if count < RIGHT * num]
    print(f"\n{num} hangs: " + ("; ".join(missed) or "all bars reached"))
    return 1 if missed else 0


def _count(lines: Sequence[Line], name: str) -> int:
    return sum(bool(line.get(name)) for line in lines)


def _times(lines: Sequence[Line], name: str) -> str:
    found = [line[name] for line in lines if line.get(name) is not None]
    return f"{statistics.median(found):.1f} ({max(found):.1f}) s" if found else "-"


def main() -> int:
    """Play what the file does not have yet, and sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--only", nargs="*", choices=KINDS)
    parser.add_argument("--healthy", type=int, metavar="MINUTES", help="a healthy run of so long, instead")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, continued if it exists")
    parser.add_argument("--keep", type=Path, help="a folder for what hosts have of a case with something wrong")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.minutes * 60
    lines = read(arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        if arguments.healthy:
            hangs_healthy.measure(arguments, model=model, done=len(lines))
        else:
            done = {(line["number"], line["seed"]) for line in lines}
            wanted = [number for number in range(arguments.cases) if (number, arguments.seed) not in done]
            if arguments.only:
                wanted = [number for number in wanted if KINDS[number % len(KINDS)] in arguments.only]
            measure(wanted, arguments, model=model, deadline=deadline)
    summary = hangs_healthy.report if arguments.healthy else report
    return summary(read(arguments.out))


if __name__ == "__main__":
    sys.exit(main())
