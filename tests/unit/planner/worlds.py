"""Machines and questions that tests of the decision share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gangline.catalog.models import known_config
from gangline.planner.architecture import Architecture
from gangline.planner.candidate import Candidate, EvaluationContext, PlanQuery, Scenario
from gangline.planner.config import read_architecture
from gangline.planner.estimate import uncalibrated
from gangline.planner.machines import Placement, PlannedCluster, imagine, link
from gangline.planner.speed import ComputeModel
from gangline.planner.training import PlannedStrategy, Training

HOME_LAN = "pc1=rtx5070ti-laptop,pc2=rtx4070-laptop,pc3=rtx3070ti"
NOWHERE = Path("/nowhere")


def world(hosts: str = HOME_LAN, *, wire: str = "1gbit", inside: str = "pcie4-x16") -> PlannedCluster:
    """Machines that nobody asks."""
    return PlannedCluster(placements=imagine(hosts), wire=link(wire), inside=link(inside), asked=False)


def with_memory(machines: PlannedCluster, *gib: float) -> PlannedCluster:
    """The same with so much free memory on each placement."""
    placements = [
        dataclasses.replace(placement, free_bytes=int(free * 2**30))
        for placement, free in zip(machines.placements, gib, strict=True)
    ]
    return dataclasses.replace(machines, placements=tuple(placements))


def crowded(machines: PlannedCluster, *hosts: str) -> PlannedCluster:
    """The same with two ranks on each card of these hosts."""
    placements = [
        dataclasses.replace(placement, num_sharing=1 + (placement.host in hosts)) for placement in machines.placements
    ]
    return dataclasses.replace(machines, placements=tuple(placements))


def model(name: str) -> Architecture:
    """A model of the catalogue."""
    config = known_config(name)
    assert config is not None
    return read_architecture(config)


def query(
    name: str = "meta-llama/Llama-2-7b-hf", *, batch: int = 24, leave_open: bool = True, **training: object
) -> PlanQuery:
    """A job; `training` replaces its fields."""
    architecture = model(name)
    base = Training(method="qlora", micro_batch=1, sequence_length=2048, targets=("q_proj", "v_proj"))

    def compute(placement: Placement, asked: Training) -> ComputeModel | None:
        return None if placement.spec is None else uncalibrated(placement.spec, architecture, asked)

    return PlanQuery(
        architecture=architecture,
        training=dataclasses.replace(base, **training),  # type: ignore[arg-type]
        batch=batch,
        compute=compute,
        open=("micro_batch", "activation_checkpointing", "activation_offloading") if leave_open else (),
    )


def option_of(asked: PlanQuery, machines: PlannedCluster, strategy: PlannedStrategy, training: Training) -> Candidate:
    """One way to run a job."""
    scenario = Scenario(query=asked, world=machines, training=training, cache=EvaluationContext())
    return Candidate(scenario=scenario, strategy=strategy)
