"""What a rank does in test_memory_watch."""

from __future__ import annotations

from dataclasses import replace

from gangline.worker.agree import NO_TIMES
from gangline.worker.memory_watch import MemoryWatch
from gangline.worker.rank_files import StopFlag
from gangline.worker.run_io import RunIO
from tests.train.small import Captured, make_world


def told(*, planned, memory, steps: int):
    """The events of an attempt whose ranks always need this memory."""
    world = make_world([1] * len(planned), rank=0)
    ranks = tuple(replace(rank, planned_bytes=each) for rank, each in zip(world.gang.ranks, planned, strict=True))
    world = replace(world, gang=replace(world.gang, ranks=ranks))
    captured = Captured([], [], [], [])
    watch = MemoryWatch(world, RunIO(recorder=captured, saver=None, stop=StopFlag()))
    for step in range(1, steps + 1):
        watch.look([replace(NO_TIMES, memory_bytes=each) for each in memory], step=step)
    return captured.events
