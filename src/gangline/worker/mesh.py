"""Ranks as a table, a row for every host: sums that leave a host once."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gangline.worker.world import World

ACROSS, INSIDE = "replicate", "shard"
"""Ranks of the same place on all hosts; ranks of one host."""


def by_host(world: World) -> DeviceMesh:
    """[hosts, ranks of each], which is the same number on all of them; collective to make."""
    ranks = torch.arange(world.size).view(len(world.gang.hosts), -1)
    return DeviceMesh(world.device.type, ranks, mesh_dim_names=(ACROSS, INSIDE))


def sum_over(flat: torch.Tensor, mesh: DeviceMesh) -> None:
    """In place, over all ranks. Of two dimensions: each rank of a host sums a part of it across hosts."""
    if mesh.ndim == 1:
        dist.all_reduce(flat, group=mesh.get_group())
        return
    inside, size = mesh.get_group(INSIDE), mesh.size(1)
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % size)])
    part = torch.empty_like(padded[: len(padded) // size])
    dist.reduce_scatter_tensor(part, padded, group=inside)
    if mesh.size(0) > 1:
        dist.all_reduce(part, group=mesh.get_group(ACROSS))
    dist.all_gather_into_tensor(padded, part, group=inside)
    flat.copy_(padded[: len(flat)])
