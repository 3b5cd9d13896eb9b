"""Who does how much of a step: by the speeds that the cluster tells, or by those that were measured. Pure."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from gangline.runs.cluster import Cluster, Host
from gangline.runs.gang import nearby, shares_by_time, split_whole, whole_count, whole_counts

MOST_STAGES = 6
"""Stages of a pipeline whose layers are named one by one."""


def rank_hosts(cluster: Cluster) -> tuple[Host, ...]:
    """The host of every rank: a host's ranks are adjacent, and the head has rank 0."""
    return tuple(host for host in cluster.hosts for _ in range(host.slots))


def rank_weights(cluster: Cluster) -> tuple[float, ...]:
    """The speed of every rank relative to the others: a host's `share` over its slots, 1 per slot where none is set."""
    return tuple(1.0 if host.share is None else host.share / host.slots for host in rank_hosts(cluster))


def rank_shares(cluster: Cluster, num_micro_batches: int) -> tuple[int, ...]:
    """Micro-batches of a full step for every rank; they sum to `num_micro_batches`."""
    return split_whole(num_micro_batches, rank_weights(cluster))


def host_shares(cluster: Cluster, num_micro_batches: int) -> tuple[int, ...]:
    """The same where the ranks of a host do the same micro-batches: each has what its host has."""
    weights: dict[str, float] = {}
    for host, weight in zip(rank_hosts(cluster), rank_weights(cluster), strict=True):
        weights[host.name] = weights.get(host.name, 0.0) + weight
    by_host = dict(zip(weights, split_whole(num_micro_batches, list(weights.values())), strict=True))
    return tuple(by_host[host.name] for host in rank_hosts(cluster))


def ceiling(seconds: Sequence[float], num_micro_batches: int) -> float:
    """Part of the sum of all speeds that a batch reaches for which only computation takes time: above 0, at most 1.

    seconds: of a micro-batch, by rank. With k_r micro-batches on the rank r, split so that the last one to finish does
    so as early as possible, and B / m of them in all:

        ceiling(B) = (B / m) / (max_r(k_r t_r) * sum_r(1 / t_r))
    """
    shares = shares_by_time(seconds, num_micro_batches)
    last_s = max(share * each for share, each in zip(shares, seconds, strict=True))
    return num_micro_batches / (last_s * math.fsum(1 / each for each in seconds))


def stages_named(stages: Sequence[int]) -> str:
    """Layers of every pipeline stage, for people: "13/10/17", of many "4/4/4/.../2"."""
    if len(stages) <= MOST_STAGES:
        return "/".join(map(str, stages))
    return f"{'/'.join(map(str, stages[:3]))}/.../{stages[-1]}"


def rows_named(rows: Sequence[Sequence[int]]) -> str:
    """Layers of every pipeline, for people: "13/10/17", "13/10 + 9/14", and of such as are cut alike "16/16 x 2"."""
    if len(set(rows)) == 1 and len(rows) > 1:
        return f"{stages_named(rows[0])} x {len(rows)}"
    more = f" + {len(rows) - 2} more" if len(rows) > 2 else ""
    return " + ".join(map(stages_named, rows[:2])) + more


# Which batch divides well among machines of unlike speeds, near the one that the job wishes for. Pure.


CLOSE = 0.99
"""Of two batches that are less than 1 % apart the one nearer to the wish is taken."""
BADLY = 0.98
"""Below that a word is said of a batch that the job gives exactly."""
MOST_SHARES = 6
"""Ranks whose shares are named one by one."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherBatch:
    """A batch that was not taken."""

    batch: int
    ceiling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dividing:
    """How well a batch divides among the ranks."""

    batch: int
    """Samples of a step."""
    about: int | None
    """What the job wishes for; None: it says exactly how many."""
    shares: tuple[int, ...]
    """Micro-batches by rank."""
    ceiling: float | None
    """Part of what the ranks' speeds allow; None where they are not known, or do not decide."""
    equal: bool = False
    """Shares are equal, whatever the speeds: N times the slowest is the most that the ranks can reach."""
    others: tuple[OtherBatch, ...] = ()
    """Where the batch was chosen and is not the wish, the wish; where it divides badly, nearby ones that do better."""

    @property
    def is_bad(self) -> bool:
        """Whether an exact batch costs so much that a word is said."""
        return self.about is None and self.ceiling is not None and self.ceiling < BADLY

    @property
    def words(self) -> str:
        """What was chosen and why, or what is bad; empty where there is nothing to say."""
        if self.about is None:
            return self._complaint() if self.is_bad else ""
        wish = ", as the job says" if self.batch == self.about else f", about {self.about} as the job says"
        if self.ceiling is None:
            return f"batch {self.batch}{wish}: speeds are unknown"
        if len(self.shares) == 1:
            return f"batch {self.batch}{wish}: one rank does all of it"
        named = "its shares"
        if len(self.shares) <= MOST_SHARES:
            named = f"shares {'/'.join(map(str, self.shares))}"
        other = "".join(f"; {each.batch} would reach {_per_cent(each.ceiling)}" for each in self.others)
        return f"batch {self.batch}{wish}: {named} reach {_per_cent(self.ceiling)} of {self._whole}{other}"

    @property
    def _whole(self) -> str:
        return f"{len(self.shares)} times the slowest" if self.equal else "an exact division"

    def _complaint(self) -> str:
        low, high = nearby(self.batch)
        better = ", ".join(f"{each.batch} would reach {_per_cent(each.ceiling)}" for each in self.others)
        reached = f"badly: batch {self.batch} reaches {_per_cent(self.ceiling or 0.0)} of {self._whole}"
        return f"{reached}; {better or f'none from {low} to {high} does better'}"


def _per_cent(part: float) -> str:
    return f"{100 * part:.3g} %"


def best_count(seconds: Sequence[float], wish: int, micro_batch: int) -> int:
    """Micro-batches of the batch about `wish` that the ranks compute at the most samples per second.

    seconds: of a micro-batch, by rank. Of those that are less than 1 % slower than the best the one nearest to the wish
    is taken, and of two that are as near the better one.
    """
    counts, first = whole_counts(wish, micro_batch), whole_count(wish, micro_batch)
    if len(counts) < 2 or ceiling(seconds, first) > CLOSE:  # no other is so much better
        return first
    reached = dict(zip(counts, ceilings(seconds, counts), strict=True))
    return _nearest(reached, wish / micro_batch, least=max(reached.values()) * CLOSE)


def _nearest(reached: dict[int, float], wish: float, *, least: float) -> int:
    good = [count for count, part in reached.items() if part > least * (1 + _ROUNDING)]
    return min(good, key=lambda count: (abs(count - wish), -reached[count]))


def ceilings(seconds: Sequence[float], counts: range) -> list[float]:
    """`ceiling` of consecutive numbers of micro-batches, in one go: each further one goes where it is done first."""
    shares = shares_by_time(seconds, counts[0])
    speeds = math.fsum(1 / each for each in seconds)
    queue = [((share + 1) * each, each, share + 1) for share, each in zip(shares, seconds, strict=True)]
    heapq.heapify(queue)
    last_s = max(share * each for share, each in zip(shares, seconds, strict=True))
    found = [counts[0] / (last_s * speeds)]
    for count in counts[1:]:
        last_s, each, share = queue[0]
        heapq.heapreplace(queue, ((share + 1) * each, each, share + 1))
        found.append(count / (last_s * speeds))
    return found


def with_others(found: Dividing, seconds: Sequence[float], *, micro_batch: int) -> Dividing:
    """The same with what other batches would reach. seconds: of a micro-batch, by rank."""
    count = found.batch // micro_batch
    others: list[int] = []
    if found.is_bad:
        others = _better(seconds, count, batch=found.batch, micro_batch=micro_batch)
    elif found.about is not None and (wish := whole_count(found.about, micro_batch)) != count:
        others = [wish]
    told = tuple(OtherBatch(batch=each * micro_batch, ceiling=ceiling(seconds, each)) for each in others)
    return dataclasses.replace(found, others=told)


def _better(seconds: Sequence[float], count: int, *, batch: int, micro_batch: int) -> list[int]:
    """The nearest number of micro-batches that is 1 % better, and the one that would be chosen if it were free."""
    counts = whole_counts(batch, micro_batch)
    reached = dict(zip(counts, ceilings(seconds, counts), strict=True))
    if max(reached.values()) * CLOSE <= reached[count]:
        return []
    nearest = _nearest(reached, count, least=reached[count] / CLOSE)
    return list(dict.fromkeys([nearest, best_count(seconds, batch, micro_batch)]))
