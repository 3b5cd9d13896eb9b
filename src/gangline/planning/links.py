"""How long a message takes: latency and bandwidth of a link, as measured or as catalogued, and rings over links. Pure.

The model is alpha + bytes / bandwidth per message. Of N ranks on a ring, with S bytes and every link busy at once:

    all-reduce                     2(N-1) alpha + 2(N-1)/N S / bandwidth
    all-gather, reduce-scatter      (N-1) alpha +  (N-1)/N S / bandwidth
    broadcast (a chain), send        alpha + S / bandwidth

A ring is as fast as its slowest link, for all of them carry the same bytes. Ranks of one host are neighbours on it, so
that it leaves and enters a host once; a switch port is full-duplex, so both directions go on at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gangline.planning.traffic import Backend, Exchange, Operation, collective_bytes, edges

GLOO_COPY_S = 1e-9
"""Per byte of the buffer. Gloo sums in an all_reduce while data comes in, but an all_gather and a reduce_scatter copy
from a buffer of their own afterwards (measured: 1.0 to 1.5 ns, torch 2.13 on two busy processors)."""
Point = tuple[float, float]
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

    def seconds(self, num_bytes: float) -> float:
        """Of one message."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The links of a gang: a network between hosts, and what is inside them."""

    slots: tuple[int, ...]
    """Ranks of every host, in rank order."""
    wire: LinkModel
    """Between hosts: the slowest way of the ring."""
    inside: LinkModel
    """Between ranks of one host."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(self.slots)


def num_messages(operation: Operation, world_size: int, *, backend: Backend = "nccl") -> int:
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


def fit_all_reduce(points: Sequence[Point], world_size: int, *, source: str) -> LinkModel | None:
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
