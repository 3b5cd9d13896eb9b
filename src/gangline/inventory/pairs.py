"""What was tried between every two hosts: plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from gangline.runs.decode import build

Tier = Literal["quick", "full", "burn"]
"""How thoroughly hosts are looked at."""
Outcome = Literal["ok", "other", "stranger", "timed out", "refused", "no route", "error"]
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
    outcome: Outcome
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
class Ear:
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
class Pairs:
    """What was tried between the hosts of a cluster."""

    measured: str
    """When, in ISO format."""
    tier: Tier
    ears: tuple[Ear, ...] = ()
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

    def ear(self, host: str) -> Ear | None:
        """The ports of a host; None where it opened none."""
        return next((ear for ear in self.ears if ear.host == host), None)

    def to(self, host: str) -> Iterator[Pair]:
        """The ways to a host."""
        return (pair for pair in self.pairs if pair.target == host)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Pairs:
        """What `to_json` wrote; raises TypeError or ValueError for anything else."""
        return build(Pairs, data)
