"""What all ranks must know alike at the end of a step, in one small all-reduce."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from gangline.worker.process_group import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Where one rank's step went, and what memory it holds."""

    data_s: float
    compute_s: float
    wait_s: float
    memory_bytes: int


NO_TIMES = RankTimes(data_s=0.0, compute_s=0.0, wait_s=0.0, memory_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One rank's word on a step; `agree` turns all of them into one that is the same everywhere.

    loss_sum: summed loss of this rank's micro-batches (agreed: of all). The flags count ranks that raised them.
    """

    loss_sum: float
    bad: int = 0
    """The loss or the gradient is not finite."""
    stop: int = 0
    finish: int = 0
    """A callback wants the run to end as finished."""
    save: int = 0
    save_failed: int = 0
    slow_saves: int = 0
    """A background write has been going on for so long that the next save is put off."""
    saving: int = 0
    """A background write is going on."""
    look: int = 0
    """All ranks are to look at the links between hosts."""
    profile: int = 0
    """So many steps are to be recorded from the next one on; rank 0 says it."""
    micro_batches: int = 0
    """Done by this rank (agreed: by all)."""
    norm: float = 0.0
    """Of the gradient, as rank 0 has it; 0 of the others, who may round it otherwise."""
    times: tuple[RankTimes, ...]


def agree(report: StepReport, world: ProcessGroup) -> StepReport:
    """Sum the reports of all ranks; `times` then has one entry per rank."""
    if world.size == 1:
        return report
    width, start = len(_OF_RANK), len(_OF_STEP) + len(_OF_RANK) * world.rank
    vector = torch.zeros(len(_OF_STEP) + width * world.size, dtype=torch.float64)
    vector[: len(_OF_STEP)] = torch.tensor([getattr(report, name) for name in _OF_STEP], dtype=torch.float64)
    own = [float(getattr(report.times[0], name)) for name in _OF_RANK]
    vector[start : start + width] = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(vector)
    values = iter(vector.tolist())
    summed = {name: kind(next(values)) for name, kind in _OF_STEP.items()}
    times = (RankTimes(**{name: kind(next(values)) for name, kind in _OF_RANK.items()}) for _ in range(world.size))
    return StepReport(**summed, times=tuple(times))


def _numbers_of(record: type) -> dict[str, Any]:
    """Field -> int or float."""
    return {each.name: {"int": int, "float": float}[str(each.type)] for each in fields(record) if each.name != "times"}


_OF_STEP, _OF_RANK = _numbers_of(StepReport), _numbers_of(RankTimes)
"""Field of a report, or of one rank's times -> its type."""


def gather(value: float, world: ProcessGroup) -> list[float]:
    """One number of every rank, by rank; collective."""
    if world.size == 1:
        return [value]
    vector = torch.zeros(world.size, dtype=torch.float64)
    vector[world.rank] = value
    dist.all_reduce(vector)
    return vector.tolist()


def gather_json(content: Any, world: ProcessGroup) -> list[Any]:
    """JSON of any length of every rank, by rank; collective."""
    if world.size == 1:
        return [content]
    own = json.dumps(content).encode()
    lengths = [int(length) for length in gather(float(len(own)), world)]
    row = torch.zeros(max(lengths), dtype=torch.uint8)
    row[: len(own)] = torch.tensor(list(own), dtype=torch.uint8)
    rows = [torch.empty_like(row) for _ in lengths]
    dist.all_gather(rows, row)
    return [json.loads(each[:length].numpy().tobytes()) for each, length in zip(rows, lengths, strict=True)]
