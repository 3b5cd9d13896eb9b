"""Which part of the trained state the ranks of every host hold, in words: of one gang, and of a checkpoint in parts.

The words are the same exactly where the parts are: a host whose words stand in a checkpoint needs no more than the part
that they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence

from gangline.runs.gang import Gang
from gangline.runs.rows import rows_of


def held_by(gang: Gang) -> dict[str, str]:
    """Host -> what its ranks hold of state that lies in parts; {} where every host has all of it.

    Whether adapters are trained under fsdp, which are whole on every rank, is not known here.
    """
    hosts = gang.hosts
    half = gang.half
    if len(hosts) == 1 or not half.parts_of_tensors:
        return {}
    if half.shards_per_host and len({gang.num_ranks(host) for host in hosts}) == 1 and gang.num_ranks(hosts[0]) > 1:
        return {}
    if half.layers == "staged":
        found = layers_on([rank.host for rank in gang.ranks], gang.stages, replicas=gang.replicas)
        depth = sum(gang.stages) // gang.replicas
        if all(len(layers) == depth for layers in found.values()):
            return {}
        return {host: f"layers {_ranges(layers)} of {depth}" for host, layers in found.items()}
    numbers = {host: [rank for rank, each in enumerate(gang.ranks) if each.host == host] for host in hosts}
    return {host: _words(gang, numbers[host][0], numbers[host][-1]) for host in hosts}


def layers_on(hosts: Sequence[str], stages: Sequence[int], *, replicas: int) -> dict[str, list[int]]:
    """Host -> layers that its ranks have in pipelines, each once, from 1 on. hosts, stages: by rank."""
    found: dict[str, set[int]] = {host: set() for host in hosts}
    for row in rows_of(stages, replicas=replicas):
        before = 0
        for rank in row:
            found[hosts[rank]] |= set(range(before + 1, before + stages[rank] + 1))
            before += stages[rank]
    return {host: sorted(layers) for host, layers in found.items()}


def _ranges(layers: Sequence[int]) -> str:
    """For instance: 1 to 3 and 7 to 9."""
    begins = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    return " and ".join(f"{begin} to {end}" for begin, end in zip(begins, ends, strict=True))


def _words(gang: Gang, first: int, last: int) -> str:
    """Of adjacent ranks."""
    ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
    return f"the rows of {ranks} of {gang.world_size}"
