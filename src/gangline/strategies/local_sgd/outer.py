"""The outer step of local SGD: hosts send what their weights have changed by, and all move by the weighted mean.

The mean is made in two halves. Each host owns an equal part of the values: it gets that part of everyone's change
(all-to-all), adds up, rounds the mean, and sends it to all (all-gather). So a host sends 2 (N - 1) / N of the rounded
values, and every host applies the very same bits: replicas stay equal, whatever machines they lie on.

Anchor and momentum lie in the memory of the machine, not of its GPU, and only on the first rank of a host: they are
needed once per round, and the wire is slower than the way there by far.

What changes of weights look like on a slow wire: rounded to few bytes, in rows of bytes that any backend sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from gangline.runs.job import StrategyJob

CHUNK = 4 << 20
"""Values that are on their way at once: 16 MiB in fp32."""
AHEAD = 2
"""Chunks between all-to-all and all-gather: the wire is not idle while one is added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePeers:
    """Who exchanges with whom."""

    index: int
    """Of this host."""
    leaders: Sequence[int]
    """Global rank of every host's first rank: these talk to each other."""
    is_leader: bool
    among_leaders: dist.ProcessGroup | None = None
    """None where the first ranks of hosts are all ranks there are."""
    inside: dist.ProcessGroup | None = None
    """The ranks of this host; None where it has one only."""

    @property
    def count(self) -> int:
        """Number of hosts."""
        return len(self.leaders)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Values [start, stop) of a flattened parameter."""

    name: str
    start: int
    stop: int


_Chunk = Sequence[_Piece]


@dataclass(slots=True)
class _Sent:
    """A chunk between the two halves of its exchange."""

    chunk: _Chunk
    num_values: int
    received: torch.Tensor
    """Bytes [hosts, row]: this host's part of everyone's change."""
    work: dist.Work


class Outer:
    """Anchor and momentum of one rank, and the exchange that moves them."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, job: StrategyJob, hosts: ExchangePeers) -> None:
        self._parameters = dict(parameters)
        self._job = job
        self.hosts = hosts
        first = next(iter(self._parameters.values()))
        self._device = first.device
        self._dtype = torch.promote_types(first.dtype, torch.float32)
        self._anchor: dict[str, torch.Tensor] = {}
        self._momentum = self._zeros() if hosts.is_leader else {}
        self.sent_bytes = 0
        """By this rank to other hosts, in the last exchange."""

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds: `outer.<parameter>.momentum`. The anchor is the weights themselves then.

        A rank that is not the first of its host has none: it gets memory to load into, and forgets it.
        """
        momentum = self._momentum if self.hosts.is_leader else self._zeros()
        return {f"outer.{name}.momentum": tensor for name, tensor in momentum.items()}

    def anchor(self) -> None:
        """Take the weights as they are for what all hosts agree on."""
        if self.hosts.is_leader:
            self._anchor = {name: self._flat(name).to("cpu", copy=True) for name in self._parameters}

    def exchange(self, weights: Sequence[float], *, waiting: Callable[[], None] = lambda: None) -> None:
        """Move all hosts to the outer step's result. weights: of every host's change; 0: it is left out.

        Where no host has any weight, all go back to the anchor, and the momentum stays as it is. Collective. `waiting`
        is called after every chunk: an exchange over a slow wire is long, and no hang.
        """
        self.sent_bytes = 0
        moving = sum(weights) > 0
        for chunk in self._averaged(weights) if moving and self.hosts.is_leader else self._chunks():
            if self.hosts.is_leader and not moving:
                self._put_back(chunk)
            self._share_inside(chunk)
            waiting()

    def _averaged(self, weights: Sequence[float]) -> Iterator[_Chunk]:
        """Every chunk, once it has been moved."""
        if self.hosts.count == 1:
            for chunk in self._chunks():
                self._move(chunk, self._change(chunk))
                yield chunk
            return
        total = sum(weights)
        parts = [weight / total for weight in weights]
        sent: deque[_Sent] = deque()
        for chunk in self._chunks():
            sent.append(self._send(chunk, counts=parts[self.hosts.index] > 0))
            if len(sent) == AHEAD:
                yield self._finish(sent.popleft(), parts)
        while sent:
            yield self._finish(sent.popleft(), parts)

    def _send(self, chunk: _Chunk, *, counts: bool) -> _Sent:
        """Begin the first half. counts: whether this host's change is used; it may not be finite otherwise."""
        change = self._change(chunk)
        num_values, hosts = len(change), self.hosts.count
        part = -(-num_values // (hosts * BLOCK)) * BLOCK
        padded = torch.zeros(hosts * part, dtype=self._dtype, device=self._device)
        if counts:
            padded[:num_values] = change
        outgoing = encode(padded.view(hosts, part), self._job.payload).to("cpu")
        received = torch.empty_like(outgoing)
        work = dist.all_to_all_single(received, outgoing, group=self.hosts.among_leaders, async_op=True)
        self.sent_bytes += 2 * (hosts - 1) * row_bytes(part, self._job.payload, self._dtype)
        return _Sent(chunk, num_values, received, work)

    def _finish(self, sent: _Sent, parts: Sequence[float]) -> _Chunk:
        """Add up what came, send the mean, and move by what all have got."""
        sent.work.wait()
        changes = decode(sent.received.to(self._device), self._job.payload, dtype=self._dtype)
        by_host = torch.tensor(parts, dtype=self._dtype, device=self._device)
        mean = (changes * by_host[:, None]).sum(dim=0, keepdim=True)
        own = encode(mean, self._job.payload).to("cpu")
        gathered = sent.received  # its content has been used
        dist.all_gather(list(gathered.unbind()), own[0], group=self.hosts.among_leaders)
        moved = decode(gathered.to(self._device), self._job.payload, dtype=self._dtype).view(-1)
        self._move(sent.chunk, moved[: sent.num_values])
        return sent.chunk

    def _change(self, chunk: _Chunk) -> torch.Tensor:
        """Anchor minus weights, [values of the chunk]: what an outer optimizer takes for a gradient."""
        return torch.cat(
            [
                self._piece(self._anchor, piece).to(self._device, self._dtype)
                - self._flat(piece.name)[piece.start : piece.stop].to(self._dtype)
                for piece in chunk
            ]
        )

    def _move(self, chunk: _Chunk, gradient: torch.Tensor) -> None:
        """SGD with Nesterov momentum, as torch.optim.SGD does it.

        Products and sums apart, so that no machine contracts them to one operation and rounds otherwise than another.
        """
        outer, begin = self._job.outer, 0
        for piece in chunk:
            part = gradient[begin : begin + piece.stop - piece.start]
            begin += len(part)
            step = part * outer.learning_rate
            if outer.momentum:
                kept = self._piece(self._momentum, piece)
                momentum = (kept.to(self._device) * outer.momentum).add_(part)
                kept.copy_(momentum)
                step = momentum.mul_(outer.momentum).add_(part).mul_(outer.learning_rate)
            anchor = self._piece(self._anchor, piece)
            weights = self._flat(piece.name)[piece.start : piece.stop]
            weights.copy_(anchor.to(self._device, self._dtype).sub_(step))
            anchor.copy_(weights)

    def _put_back(self, chunk: _Chunk) -> None:
        for piece in chunk:
            self._flat(piece.name)[piece.start : piece.stop].copy_(self._piece(self._anchor, piece))

    def _share_inside(self, chunk: _Chunk) -> None:
        """From the first rank of this host to its others, which wait for it: no rank is ahead by more than a chunk."""
        if self.hosts.inside is None:
            return
        weights = [self._flat(piece.name)[piece.start : piece.stop] for piece in chunk]
        joined = torch.cat(weights)
        dist.broadcast(joined, src=self.hosts.leaders[self.hosts.index], group=self.hosts.inside)
        for target, source in zip(weights, joined.split([len(each) for each in weights]), strict=True):
            target.copy_(source)
        if self._device.type == "cuda" and not self.hosts.is_leader:
            torch.cuda.synchronize(self._device)

    def _chunks(self) -> Iterator[_Chunk]:
        """All trained values, in chunks of CHUNK; large tensors are cut, small ones put together."""
        chunk: list[_Piece] = []
        room = CHUNK
        for name, parameter in self._parameters.items():
            start, size = 0, parameter.numel()
            while start < size:
                stop = min(size, start + room)
                chunk.append(_Piece(name, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    yield chunk
                    chunk, room = [], CHUNK
        if chunk:
            yield chunk

    def _zeros(self) -> dict[str, torch.Tensor]:
        if not self._job.outer.momentum:
            return {}
        return {name: torch.zeros(each.shape, dtype=self._dtype) for name, each in self._parameters.items()}

    def _flat(self, name: str) -> torch.Tensor:
        return self._parameters[name].detach().view(-1)

    @staticmethod
    def _piece(tensors: Mapping[str, torch.Tensor], piece: _Piece) -> torch.Tensor:
        return tensors[piece.name].view(-1)[piece.start : piece.stop]


Payload = Literal["int8", "bf16", "fp32"]

BLOCK = 256
"""Values with one scale."""
LEVELS = 127
_LEAST = 1e-30
"""A block whose largest value is below it counts as zero: the inverse of its scale could overflow."""


def row_bytes(num_values: int, payload: Payload, dtype: torch.dtype) -> int:
    """Bytes of one encoded row. num_values: a multiple of BLOCK; dtype: of the values."""
    if payload == "int8":
        return num_values + 4 * (num_values // BLOCK)
    return num_values * (2 if payload == "bf16" else dtype.itemsize)


def encode(values: torch.Tensor, payload: Payload) -> torch.Tensor:
    """Rows of finite values [rows, n] as rows of bytes [rows, row_bytes], n a multiple of BLOCK.

    int8: the values of a row in whole 127ths of the largest of their block, then the fp32 scales of its blocks: no
    value is off by more than half a scale, which is a 254th of the largest. fp32: the values as they are.
    """
    if payload == "fp32":
        return values.contiguous().view(torch.uint8)
    if payload == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    rows = values.shape[0]
    blocks = values.reshape(rows, -1, BLOCK)
    largest = torch.linalg.vector_norm(blocks, ord=torch.inf, dim=-1)
    inverse = torch.where(largest < _LEAST, 0.0, LEVELS / largest.clamp(min=_LEAST))
    levels = (blocks * inverse[..., None]).round_().to(torch.int8)
    scales = (largest / LEVELS).float()
    return torch.cat([levels.view(rows, -1).view(torch.uint8), scales.view(torch.uint8)], dim=1)


def decode(data: torch.Tensor, payload: Payload, *, dtype: torch.dtype) -> torch.Tensor:
    """The values [rows, n] of rows of bytes that `encode` made, in `dtype`, on the same device."""
    if payload == "fp32":
        return data.view(dtype)
    if payload == "bf16":
        return data.view(torch.bfloat16).to(dtype)
    rows, num_blocks = data.shape[0], data.shape[1] // (BLOCK + 4)
    levels = data[:, : num_blocks * BLOCK].view(torch.int8).reshape(rows, num_blocks, BLOCK)
    scales = data[:, num_blocks * BLOCK :].contiguous().view(torch.float32)
    return (levels.to(dtype) * scales.to(dtype)[..., None]).view(rows, -1)
