"""Who does how much of a step: the speed of every rank, as the cluster tells it. Pure."""

from __future__ import annotations

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
