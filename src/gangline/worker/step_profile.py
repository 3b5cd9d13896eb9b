"""A few steps of a running job under torch's profiler, on all ranks, for `gangline profile`.

Rank 0 finds the order in the folder of the attempt, `profile.json`, and all ranks learn of it with the report of the
step, so they begin and end with the same steps. Each leaves `profile-<id>-<rank>.trace.json.gz` in the folder of the
attempt on its own host, and after it `profile-<id>-<rank>.json`, which says where the trace lies on its clock.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, record_function

from gangline.runs.files import read_json, write_json
from gangline.runs.profile_order import CLOCK, DATA, STEPS, ProfileOrder, rank_files
from gangline.worker.agree import gather_json
from gangline.worker.process_group import ProcessGroup

log = logging.getLogger(__name__)

_ROUNDS = 16
"""Questions to each rank for its clock; the one that came back fastest counts."""


def clock_offsets(world: ProcessGroup, clock: Callable[[], int] = time.time_ns) -> list[tuple[int, int]]:
    """By how many nanoseconds each rank's clock is ahead of rank 0's, and the most that this can be wrong; collective.

    A clock that is read between question and answer is rank 0's in the middle of both, give or take half of the way
    (Cristian, "Probabilistic clock synchronization", 1989). Other ranks than 0 get zeros.
    """
    found = [(0, 0)] * world.size
    for rank in range(1, world.size):
        told = torch.zeros(1, dtype=torch.int64)
        if world.rank == 0:
            found[rank] = _ask(rank, told, clock)
        elif world.rank == rank:
            for _ in range(_ROUNDS):
                dist.recv(told, src=0)
                told[0] = clock()
                dist.send(told, dst=0)
    return found


def _ask(rank: int, told: torch.Tensor, clock: Callable[[], int]) -> tuple[int, int]:
    best: tuple[int, int] | None = None
    for _ in range(_ROUNDS):
        asked = clock()
        dist.send(told, dst=rank)
        dist.recv(told, src=rank)
        back = clock()
        if best is None or back - asked < 2 * best[1]:
            best = int(told[0]) - (asked + back) // 2, (back - asked + 1) // 2
    assert best is not None
    return best


class StepProfile:
    """What one rank does about it. Steps are counted by the loop; nothing is done between them without an order."""

    def __init__(self, order: Path, world: ProcessGroup) -> None:
        """order: where it comes to, on the head; traces go beside it."""
        self._path = order
        self._world = world
        self._profiler: Any = None
        self._spans: list[Any] = []
        self._order = ProfileOrder(id="", steps=0)
        self._last_step = 0
        self._record: dict[str, Any] = {}

    def asked(self) -> int:
        """Steps to record, where rank 0 finds a new order; otherwise 0."""
        if self._world.rank != 0 or self._profiler is not None:
            return 0
        order = self._read()
        if order is None or order.id == self._order.id:
            return 0
        self._order = order
        return order.steps

    def _read(self) -> ProfileOrder | None:
        try:
            return ProfileOrder.of(read_json(self._path)) if self._path.exists() else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def ends_with(self, step: int) -> bool:
        """Whether the trace is written after that step."""
        return self._profiler is not None and step >= self._last_step

    def after(self, wanted: int, *, step: int) -> None:
        """Begin or end at this boundary, as all ranks have agreed. step: the one that was done last."""
        if self.ends_with(step):
            self._end(step)
        elif wanted and self._profiler is None:
            self._begin(wanted, step=step)

    @contextlib.contextmanager
    def data(self) -> Iterator[None]:
        """Around the reading of a batch."""
        with record_function(DATA) if self._profiler is not None else contextlib.nullcontext():
            yield

    def _begin(self, wanted: int, *, step: int) -> None:
        world = self._world
        self._order = ProfileOrder(id=gather_json(self._order.id, world)[0], steps=wanted)
        self._last_step = step + wanted
        offsets = clock_offsets(world)
        on_card = world.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        with record_function(CLOCK):
            marked = time.time_ns()
        self._record = {
            "rank": world.rank,
            "host": world.host,
            "device": world.device.type,
            "first_step": step + 1,
            "marked_ns": marked,
            "offsets_ns": offsets if world.rank == 0 else [],
        }
        self._spans = [record_function(STEPS)]
        self._spans[0].__enter__()
        log.info("recording steps %d to %d", step + 1, step + wanted)

    def _end(self, step: int) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        self._spans.pop().__exit__(None, None, None)
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        trace, record = (self._path.with_name(name) for name in rank_files(self._order.id, self._world.rank))
        error = ""
        try:
            profiler.export_chrome_trace(str(trace))
            trace.chmod(0o600)
        except (OSError, RuntimeError) as failure:  # a full disk; the run goes on
            error = f"{type(failure).__name__}: {failure}"
            log.error("the recorded steps cannot be written: %s", error)  # noqa: TRY400
        with contextlib.suppress(OSError):
            write_json(record, {**self._record, "last_step": step, "error": error})
