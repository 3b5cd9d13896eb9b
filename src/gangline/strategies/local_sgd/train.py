"""Hosts that train apart for a round: inside a host gradients are exchanged in every step, between hosts once a round.

`rounds.py` moves hosts apart and together again; this file has the groups that talk to each other, and the state.
A collective that waits does not say which ranks are missing: `ArrivalKeys` does, by a key of every rank in the store.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import nn

from gangline.errors import RunFailed
from gangline.runs.job import StrategyJob
from gangline.strategies.ddp.train import Ddp
from gangline.worker import compat
from gangline.worker.batch import Batch
from gangline.worker.buckets import joined, spread
from gangline.worker.loss import CausalLoss
from gangline.worker.model import trainable
from gangline.worker.process_group import ProcessGroup
from gangline.worker.strategy import Strategy, StrategySetup

if TYPE_CHECKING:
    from gangline.worker.loop import Stepper, TrainingRun


# The outer step of local SGD: hosts send what their weights have changed by, and all move by the weighted mean.
#
# The mean is made in two halves. Each host owns an equal part of the values: it gets that part of everyone's change
# (all-to-all), adds up, rounds the mean, and sends it to all (all-gather). So a host sends 2 (N - 1) / N of the
# rounded values, and every host applies the very same bits: replicas stay equal, whatever machines they lie on.
#
# Anchor and momentum lie in the memory of the machine, not of its GPU, and only on the first rank of a host: they are
# needed once per round, and the wire is slower than the way there by far.
#
# What changes of weights look like on a slow wire: rounded to few bytes, in rows of bytes that any backend sends.


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
        row = joined(weights)
        dist.broadcast(row, src=self.hosts.leaders[self.hosts.index], group=self.hosts.inside)
        spread(row, weights)
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


LOOK_S = 0.01
"""How often a rank that waits for slower hosts looks whether they have come."""
LATE = 4.0
"""Rounds that a host may take while another takes one, before it counts as hung."""


class LocalSgd(Strategy):
    """The gradient of a host's own batch, and the exchange of hosts.

    For the ranks of one host it is as any strategy: what `forward_backward` leaves is the sum over these only.
    """

    min_ranks = 1
    replicated = False

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        world = setup.world
        self._patience_s = LATE * world.gang.collective_timeout_s * setup.job.strategy.inner_steps
        self._everyone = _everyone(world, patience_s=self._patience_s)
        self._arrivals = ArrivalKeys(world, self._everyone) if self._everyone else None
        self._hosts = _hosts(world)
        self._inside = self._hosts.inside
        self._inner = Strategy(setup) if self._inside is None else Ddp(setup, group=self._inside, narrows=False)
        self.keeps_gradients = self._inner.keeps_gradients
        self.outer: Outer

    def wrap(self, loss: CausalLoss) -> None:
        """Wrap for the ranks of a host, and make room for what hosts agree on."""
        super().wrap(loss)
        self._inner.wrap(loss)
        self.outer = Outer(trainable(loss.model), job=self.job.strategy, hosts=self._hosts)

    def stepper(self, run: TrainingRun) -> Stepper:
        """Rounds of inner steps."""
        from gangline.strategies.local_sgd.rounds import Rounds

        return Rounds(run, self)

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """Add one micro-batch; `last` of a rank completes the exchange inside its host."""
        return self._inner.forward_backward(batch, scale=scale, last=last)

    def join(self, *, last: bool) -> None:
        """Take part in a step of this host without any work of one's own."""
        self._inner.join(last=last)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The outer momentum."""
        return self.outer.state_tensors()

    def waited_s(self) -> float:
        """For the other ranks of this host, in its last step."""
        return self._inner.waited_s()

    def all_agree(self, value: bool) -> bool:
        """Whether it is so on every rank of this host; collective inside it."""
        if self._inside is None:
            return value
        flag = torch.tensor([int(value)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._inside)
        return bool(flag.item())

    def meet(
        self, row: Sequence[float], *, waiting: Callable[[], None] = lambda: None, limit_s: float = math.inf
    ) -> list[list[float]]:
        """A few numbers of every rank, by rank; collective.

        Whoever is early waits here for the slowest host, and calls `waiting` again and again meanwhile. Raises
        RunFailed that names who has not come, once that has taken `limit_s`, or longer than any round should.
        """
        if self._arrivals is None:
            return [list(row)]
        self._arrivals.arrive()
        limit_s = min(limit_s, self._patience_s)
        table = torch.zeros(self.world.size, len(row), dtype=torch.float64)
        table[self.world.rank] = torch.tensor(row, dtype=torch.float64)
        work = dist.all_reduce(table, group=self._everyone, async_op=True)
        started = time.monotonic()
        while not work.is_completed():
            if time.monotonic() > started + limit_s:
                raise _hung(self._arrivals.missing(), waited_s=limit_s)
            waiting()
            time.sleep(LOOK_S)
        work.wait()
        rows: list[list[float]] = table.tolist()
        return rows


def _everyone(world: ProcessGroup, *, patience_s: float) -> dist.ProcessGroup | None:
    """All ranks. The group waits for longer than `meet` does, which knows who has not come."""
    if world.size == 1:
        return None
    timeout = timedelta(seconds=patience_s + world.gang.collective_timeout_s + 2 * ANSWER_S)
    return dist.new_group(list(range(world.size)), backend="gloo", timeout=timeout)


def _hung(hosts: Sequence[str] | None, *, waited_s: float) -> RunFailed:
    """hosts: who has not come; None: not known."""
    seen = f"expected all hosts to end it at about the same time, waited {waited_s:.0f} s"
    if hosts is None:
        seen += "; who has not come cannot be known, for the head does not answer"
    elif not hosts:
        seen += "; all have come, but do not hear of each other"
    return RunFailed(
        f"{', '.join(hosts or ['a host'])} did not end a round of local SGD that others have ended",
        seen=seen,
        fix="see in the logs of that host what its ranks do; if it is only slower than planned, leave the shares to "
        "gangline, or write down smaller ones for it; the run goes on from its last checkpoint",
    )


def _hosts(world: ProcessGroup) -> ExchangePeers:
    """The groups that exist; all ranks make all of them, in the same order."""
    gang = world.gang
    ranks_of = {host: gang.ranks_on(host) for host in gang.hosts}
    leaders = [ranks[0] for ranks in ranks_of.values()]
    several = {host: ranks for host, ranks in ranks_of.items() if len(ranks) > 1}
    timeout = timedelta(seconds=gang.collective_timeout_s)
    groups = {host: dist.new_group(ranks, timeout=timeout) for host, ranks in several.items()}
    among = dist.new_group(leaders, backend="gloo", timeout=timeout) if several else None
    return ExchangePeers(
        index=gang.hosts.index(world.host),
        leaders=leaders,
        is_leader=world.is_first_of_host,
        among_leaders=among if world.is_first_of_host else None,
        inside=groups.get(world.host),
    )


ANSWER_S = 5.0
"""How long the store, which lies on the head, may take to answer; it may be the head that hangs."""


class ArrivalKeys:
    """One key of every rank in the store of the process group: how many meetings it has come to."""

    def __init__(self, world: ProcessGroup, group: dist.ProcessGroup) -> None:
        """Every rank makes one for the same group. group: all ranks."""
        self._world = world
        self._store = dist.PrefixStore(f"arrivals/{group.group_name}", compat.DEFAULT_STORE.get()())
        self._meeting = 0

    def arrive(self) -> None:
        """To the next meeting. Not worth a failure: without a store nobody can be named, and that is all."""
        self._meeting += 1
        with contextlib.suppress(RuntimeError):
            self._store.set(str(self._world.rank), str(self._meeting))

    def missing(self) -> list[str] | None:
        """Hosts with a rank that has not come to this meeting; None: the store does not answer."""
        found: list[list[str]] = []
        asking = threading.Thread(target=lambda: found.append(self._ask()), daemon=True)
        asking.start()
        asking.join(ANSWER_S)
        return found[0] if found else None

    def _ask(self) -> list[str]:
        ranks = self._world.gang.ranks
        return list(dict.fromkeys(each.host for rank, each in enumerate(ranks) if not self._has_come(rank)))

    def _has_come(self, rank: int) -> bool:
        key = str(rank)
        return self._store.check([key]) and int(self._store.get(key)) >= self._meeting
