"""In how many pieces gradients travel, so that their exchange hides behind backward. Pure; plan and ranks both use it.

Only the last backward pass of a step can hide an exchange. Of R bytes in n buckets, one all-reduce takes

    c = latency + R/n * seconds per byte

A rank that ends its computation at T after a backward of B seconds has bucket j of n ready at T - B (1 - j/n): the
first one B (1 - 1/n) before the end, the last one at the end. An all-reduce begins when the slowest rank is ready and
the one before is through. Both are linear in j, so either the first bucket decides, behind which all others queue, or
the last one, which nothing hides:

    end = max(T - B (1 - 1/n) + n c, T + c)           over all ranks

Where t bytes are ready last and together (the embedding table of a full fine-tune), the n buckets are all in front of
it: bucket j of n + 1 is ready at T - B (1 - j/(n+1)), and T + latency + t * seconds per byte is the least. More buckets
hide more, but each costs its latency, and a moment of the processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BUCKET_S = 1e-4
"""Of the processor for each bucket: the hook, the call, the copy into a queue (measured: 0.06 to 0.15 ms)."""
SMALLEST_BYTES = 256 << 10
"""As they travel: below that a message is mostly latency on any network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """What an all-reduce over all ranks costs, as a line over its bytes."""

    latency_s: float
    per_byte_s: float

    def seconds(self, num_bytes: float) -> float:
        """Of one, alone on the network."""
        return self.latency_s + num_bytes * self.per_byte_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one rank computes in a step."""

    busy_s: float
    """All of it."""
    backward_s: float
    """The last backward pass, behind which an exchange can hide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """How gradients are cut."""

    count: int
    """Without those that are ready last and together."""
    num_bytes: int
    """Of one, as gradients are kept (not as they travel)."""
    exposed_s: float
    """What the exchange makes a step longer than the slowest rank's computation."""


def choose_buckets(
    num_bytes: int, wire: AllReduce, windows: Sequence[Window], *, tail_bytes: int = 0, packed: float = 1.0
) -> Buckets:
    """The cut that makes a step shortest.

    num_bytes: of all gradients, as they are kept. tail_bytes: of those, ready last and together. packed: bytes that
    travel for each of them (0.5: as bf16 instead of fp32). The count is a power of two, so that the noise of a
    measurement seldom changes it.
    """
    rest = num_bytes - tail_bytes
    most = max(1, int(rest * packed) // SMALLEST_BYTES)
    count, one_s = 1, exposed_s(1, num_bytes, wire, windows, tail_bytes=tail_bytes, packed=packed)
    while 2 * count <= most:
        two_s = exposed_s(2 * count, num_bytes, wire, windows, tail_bytes=tail_bytes, packed=packed)
        if two_s + count * BUCKET_S >= one_s:  # what a count costs is convex: beyond this it only rises
            break
        count, one_s = 2 * count, two_s
    return Buckets(count=count, num_bytes=max(1, -(-rest // count)), exposed_s=one_s)


def exposed_s(
    count: int,
    num_bytes: int,
    wire: AllReduce,
    windows: Sequence[Window],
    *,
    tail_bytes: int = 0,
    packed: float = 1.0,
) -> float:
    """What of the exchange is not hidden with `count` buckets; arguments as in `choose_buckets`."""
    each_s = wire.seconds((num_bytes - tail_bytes) / count * packed)
    early, last_s = (count, wire.seconds(tail_bytes * packed)) if tail_bytes else (count - 1, each_s)
    hidden = early / (early + 1)
    slowest_s = max(window.busy_s for window in windows)
    end_s = max(max(each.busy_s - hidden * each.backward_s + early * each_s, each.busy_s) for each in windows)
    return end_s + last_s - slowest_s
