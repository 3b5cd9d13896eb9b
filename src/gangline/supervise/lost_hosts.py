"""Lost hosts of a run until they answer again, partitions of its network, and the time of a recovery."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from gangline.errors import GanglineError, RunFailed
from gangline.inventory.pairs import Pair, say_tries
from gangline.inventory.probe import Probe, listening
from gangline.runs.cluster import Cluster, Host
from gangline.supervise.background import Background
from gangline.transport.transport import Transport
from gangline.units import listed

BACK_S = 10.0
"""A host is back once it has answered for so long: one that comes and goes would disturb the others."""
LOOK_S = 3.0
PATIENCE_S = 0.2


class LostHosts:
    """Hosts that the run has lost. answers: whether a host answers now; it may take long and runs in the background."""

    def __init__(self, answers: Callable[[str], bool], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._answers = answers
        self._clock = clock
        self._since: dict[str, float | None] = {}
        """Since when it has answered each time; None: it does not."""
        self._looks = Background[bool](patience_s=PATIENCE_S)
        self._looked_at: dict[str, float] = {}

    @property
    def hosts(self) -> set[str]:
        """All of them."""
        return set(self._since)

    @property
    def silent(self) -> set[str]:
        """The lost hosts that are not back."""
        return set(self._since) - set(self.back())

    def lose(self, hosts: Iterable[str]) -> None:
        """Replace the lost hosts; those that are not among them have joined again."""
        self._since = {host: self._since.get(host) for host in hosts}

    def look(self) -> None:
        """Ask the lost hosts in the background."""
        now = self._clock()
        for host in self._since:
            if now >= self._looked_at.get(host, float("-inf")) + LOOK_S:
                self._looks.start(host, partial(self._answers, host))
        for host, does_answer in self._looks.results().items():
            if host in self._since:
                self._looked_at[host] = now
                self._since[host] = (self._since[host] or now) if does_answer else None

    def back(self) -> list[str]:
        """The hosts that have answered for a while."""
        now = self._clock()
        return [host for host, since in self._since.items() if since is not None and now - since >= BACK_S]


class Recovery:
    """The time from a failure to the first step after it, stage by stage. begun: when the failure was seen, by `clock`.

    ended: all processes of the attempt before are gone. prepared: every host has the checkpoint and the next attempt.
    started: its host agents run. joined: its ranks have joined. step: they have completed a step.
    """

    def __init__(self, begun: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reached: dict[str, float] = {}
        self._last = begun
        self._begun = begun

    def reach(self, stage: str) -> None:
        """Note that a stage is reached; only the first time counts."""
        if stage not in self._reached:
            now = self._clock()
            self._reached[stage], self._last = now - self._last, now

    def to_json(self) -> dict[str, Any]:
        """Seconds in all, and of each stage."""
        stages = {stage: round(seconds, 2) for stage, seconds in self._reached.items()}
        return {"seconds": round(self._last - self._begun, 2), "stages": stages}


# Network partitions: the hosts try each other, where no rank explains a failure.


OPEN_S = 60.0
"""How long ports may stay open: much longer than the test takes."""
SHOWN_PAIRS = 4
FRESH_S = 15.0
"""The result for a host counts for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Hosts without which all others reach each other."""

    hosts: tuple[str, ...]
    what: str
    seen: str

    def to_json(self) -> dict[str, Any]:
        """As `Outcome.error`."""
        fix = "look for a firewall, a bad switch or a bad cable; test every pair: gangline check; then: gangline resume"
        return RunFailed(self.what, seen=self.seen, fix=fix, details={"host": self.hosts[0]}).to_json()


def find_partition(
    hosts: Iterable[Host], cluster: Cluster, transports: Mapping[str, Transport], *, port: int
) -> Partition | None:
    """Have these hosts connect to each other; None if all of them can, or are one machine.

    port: the rendezvous port, which is tried where it is free, beside ports that the kernel gives.
    """
    machines = list({host.address: host for host in hosts}.values())
    if len(machines) < 2:
        return None
    with listening(cluster, machines, transports, seconds=OPEN_S, port=port) as listeners:
        pairs = Probe(listeners=listeners, transports=transports, measure=()).every_pair()
    return judge(pairs, [host.name for host in machines])


def judge(pairs: Sequence[Pair], names: Sequence[str]) -> Partition | None:
    """The hosts to leave out. Of two with equally many broken links it is the later one: rank 0 is on the first."""
    left = [pair for pair in pairs if not pair.is_open]
    hosts: list[str] = []
    words: list[str] = []
    shown = left[:SHOWN_PAIRS]
    while left:
        peers = _peers(left)
        worst = max(peers, key=lambda host: (len(peers[host]), names.index(host)))
        mine = [pair for pair in left if worst in {pair.source, pair.target}]
        left = [pair for pair in left if pair not in mine]
        hosts.append(worst)
        words.append(_words(worst, mine))
    if not hosts:
        return None
    seen = [f"from {pair.source} to {pair.target}: {say_tries(pair.tries)}" for pair in shown]
    return Partition(hosts=tuple(hosts), what="; ".join(words), seen="\n".join(seen))


def _peers(pairs: Sequence[Pair]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for pair in pairs:
        found.setdefault(pair.source, set()).add(pair.target)
        found.setdefault(pair.target, set()).add(pair.source)
    return found


def _words(host: str, pairs: Sequence[Pair]) -> str:
    to, since = ({pair.source for pair in pairs} - {host}, {pair.target for pair in pairs} - {host})
    others = listed(sorted(to | since))
    if to == since:
        return f"{host} does not reach {others}, and is not reached from there"
    if since:
        return f"{host} does not reach {others}"
    return f"{others} {'does' if len(to) == 1 else 'do'} not reach {host}"


class CutOff:
    """Hosts that are cut off, tested again until they are not. find: the current partition."""

    def __init__(self, hosts: Iterable[str], find: Callable[[], Partition | None]) -> None:
        self._hosts = set(hosts)
        self._find = find
        self._looks = Background[list[Partition | None]](patience_s=PATIENCE_S)

    def look(self) -> set[str]:
        """The hosts that are cut off, according to the last test."""
        if self._hosts:
            with suppress(GanglineError, OSError):
                for found in self._looks.do(lambda: [self._find()]) or []:
                    self._hosts = set(found.hosts) if found else set()
        return self._hosts


class Reaching:
    """Whether hosts that are back reach the hosts that train; tested at intervals, for it costs a little.

    find: the hosts among some that are cut off from the others.
    """

    def __init__(
        self, find: Callable[[Collection[str]], Partition | None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._find = find
        self._clock = clock
        self._said: dict[str, tuple[float, bool]] = {}

    def reaches(self, host: str, others: Iterable[str]) -> bool:
        """Whether this host and the others reach each other."""
        at, said = self._said.get(host, (float("-inf"), False))
        if self._clock() - at > FRESH_S:
            try:
                found = self._find([*others, host])
            except (GanglineError, OSError):
                return False
            said = found is None or host not in found.hosts
            self._said[host] = self._clock(), said
        return said
