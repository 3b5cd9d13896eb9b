"""Which host is behind pairs that are all bad in the same way. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gangline.inventory.pairs import Pair

EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Pairs with one cause."""

    hosts: tuple[str, ...]
    """The host that they have in common, else all of theirs."""
    pairs: tuple[Pair, ...]


def blame(bad: Iterable[Pair]) -> list[Blame]:
    """Bad pairs, put together by what they have in common: each pair is in one group."""
    left = list(bad)
    found: list[Blame] = []
    while left:
        peers = _peers(left)
        # pc1 before pc2 where both explain as much: the order of the cluster
        worst = max(peers, key=lambda host: len(peers[host]))
        everybody = len(peers) > 2 and all(len(others) == len(peers) - 1 for others in peers.values())
        if everybody or len(peers[worst]) == 1:
            hosts = tuple(peers) if everybody else (worst, *peers[worst])
        else:
            hosts = (worst,)
        mine = [
            pair
            for pair in left
            if (set(hosts) & {pair.source, pair.target} if len(hosts) == 1 else _both(pair, hosts))
        ]
        left = [pair for pair in left if pair not in mine]
        found.append(Blame(hosts=hosts, pairs=tuple(mine)))
    return found


def examples(words: Sequence[str], most: int = EXAMPLES) -> str:
    """The first few, and how many more there are."""
    more = f"; and {len(words) - most} more" if len(words) > most else ""
    return "; ".join(words[:most]) + more


def _both(pair: Pair, hosts: Sequence[str]) -> bool:
    return pair.source in hosts and pair.target in hosts


def _peers(pairs: Sequence[Pair]) -> dict[str, list[str]]:
    """Host -> those with which it has a bad pair, in the order met."""
    found: dict[str, dict[str, None]] = {}
    for pair in pairs:
        found.setdefault(pair.source, {})[pair.target] = None
        found.setdefault(pair.target, {})[pair.source] = None
    return {host: list(others) for host, others in found.items()}
