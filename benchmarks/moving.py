"""A machine becomes twice as slow in the middle of a run, and recovers: how soon is the work split anew, and right?

    python -m benchmarks.moving --out moving.jsonl                    # as root, for the lab; about 15 minutes

Three lab hosts at 1 Gbit with speeds as 1 : 0.55 : 0.45, 200 steps of 40 micro-batches, float64; the first host takes
twice as long from step 50 to step 150. Ranks, sockets, exchanges, adapters and their gradients are real; COMPUTATION IS
EMULATED by sleeping (see emulated.py). A start of its own without the slowness is what losses are compared with.

One JSON line per run in --out; what is there is not measured again. Exit code 0 if in every run the ten steps from the
10th after each change on do 95 % of what the speeds then allow, all losses are within 1e-9 (relative), and every rank
read just the samples that are its part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.emulated import FACTORS, Setup, job
from benchmarks.plan_time import read
from benchmarks.scaling import SPEEDS, commit, quiet, ranks
from gangline.worker.batch import SampleOrder

BATCH, STEPS, MICRO_BATCH_S = 40, 200, 0.03
SLOW = {"rank": 0, "factor": 2.0, "begin": 50, "end": 150}
SHAPE = {"layers": 4, "hidden": 256}
MOST_TIMED = 2
RUNS, WITHIN, WINDOW, BAR, EXACT = 5, 10, 10, 0.95, 1e-9
Line = dict[str, Any]


def main() -> int:
    """Measure what is missing, then report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    for kind, run in [("undisturbed", 0), *(("slowed", run) for run in range(RUNS))]:
        if not any((line["kind"], line["run"]) == (kind, run) for line in read(out)):
            line = measured(kind, run)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    return report(read(out))


def measured(kind: str, run: int) -> Line:
    """One start."""
    load = quiet()
    order: Line = {
        "side": "gangline",
        "micro_batch_s": MICRO_BATCH_S,
        "batch": BATCH,
        "steps": STEPS,
        "limit_s": 600,
        "shape": SHAPE,
        "fp64": True,
        "audit": True,
    }
    said = ranks({**order, "slow": SLOW} if kind == "slowed" else order, "1gbit")
    head = said[0]
    moves = [event["step"] for event in head["events"] if event["event"] == "shares"]
    return {
        "kind": kind,
        "run": run,
        "load": load,
        "commit": commit(),
        "steps_s": [after - before for before, after in zip(head["ends_s"], head["ends_s"][1:], strict=False)],
        "losses": head["losses"],
        "shares": head["shares"],
        "moves": moves,
        "audit": audit(said, head["shares"]),
    }


def audit(said: Sequence[Line], shares: Sequence[Sequence[int]]) -> bool:
    """Whether every rank read what was assigned to it, in order; before the first step it reads a few of the first
    batch to be timed.
    """
    setup = Setup(batch=BATCH, steps=STEPS)
    order = SampleOrder(num_samples=BATCH * STEPS, batch=BATCH, micro_batch=1, seed=job(setup).seed)
    expected: list[list[int]] = [[] for _ in said]
    for step, work_split in enumerate(shares):
        samples, begin = order.samples(step), 0
        for rank, count in enumerate(work_split):
            expected[rank] += [int(sample) for sample in samples[begin : begin + count]]
            begin += count
    return all(
        _read_so(each["read"], wanted, set(map(int, order.samples(0))))
        for each, wanted in zip(said, expected, strict=True)
    )


def _read_so(read: Sequence[int], wanted: Sequence[int], first: set[int]) -> bool:
    num_timed = len(read) - len(wanted)
    return 0 <= num_timed <= MOST_TIMED and set(read[:num_timed]) <= first and list(read[num_timed:]) == list(wanted)


def allowed(*, slow: bool) -> float:
    """Samples per second that the speeds allow."""
    speeds = list(SPEEDS)
    if slow:
        speeds[SLOW["rank"]] /= SLOW["factor"]
    return sum(speeds) / MICRO_BATCH_S


def reached(line: Line, change: int, *, slow: bool) -> float:
    """Part of what is allowed, in the ten steps from the tenth after a change on; steps count from 0."""
    steps_s = [float("nan"), *line["steps_s"]]
    window = steps_s[change + WITHIN : change + WITHIN + WINDOW]
    return BATCH * len(window) / sum(window) / allowed(slow=slow)


def report(lines: Sequence[Line]) -> int:
    """A table, and whether the bars are reached."""
    plain = next(line for line in lines if line["kind"] == "undisturbed")
    bad = [] if plain["audit"] else ["undisturbed: samples"]
    print("computation EMULATED, network real; the first of three hosts twice as slow from step 50 to 150")
    print("\n| run | slow: of what is allowed | recovered | moves at steps | largest loss difference | samples |")
    print("|" + "---|" * 6)
    rows = []
    for line in (line for line in lines if line["kind"] == "slowed"):
        slow = reached(line, SLOW["begin"], slow=True)
        back = reached(line, SLOW["end"], slow=False)
        error = max(abs(a / b - 1) for a, b in zip(line["losses"], plain["losses"], strict=True))
        rows.append((slow, back))
        cells = [str(line["run"]), f"{slow:.1%}", f"{back:.1%}", ", ".join(map(str, line["moves"])), f"{error:.1e}"]
        print("| " + " | ".join([*cells, "right" if line["audit"] else "WRONG"]) + " |")
        if min(slow, back) < BAR or error > EXACT or not line["audit"]:
            bad.append(f"run {line['run']}")
    for name, column in zip(("slow", "recovered"), zip(*rows, strict=True), strict=False):
        print(f"{name}: median {statistics.median(column):.1%}, worst {min(column):.1%}")
    before = BATCH * 30 / sum(plain["steps_s"][10:40]) / allowed(slow=False)
    print(f"undisturbed: {before:.1%} of the sum of {len(FACTORS)} speeds")
    print("NOT REACHED: " + ", ".join(bad) if bad else "every bar is reached")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
