"""Pull any plug: faults at random moments of a run, and whether it goes on by itself (issue: nothing lost).

    python -m benchmarks.faults --out faults.jsonl --cases 200                 # as root, for the lab
    python -m benchmarks.faults --out faults.jsonl --cases 200 --minutes 60    # go on another time

Three lab hosts with real sshd, real torchrun and gloo, gangline's own trainer with a small model on the processor. What
is done:

    rank, process, host agent, launcher    kill -9 of a rank; of the process it was forked from; of a host agent; of
    torchrun crash, power                      a host is gone, with a reset to its peers, or without a word; it stays
    away partition                         a host is cut off for a minute, then back
    one-way                           nothing of its peers reaches a host, for a minute; it can still be asked
    flap                              the cable of a host is out for five seconds
    stopped                           SIGSTOP of a rank
    exception                         a rank's forward pass raises ValueError
    nan                               one forward pass of a rank gives no numbers
    nan-stays, flip                   a weight of a rank is no number, or another one, from then on
    memory                            a rank takes ever more memory, until the kernel kills it: the host has a limit
    disk, disk-stop                   the disk of a host is full for 20 s, in which checkpoints are due; the job says
                                      that a save that fails ends nothing, or that it does
    clock                             the clock of a host is wrong by an hour for 20 s, as all its programs see it
    supervisor                        kill -9 of the supervisor, where it lives on the head
    ssh                               all ssh connections to a host are cut

One run goes through several faults, until a host is lost for good. Per fault: whether the run does another step by
itself, after how many seconds, how many steps were done again, which cause was named, and what of it is wrong: a cause
that is not the right one on the right host (`faults_causes.py`; in the events of the run and in `gangline explain`), an
attempt that ended without need, more than one interval and one step lost, no other supervisor, a host that is back and
takes no part. One JSON line per fault; a file that has lines already is continued; SIGTERM ends it after a fault. What
was written down of a run in which something went wrong is kept in a folder beside that file. Exit code 1 if anything is
wrong.

The clock is not that of the machine: a library that all programs of the host load shows it (`faults_clock.c`). Times of
files stay right there. NaN, exceptions and memory come from hooks in the rank's process (`faults_in_rank.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults_kinds import Fault, Line
from benchmarks.faults_world import JOB, World
from benchmarks.plan_time import read
from benchmarks.scaling import commit
from tests.lab.namespaces import LabFailed
from tests.lab.user import make_model

KEPT_BY_HEAD = {"supervisor"}
KINDS = (
    *("rank", "nan", "launcher", "partition", "process", "exception", "disk", "host-agent", "flap", "stopped"),
    *("memory", "one-way", "ssh", "nan-stays", "clock", "crash", "disk-stop", "supervisor", "supervisor", "rank"),
    *("flip", "exception", "memory", "nan", "power"),
)
"""In this order again and again; the world changes where it has to."""
GOES_ON = JOB.replace("keep_last: 2}", "keep_last: 2, on_failure: continue}")
FAILED = (AssertionError, LabFailed, OSError, ValueError, LookupError, StopIteration, subprocess.SubprocessError)
MOST_IN_VAIN = 3
WORLD_S = 2400.0
"""No world is used for longer than that."""


def world_of(kind: str) -> tuple[str, str]:
    """Who looks after the run for such a fault, and its job: any host can be lost if it is the user's computer."""
    return "head" if kind in KEPT_BY_HEAD else "desk", JOB if kind == "disk-stop" else GOES_ON


def measure(numbers: Sequence[int], out: Path, *, seed: int, model: Path, deadline: float) -> None:
    """Faults by number, in as few worlds as can be."""
    queue, in_vain = list(numbers), 0
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: told.set())
    while queue and time.monotonic() < deadline and not told.is_set():
        keep, job = world_of(KINDS[queue[0] % len(KINDS)])
        try:
            with World(model, keep=keep, seed=f"{seed} {queue[0]}", job=job, planted=True) as world:
                in_vain = 0
                until = min(deadline, time.monotonic() + WORLD_S)
                while queue and time.monotonic() < until and not told.is_set() and _one(queue, world, out, seed):
                    pass
        except FAILED as error:
            in_vain += 1
            print(f"no world for {queue[0]}: {type(error).__name__}: {error}", flush=True)
            if in_vain == MOST_IN_VAIN:
                raise


def _one(queue: list[int], world: World, out: Path, seed: int) -> bool:
    """Play the next fault, if this world is one for it; whether it is good for another one after that."""
    kind = KINDS[queue[0] % len(KINDS)]
    if not fits(kind, world):
        return False
    number = queue.pop(0)
    busy = round(os.getloadavg()[0], 1)
    line = {"number": number, "seed": seed, "kind": kind, "commit": commit(), "load": busy, **_play(world, kind)}
    write(out, line)
    if line["wrong"]:
        with contextlib.suppress(*FAILED):
            world.save_evidence(out.parent / f"{out.stem}-bad" / f"{number}-{kind}")
    return not line["wrong"]  # the next one shall not suffer from it


def fits(kind: str, world: World) -> bool:
    """Whether such a fault can be played in this world."""
    keep, job = world_of(kind)
    # where the supervisor lives on a host, another one is lost
    return world.keep in {keep, "head"} and job == world.job and len(world.living) == 3


def write(out: Path, line: Line) -> None:
    """Add a line, and say it."""
    with out.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")
    words = (line["number"], line["kind"], line.get("victim"), line.get("back_s"), line["wrong"] or line.get("what"))
    print(*words, flush=True)


def _play(world: World, kind: str) -> Line:
    try:
        return Fault(world, kind).play()
    except FAILED as error:
        return {"back_s": None, "wrong": [f"{type(error).__name__}: {error}"]}


def report(lines: Sequence[Line]) -> int:
    """A table; 1 if anything is wrong."""
    print(
        "\n| fault | times | back by itself | seconds to the next step, median (worst) | steps done again, worst |\n|"
        + "---|" * 5
    )
    for kind in sorted({line["kind"] for line in lines}):
        mine = [line for line in lines if line["kind"] == kind]
        back = [line["back_s"] for line in mine if line["back_s"] is not None]
        times = f"{statistics.median(back):.1f} ({max(back):.1f})" if back else "-"
        good = sum(not line["wrong"] for line in mine)
        print(f"| {kind} | {len(mine)} | {good} | {times} | {max(line.get('lost_steps', 0) for line in mine)} |")
    bad = [line for line in lines if line["wrong"]]
    for line in bad:
        print(json.dumps(line))
    loads = [line["load"] for line in lines if "load" in line]
    busy = f"; load of the machine {statistics.median(loads):.0f} (median), {max(loads):.0f} (most)" if loads else ""
    print(f"\n{len(lines)} faults, {len(bad)} with something wrong{busy}")
    return 1 if bad else 0


def main() -> int:
    """Play what the file does not have yet, and sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--only", nargs="*", choices=sorted(set(KINDS)))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, continued if it exists")
    arguments = parser.parse_args()
    lines = read(arguments.out)
    done = {(line["number"], line["seed"]) for line in lines}
    wanted = [number for number in range(arguments.cases) if (number, arguments.seed) not in done]
    if arguments.only:
        wanted = [number for number in wanted if KINDS[number % len(KINDS)] in arguments.only]
    deadline = time.monotonic() + arguments.minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        measure(wanted, arguments.out, seed=arguments.seed, model=make_model(Path(folder) / "model"), deadline=deadline)
    return report(read(arguments.out))


if __name__ == "__main__":
    sys.exit(main())
