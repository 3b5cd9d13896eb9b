"""Who does how much of a step: by the speeds that the cluster tells, or by those that were measured. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from gangline.runs.cluster import Cluster, Host
from gangline.runs.deal import shares_by_time, split_whole

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

    seconds: of a micro-batch, by rank. With k_r micro-batches on the rank r, dealt so that the last one to finish does
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


def split_layers(seconds: Sequence[float], num_layers: int, *, most: Sequence[int]) -> tuple[int, ...] | None:
    """Consecutive layers of every pipeline stage, so that the slowest stage is as fast as possible.

    seconds: of one layer, by rank; most: layers that a rank has memory for. Each rank gets one layer at least. None
    where the layers do not fit.
    """
    if len(seconds) > num_layers or min(most, default=0) < 1 or sum(most) < num_layers:
        return None
    stages = [1] * len(seconds)
    queue = [(2 * each, rank) for rank, each in enumerate(seconds) if most[rank] > 1]
    heapq.heapify(queue)
    for _ in range(num_layers - len(seconds)):
        rank = queue[0][1]
        stages[rank] += 1
        if stages[rank] < most[rank]:
            heapq.heapreplace(queue, ((stages[rank] + 1) * seconds[rank], rank))
        else:
            heapq.heappop(queue)
    return tuple(stages)
