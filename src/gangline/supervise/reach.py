"""Which hosts of a run the others do not reach: asked of the hosts themselves, where no rank says why the gang broke.

A host may answer us and still be cut off from its peers: a firewall, a switch, a cable through which packets go one
way only. All ranks then wait for each other, and none of them is to blame.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gangline.errors import GanglineError, RunFailed
from gangline.inventory.ears import listening
from gangline.inventory.pairs import Pair, say_tries
from gangline.inventory.probe import Probe
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster, Host
from gangline.supervise.aside import Aside
from gangline.supervise.standing import listed

OPEN_S = 60.0
"""How long ports may stay open: much longer than it takes."""
SHOWN_PAIRS = 4
PATIENCE_S = 0.1
FRESH_S = 15.0
"""A host that was found to reach the others, or not to, is not asked again before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Hosts without which all others reach each other."""

    hosts: tuple[str, ...]
    what: str
    seen: str

    def to_json(self) -> dict[str, Any]:
        """As `Outcome.error`."""
        fix = "is a firewall, a switch or a cable in the way? gangline check tries every pair; then: gangline resume"
        return {**RunFailed(self.what, seen=self.seen, fix=fix).to_json(), "host": self.hosts[0]}


def find_cut(hosts: Iterable[Host], cluster: Cluster, transports: Mapping[str, Transport], *, port: int) -> Cut | None:
    """Have these hosts try each other; None if all of them get through, or are one machine, or nobody can be asked.

    port: where ranks meet; tried where it is free, and so are some that the kernel gives.
    """
    machines = list({host.address: host for host in hosts}.values())
    if len(machines) < 2:
        return None
    with listening(cluster, machines, transports, seconds=OPEN_S, port=port) as ears:
        pairs = Probe(ears=ears, transports=transports, measure=()).every_pair()
    return judge(pairs, [host.name for host in machines])


def judge(pairs: Sequence[Pair], names: Sequence[str]) -> Cut | None:
    """Whom to leave out. Of two hosts that do not reach each other and all others, it is the one further back: rank 0
    is on the first.
    """
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
    return Cut(hosts=tuple(hosts), what="; ".join(words), seen="\n".join(seen))


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
    """Hosts that were found to be cut off, and are asked again until they are not. find: who is now."""

    def __init__(self, hosts: Iterable[str], find: Callable[[], Cut | None]) -> None:
        self._hosts = set(hosts)
        self._looking = Aside(lambda: [find()], patience_s=PATIENCE_S)

    def look(self) -> set[str]:
        """Those that are cut off, as far as is known by now."""
        if self._hosts:
            with suppress(GanglineError, OSError):
                for found in self._looking.do() or []:
                    self._hosts = set(found.hosts) if found else set()
        return self._hosts


class Reaching:
    """Whether hosts that have come back reach those that train: asked once in a while, for it costs them a little.

    find: who of some hosts is cut off from the others of them.
    """

    def __init__(
        self, find: Callable[[Collection[str]], Cut | None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._find = find
        self._clock = clock
        self._said: dict[str, tuple[float, bool]] = {}

    def reaches(self, host: str, others: Iterable[str]) -> bool:
        """Whether all of the others and this host get through to each other."""
        at, said = self._said.get(host, (float("-inf"), False))
        if self._clock() - at > FRESH_S:
            try:
                found = self._find([*others, host])
            except (GanglineError, OSError):
                return False
            said = found is None or host not in found.hosts
            self._said[host] = self._clock(), said
        return said
