"""A healthy run with evaluations, saves and long pauses: is anybody accused? (hangs.py --healthy MINUTES)

Evaluations every 20 steps, saves every 10. In three of its minutes something takes long that may: one micro-batch of an
evaluation takes 45 s on one host; a host's disk takes 45 s for one file of a checkpoint, so that its rank waits for it
at the next save; every micro-batch of one evaluation takes 5 s. That these pauses came is seen in the steps: one that
did not is wrong, as it would prove nothing. One JSON line per minute; a file that has lines already is continued.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults_world import JOB as RUN
from benchmarks.hangs_world import HangWorld, Line, Tail, seconds_of
from benchmarks.scaling import commit

JOB = RUN.replace("fox.txt,", "fox.txt, eval: 0.04,").replace("{at_start: false}", "{at_start: false, every_steps: 20}")
JOB = JOB.replace("every_steps: 20, every_minutes", "every_steps: 10, every_minutes")
ACCUSING = {"hanging", "failing", "restarting", "stalled", "unreachable", "leaving", "stopping", "failed", "stopped"}
"""Events that say of somebody that something is wrong, or end an attempt."""
PAUSES = {0.2: ("evaluation", 45), 0.45: ("save", 45), 0.7: ("evaluations", 35)}
"""At which part of the run something takes so many seconds."""
LONG_S = 30.0
"""A shorter pause would have been nothing to accuse anybody of."""


def measure(arguments: argparse.Namespace, *, model: Path, done: int) -> None:
    """The minutes that the file does not have yet, in a world of their own."""
    minutes = range(done, arguments.healthy)
    if not minutes:
        return
    pauses = {round(part * arguments.healthy): pause for part, pause in PAUSES.items()}
    with HangWorld(model, seed=f"{arguments.seed} healthy {done}", job=JOB, ttl_s=60 * len(minutes) + 1200) as world:
        watch = _Minutes(world)
        for minute in minutes:
            line = watch.play(pauses.get(minute))
            line = {"minute": minute, "seed": arguments.seed, "commit": commit(), **line}
            with arguments.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            shown = ("steps", "evaluations", "saves", "longest_s", "pause", "accusations", "wrong")
            print(minute, *(line[name] for name in shown), flush=True)
            if line["wrong"] and arguments.keep:
                world.save_evidence(arguments.keep / f"healthy-{arguments.seed}-{minute}")
            if line["phase"] != "running":
                break


class _Minutes:
    """The minutes of one run, one after the other."""

    def __init__(self, world: HangWorld) -> None:
        self._world = world
        self._figures = Tail(world.lab.hosts[0], f"{world.folder(world.lab.hosts[0])}/metrics.jsonl")
        self._events = Tail(world.keeper, f"{world.folder(world.keeper)}/events.jsonl")
        self._last = self._figures.lines()[-1:]
        self._end = time.monotonic()

    def play(self, pause: tuple[str, int] | None) -> Line:
        """One minute. pause: what shall take how many seconds in it."""
        world, victim = self._world, self._world.chance.choice(self._world.lab.hosts)
        if pause is not None:
            world.order(victim, pause[0], str(pause[1]))
        self._end += 60.0
        time.sleep(max(0.0, self._end - time.monotonic()))
        figures = self._last + self._figures.lines()
        self._last = figures[-1:]
        times = [seconds_of(line) for line in figures]
        longest_s = max((after - before for before, after in itertools.pairwise(times)), default=60.0)
        kinds = Counter(line["kind"] for line in figures[1:])
        events = self._events.lines()
        told = [event for event in events if event["source"] == "supervisor" and event["event"] in ACCUSING]
        state = world.state()
        line = {
            "phase": state["phase"],
            "attempt": state["attempt"],
            "steps": kinds["step"],
            "evaluations": kinds["evaluation"],
            "saves": sum(event["event"] == "committed" for event in events),
            "longest_s": round(longest_s, 1),
            "pause": None if pause is None else [victim.name, *pause],
            "accusations": [[event["event"], event.get("what", event.get("why", ""))] for event in told],
            "stragglers": [event["what"] for event in events if event["event"] == "straggler"],
            "load": os.getloadavg()[0],
        }
        return {**line, "wrong": _wrong(line)}


def _wrong(line: Line) -> list[str]:
    wrong = [f"{event}: {what}" for event, what in line["accusations"]]
    if line["phase"] != "running" or line["attempt"] != 1:
        wrong.append(f"attempt {line['attempt']} is {line['phase']}")
    if not (line["steps"] and line["evaluations"] and line["saves"]):
        wrong.append("nothing is trained, evaluated or saved")
    if line["pause"] and line["longest_s"] < LONG_S:
        wrong.append(f"the pause did not come: {line['pause']}")
    return wrong


def report(lines: Sequence[Line]) -> int:
    """What was seen; 1 if anybody was accused, or nothing was proved."""
    sums = {name: sum(line[name] for line in lines) for name in ("steps", "evaluations", "saves")}
    accusations = sum(len(line["accusations"]) for line in lines)
    wrong = [line for line in lines if line["wrong"]]
    for line in wrong:
        print(json.dumps(line))
    pauses = [f"{line['pause'][1]} on {line['pause'][0]}: {line['longest_s']:g} s" for line in lines if line["pause"]]
    stragglers = [words for line in lines for words in line["stragglers"]]
    print(
        f"\n{len(lines)} healthy minutes, {sums['steps']} steps, {sums['evaluations']} evaluations, {sums['saves']} "
        f"checkpoints; pauses: {', '.join(pauses) or 'none'}; {accusations} accusations; "
        f"{len(stragglers)} words about stragglers {stragglers or ''}"
    )
    return 1 if wrong or not lines else 0
