"""Planned against measured speed of public runs on GPUs.

    python -m benchmarks.plan_gpu_time                # summary by source, card and method; GeForce rows; orders
    python -m benchmarks.plan_gpu_time --all          # every row
    python -m benchmarks.plan_gpu_time --coarse       # with the few stacks that rows name, not that of their software

The rows and their sources are in benchmarks/gpu_rows; tests/unit/planner/gpu_rows.py asks the plan's question of each.
"Off" is the larger of planned over measured and its inverse, its mean the geometric one. Rows apart (FlashAttention 2
on Blackwell, an attention kernel made for older cards) count in no figure but their own.

A recipe is everything but machines, length, micro-batch, accumulation, recomputation and offload: pairs of one source
and one recipe must come out in the order in which they were measured. Strict pairs are those that differ by more than
5 %, which is what a repeated run may differ by.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from gangline.catalog.models import known_config
from gangline.decide.hosts import SpeedTable
from gangline.planner.config import read_architecture
from gangline.planner.machines import imagine
from gangline.planner.software import HF
from gangline.planner.training import GANGLINE, Training
from tests.unit.planner.gpu_rows import TimedRun, factor_off, mean_factor, timed_runs

RECIPE = ("source", "model", "method", "rank", "targets", "optimizer", "parameters", "stack", "software")
STRICT = 1.05
NEAR = 1.5
ORDERS = (
    ("L4", "3090"),
    ("A10G", "3090"),
    ("3090", "4090"),
    ("4090", "5090"),
    ("T4", "2080 Ti"),
    ("A6000", "4090"),
    ("3090", "A5000"),
    ("A5000", "4090"),
)
"""Slower and faster card for LoRA and QLoRA of an 8B model at the same settings."""
SETTINGS = tuple(itertools.product((512, 2048, 8192), (1, 4), (GANGLINE, HF)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of the table: tokens per second and GPU."""

    run: TimedRun
    planned: float
    low: float
    high: float

    @property
    def off(self) -> float:
        """How many times too fast or too slow."""
        return factor_off(self.planned, self.run.measured)

    @property
    def is_inside(self) -> bool:
        """Whether what was measured lies in the plan's interval."""
        return self.low <= self.run.measured <= self.high


def lines(*, coarse: bool = False) -> list[Line]:
    """Every row with a speed; coarse: see `timed_runs`."""
    return [line_of(run) for run in timed_runs(coarse=coarse)]


def line_of(run: TimedRun) -> Line:
    """What the plan says of a run."""
    time = run.candidate().time
    assert time is not None, f"{run.id}: its card is in no table"
    return Line(run=run, planned=run.speed(time.total_s), low=run.speed(time.high_s), high=run.speed(time.low_s))


def summary(found: Iterable[Line]) -> str:
    """Rows, mean factor, share within 1.5, worst, share inside the interval."""
    rows = list(found)
    offs = [line.off for line in rows]
    near = sum(off <= NEAR for off in offs) / len(rows)
    inside = sum(line.is_inside for line in rows) / len(rows)
    return f"{len(rows)} | {mean_factor(offs):.2f} | {near:.0%} | {max(offs):.2f} | {inside:.0%}"


def pairs(found: Iterable[Line], *, strict: float) -> tuple[int, int]:
    """Right ones and all of those pairs of one source and recipe that differ by more than `strict`."""
    recipes: dict[str, list[Line]] = {}
    for line in found:
        recipes.setdefault(str([line.run.row[key] for key in RECIPE]), []).append(line)
    right = total = 0
    for one, other in itertools.chain.from_iterable(itertools.combinations(each, 2) for each in recipes.values()):
        if factor_off(one.run.measured, other.run.measured) > strict:
            total += 1
            right += (one.planned - other.planned) * (one.run.measured - other.run.measured) > 0
    return right, total


def wrong_orders() -> list[str]:
    """Cards that come out in the wrong order, with the setting."""
    config = known_config("meta-llama/Llama-3.1-8B")
    assert config is not None
    architecture = read_architecture(config)
    speeds = SpeedTable(architecture=architecture, home=Path("/nowhere"))

    def seconds(card: str, training: Training) -> float:
        (placement,) = imagine(card)
        model = speeds.of(placement, training)
        assert model is not None
        return model.micro_batch_s(training.tokens, training.sequence_length)

    wrong = []
    for slower, faster in ORDERS:
        for method, (length, micro, stack) in itertools.product(("lora", "qlora"), SETTINGS):
            if slower == "T4" and method == "lora":
                continue  # 16 GB of weights fit in neither
            training = Training(
                method=method,
                micro_batch=micro,
                sequence_length=length,
                compute="fp16" if slower == "T4" else "bf16",
                checkpointing=True,
                stack=stack,
            )
            if seconds(slower, training) <= seconds(faster, training):
                wrong.append(f"{slower} < {faster}, {method}, {micro} x {length}, {stack.name}")
    return wrong


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="planned against measured speed of public runs on GPUs")
    parser.add_argument("--all", action="store_true", help="every row")
    parser.add_argument("--coarse", action="store_true", help="with the stacks that rows name: hf, hf-pure, gangline")
    options = parser.parse_args()
    found = lines(coarse=options.coarse)
    if options.all:
        _print_rows(found)
    counted = [line for line in found if not line.run.is_apart]
    print("| rows of | rows | mean off | within 1.5 | worst | inside the interval |\n|---|---|---|---|---|---|")
    print(f"| all | {summary(counted)} |")
    groups: dict[str, Callable[[Line], str]] = {
        "source": lambda line: line.run.source,
        "card": lambda line: line.run.card,
        "method": lambda line: str(line.run.row["method"]),
    }
    for what, key in groups.items():
        for name in dict.fromkeys(map(key, counted)):
            print(f"| {what} {name} | {summary(line for line in counted if key(line) == name)} |")
    print(f"| apart: FlashAttention 2 on Blackwell | {summary(line for line in found if line.run.is_apart)} |")
    print("\nGeForce rows:")
    _print_rows([line for line in counted if line.run.machines.placements[0].gpu.startswith("GeForce")])
    for strict in (STRICT, 1.0):
        right, total = pairs(counted, strict=strict)
        print(f"pairs that differ by more than {strict - 1:.0%}: {right} of {total} in order ({right / total:.0%})")
    wrong = wrong_orders()
    by_pair = Counter(case.split(",")[0] for case in wrong)
    print(f"orders of cards: {len(wrong)} wrong", *(f"{pair}: {count}" for pair, count in by_pair.items()), sep="\n  ")
    return 0


def _print_rows(found: Iterable[Line]) -> None:
    print(f"{'planned':>8} {'measured':>8}   off  tokens/s and GPU")
    for line in found:
        mark = " " if line.is_inside else "!"
        print(f"{line.planned:8.0f} {line.run.measured:8.0f} {line.off:5.2f}{mark} {line.run.id}")
    print()


if __name__ == "__main__":
    sys.exit(main())
