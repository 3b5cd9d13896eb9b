"""What all ranks must know alike at the end of a step, in one small all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from gangline.worker.process_group import ProcessGroup

_FLAGS = 10
_PER_RANK = 4


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
    save: int = 0
    save_failed: int = 0
    slow_saves: int = 0
    """A background write has been going on for so long that the next save is put off."""
    saving: int = 0
    """A background write is going on."""
    look: int = 0
    """All ranks are to look at the links between hosts."""
    micro_batches: int = 0
    """Done by this rank (agreed: by all)."""
    norm: float = 0.0
    """Of the gradient, as rank 0 has it; 0 of the others, who may round it otherwise."""
    times: tuple[RankTimes, ...]


def agree(report: StepReport, world: ProcessGroup) -> StepReport:
    """Sum the reports of all ranks; `times` then has one entry per rank."""
    if world.size == 1:
        return report
    vector = torch.zeros(_FLAGS + _PER_RANK * world.size, dtype=torch.float64)
    flags = (report.bad, report.stop, report.save, report.save_failed, report.slow_saves, report.saving, report.look)
    told = [report.loss_sum, report.norm, *flags, report.micro_batches]
    vector[:_FLAGS] = torch.tensor(told, dtype=torch.float64)
    own = report.times[0]
    start = _FLAGS + _PER_RANK * world.rank
    vector[start : start + _PER_RANK] = torch.tensor(
        [own.data_s, own.compute_s, own.wait_s, float(own.memory_bytes)], dtype=torch.float64
    )
    dist.all_reduce(vector)
    values = vector.tolist()
    times = tuple(
        RankTimes(data_s=data, compute_s=compute, wait_s=wait, memory_bytes=int(memory))
        for data, compute, wait, memory in zip(*(iter(values[_FLAGS:]),) * _PER_RANK, strict=True)
    )
    bad, stop, save, save_failed, slow_saves, saving, look, micro_batches = (int(value) for value in values[2:_FLAGS])
    return StepReport(
        loss_sum=values[0],
        norm=values[1],
        bad=bad,
        stop=stop,
        save=save,
        save_failed=save_failed,
        slow_saves=slow_saves,
        saving=saving,
        look=look,
        micro_batches=micro_batches,
        times=times,
    )


def gather(value: float, world: ProcessGroup) -> list[float]:
    """One number of every rank, by rank; collective."""
    if world.size == 1:
        return [value]
    vector = torch.zeros(world.size, dtype=torch.float64)
    vector[world.rank] = value
    dist.all_reduce(vector)
    return vector.tolist()


def gather_text(text: str, world: ProcessGroup) -> list[str]:
    """A text of any length of every rank, by rank; collective."""
    if world.size == 1:
        return [text]
    own = text.encode()
    lengths = [int(length) for length in gather(float(len(own)), world)]
    row = torch.zeros(max(1, *lengths), dtype=torch.uint8)
    row[: len(own)] = torch.tensor(list(own), dtype=torch.uint8)
    rows = [torch.empty_like(row) for _ in lengths]
    dist.all_gather(rows, row)
    return [bytes(each[:length].numpy()).decode() for each, length in zip(rows, lengths, strict=True)]
