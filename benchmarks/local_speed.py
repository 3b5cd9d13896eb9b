"""Local SGD over a slow link against synchronous training over one ten times as fast: steps per second.

    python -m benchmarks.local_speed --out local_speed.jsonl          # as root, for the lab; about 10 minutes

Three lab hosts. 12.6 million trained weights in fp32 travel for real; COMPUTATION IS EMULATED by sleeping (see
emulated.py), as long as keeps the ratio of traffic to computation that full fine-tuning of 1.24 billion weights has:
there a step computes for 7.3 s and its all-reduce takes 5.3 s at 10 Gbit (fp32, three hosts), so here one that takes
0.54 s at 1 Gbit stands beside 0.74 s of computation: 1 Gbit stands for 10 Gbit, 100 Mbit for 1 Gbit.

    fast, fp32   synchronous, 1 Gbit, gradients as they are
    fast, bf16   synchronous, 1 Gbit, gradients rounded: the best that synchronous training does there
    slow, bf16   synchronous, 100 Mbit
    slow, local  local-sgd with rounds of 50 steps and int8, 100 Mbit

One JSON line per run in --out; what is there is not measured again. Exit code 0 if `slow, local` does 90 % of the steps
per second of both fast sides (median of runs). Quality is another question: local_quality.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.plan_time import read
from benchmarks.scaling import commit, quiet, ranks

WEIGHTS = {"layers": 12, "hidden": 2048, "rank": 128}
BATCH, MICRO_BATCH_S, INNER_STEPS, RUNS, BAR = 6, 0.37, 50, 5, 0.9
ORDER = {"side": "gangline", "batch": BATCH, "micro_batch_s": MICRO_BATCH_S, "shape": WEIGHTS, "full": True}
SIDES: dict[str, dict[str, Any]] = {
    "fast, fp32": {"rate": "1gbit", "steps": 12},
    "fast, bf16": {"rate": "1gbit", "steps": 12, "exchange": "bf16"},
    "slow, bf16": {"rate": "100mbit", "steps": 5, "exchange": "bf16"},
    "slow, local": {
        "rate": "100mbit",
        "steps": 3 * INNER_STEPS,
        "strategy": {"kind": "local-sgd", "inner_steps": INNER_STEPS, "payload": "int8"},
    },
}
Line = dict[str, Any]


def main() -> int:
    """Measure what is missing, then report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    for run in range(RUNS):
        for side, words in SIDES.items():
            if not any((line["side"], line["run"]) == (side, run) for line in read(out)):
                line = {"side": side, "run": run, "load": quiet(), "commit": commit(), **measured(words)}
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    return report(read(out))


def measured(words: dict[str, Any]) -> Line:
    """One start: steps per second, without the first step or round."""
    head = ranks({**ORDER, "limit_s": 800, "factors": [1.0] * 3, **words}, words["rate"])[0]
    passed_s = head["ends_s"][-1] - head["ends_s"][0]
    return {"steps_per_s": sum(head["samples"][1:]) / BATCH / passed_s, "ends_s": head["ends_s"]}


def report(lines: Sequence[Line]) -> int:
    """A table, and whether the bar is reached."""
    found = {side: [line["steps_per_s"] for line in lines if line["side"] == side] for side in SIDES}
    local = statistics.median(found["slow, local"])
    print("computation EMULATED, network real; three equal hosts; median (worst) of runs\n")
    print("| side | steps/s | of it `slow, local` does |\n|---|---|---|")
    for side, values in found.items():
        middle = statistics.median(values)
        print(f"| {side} | {middle:.3f} ({min(values):.3f}) | {local / middle:.1%} |")
    reached = all(local >= BAR * statistics.median(found[side]) for side in ("fast, fp32", "fast, bf16"))
    print("\nthe bar is reached" if reached else f"\nNOT REACHED: {BAR:.0%} of both fast sides")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
