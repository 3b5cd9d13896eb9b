"""Memory that `gangline plan --stack NAME` foresees, against peaks that others measured on GPUs.

    python -m benchmarks.plan_gpu_memory             # a summary per source and stack, and every row off by 10 % or more
    python -m benchmarks.plan_gpu_memory --all       # every row
    python -m benchmarks.plan_gpu_memory --json

Every row of benchmarks/gpu_rows/rows.json that has a peak becomes a job and a `--hosts`, and is asked as the command
asks it; nothing here knows how memory is reckoned. `STACK_OF` says with which `--stack` a user of that software asks.
The planned figure is of the measured kind: what tensors take (allocated), what the allocator holds for them (reserved),
or the whole process (nvsmi).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gangline.cli.output import Terminal
from gangline.context import StartOptions
from gangline.decide.what_if import WhatIf, predict
from gangline.planner.candidate import Candidate
from gangline.planner.memory_fit import Need

GIB = 2**30
FOLDER = Path(__file__).parent / "gpu_rows"
OFF = 0.10
Row = Mapping[str, Any]


def rows() -> list[Row]:
    """Those with a measured peak."""
    found: list[Row] = json.loads((FOLDER / "rows.json").read_text(encoding="utf-8"))["rows"]
    return [row for row in found if row["memory_gib"]]


def stack_of(row: Row) -> str:
    """The `--stack` of the software that a row was measured with."""
    found = next((stack for part, stack in STACK_OF.items() if part in row["source"]), row["stack"])
    if found == "prime-rl" and row["note"].startswith("sft"):
        return "prime-rl-sft"
    if found == "fms":
        recipe = str(row["id"]).split("/")[4]
        plain = "fms-accelerated-peft" if recipe.startswith("accelerated-peft") else "trl"
        amp = "fms-foak-amp" if "liger" in row["source"] else "fms-foak"
        return "fms-liger" if recipe.endswith("-liger") else amp if "foak" in recipe else plain
    return str(found)


STACK_OF = {
    "fsdp_qlora": "fsdp-qlora",
    "peft docs": "trl",
    "fms-acceleration": "fms",
    "litgpt": "litgpt",
    "prime-rl": "prime-rl",
    "longlora": "deepspeed",
    "2309.12307": "deepspeed",
    "torchtune": "torchtune",
    "unsloth": "unsloth",
    "axolotl": "axolotl",
    "LLaMA-Factory": "llama-factory",
}
"""A part of a row's source -> stack; "fms" stands for those of its recipes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of the table."""

    row: str
    source: str
    stack: str
    kind: str
    planned_gib: float
    measured_gib: float
    instant: str
    """Where the plan has the peak."""

    @property
    def error(self) -> float:
        """Planned over measured, minus one."""
        return self.planned_gib / self.measured_gib - 1


def lines(found: Iterable[Row]) -> list[Line]:
    """Every row, asked."""
    with tempfile.TemporaryDirectory() as folder:
        return [line(row, Path(folder)) for row in found]


def line(row: Row, folder: Path) -> Line:
    """One row; folder: where its model's config.json may lie."""
    stack = stack_of(row)
    need = asked(row, folder, stack=stack).needs[0]
    return Line(
        row=row["id"],
        source=row["source"].split(" ")[0],
        stack=stack,
        kind=row["memory_kind"],
        planned_gib=planned_bytes(need, row["memory_kind"]) / GIB,
        measured_gib=row["memory_gib"],
        instant=need.memory.peak.name,
    )


def planned_bytes(need: Need, kind: str) -> int:
    """The plan's figure of this kind."""
    memory = need.memory
    return {
        "allocated": memory.allocated_bytes,
        "reserved": memory.reserved_bytes(need.placement.free_bytes),
        "nvsmi-rounded": memory.process_bytes(need.placement.free_bytes),
    }[kind]


def asked(row: Row, folder: Path, *, stack: str) -> Candidate:
    """The answer of the command for the way that the row took."""
    start = StartOptions(home=folder, job=job_of(row, folder))
    prediction = predict(start, WhatIf(hosts=row["hosts"].partition("=")[2], stack=stack), console=Terminal(quiet=True))
    choice = prediction.job_forecast.choice
    assert choice is not None, row["id"]
    kind = row["strategy"] or ("ddp" if row["gpus"] > 1 else "single")
    return next(candidate for candidate in choice.by_kind if candidate.strategy.kind == kind)


def job_of(row: Row, folder: Path) -> dict[str, Any]:
    """The job file of a row."""
    adapters = {
        "rank": row["rank"],
        "dropout": row["dropout"],
        **({"targets": row["targets"]} if row["targets"] else {}),
    }
    strategy = {"kind": row["strategy"] or "auto", **({"offload": row["offload"]} if row["offload"] else {})}
    return {
        "name": "row",
        "model": _model(row["model"], folder),
        "method": {"kind": row["method"], **(adapters if row["method"] != "full" else {})},
        "data": {"train": "rows.jsonl", "sequence_length": row["seq"], "packing": False},
        "batch": row["micro_batch"] * row["accumulation"] * row["gpus"],
        "micro_batch": row["micro_batch"],
        "steps": 10,
        "activation_checkpointing": row["activation_checkpointing"],
        "activation_offloading": row["activation_offloading"],
        "optimizer": row["optimizer"],
        "precision": {"compute": row["precision"], "parameters": row["parameters"]},
        "strategy": strategy,
    }


def _model(name: str, folder: Path) -> str:
    """A name of the hub, or a folder with the shape that shapes.json has."""
    if not name.startswith("dir:"):
        return name
    shape = name.removeprefix("dir:")
    place = folder / shape
    place.mkdir(exist_ok=True)
    config = json.loads((FOLDER / "shapes.json").read_text(encoding="utf-8"))[shape]
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(place)


def summary(found: Iterable[Line]) -> dict[str, float]:
    """Absolute errors in the mean; how far the worst are under and over."""
    errors = [each.error for each in found]
    return {
        "rows": len(errors),
        "mean": fmean(abs(error) for error in errors),
        "under": min(0.0, *errors),
        "over": max(0.0, *errors),
    }


def groups(found: list[Line]) -> dict[str, dict[str, float]]:
    """Summaries of all rows, of each source, and of each stack of it."""
    stacks = sorted({f"{each.source}: {each.stack}" for each in found})
    keys = ["all", *sorted({each.source for each in found}), *stacks]
    return {
        key: summary(each for each in found if key in ("all", each.source, f"{each.source}: {each.stack}"))
        for key in keys
    }


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every row, not only those that are off by 10 percent")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    options = parser.parse_args()
    found = lines(rows())
    if options.json:
        print(json.dumps({"rows": [asdict(each) | {"error": each.error} for each in found], "summary": groups(found)}))
        return 0
    print("planned  measured GiB   error")
    for each in found:
        if options.all or abs(each.error) >= OFF:
            sizes = f"{each.planned_gib:7.2f}  {each.measured_gib:8.2f}     {each.error:+7.1%}"
            print(f"{sizes}  {each.row} ({each.kind}, {each.stack}; {each.instant})")
    print(f"\n{'rows':>4}    mean   under    over")
    for key, figures in groups(found).items():
        sizes = "  ".join(f"{figures[name]:6.1%}" for name in ("mean", "under", "over"))
        print(f"{figures['rows']:4}  {sizes}  {key}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
