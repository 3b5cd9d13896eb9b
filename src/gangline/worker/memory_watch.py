"""Memory of this process, and the memory watch: whether ranks need what the plan predicted.

It compares once per attempt, after its first steps, and on GPUs only, where tensors are counted; what a process on a
CPU needs besides is not known well enough. Peaks until then count: later samples may be longer, so a need below the
prediction is reported only where it is much less.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from gangline.runs.gang import GangRank
from gangline.units import format_bytes
from gangline.worker.agree import RankTimes
from gangline.worker.process_group import ProcessGroup
from gangline.worker.run_io import RunIO


def memory_bytes(device: torch.device) -> int:
    """Peak of the allocator on a GPU; resident memory of the process now on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def return_freed() -> None:
    """Let the system have what was freed: glibc keeps pieces of less than 32 MiB for the next ones of their kind."""
    with suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


AFTER = 10
"""Steps of an attempt."""
MORE, LESS = 0.10, 0.25
"""So far above or below what was planned it is told."""


class MemoryWatch:
    """Compares the memory of all ranks of one attempt with the plan's."""

    def __init__(self, world: ProcessGroup, outlets: RunIO) -> None:
        self._ranks = world.gang.ranks
        self._out = outlets
        self._steps = 0

    def look(self, times: Sequence[RankTimes], *, step: int) -> None:
        """Take in a step; times: of every rank."""
        self._steps += 1
        if self._steps != AFTER:
            return
        for number, what in remarks(self._ranks, [each.memory_bytes for each in times]).items():
            self._out.event("memory-off", step=step, rank=number, host=self._ranks[number].host, what=what)


def remarks(ranks: Sequence[GangRank], memory_bytes: Sequence[int]) -> dict[int, str]:
    """What there is to say, by rank: of those that need more the one that needs most more, else of those far below."""
    off = {
        number: memory / rank.planned_bytes - 1
        for number, (rank, memory) in enumerate(zip(ranks, memory_bytes, strict=True))
        if rank.planned_bytes
    }
    most = max(off, key=lambda number: off[number], default=None)
    if most is None or -LESS <= off[most] <= MORE:
        return {}
    advice = "it may not suffice for longer samples" if off[most] > 0 else "there is room for larger micro-batches"
    needs, planned = format_bytes(memory_bytes[most]), format_bytes(ranks[most].planned_bytes or 0)
    who = f"rank {most} on {ranks[most].host}"
    return {most: f"{who} needs {needs} for tensors, and {planned} were planned ({100 * off[most]:+.0f} %): {advice}"}
