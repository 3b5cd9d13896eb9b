"""Ranks that do the same micro-batches: pipelines, and under tp the ranks of a host. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gangline.planning.speed import ComputeModel, RankWork, works_of
from gangline.planning.training import Strategy
from gangline.planning.world import World


def crews(world: World, strategy: Strategy) -> list[range]:
    """Ranks of each; where everybody does others, each rank by itself."""
    size = len(world.seats)
    if strategy.half.layers == "sliced":
        hosts = [seat.host for seat in world.seats]
        firsts = [hosts.index(host) for host in world.hosts]
        return [range(first, end) for first, end in zip(firsts, (*firsts[1:], size), strict=True)]
    row = size // strategy.replicas if strategy.half.layers == "staged" else 1
    return [range(first, first + row) for first in range(0, size, row)]


def weights_of(world: World, found: Sequence[range]) -> list[float]:
    """What the cluster file says of their speeds, by crew."""
    weights = [1.0 if seat.weight is None else seat.weight for seat in world.seats]
    return [sum(weights[rank] for rank in crew) for crew in found]


def hosts_s(seconds: Sequence[float], found: Sequence[range]) -> tuple[float, ...]:
    """Of a micro-batch, by crew: as its slowest rank."""
    return tuple(max(seconds[rank] for rank in crew) for crew in found)


def rows_s(strategy: Strategy, models: Sequence[ComputeModel], *, tokens: float, length: float) -> tuple[float, ...]:
    """Of a micro-batch, by pipeline: as its slowest stage, for that decides how many go through."""
    rows = works_of(strategy, [RankWork(compute=model, micro_batches=1) for model in models])
    return tuple(max(stage.compute.micro_batch_s(tokens, length) for stage in row) for row in rows)
