"""Who does how much of a step: by the speeds that the cluster tells, or by those that were measured. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from gangline.runs.cluster import Cluster, Host
from gangline.runs.deal import split_whole


def rank_hosts(cluster: Cluster) -> tuple[Host, ...]:
    """The host of every rank: a host's ranks are adjacent, and the head has rank 0."""
    return tuple(host for host in cluster.hosts for _ in range(host.slots))


def rank_weights(cluster: Cluster) -> tuple[float, ...]:
    """The speed of every rank relative to the others: a host's `share` over its slots, 1 per slot where none is set."""
    return tuple(1.0 if host.share is None else host.share / host.slots for host in rank_hosts(cluster))


def rank_shares(cluster: Cluster, num_micro_batches: int) -> tuple[int, ...]:
    """Micro-batches of a full step for every rank; they sum to `num_micro_batches`."""
    return split_whole(num_micro_batches, rank_weights(cluster))


def shares_by_time(seconds: Sequence[float], num_micro_batches: int) -> tuple[int, ...]:
    """Micro-batches of a full step for every rank, so that the last one to finish finishes as early as possible.

    seconds: of one micro-batch, by rank. Each micro-batch goes to the rank that would have done it first; for equal
    pieces of work that gives the smallest possible maximum of share * seconds. Ties go to the faster rank, then to the
    lower number. Raises ValueError for times that are not positive.
    """
    if not seconds or min(seconds) <= 0:
        raise ValueError(f"seconds of a micro-batch must be positive: {list(seconds)}")
    if min(seconds) == max(seconds):  # in turn
        each_one, more = divmod(num_micro_batches, len(seconds))
        return tuple(each_one + (rank < more) for rank in range(len(seconds)))
    shares = [0] * len(seconds)
    queue = [(each, each, rank) for rank, each in enumerate(seconds)]
    heapq.heapify(queue)
    for _ in range(num_micro_batches):
        ends, each, rank = queue[0]
        shares[rank] += 1
        heapq.heapreplace(queue, (ends + each, each, rank))
    return tuple(shares)


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
