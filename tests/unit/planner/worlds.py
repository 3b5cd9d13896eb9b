"""Machines and questions that tests of the decision share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gangline.catalog.models import known_config
from gangline.planner.architecture import Architecture
from gangline.planner.config import read_architecture
from gangline.planner.machines import PlannedCluster, Seat, imagine, link
from gangline.planner.option import EvaluationContext, Option, Question, Shift
from gangline.planner.speed import ComputeModel, uncalibrated
from gangline.planner.training import PlannedStrategy, Training

HOME_LAN = "pc1=rtx5070ti-laptop,pc2=rtx4070-laptop,pc3=rtx3070ti"
NOWHERE = Path("/nowhere")


def world(hosts: str = HOME_LAN, *, wire: str = "1gbit", inside: str = "pcie4-x16") -> PlannedCluster:
    """Machines that nobody asks."""
    return PlannedCluster(seats=imagine(hosts), wire=link(wire), inside=link(inside), asked=False)


def with_memory(machines: PlannedCluster, *gib: float) -> PlannedCluster:
    """The same with so much free memory on each seat."""
    seats = [
        dataclasses.replace(seat, free_bytes=int(free * 2**30)) for seat, free in zip(machines.seats, gib, strict=True)
    ]
    return dataclasses.replace(machines, seats=tuple(seats))


def crowded(machines: PlannedCluster, *hosts: str) -> PlannedCluster:
    """The same with two ranks on each card of these hosts."""
    seats = [dataclasses.replace(seat, num_sharing=1 + (seat.host in hosts)) for seat in machines.seats]
    return dataclasses.replace(machines, seats=tuple(seats))


def model(name: str) -> Architecture:
    """A model of the catalogue."""
    config = known_config(name)
    assert config is not None
    return read_architecture(config)


def question(
    name: str = "meta-llama/Llama-2-7b-hf", *, batch: int = 24, leave_open: bool = True, **training: object
) -> Question:
    """A job; `training` replaces its fields."""
    architecture = model(name)
    base = Training(method="qlora", micro_batch=1, sequence_length=2048, targets=("q_proj", "v_proj"))

    def compute(seat: Seat, asked: Training) -> ComputeModel | None:
        return None if seat.spec is None else uncalibrated(seat.spec, architecture, asked)

    return Question(
        architecture=architecture,
        training=dataclasses.replace(base, **training),  # type: ignore[arg-type]
        batch=batch,
        compute=compute,
        open=("micro_batch", "activation_checkpointing") if leave_open else (),
    )


def option_of(asked: Question, machines: PlannedCluster, strategy: PlannedStrategy, training: Training) -> Option:
    """One way to run a job."""
    shift = Shift(question=asked, world=machines, training=training, cache=EvaluationContext())
    return Option(shift=shift, strategy=strategy)
