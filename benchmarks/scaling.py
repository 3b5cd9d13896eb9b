"""Three unlike machines at the sum of their speeds: how near?

    python -m benchmarks.scaling --out scaling.jsonl                  # as root, for the lab; about 50 minutes
    python -m benchmarks.scaling --out scaling.jsonl --cases short    # one of CASES

Three lab hosts (network namespaces, links shaped by tc) whose speeds are as 1 : 0.55 : 0.45. Ranks, sockets, exchanges,
adapters (33.6 MB), their gradients and optimizer are real; COMPUTATION IS EMULATED by sleeping to absolute deadlines
(see emulated.py), for three ranks on two processors would measure each other. The sides:

    alone        every machine trains by itself with the whole batch, gangline's loop: the speeds that are summed up
    gangline     all together: shares measured at the start, gangline's buckets
    even ddp     all together: the same number of micro-batches each, torch's DDP with its own settings
    accelerate   all together: HF Trainer on the same hosts

Speed is samples per second over all steps but the first. A run of a side is a start of its own; sides alternate. One
JSON line per run in --out; what is there is not measured again. Nothing is measured while the machine is loaded, and
nothing is reported where a machine alone is more than 2 % off its nominal speed. Percentages are of the sum of the
nominal speeds (nothing but computation) and of the measured ones (with the optimizer's time); bars are for the lower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import plan_time
from benchmarks.emulated import FACTORS
from benchmarks.plan_time import ROOT, read

LOAD, PATIENCE_S = 1.5, 180.0
LIMIT_S = 900
OFF = 0.02
SPEEDS = tuple(1 / factor for factor in FACTORS)
TOGETHER = ("gangline", "even ddp", "accelerate")
SIDES = ("alone", *TOGETHER)
Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One size of batch and micro-batch on one kind of link."""

    rate: str = "1gbit"
    micro_batch_s: float = 0.1
    batch: int = 40
    steps: int = 6
    runs: int = 5
    sides: Sequence[str] = SIDES
    bar: float | None = None
    """Part of the sum that gangline must reach."""
    exposed_bar: float | None = None
    """Part of a step that the exchange may take visibly."""
    order: Line = field(default_factory=dict)
    """What else ranks are told."""


CASES = {
    "short": Case(),
    "short, bf16": Case(sides=("gangline",), order={"exchange": "bf16"}),
    "short, B=120, bf16": Case(batch=120, steps=4, sides=("gangline",), bar=0.97, order={"exchange": "bf16"}),
    "short, B=240": Case(batch=240, steps=3, sides=TOGETHER, bar=0.97),
    "real size": Case(micro_batch_s=1.4, steps=3, sides=("gangline", "even ddp"), bar=0.97, exposed_bar=0.02),
    "real size, 100 Mbit": Case(rate="100mbit", micro_batch_s=1.4, steps=3, runs=3, sides=("gangline",), bar=None),
}
"""Micro-batches of 0.1 s keep the bench short and are ten times as hard as those of 1.4 s that real ones take."""


def main() -> int:
    """Measure what is missing, then report."""
    arguments = _arguments()
    for name in arguments.cases:
        measure(name, CASES[name], arguments.out)
    return report(read(arguments.out), arguments.cases)


def measure(name: str, case: Case, out: Path) -> None:
    """Every run that is missing, sides alternating."""
    for run in range(case.runs):
        for side in case.sides:
            if any((line["case"], line["side"], line["run"]) == (name, side, run) for line in read(out)):
                continue
            load = quiet()
            said = ranks({**order_of(case), "side": side}, case.rate)
            line = {"case": name, "side": side, "run": run, "load": load, "commit": commit(), **figures(case, said)}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def order_of(case: Case) -> Line:
    """What ranks are told."""
    return {
        "micro_batch_s": case.micro_batch_s,
        "batch": case.batch,
        "steps": case.steps,
        "limit_s": LIMIT_S,
        **case.order,
    }


def figures(case: Case, said: Sequence[Line]) -> Line:
    """Samples per second of each rank that kept time, and what rank 0 saw of the exchange."""
    found = [
        (len(each["ends_s"]) - 1) * each.get("per_step", case.batch) / (each["ends_s"][-1] - each["ends_s"][0])
        for each in said
        if len(each["ends_s"]) > 1
    ]
    head = said[0]
    steps_s = [after - before for before, after in zip(head["ends_s"], head["ends_s"][1:], strict=False)]
    waits = head.get("waits", [])[1:]
    exposed = [min(wait) / step_s for wait, step_s in zip(waits, steps_s, strict=True)] if waits else []
    return {
        "samples_per_s": found,
        "steps_s": steps_s,
        "exposed": statistics.median(exposed) if exposed else None,
        "shares": head["shares"][-1] if head.get("shares") else None,
    }


def ranks(order: Line, rate: str) -> list[Line]:
    """What every rank said, each on a host of its own."""
    return plan_time.ranks(order, rate, module=("benchmarks.scaling_ranks",), limit_s=LIMIT_S)


def quiet() -> float:
    """The load average, once it is low; SystemExit where it stays high."""
    until = time.monotonic() + PATIENCE_S
    while (load := os.getloadavg()[0]) > LOAD:
        if time.monotonic() > until:
            raise SystemExit(f"the machine is loaded ({load:.1f}): nothing that is measured now would be true")
        time.sleep(5)
    return load


def report(lines: Sequence[Line], names: Sequence[str]) -> int:
    """Tables, and whether the bars are reached."""
    bad: list[str] = []
    print("computation EMULATED, network real; three hosts with speeds as 1 : 0.55 : 0.45; median (worst) of runs")
    for name in names:
        mine = [line for line in lines if line["case"] == name]
        if mine:
            bad += report_case(name, CASES[name], mine)
    print("\n" + ("\n".join(f"NOT REACHED {words}" for words in bad) or "every bar is reached"))
    return 1 if bad else 0


def report_case(name: str, case: Case, lines: Sequence[Line]) -> list[str]:
    """One table; what is not as it must be."""
    nominal = [speed / case.micro_batch_s for speed in SPEEDS]
    alone = [line["samples_per_s"] for line in lines if line["side"] == "alone"]
    bad = []
    for one, wanted in ((one, wanted) for each in alone for one, wanted in zip(each, nominal, strict=True)):
        if abs(one / wanted - 1) > OFF:
            bad.append(f"{name}: a machine alone does {one:.2f} samples/s, nominal are {wanted:.2f}; run it again")
    sums = [sum(nominal), *(sum(each) for each in alone)]
    print(f"\n{name}: micro-batch {case.micro_batch_s:g} s on the fastest, batch {case.batch}, {case.rate}; ", end="")
    print(f"sum of speeds {sums[0]:.2f} samples/s nominal", end="")
    print(f", {statistics.median(sums[1:]):.2f} measured" if alone else "")
    print("\n| side | samples/s | of the nominal sum | of the measured sum | exposed exchange | runs |\n|" + "---|" * 6)
    for side in case.sides:
        mine = [line for line in lines if line["side"] == side]
        if side == "alone" or not mine:
            continue
        speeds = [line["samples_per_s"][0] for line in mine]
        share = [speed / sums[0] for speed in speeds]
        measured = [speed / statistics.median(sums[1:]) for speed in speeds] if alone else []
        exposed = [line["exposed"] for line in mine if line["exposed"] is not None]
        cells = [side, f"{statistics.median(speeds):.2f}", percent(share), percent(measured)]
        cells += [percent(exposed, worst=max), str(len(mine))]
        print("| " + " | ".join(cells) + " |")
        if side == "gangline" and case.bar and statistics.median(share) < case.bar:
            bad.append(f"{name}: {statistics.median(share):.1%} of the sum, {case.bar:.0%} are wanted")
        if side == "gangline" and case.exposed_bar and statistics.median(exposed) > case.exposed_bar:
            bad.append(f"{name}: {statistics.median(exposed):.1%} of a step are exposed exchange")
    return bad


def percent(parts: Sequence[float], worst: Any = min) -> str:
    """Median and worst."""
    return f"{statistics.median(parts):.1%} ({worst(parts):.1%})" if parts else "-"


def commit() -> str:
    """Of what is measured."""
    argv = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
