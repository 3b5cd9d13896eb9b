"""The state of a checkpoint for ranks on hosts that do not have it: a rank that has read it sends it to them.

After a failure the hosts that are left have saved a step that the others lack. To copy files between hosts first takes
longer than all else that the way back consists of; ranks are connected anyway. The disks of those hosts have the next
step that is saved. Messages go through the machines' memory, over the CPU group (gloo), whatever the devices are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gangline.worker.buckets import in_lots, joined, spread
from gangline.worker.world import World


def lacks_state(world: World) -> bool:
    """Whether the step to go on from is not on this rank's host."""
    return world.host in world.gang.lacking


def give(tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], world: World) -> None:
    """Send what this rank has read to all that lack it, if it is the first rank that does not."""
    giver, receivers = _parties(world)
    if not receivers or world.rank != giver:
        return
    told = json.dumps(dict(state)).encode()
    for message in (torch.tensor([len(told)]), torch.frombuffer(bytearray(told), dtype=torch.uint8)):
        _send(message, receivers)
    for lot in in_lots(tensors.values()):
        _send(joined(lot).cpu(), receivers)


def give_lot(tensors: Mapping[str, torch.Tensor], world: World) -> None:
    """Send some whole tensors, as `give` sends all of them."""
    giver, receivers = _parties(world)
    if receivers and world.rank == giver:
        _send(joined(list(tensors.values())), receivers)


def receive_lot(like: Mapping[str, torch.Tensor], world: World) -> dict[str, torch.Tensor]:
    """New tensors of the same names, shapes and format, as `give_lot` sends them."""
    giver, _ = _parties(world)
    row = torch.empty(sum(tensor.numel() for tensor in like.values()), dtype=next(iter(like.values())).dtype)
    dist.recv(row, src=giver)
    parts = row.split([tensor.numel() for tensor in like.values()])
    return {name: part.view(like[name].shape) for name, part in zip(like, parts, strict=True)}


def receive(tensors: Mapping[str, torch.Tensor], world: World) -> dict[str, Any]:
    """Fill `tensors` in place, and give back the state that was saved with them; see `restore.load_part`."""
    giver, _ = _parties(world)
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, src=giver)
    told = torch.zeros(int(length.item()), dtype=torch.uint8)
    dist.recv(told, src=giver)
    for lot in in_lots(tensors.values()):
        row = torch.empty(sum(tensor.numel() for tensor in lot), dtype=lot[0].dtype)
        dist.recv(row, src=giver)
        spread(row, lot)
    state: dict[str, Any] = json.loads(bytes(told.tolist()))
    return state


def _parties(world: World) -> tuple[int, list[int]]:
    """The rank that sends, and those that get."""
    lacking = [rank for rank, each in enumerate(world.gang.ranks) if each.host in world.gang.lacking]
    return next(rank for rank in range(world.size) if rank not in lacking), lacking


def _send(message: torch.Tensor, receivers: list[int]) -> None:
    for work in [dist.isend(message, dst=rank) for rank in receivers]:
        assert work is not None
        work.wait()
