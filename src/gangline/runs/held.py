"""Which part of the trained state the ranks of every host hold, in words: of one gang, and of a checkpoint in parts.

The words are the same exactly where the parts are: a host whose words stand in a checkpoint needs no more than the part
that they belong to.
"""

from __future__ import annotations

from gangline.runs.gang import Gang


def held_by(gang: Gang) -> dict[str, str]:
    """Host -> what its ranks hold of state that lies in parts; {} where every host has all of it.

    Whether adapters are trained under fsdp, which are whole on every rank, is not known here.
    """
    hosts = gang.hosts
    if len(hosts) == 1 or gang.strategy not in ("fsdp", "hsdp", "pipeline"):
        return {}
    if gang.strategy == "hsdp" and len({gang.num_ranks(host) for host in hosts}) == 1 and gang.num_ranks(hosts[0]) > 1:
        return {}
    numbers = {host: [rank for rank, each in enumerate(gang.ranks) if each.host == host] for host in hosts}
    return {host: _words(gang, numbers[host][0], numbers[host][-1]) for host in hosts}


def _words(gang: Gang, first: int, last: int) -> str:
    """Of adjacent ranks."""
    if gang.strategy == "pipeline":
        before, own = sum(gang.stages[:first]), sum(gang.stages[first : last + 1])
        return f"layers {before + 1} to {before + own} of {sum(gang.stages)}"
    ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
    return f"the rows of {ranks} of {gang.world_size}"
