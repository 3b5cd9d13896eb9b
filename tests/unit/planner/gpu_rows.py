"""Public measured runs on GPUs (benchmarks/gpu_rows) as the questions that `gangline plan` would ask of them.

A row names machines, model, method and settings; its candidate is the one that the command weighs for the strategy of
the row, so that strategies, links and memory are the plan's own.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.plan_gpu_memory import stack_of
from gangline.catalog.models import known_config
from gangline.decide.hosts import SpeedTable
from gangline.planner.architecture import Architecture
from gangline.planner.candidate import Candidate, EvaluationContext, PlanQuery
from gangline.planner.config import read_architecture
from gangline.planner.decision import best_of_kinds
from gangline.planner.machines import Placement, PlannedCluster, assumed_link, bus_of, imagine, link
from gangline.planner.software import STACKS
from gangline.planner.speed import ComputeModel
from gangline.planner.training import Training
from gangline.runs.job import StrategyJob

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu_rows"
SHAPES = json.loads((FOLDER / "shapes.json").read_text(encoding="utf-8"))
Compute = Callable[[Placement, Training], ComputeModel | None]


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """One row with tokens per second."""

    row: dict[str, Any]
    stack: str
    """The `--stack` it is asked with."""

    @property
    def id(self) -> str:
        """Its name."""
        return str(self.row["id"])

    @property
    def source(self) -> str:
        """The repository: all rows of one share a way of measuring."""
        return self.id.split("/")[0]

    @property
    def card(self) -> str:
        """As the catalogue calls it."""
        return self.machines.placements[0].label

    @property
    def measured(self) -> float:
        """Tokens per second and GPU."""
        return float(self.row["tok_s_gpu"])

    @property
    def is_apart(self) -> bool:
        """Whether its card runs an attention kernel that was made for older ones: FlashAttention 2 on Blackwell."""
        return "b200" in self.row["hosts"] and "flash_attention_2" in self.row["software"]

    @functools.cached_property
    def machines(self) -> PlannedCluster:
        """Those that `--hosts` and `--link` would give."""
        placements = imagine(self.row["hosts"])
        wire = link(self.row["link"]) if self.row["link"] else assumed_link()
        return PlannedCluster(placements=placements, wire=wire, inside=bus_of(placements), asked=False)

    @functools.cached_property
    def architecture(self) -> Architecture:
        """The model's shape."""
        name = self.row["model"]
        config = SHAPES[name.removeprefix("dir:")] if name.startswith("dir:") else known_config(name)
        assert config is not None, f"no shape for {name}"
        return read_architecture(config)

    @property
    def training(self) -> Training:
        """What one rank computes."""
        row = self.row
        return Training(
            method=row["method"],
            micro_batch=row["micro_batch"],
            sequence_length=row["seq"],
            compute=row["precision"],
            parameters=row["precision"] if row["parameters"] == "compute" else "fp32",
            rank=row["rank"],
            targets=tuple(row["targets"] or ("all-linear",)),
            dropout=row["dropout"] or 0.0,
            checkpointing=row["activation_checkpointing"],
            offloading=row["activation_offloading"],
            optimizer=row["optimizer"],
            stack=STACKS[self.stack],
        )

    def candidate(self, compute: Compute | None = None) -> Candidate:
        """The way to run it that the plan weighs for the strategy of the row."""
        kind = self.row["strategy"] or "single"
        query = PlanQuery(
            architecture=self.architecture,
            training=self.training,
            batch=self.row["micro_batch"] * self.row["accumulation"] * self.row["gpus"],
            compute=compute or SpeedTable(architecture=self.architecture, home=Path("/nowhere")).of,
            strategy=StrategyJob(kind=kind, offload=tuple(self.row["offload"] or ())),
        )
        found = best_of_kinds(query, self.machines, EvaluationContext())
        return next(each for each in found if each.strategy.kind == kind)

    def speed(self, step_s: float) -> float:
        """Tokens per second and GPU of a step that takes so long."""
        return float(self.row["micro_batch"] * self.row["accumulation"] * self.row["seq"]) / step_s


def timed_runs(*, coarse: bool = False) -> list[TimedRun]:
    """Every row with a speed that the command can express, asked with the stack of its software.

    coarse: with the stack that its row names, one of the four that there were first.
    """
    rows = json.loads((FOLDER / "rows.json").read_text(encoding="utf-8"))["rows"]
    timed = [row for row in rows if row["tok_s_gpu"] is not None and row["expressible"]]
    return [TimedRun(row=row, stack=row["stack"] if coarse else stack_of(row)) for row in timed]


def factor_off(planned: float, measured: float) -> float:
    """How many times too high or too low, at least 1."""
    return max(planned / measured, measured / planned)


def mean_factor(factors: list[float]) -> float:
    """Geometric mean."""
    return math.exp(sum(map(math.log, factors)) / len(factors))
