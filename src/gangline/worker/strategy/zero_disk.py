"""DeepSpeed's states of the optimizer on a disk of the host: what that takes is looked at before a model is loaded."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gangline.errors import UsageError
from gangline.runs.job import Job
from gangline.units import format_bytes
from gangline.worker.world import World

GROUP_NUMBERS = 100_000_000
"""Of what comes from the disk at once: four times as many numbers of fp32 are in memory."""
NUMBER_BYTES = 16
"""On the disk, of each number: fp32 weight, gradient, two moments."""


def on_disk(job: Job, world: World) -> dict[str, Any]:
    """What DeepSpeed is told of the disk; {} where there is none in the job."""
    folder = job.strategy.offload_to
    return {} if folder is None else {"device": "nvme", "nvme_path": str(_folder(folder, world))}


def require_operator(deepspeed: Any, job: Job) -> None:
    """Raise UsageError where states are to lie on a disk, and DeepSpeed's operator for it cannot be built or loaded."""
    if job.strategy.offload_to is None:
        return
    builder = deepspeed.ops.op_builder.AsyncIOBuilder()
    seen = "it does not fit this host: libaio and its headers are not found"
    try:
        if builder.is_compatible(verbose=False):
            builder.load(verbose=False)  # builds it where that was not done yet, for some minutes
            return
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        seen = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
    raise UsageError(
        "strategy.offload_to: DeepSpeed's operator async_io cannot be loaded",
        seen=seen,
        fix="install libaio-dev (libaio-devel), g++ and ninja on every host; or delete offload_to: states in memory",
    )


def require_room(job: Job, world: World, *, num_trained: int) -> None:
    """Raise UsageError where the folder is not there or cannot be written to, or the disk has no room; collective.

    What an attempt before this one has left there is deleted first.
    """
    if job.strategy.offload_to is None:
        return
    path = Path(job.strategy.offload_to)
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise UsageError(
            "strategy.offload_to: nothing can be written there",
            seen=f"{path} on {world.host} is {'not writable' if path.exists() else 'not there'}",
            fix="make the folder on every host for the user of the run, or delete offload_to",
        )
    ours = _folder(job.strategy.offload_to, world)
    if world.is_first_of_host:
        shutil.rmtree(ours, ignore_errors=True)
    dist.barrier()
    ours.mkdir(parents=True, exist_ok=True)
    needed = NUMBER_BYTES * -(-num_trained // world.size) * world.gang.num_ranks(world.host)
    free = shutil.disk_usage(path).free
    if free < needed:
        raise UsageError(
            "strategy.offload_to: the disk has no room for the optimizer's states",
            seen=f"{format_bytes(free)} in {path} on {world.host}; expected {format_bytes(needed)} for its ranks",
            fix="name a folder on a larger disk, add hosts, or delete offload_to",
        )


def clear(job: Job, world: World) -> None:
    """Delete this rank's files at the end of a run, and the folders of it that are empty then."""
    if job.strategy.offload_to is None:
        return
    place = _folder(job.strategy.offload_to, world) / "zero_stage_3" / "optimizer" / f"rank{world.rank}"
    shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):  # other ranks have theirs there
        for parent in place.parents[:4]:
            parent.rmdir()


def _folder(folder: str, world: World) -> Path:
    """Of this run and host: several hosts may have one disk."""
    return Path(folder) / f"gangline-{world.gang.run_id}" / world.host
