"""The same kinds of fault against torchrun alone: what it does, and how long that takes (beside faults.py).

    python -m benchmarks.faults_torchrun --out torchrun.jsonl --beside faults.jsonl       # as root, for the lab

Three lab hosts, one rank each, started by ssh from the user's computer with their output in a file, as one does:

    torchrun --nnodes 2:3 --nproc-per-node 1 --max-restarts 6 --monitor-interval 0.1 --shutdown-timeout 10
             --rdzv-backend c10d --rdzv-endpoint h0:29500
             --rdzv-conf join_timeout=120,last_call_timeout=5,read_timeout=60 faults_plain.py

These are settings that help it: it may go on with two of three hosts, waits 5 s for a third (its own choice is 30 s),
gives up joining after 120 s (600 s), looks after its ranks ten times a second. Heartbeats are its own: every 5 s, three
may be missed. The script gives up a collective after 60 s (torch: half an hour), saves every 20 steps on every host and
goes on from the newest step that all have. A step takes 0.1 s and a little.

Each fault has three hosts of its own. After it the run is watched for 120 s at the most: until a new rank has done a
step, or, where the ranks of before go on, for 40 s. Hosts that are cut off are back after 60 s, as in faults.py. One
JSON line per fault; what the file has is not played again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.faults_kinds import CUT, CUT_S, Line
from benchmarks.faults_plug import Plug
from benchmarks.faults_trial import Mark, Trial
from benchmarks.plan_time import read
from benchmarks.scaling import commit
from tests.lab.namespaces import LabFailed

WAIT_S = 120.0
UNHARMED_S = 40.0
"""Where the ranks of before go on, what comes later is seen within this time."""
GOES_ON_STEPS = 10
LOOK_S = 0.25
BOTH = ("rank", "launcher", "crash", "power", "partition")
"""Tried on the host where the launchers meet, and on another one."""
KINDS = (*BOTH, "one-way", "flap", "stopped", "exception", "nan", "nan-stays", "flip", "memory", "disk", "clock", "ssh")
CASES = tuple((kind, victim) for kind in KINDS for victim in (("h2", "h0") if kind in BOTH else ("h2",)))
WITHOUT = "supervisor, host agent, process: torchrun alone has no such parts; its launchers look after the ranks"


def play(kind: str, victim: str) -> Line:
    """One fault in three hosts of its own."""
    with Trial(seed=f"{kind} {victim}") as trial:
        host = next(host for host in trial.lab.hosts if host.name == victim)
        time.sleep(trial.chance.uniform(0.0, 2.0))
        plug = Plug(trial, host)
        watch = Watch(trial, plug, kind)
        watch.begin()
        plug.pull(kind)
        watch.follow()
        return watch.said()


class Watch:
    """What becomes of the training after a fault."""

    def __init__(self, trial: Trial, plug: Plug, kind: str) -> None:
        self._trial = trial
        self._plug = plug
        self._kind = kind
        self._new: Mark | None = None
        """The first rank of another start that was seen to have done a step."""
        self._back_s: float | None = None

    def begin(self) -> None:
        """Look where it stands; the fault comes now."""
        self._old = self._trial.marks()
        self._last = dict(self._old)
        self._begun = time.monotonic()
        self._moved_s = 0.0
        """When ranks of before were last seen to get on."""

    @property
    def _passed_s(self) -> float:
        return time.monotonic() - self._begun

    def follow(self) -> None:
        """Until it trains again, or for as long as is waited."""
        is_cut = self._kind in CUT
        while self._back_s is None and self._passed_s < WAIT_S:
            if is_cut and self._passed_s > CUT_S:
                is_cut = False
                self._plug.heal(self._kind)
            self._look()
            if self._goes_on and not is_cut and self._passed_s > UNHARMED_S:
                return
            time.sleep(LOOK_S)

    def _look(self) -> None:
        passed_s = self._passed_s
        for name, mark in self._trial.marks().items():
            before = self._last.get(name)
            if self._old[name].pid != mark.pid:
                self._new, self._back_s = mark, passed_s
            elif before is None or mark.step > before.step:
                self._last[name], self._moved_s = mark, passed_s

    @property
    def _goes_on(self) -> bool:
        """Whether the ranks of before do."""
        far = max(mark.step for mark in self._last.values()) - max(mark.step for mark in self._old.values())
        return self._new is None and far > GOES_ON_STEPS and self._passed_s - self._moved_s < 5.0

    def said(self) -> Line:
        """For the file."""
        reached = max(mark.step for mark in self._last.values())
        line: Line = {
            "victim": self._plug.victim.name,
            "back_s": None,
            "lost_steps": None,
            "ahead_s": self._plug.ahead_s,
        }
        if self._new is not None and self._back_s is not None:
            resumed = self._trial.first_step(self._new) - 1
            line |= {
                "back_s": round(self._back_s, 1),
                "lost_steps": max(0, reached - resumed),
                "ranks": self._new.ranks,
            }
        elif self._goes_on:
            line |= {"back_s": 0.0, "lost_steps": 0, "ranks": next(iter(self._last.values())).ranks}
        return line | {"did": "; ".join(self._words(line)), "reached": reached, "logs": self._trial.said()}

    def _words(self, line: Line) -> Iterator[str]:
        if self._new is not None:
            yield f"new ranks on {line['ranks']} of 3 hosts"
        elif self._goes_on:
            yield "the ranks go on as if nothing were"
            yield from self._trial.oddities()
        else:
            yield f"no step in {WAIT_S:.0f} s"
        yield from self._trial.launchers()


def main() -> int:
    """Play what the file does not have, and sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, continued if it exists")
    parser.add_argument("--only", nargs="*", choices=KINDS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so long")
    parser.add_argument("--beside", type=Path, help="what faults.py has written")
    arguments = parser.parse_args()
    done = {(line["kind"], line["victim"]) for line in read(arguments.out)}
    deadline = time.monotonic() + arguments.minutes * 60
    for kind, victim in CASES:
        is_wanted = (kind, victim) not in done and kind in (arguments.only or KINDS)
        if is_wanted and time.monotonic() < deadline:
            try:
                busy = round(os.getloadavg()[0], 1)
                line = {"kind": kind, "commit": commit(), "load": busy, **play(kind, victim)}
            except (AssertionError, LabFailed, OSError, LookupError, ValueError, subprocess.SubprocessError) as error:
                print(kind, victim, f"was not played: {type(error).__name__}: {error}", flush=True)
                continue
            with arguments.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            print(kind, victim, line["back_s"], line["did"], flush=True)
    return report(read(arguments.out), read(arguments.beside) if arguments.beside else [])


def report(lines: Sequence[Line], beside: Sequence[Line]) -> int:
    """A table; 1 if a fault is missing in it."""
    ours = _by_kind(beside)
    print(
        "\n| fault | torchrun alone: what it did | seconds to the next step | steps done again | gangline: seconds, ",
        end="",
    )
    print("median (worst) | steps done again, worst |\n|" + "---|" * 6)
    for line in sorted(lines, key=lambda line: CASES.index((line["kind"], line["victim"]))):
        where = " (where they meet)" if line["victim"] == "h0" else ""
        seconds = ">120" if line["back_s"] is None else f"{line['back_s']:.1f}"
        lost = "-" if line["lost_steps"] is None else line["lost_steps"]
        print(
            f"| {line['kind']}{where} | {line['did']} | {seconds} | {lost} | {' | '.join(_ours(ours, line['kind']))} |"
        )
    loads = [line["load"] for line in lines if "load" in line]
    busy = f" Load of the machine {statistics.median(loads):.0f} (median), {max(loads):.0f} (most)." if loads else ""
    print(f"\n{WITHOUT}.{busy}")
    missing = [case for case in CASES if case not in {(line["kind"], line["victim"]) for line in lines}]
    if missing:
        print(f"not played: {missing}")
    return 1 if missing else 0


def _by_kind(lines: Sequence[Line]) -> Mapping[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        if line["back_s"] is not None:
            found.setdefault(line["kind"], []).append(line)
    return found


def _ours(lines: Mapping[str, list[Line]], kind: str) -> tuple[str, str]:
    mine = lines.get(kind)
    if not mine:
        return "", ""
    back = [line["back_s"] for line in mine]
    return f"{statistics.median(back):.1f} ({max(back):.1f})", str(max(line.get("lost_steps", 0) for line in mine))


if __name__ == "__main__":
    sys.exit(main())
