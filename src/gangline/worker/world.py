"""Joining the gang: process group, device, and the place of this rank in it."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from gangline.errors import RunFailed
from gangline.runs.gang import Gang
from gangline.worker.cut import connecting


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This rank's place in the gang."""

    gang: Gang
    rank: int
    device: torch.device

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.gang.world_size

    @property
    def host(self) -> str:
        """Name of this rank's host."""
        return self.gang.ranks[self.rank].host

    @property
    def is_head(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_first_of_host(self) -> bool:
        """Whether this rank writes its host's checkpoints."""
        return self.rank == next(index for index, rank in enumerate(self.gang.ranks) if rank.host == self.host)

    @property
    def shares(self) -> list[int]:
        """Micro-batches of a full step, by rank."""
        return [rank.share for rank in self.gang.ranks]


def join(gang: Gang) -> World:
    """Join the process group that torchrun prepared.

    Raises RunFailed when the number of processes is not the gang's: a run of another size would be another run.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size != gang.world_size:
        raise RunFailed(
            f"the gang of {gang.run_id} was started with another number of processes than planned",
            seen=f"expected {gang.world_size}, saw WORLD_SIZE={size}",
            fix="start it with `gangline train` or `gangline resume`, not by hand",
        )
    device = _own_device(gang.ranks[rank].device)
    if size > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and not gang.shares_gpus else "gloo"
        with connecting():
            dist.init_process_group(backend, timeout=timedelta(seconds=gang.collective_timeout_s))
    return World(gang=gang, rank=rank, device=device)


def leave(code: int) -> NoReturn:
    """End this process at once with an exit code.

    Not by returning: whoever drops the last reference to a gloo group (DDP's reducer, as a frame unwinds) joins the
    group's thread while holding the interpreter's lock, which that thread may need to let go of a tensor; one rank in
    a few hundred then never ends (torch 2.13). Files must be closed before.
    """
    if code == 0 and dist.is_initialized() and torch.cuda.is_available():  # of a broken gang it would wait for ever
        dist.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _own_device(index: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index %= torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
