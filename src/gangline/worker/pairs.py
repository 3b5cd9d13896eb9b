"""How long messages take between hosts right now, pair by pair; and which host became slow, by two such looks.

They go over the processes' CPU group (gloo): where gradients have a fabric of their own (NCCL over InfiniBand), this
is not what they take.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gangline.worker.world import World

MESSAGE_BYTES = 1 << 20
MANY_HOSTS = 16
TRIES, BUDGET_S = (3, 6), 1.0
"""Messages to and fro per pair: so many at least and at most, and no more once the pair's part of the time is over."""
SLOWER = 1.2
"""Times as long as before: less may be noise."""

Pairs = Mapping[tuple[int, int], float]
"""Seconds of a message there and back, by the numbers of two hosts, the lower one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """What became slow."""

    hosts: tuple[int, ...]
    """One: all its links. Two: the link between them. (): all links."""
    factor: float
    before_s: float
    now_s: float


def message_bytes(num_hosts: int) -> int:
    """Size of a message: smaller where there are many pairs."""
    return MESSAGE_BYTES if num_hosts <= MANY_HOSTS else MESSAGE_BYTES // 4


def probe(world: World) -> Pairs:
    """Seconds of a message there and back between the first ranks of every two hosts; collective, about a second.

    A host that does not answer ends it as it ends every exchange: by the group's timeout.
    """
    num_hosts = len(world.gang.hosts)
    seconds = torch.zeros(num_hosts, num_hosts, dtype=torch.float64)
    if world.is_first_of_host:
        me = world.gang.hosts.index(world.host)
        rounds = list(pairings(num_hosts))
        for pairing in rounds:
            for low, high in pairing:
                if me == low:
                    seconds[low, high] = _ask(_first_rank(world, high), num_hosts, budget_s=BUDGET_S / len(rounds))
                elif me == high:
                    _answer(_first_rank(world, low), num_hosts)
    dist.all_reduce(seconds)
    return {(low, high): float(seconds[low, high]) for low in range(num_hosts) for high in range(low + 1, num_hosts)}


def pairings(num_hosts: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs in rounds in which nobody is in two: everybody round a table, the first one keeps its seat."""
    seats = [*range(num_hosts + num_hosts % 2)]
    for _ in range(len(seats) - 1):
        opposite = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        pairs = ((min(pair), max(pair)) for pair in opposite)
        yield [(low, high) for low, high in pairs if high < num_hosts]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def blame(before: Pairs, now: Pairs, *, num_hosts: int) -> list[Slow]:
    """Hosts whose links all became slower, or all links, or single ones; [] where none did.

    Next to a link that became four times as slow, one that became 1.3 times as slow does not count: by the logarithm
    it must be half as bad.
    """
    factors = {pair: seconds / before[pair] for pair, seconds in now.items()}
    least = max(SLOWER, max(factors.values()) ** 0.5)
    slow = {pair for pair, factor in factors.items() if factor >= least}
    links = {host: {pair for pair in now if host in pair} for host in range(num_hosts)}
    hosts = [host for host in links if links[host] <= slow]
    if num_hosts > 2 and len(hosts) == num_hosts:
        return [_slow((), slow, before, now)]
    if num_hosts > 2 and hosts:
        return [_slow((host,), links[host], before, now) for host in hosts]
    return [_slow(pair, {pair}, before, now) for pair in sorted(slow)]


def _slow(hosts: Sequence[int], links: set[tuple[int, int]], before: Pairs, now: Pairs) -> Slow:
    """By the median of these links."""
    middle = sorted(links, key=lambda pair: now[pair] / before[pair])[len(links) // 2]
    return Slow(hosts=tuple(hosts), factor=now[middle] / before[middle], before_s=before[middle], now_s=now[middle])


def _ask(peer: int, num_hosts: int, *, budget_s: float) -> float:
    """The second best of several tries: the best one may be luck. The first byte says that there are no more."""
    message = torch.zeros(message_bytes(num_hosts), dtype=torch.uint8)
    took: list[float] = []
    _meet(peer, is_first=True)
    began = time.perf_counter()
    least, most = TRIES
    while not message[0]:
        is_late = time.perf_counter() - began > budget_s
        message[0] = len(took) + 1 == most or (is_late and len(took) + 1 >= least)
        started = time.perf_counter()
        dist.send(message, peer)
        dist.recv(message, peer)
        took.append(time.perf_counter() - started)
    return sorted(took)[1]


def _answer(peer: int, num_hosts: int) -> None:
    message = torch.zeros(message_bytes(num_hosts), dtype=torch.uint8)
    _meet(peer, is_first=False)
    while not message[0]:
        dist.recv(message, peer)
        dist.send(message, peer)


def _meet(peer: int, *, is_first: bool) -> None:
    """Wait until the other one is there: it may still be with somebody else."""
    word = torch.zeros(1, dtype=torch.uint8)
    for step in (dist.send, dist.recv) if is_first else (dist.recv, dist.send):
        step(word, peer)


def _first_rank(world: World, host: int) -> int:
    name = world.gang.hosts[host]
    return next(rank for rank, each in enumerate(world.gang.ranks) if each.host == name)
