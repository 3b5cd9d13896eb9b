"""Formulas of the planner and the ranks: how tensors are divided, when stages work and how gradients are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Along which of its dimensions a tensor is divided among ranks: what the plan counts and the worker does.


def shard_dimension(shape: Sequence[int], parts: int) -> int:
    """The first one, but for experts: the first that is divided evenly, if there is one.

    Rows of a matrix are many, and one more on some ranks is nothing. The first dimension of experts that lie in one
    tensor is their number: 8 of them over 12 ranks would be one on each of 8 ranks, none on the others, and FSDP2 sends
    what is missing as zeros. It divides no other dimension unevenly.
    """
    if len(shape) < 3 or shape[0] % parts == 0:
        return 0
    return next((place for place, size in enumerate(shape) if size % parts == 0), 0)


def padded(shape: Sequence[int], parts: int) -> int:
    """Numbers of all parts, each as large as the largest."""
    place, numbers = shard_dimension(shape, parts), 1
    for each, size in enumerate(shape):
        numbers *= -(-size // parts) * parts if each == place else size
    return numbers


# What the stages of a pipeline do when, and how long that takes: 1F1B. Pure.
#
# A stage begins with some micro-batches forward, and then does one backward and one forward in turn (Narayanan et
# al., PipeDream, 2019; Megatron-LM, 2021). With as many at the beginning as there are stages behind it, it holds the
# activations of the fewest that keep all stages busy, if sending takes no time. Where it does, a micro-batch comes
# back late, and everybody waits; with twice as many what travels is hidden (Zhuang et al., On Optimizing the
# Communication of Model Parallelism, 2022, call that eager 1F1B).


def ahead(number: int, stages: int, *, eager: bool) -> int:
    """Micro-batches that stage `number` of so many does forward before its first backward."""
    return (2 if eager else 1) * (stages - 1 - number)


def step_s(
    forward: Sequence[float], backward: Sequence[float], *, send_s: float, micro_batches: int, eager: bool
) -> float:
    """Seconds until all micro-batches have gone through and come back.

    forward, backward: of one micro-batch, by stage; send_s: between two stages, each way. It is the longest of what
    cannot be shorter: each link one tensor at a time; each stage all its work, after its first micro-batch has come and
    until its last has gone back, and idle while the first one is on its way behind it and nothing else is to be done;
    each stage's round, for no more than its number on the way can come back in the time that one takes. Against the
    schedule played event by event it is within 5 % with `eager`, and within 10 % without.
    """
    stages, k = len(forward), micro_batches
    both = [one + other for one, other in zip(forward, backward, strict=True)]
    row_s = sum(both) + 2 * (stages - 1) * send_s
    longest = row_s + ((k - 1) * send_s if stages > 1 else 0.0)
    before_s = 0.0
    for number, each_s in enumerate(both):
        behind_s = row_s - before_s - each_s
        most = ahead(number, stages, eager=eager)
        idle_s = max(0.0, behind_s - min(k - 1, most) * forward[number])
        longest = max(longest, before_s + k * each_s + idle_s)
        if k > most + 1:
            longest = max(longest, row_s + (k - 1) * (each_s + behind_s) / (most + 1))
        before_s += each_s + 2 * send_s
    return longest


# In how many pieces gradients travel, so that their exchange hides behind backward. Pure; plan and ranks both use it.
#
# Only the last backward pass of a step can hide an exchange. Of R bytes in n buckets, one all-reduce takes
#
#     c = latency + R/n * seconds per byte
#
# A rank that ends its computation at T after a backward of B seconds has bucket j of n ready at T - B (1 - j/n): the
# first one B (1 - 1/n) before the end, the last one at the end. An all-reduce begins when the slowest rank is ready
# and the one before is through. Both are linear in j, so either the first bucket decides, behind which all others
# queue, or the last one, which nothing hides:
#
#     end = max(T - B (1 - 1/n) + n c, T + c)           over all ranks
#
# Where t bytes are ready last and together (the embedding table of a full fine-tune), the n buckets are all in front
# of it: bucket j of n + 1 is ready at T - B (1 - j/(n+1)), and T + latency + t * seconds per byte is the least. More
# buckets hide more, but each costs its latency, and a moment of the processor.


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
