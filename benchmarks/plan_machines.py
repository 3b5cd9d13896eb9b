"""Are machines together ever planned slower than the best of them alone, but for the network?

    python -m benchmarks.plan_machines --out machines.jsonl [--cases 200] [--examples]

Random sets of 2 to 5 cards of the catalogue, one in each host; one of three jobs; a link that costs nothing, and 1, 2.5
and 10 Gbit/s. A line is appended for each case, and a run with the same file goes on behind the lines that are there.
Only plans are made: no card computes. A set "counts" if each of its machines has room for the job alone. Exit code 1 if
one that counts is slower than its best machine by more than the exposed traffic that the plan prints and the longer
update of its slowest card; a pipeline may be so by its fill and drain, which are no traffic.

--examples: the plans of the seed's PCs with a fourth one, and of two unlike cards.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from gangline.catalog.gpu_specs import GPUS
from gangline.planner.candidate import PlanQuery
from gangline.planner.decision import Choice, decide
from gangline.planner.machines import PlannedCluster
from gangline.planner.report import Length, report
from gangline.planner.traffic import LinkModel
from gangline.strategies.table import plan_half
from tests.unit.planner.worlds import HOME_LAN, query, world

FREE = LinkModel(latency_s=0.0, bytes_per_s=1e18, source="a link that costs nothing")
LINKS = ("free", "1gbit", "2.5gbit", "10gbit")
CARDS = [spec.name for spec in GPUS if spec.bf16 and not spec.untrained and not spec.is_unified]
JOBS: dict[str, dict[str, Any]] = {
    "Llama-2-7B QLoRA": {"name": "meta-llama/Llama-2-7b-hf", "batch": 32},
    "Llama-3.2-1B LoRA": {
        "name": "meta-llama/Llama-3.2-1B",
        "method": "lora",
        "targets": ("all-linear",),
        "sequence_length": 1024,
        "batch": 64,
    },
    "Llama-3.2-1B full": {"name": "meta-llama/Llama-3.2-1B", "method": "full", "sequence_length": 1024, "batch": 64},
}
EXAMPLES = {
    "the seed's three PCs and a 4090": f"{HOME_LAN},pc4=rtx4090",
    "a 4090 and a 3060": "pc1=rtx4090,pc2=rtx3060",
}


def main() -> int:
    """Plan, append, count; the exit code says whether each case is right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("machines.jsonl"))
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--examples", action="store_true")
    asked = parser.parse_args()
    if asked.examples:
        examples()
        return 0
    rows = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    with asked.out.open("a", encoding="utf-8") as out:
        for number in range(len(rows), asked.cases):
            rows.append(one(number))
            out.write(json.dumps(rows[-1]) + "\n")
            out.flush()
    return told(rows[: asked.cases])


def one(number: int) -> dict[str, Any]:
    """A case, by its number."""
    chance = random.Random(number)
    hosts = ",".join(chance.choice(CARDS) for _ in range(chance.randint(2, 5)))
    name = chance.choice(list(JOBS))
    job = query(**JOBS[name])
    return {"number": number, "hosts": hosts, "job": name, "links": {each: on(job, hosts, each) for each in LINKS}}


def on(job: PlanQuery, hosts: str, wire: str) -> dict[str, Any]:
    """What is planned on one link."""
    machines = _machines(hosts, wire)
    begun = time.process_time()
    choice = decide(job, machines)
    spent_s = time.process_time() - begun
    best, alone = choice.best, choice.by_hosts[0].best if choice.by_hosts else None
    if best is None or best.time is None or alone is None or alone.time is None or len(alone.world.hosts) > 1:
        return {"decision_s": spent_s, "fits": best is not None, "counts": False}
    return {
        "decision_s": spent_s,
        "fits": True,
        "counts": bool(choice.alone_s),
        "kind": best.strategy.kind,
        "own_settings": bool(best.scenario.settings),
        "step_s": best.seconds,
        "alone_s": alone.seconds,
        "exposed_s": best.time.exposed_s,
        "longer_update_s": max(0.0, best.time.optimizer_s - alone.time.optimizer_s),
        "part_of_sum": choice.part_of_sum,
    }


def _machines(hosts: str, wire: str) -> PlannedCluster:
    return dataclasses.replace(world(hosts), wire=FREE) if wire == "free" else world(hosts, wire=wire)


def told(rows: list[dict[str, Any]]) -> int:
    """A line of a table for each link; 1 if a case is wrong."""
    wrong = 0
    print("| link | sets | slower than the best alone | by more than the plan explains | own settings | of the sum |")
    print("|---|---|---|---|---|---|")
    for wire in LINKS:
        found = [row["links"][wire] for row in rows if row["links"][wire]["counts"]]
        slower = [each for each in found if each["step_s"] > each["alone_s"] * (1 + 1e-9)]
        bad = [
            each
            for each in slower
            if each["step_s"] - each["alone_s"] > each["exposed_s"] + each["longer_update_s"] + 1e-9 * each["step_s"]
        ]
        staged = sum(plan_half(each["kind"]).layers == "staged" for each in bad)
        wrong += len(bad) - staged
        parts = sorted(each["part_of_sum"] for each in found)
        own = sum(each["own_settings"] for each in found)
        part = f"median {100 * statistics.median(parts):.1f} %, least {100 * parts[0]:.1f} %" if parts else "-"
        print(f"| {wire} | {len(found)} | {len(slower)} | {len(bad)} (pipelines: {staged}) | {own} | {part} |")
    spent = [each["decision_s"] for row in rows for each in row["links"].values()]
    print(
        f"\n{len(rows)} sets; a decision takes {statistics.median(spent):.2f} s (worst {max(spent):.2f} s) of processor"
    )
    apart = [row for row in rows if not row["links"]["free"]["counts"] and row["links"]["free"].get("step_s")]
    late = sum(row["links"]["free"]["step_s"] > row["links"]["free"]["alone_s"] for row in apart)
    print(
        f"{len(apart)} further sets have a machine without room for the job; {late} of them are slower on a free link"
    )
    return int(wrong > 0)


def examples() -> None:
    """The screens of the two examples, and their figures without settings of ranks' own."""
    for title, hosts in EXAMPLES.items():
        job = query(batch=32)
        stack = dataclasses.replace(job.training.stack, name="one setting for all")
        alike = dataclasses.replace(job, training=dataclasses.replace(job.training, stack=stack))
        before, now = (decide(each, world(hosts)) for each in (alike, job))
        print(f"{title}: {_seconds(before)} with one setting for all, {_seconds(now)} with settings of each rank's own")
        print("\n".join(report(now, Length(None), width=110)), end="\n\n")


def _seconds(choice: Choice) -> str:
    ddp = next(each for each in choice.by_kind if each.strategy.kind == "ddp")
    sum_s = 1 / sum(1 / each for each in choice.alone_s.values())
    return f"{ddp.seconds:.1f} s a step (the sum: {sum_s:.1f} s, the best alone: {min(choice.alone_s.values()):.1f} s)"


if __name__ == "__main__":
    sys.exit(main())
