"""Which hosts seem far from each other. Pure.

What is in the way of a small message makes it late and never early: a host without a free core, a queue that somebody
else's data, or our own, stands in. So of all round trips between two hosts, in both directions, the quickest counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from gangline.inventory.pairs import Pair

FAR_S = 0.005
"""A switch adds microseconds, Wi-Fi 2 to 4 ms."""


def quickest(pairs: Iterable[Pair]) -> dict[frozenset[str], float]:
    """Two hosts -> the quickest round trip between them, whoever of them began it."""
    found: dict[frozenset[str], float] = {}
    for pair in pairs:
        if pair.latency_min_s is not None:
            key = frozenset((pair.source, pair.target))
            found[key] = min(pair.latency_min_s, found.get(key, pair.latency_min_s))
    return found


def far(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs of hosts between which not even the quickest round trip was quick."""
    trips = quickest(pairs)
    return [pair for pair in pairs if trips.get(frozenset((pair.source, pair.target)), 0.0) > FAR_S]


def once(pairs: Iterable[Pair]) -> list[Pair]:
    """Of every two hosts one direction."""
    found: dict[frozenset[str], Pair] = {}
    for pair in pairs:
        found.setdefault(frozenset((pair.source, pair.target)), pair)
    return list(found.values())


def with_quicker(pair: Pair, other: Pair) -> Pair:
    """A pair, with what the quicker of two looks at it says of round trips and the clock."""
    if other.latency_min_s is None:
        return pair
    if pair.latency_min_s is not None and pair.latency_min_s <= other.latency_min_s:
        return pair
    return dataclasses.replace(
        pair,
        latency_min_s=other.latency_min_s,
        latency_median_s=other.latency_median_s,
        ahead_s=other.ahead_s,
    )
