"""What was tried between every two hosts: plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gangline.runs.record_versions import Record

Tier = Literal["quick", "full", "burn"]
"""How thoroughly hosts are looked at."""
ConnectOutcome = Literal["ok", "other", "stranger", "timed out", "refused", "no route", "error"]
"""other: another host of the cluster answered. stranger: something else took the connection."""

RENDEZVOUS_PORTS = (29500, 29999)
"""Where the ranks meet, unless the cluster file says otherwise: below what Linux gives to who asks for any port."""
CLAIMS_FOLDER = "ports"
"""Below a host's work folder: ports that were handed out to runs which are about to start."""
MOST_WAITED = 0.9
"""A measurement whose hosts had no core for it most of the time says little; up to here it is put right."""
HOLD_S = 120.0
"""How long such a port is given to nobody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortTry:
    """One port of a host that another machine tried to reach."""

    kind: Literal["rendezvous", "ephemeral"]
    """rendezvous: where the ranks meet. ephemeral: one that the kernel gave, as gloo and NCCL use them."""
    address: str
    port: int
    outcome: ConnectOutcome
    seconds: float = 0.0
    """Of the last try."""
    tries: int = 1
    answered_by: str | None = None
    """The host that answered, by its own account."""
    detail: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the right host answered."""
        return self.outcome == "ok"

    @property
    def ending(self) -> str:
        """What happened, in words."""
        often = f", {self.tries} times" if self.tries > 1 else ""
        endings = {
            "ok": "answered",
            "other": f"was answered by {self.answered_by}",
            "stranger": f"was answered by something else ({self.detail})",
            "timed out": f"timed out after {self.seconds:.1f} s{often}",
            "refused": f"refused{often}",
            "no route": f"no route ({self.detail}){often}",
            "error": f"failed ({self.detail}){often}",
        }
        return endings[self.outcome]


def say_tries(tries: Iterable[PortTry]) -> str:
    """What happened, port by port; ports with the same fate together."""
    groups: dict[tuple[str, str], list[int]] = {}
    for attempt in tries:
        host = f"[{attempt.address}]" if ":" in attempt.address else attempt.address
        groups.setdefault((host, attempt.ending), []).append(attempt.port)
    return ", ".join(f"{host}:{' :'.join(map(str, ports))} {ending}" for (host, ending), ports in groups.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What one host found out about the way to another; None where it was not measured."""

    source: str
    target: str
    tries: tuple[PortTry, ...]
    source_address: str | None = None
    interface: str | None = None
    """Of the source, through which it goes there."""
    neighbour: str | None = None
    """The MAC that answers for the target's address on the same network."""
    latency_min_s: float | None = None
    latency_median_s: float | None = None
    """Of a round trip."""
    ahead_s: float | None = None
    """By how much the target's clock is ahead of the source's."""
    full_segment: bool | None = None
    """Whether a TCP packet of full size arrives."""
    own_mtu: int | None = None
    largest_packet: int | None = None
    """With headers; None where not even small UDP packets are answered."""
    told_mtu: int | None = None
    """The largest packet according to a router on the way."""
    packets_sent: int = 0
    packets_answered: int = 0
    burst_mbps: float | None = None
    """Of 1 MiB: a hint."""
    throughput_mbps: float | None = None
    """The median where it was measured several times."""
    worst_mbps: float | None = None
    """The least of several times; None: it was measured once."""
    retransmits: int | None = None
    waited: float | None = None
    """The part of the time in which a host had no core for the measurement: then the link may be faster."""

    def of_kind(self, kind: str) -> list[PortTry]:
        """The tries of that kind of port."""
        return [attempt for attempt in self.tries if attempt.kind == kind]

    @property
    def is_open(self) -> bool:
        """Whether every port answered."""
        return all(attempt.ok for attempt in self.tries)

    @property
    def is_closed(self) -> bool:
        """Whether no port answered."""
        return not any(attempt.ok for attempt in self.tries)

    @property
    def possible_mbps(self) -> float:
        """What the link may do: busy hosts used it only part of the time. 0 where it was not measured."""
        return (self.throughput_mbps or 0.0) / (1 - min(self.waited or 0.0, MOST_WAITED))

    @property
    def loss(self) -> float | None:
        """The fraction of small packets without an answer; None where none was answered: UDP may be forbidden."""
        return 1 - self.packets_answered / self.packets_sent if self.packets_answered else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerFacts:
    """A host that opened ports for the others to try."""

    host: str
    address: str
    has_address: bool
    """Whether the address in the cluster file is the host's own."""
    data_address: str | None = None
    """The address of the interface in the cluster file, where it names one that exists and has another address."""
    rendezvous_port: int | None = None
    problems: tuple[str, ...] = ()
    """Ports that could not be opened, and why."""
    macs: tuple[str, ...] = ()
    ephemeral: tuple[int, int] = (32768, 60999)
    """The ports that its kernel gives to who asks for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The clock of a host."""

    host: str
    ahead_s: float
    """Of the head's clock."""
    uncertainty_s: float
    method: Literal["network", "ssh"] = "network"
    """ssh: the host could not be asked by another; then the way through ssh is part of the uncertainty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What a machine that is no host of the cluster reaches."""

    host: str
    tries: tuple[PortTry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """What was not tried, and why."""

    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs(Record):
    """What was tried between the hosts of a cluster."""

    measured: str
    """When, in ISO format."""
    tier: Tier
    listeners: tuple[ListenerFacts, ...] = ()
    pairs: tuple[Pair, ...] = ()
    """Every ordered pair of hosts that could be asked."""
    clocks: tuple[Clock, ...] = ()
    outside: tuple[Outside, ...] = ()
    outside_from: str | None = None
    """The address of the computer that tried from outside, None where none did."""
    skipped: tuple[Skipped, ...] = ()

    def find(self, source: str, target: str) -> Pair | None:
        """What the one found out about the other."""
        return next((pair for pair in self.pairs if (pair.source, pair.target) == (source, target)), None)

    def listener(self, host: str) -> ListenerFacts | None:
        """The ports of a host; None where it opened none."""
        return next((listener for listener in self.listeners if listener.host == host), None)

    def to(self, host: str) -> Iterator[Pair]:
        """The ways to a host."""
        return (pair for pair in self.pairs if pair.target == host)


# Which host is behind pairs that are all bad in the same way. Pure.


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
        mine = [pair for pair in left if len({pair.source, pair.target}.intersection(hosts)) == min(2, len(hosts))]
        left = [pair for pair in left if pair not in mine]
        found.append(Blame(hosts=hosts, pairs=tuple(mine)))
    return found


def examples(words: Sequence[str], most: int = EXAMPLES) -> str:
    """The first few, and how many more there are."""
    more = f"; and {len(words) - most} more" if len(words) > most else ""
    return "; ".join(words[:most]) + more


def _peers(pairs: Sequence[Pair]) -> dict[str, list[str]]:
    """Host -> those with which it has a bad pair, in the order met."""
    found: dict[str, dict[str, None]] = {}
    for pair in pairs:
        found.setdefault(pair.source, {})[pair.target] = None
        found.setdefault(pair.target, {})[pair.source] = None
    return {host: list(others) for host, others in found.items()}


# Which hosts seem far from each other. Pure.


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


# Who measures with whom, and when: no host is in two pairs at once. Pure.


def rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Every unordered pair once, in as few rounds as there can be: as in a tournament, one stays, the others turn."""
    circle: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        meets = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(one, other) for one, other in meets if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in found if pairs]


def both_ways(pairs: Sequence[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The same pairs there, and back."""
    return list(pairs), [(other, one) for one, other in pairs]


def sample(found: list[list[tuple[str, str]]], most: int) -> list[list[tuple[str, str]]]:
    """At most so many rounds, spread evenly: each host still meets as many others as every other host does."""
    if len(found) <= most:
        return found
    return [found[index * len(found) // most] for index in range(most)]
