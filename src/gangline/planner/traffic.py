"""What ranks send each other in one optimizer step, by strategy: operations, buffers, bytes. Pure.

The formulas are those of the strategies (`strategies/<kind>/plan.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gangline.planner.architecture import Architecture, Layer, lora_parameters
from gangline.planner.states import DOUBLE_SCALE_BYTES, PACKED_BYTES, ROW_SCALE_BYTES
from gangline.planner.training import Number, PlannedStrategy, Training

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"]
CollectiveBackend = Literal["nccl", "gloo"]
"""nccl: rings. gloo (torch 2.13, counted on the interface: tests/lab/test_traffic.py): rings, too, but a reduce_scatter
is a whole all_reduce of which each rank keeps its part, and the root of a broadcast sends the buffer log2(N) times."""
Among = Literal["world", "shard", "replicas", "next", "previous", "ends"]
"""Who takes part in one: all ranks; the neighbours that hold one copy; those with the same part of all copies; a rank
and the one after it (or before it) in its copy, everywhere at once; the first and the last rank of all copies."""
Hides = Literal["nothing", "in-layer", "last-backward", "forward-layer", "backward-layer", "stages"]
"""Behind which computation it can run: none; none, and a layer waits for it in every micro-batch; backward of a rank's
last micro-batch; the layer before (in forward or backward); other micro-batches of a pipeline."""

NF4_BYTES = PACKED_BYTES + DOUBLE_SCALE_BYTES
"""Of one weight, with the block scales quantised in their turn (QLoRA, "double quantisation")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One kind of collective, as often as a step does it."""

    what: str
    """For people: what travels."""
    operation: Operation
    num_bytes: int
    """Of one buffer: what a rank puts in (all_reduce, reduce_scatter, broadcast, send) or ends up with (all_gather)."""
    times: float
    """In one optimizer step."""
    ranks: int
    """That take part in one."""
    number: str
    """Format of the numbers: bf16, fp32, nf4, int8."""
    among: Among = "world"
    hides: Hides = "nothing"
    backend: CollectiveBackend = "nccl"

    @property
    def once_bytes(self) -> float:
        """Sent by one rank for one of them."""
        return collective_bytes(self.operation, self.num_bytes, self.ranks, backend=self.backend)

    @property
    def sent_bytes(self) -> float:
        """Sent by one rank in one step."""
        return self.times * self.once_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Everything that ranks exchange in one optimizer step."""

    world_size: int
    shard_size: int
    micro_batches: float
    exchanges: tuple[Exchange, ...] = ()

    @property
    def sent_bytes(self) -> float:
        """By the rank that sends most, in one step."""
        wire = wire_bytes(self, (1,) * self.world_size)
        return max(wire.between, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Bytes that ranks send in one optimizer step, by rank."""

    inside: tuple[float, ...]
    """To ranks of the same host."""
    between: tuple[float, ...]
    """To other hosts."""
    out: tuple[float, ...]
    """Of each host, over its network link."""


@dataclass(frozen=True, slots=True)
class TrafficQuery:
    """One way to run a job, whose exchanges are asked for."""

    architecture: Architecture
    training: Training
    strategy: PlannedStrategy
    micro_batches: float
    """Of every rank, in one step."""

    @property
    def size(self) -> int:
        """Ranks."""
        return self.strategy.world_size

    @property
    def kept(self) -> Number:
        """Format in which gradients travel."""
        return self.training.exchange or self.training.parameters


def collective_bytes(
    operation: Operation, num_bytes: float, world_size: int, *, backend: CollectiveBackend = "nccl"
) -> float:
    """What one rank sends for one operation (the root, for a broadcast); `num_bytes` as in `Exchange`."""
    if world_size < 2:
        return 0.0
    part = (world_size - 1) / world_size
    if operation == "all_reduce" or (operation == "reduce_scatter" and backend == "gloo"):
        return 2 * part * num_bytes
    if operation == "broadcast" and backend == "gloo":
        return math.ceil(math.log2(world_size)) * num_bytes
    return part * num_bytes if operation in {"all_gather", "reduce_scatter"} else num_bytes


def traffic(
    architecture: Architecture,
    training: Training,
    strategy: PlannedStrategy,
    *,
    micro_batches: float,
    backend: CollectiveBackend = "nccl",
) -> Traffic:
    """The exchanges of one optimizer step in which every rank does `micro_batches` (in a pipeline: all go through it).

    Where ranks do unequal numbers of them (ddp, local-sgd, zero-1) the bytes are the same. Raises ModelError for
    adapters that find no place in the model.
    """
    found: list[Exchange] = []
    if strategy.world_size > 1:
        every = strategy.half.traffic(TrafficQuery(architecture, training, strategy, micro_batches))
        found = [replace(each, backend=backend) for each in every if each.num_bytes and each.ranks > 1]
    return Traffic(
        world_size=strategy.world_size,
        shard_size=strategy.half.ring(strategy),
        micro_batches=micro_batches,
        exchanges=tuple(found),
    )


def wire_bytes(traffic: Traffic, slots: Sequence[int]) -> Wire:
    """Bytes by rank and host; `slots`: ranks of every host, in rank order, so that a host's ranks are neighbours.

    A ring over all ranks then leaves every host once, whatever the number of its ranks.
    """
    host_of = [host for host, count in enumerate(slots) for _ in range(count)]
    inside, between = [0.0] * traffic.world_size, [0.0] * traffic.world_size
    for exchange in traffic.exchanges:
        for source, target in edges(exchange.among, traffic.world_size, traffic.shard_size):
            kind = inside if host_of[source] == host_of[target] else between
            kind[source] += exchange.sent_bytes
    out = [0.0] * len(slots)
    for rank, host in enumerate(host_of):
        out[host] += between[rank]
    return Wire(inside=tuple(inside), between=tuple(between), out=tuple(out))


def edges(among: Among, world_size: int, shard_size: int) -> list[tuple[int, int]]:
    """Who sends to whom: (source, target) for every ring or pair of an exchange."""
    befores = [rank for rank in range(world_size) if (rank + 1) % shard_size]
    if among == "next":
        return [(rank, rank + 1) for rank in befores]
    if among == "previous":
        return [(rank + 1, rank) for rank in befores]
    rings: list[Sequence[int]] = [range(world_size)]
    if among == "ends":
        rings = [[rank for rank in range(world_size) if rank % shard_size in (0, shard_size - 1)]]
    elif among == "shard":
        rings = [range(first, first + shard_size) for first in range(0, world_size, shard_size)]
    elif among == "replicas":
        rings = [range(first, world_size, shard_size) for first in range(shard_size)]
    return [edge for ring in rings if len(ring) > 1 for edge in zip(ring, (*ring[1:], ring[0]), strict=True)]


def trained_weights(architecture: Architecture, training: Training) -> int:
    """Numbers that are trained: all, or those of the adapters. Raises ModelError if no adapter finds a place."""
    if training.method == "full":
        return architecture.num_parameters
    return lora_parameters(architecture, training.rank, training.targets, dora=training.dora)


def linear_bytes(layer: Layer, training: Training) -> float:
    """Of the quantised linears of one layer, scales included."""
    if training.bits == 8:
        return float(layer.linear_weights + layer.linear_rows * ROW_SCALE_BYTES)
    return layer.linear_weights * NF4_BYTES


# How long a message takes: latency and bandwidth of a link, as measured or as catalogued, and rings over links.
# Pure.


GLOO_COPY_S = 1e-9
"""Per byte of the buffer. Gloo sums in an all_reduce while data comes in, but an all_gather and a reduce_scatter copy
from a buffer of their own afterwards (measured: 1.0 to 1.5 ns, torch 2.13 on two busy processors)."""
MessageTime = tuple[float, float]
"""Bytes of a buffer, and the seconds that the operation took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """One direction of a link, as ranks see it."""

    latency_s: float
    """Of one message, whatever its size (alpha)."""
    bytes_per_s: float
    """Payload."""
    source: str
    """Where the figures come from, for people."""
    spread: float = 0.0
    """How far times may be off, as a part: the worst point of a fit, or what a catalogue leaves open."""
    warning: str = ""
    """Why the figures may mislead."""
    per_port: bool = False
    """Whether a server has one such port for each GPU, as those with NVLink have of InfiniBand (8 x 400 Gbit/s)."""

    def seconds(self, num_bytes: float) -> float:
        """Of one message."""
        return self.latency_s + num_bytes / self.bytes_per_s


HOST_LINK_BYTES_PER_S = 15e9
"""Between a card and its machine's memory, where the bus is not known: what cards behind PCIe 4.0 x16 pass on through
it (catalog/links). Copies alone may be faster; NOT VERIFIED for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The links of a gang: a network between hosts, and what is inside them."""

    slots: tuple[int, ...]
    """Ranks of every host, in rank order."""
    wire: LinkModel
    """Between hosts: the slowest way of the ring."""
    inside: LinkModel
    """Between ranks of one host."""
    host_bytes_per_s: float = HOST_LINK_BYTES_PER_S
    """Between a card and its machine's memory; of the slowest."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(self.slots)


def num_messages(operation: Operation, world_size: int, *, backend: CollectiveBackend = "nccl") -> int:
    """Messages one after the other, each of which costs the latency."""
    if world_size < 2:
        return 0
    if operation == "all_reduce" or (operation == "reduce_scatter" and backend == "gloo"):
        return 2 * (world_size - 1)
    return world_size - 1 if operation in {"all_gather", "reduce_scatter"} else 1


def exchange_s(exchange: Exchange, fabric: Fabric, *, shard_size: int) -> float:
    """Seconds of an exchange once, with all its rings (or pairs) at the same time.

    Rings that leave a host together share its link: eight cards that sum their parts across hosts, for instance.
    """
    host_of = [host for host, count in enumerate(fabric.slots) for _ in range(count)]
    ways = edges(exchange.among, fabric.world_size, shard_size)
    leaving, entering = [0] * len(fabric.slots), [0] * len(fabric.slots)
    stays = False
    for source, target in ways:
        if host_of[source] == host_of[target]:
            stays = True
        else:
            leaving[host_of[source]] += 1
            entering[host_of[target]] += 1
    crossing = max(*leaving, *entering)
    sent = exchange.once_bytes
    messages = num_messages(exchange.operation, exchange.ranks, backend=exchange.backend)
    latency_s = max(fabric.wire.latency_s if crossing else 0.0, fabric.inside.latency_s if stays else 0.0)
    wire_s = crossing * sent / fabric.wire.bytes_per_s
    inside_s = sent / fabric.inside.bytes_per_s if stays else 0.0
    copies = exchange.backend == "gloo" and exchange.operation in {"all_gather", "reduce_scatter"}
    return messages * latency_s + max(wire_s, inside_s) + (exchange.num_bytes * GLOO_COPY_S if copies else 0.0)


def fit_all_reduce(points: Sequence[MessageTime], world_size: int, *, source: str) -> LinkModel | None:
    """Latency and bandwidth from all-reduces of two sizes or more; None where that says nothing.

    Least squares of relative errors: a small message counts as much as a large one. Its spread is the worst of them.
    """
    if world_size < 2 or len({num_bytes for num_bytes, _ in points}) < 2:
        return None
    messages = num_messages("all_reduce", world_size)
    rows = [(float(messages), collective_bytes("all_reduce", size, world_size), seconds) for size, seconds in points]
    latency_s, per_byte_s = fit_two(rows)
    if per_byte_s <= 0:
        return None
    worst = max(abs(latency_s * a + per_byte_s * b - seconds) / seconds for a, b, seconds in rows)
    return LinkModel(latency_s=latency_s, bytes_per_s=1 / per_byte_s, source=source, spread=worst)


def slowest_of_ring(
    rates: Mapping[tuple[str, str], float], ring: Sequence[str], *, latency_s: float, source: str
) -> LinkModel | None:
    """The slowest way of a ring of hosts; rates: payload bytes per second of (from, to). None where none is known."""
    ways = zip(ring, (*ring[1:], ring[0]), strict=True) if len(ring) > 1 else ()
    known = [rates[way] for way in ways if way in rates]
    if not known:
        return None
    return LinkModel(latency_s=latency_s, bytes_per_s=min(known), source=source)


def fit_two(rows: Sequence[tuple[float, float, float]], scales: Sequence[float] | None = None) -> tuple[float, float]:
    """x, y >= 0 that make a*x + b*y come nearest to t, for rows of (a, b, t); errors count relative to the scales.

    Those are t itself if none are given.
    """
    scales = scales or [t for *_, t in rows]
    weighted = [(a / scale, b / scale, t / scale) for (a, b, t), scale in zip(rows, scales, strict=True)]
    aa, ab, bb, at, bt = (sum(row[i] * row[j] for row in weighted) for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2)))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        x, y = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
        if x >= 0 and y >= 0:
            return x, y
        if x < 0:
            return 0.0, max(0.0, bt / bb)
    return (max(0.0, at / aa), 0.0) if aa else (0.0, max(0.0, bt / bb))
