"""What the ranks of one host hold of the trained state, brought together in one of them, which saves it.

Nothing leaves the host: ranks send their pieces to the first of it, as many megabytes at a time as `lots` says, over
the CPU group (gloo). It is done between two steps by the threads that train, so whatever ends a wait of a step that has
lost a rank ends this one, too (`worker.cut`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from gangline.worker.buckets import in_lots
from gangline.worker.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A block of one tensor of the state."""

    name: str
    tensor: torch.Tensor
    offsets: tuple[int, ...]
    """Where in the whole tensor it begins."""
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """The same for two copies of one piece."""
        return self.name, self.offsets

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its tensor."""
        return tuple(self.tensor.shape) == self.shape


def own_pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
    """What this rank has: the live tensors."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            yield Piece(name=name, tensor=tensor.detach(), offsets=(0,) * tensor.ndim, shape=tuple(tensor.shape))
            continue
        local = tensor.detach().to_local()
        if local.numel():
            _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            yield Piece(name=name, tensor=local, offsets=tuple(offsets), shape=tuple(tensor.shape))


def of_host(tensors: Mapping[str, torch.Tensor], world: World) -> Iterator[Piece]:
    """All pieces of this host, each once: this rank's own, which are live, and then those of its other ranks.

    For the first rank of a host, while the others `send`. Of what others have one lot is held at a time.
    """
    seen: set[object] = set()
    for piece in own_pieces(tensors):
        seen.add(piece.key)
        yield piece
    for rank in _others(world):
        for piece in _received(rank):
            if piece.key not in seen:
                seen.add(piece.key)
                yield piece


def send(tensors: Mapping[str, torch.Tensor], world: World) -> None:
    """Give this rank's pieces to the first rank of its host."""
    first = _ranks_here(world)[0]
    pieces = list(own_pieces(tensors))
    text = json.dumps([[p.name, _word(p.tensor.dtype), list(p.tensor.shape), p.offsets, p.shape] for p in pieces])
    told = bytearray(text.encode())
    dist.send(torch.tensor([len(told)]), dst=first)
    dist.send(torch.frombuffer(told, dtype=torch.uint8), dst=first)
    left = iter(pieces)
    for lot in in_lots([_like(piece.tensor.dtype, piece.tensor.shape) for piece in pieces]):
        dist.send(torch.cat([next(left).tensor.reshape(-1).cpu() for _ in lot]), dst=first)


def _received(rank: int) -> Iterator[Piece]:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, src=rank)
    told = torch.zeros(int(length.item()), dtype=torch.uint8)
    dist.recv(told, src=rank)
    rows = json.loads(told.numpy().tobytes())
    left = iter(rows)
    for lot in in_lots([_like(getattr(torch, dtype), shape) for _, dtype, shape, _, _ in rows]):
        row = torch.empty(sum(each.numel() for each in lot), dtype=lot[0].dtype)
        dist.recv(row, src=rank)
        for part in row.split([each.numel() for each in lot]):
            name, _, shape, offsets, whole = next(left)
            yield Piece(name=name, tensor=part.view(shape), offsets=tuple(offsets), shape=tuple(whole))


def _like(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Without numbers: both ends cut their lots by such, whatever device a piece is on."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _ranks_here(world: World) -> list[int]:
    return [rank for rank, each in enumerate(world.gang.ranks) if each.host == world.host]


def _others(world: World) -> list[int]:
    return [rank for rank in _ranks_here(world) if rank != world.rank]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
