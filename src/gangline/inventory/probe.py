"""Try the network between every two hosts: `listen` on all of them, then `reach` from each."""

from __future__ import annotations

import dataclasses
import datetime as dt
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gangline.inventory.ask import CannotAsk, ask
from gangline.inventory.ears import Ears, listening
from gangline.inventory.facts import Inventory
from gangline.inventory.near import far, once, with_quicker
from gangline.inventory.outside import is_member, own_address, probe_outsider
from gangline.inventory.pairs import Clock, Outside, Pair, Pairs, Skipped, Tier
from gangline.inventory.rounds import both_ways, rounds, sample
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster, Host

OPEN_S: Mapping[Tier, float] = {"quick": 45.0, "full": 90.0, "burn": 170.0}
"""How long ports may stay open: much longer than it takes."""
RATE_S: Mapping[Tier, float] = {"full": 1.0, "burn": 4.0}
"""How long the throughput of one ordered pair is measured."""
RATE_BUDGET_S: Mapping[Tier, float] = {"full": 30.0, "burn": 120.0}
"""How long that may take for all of them; burn: how long it takes."""
THOROUGH = 8
"""With how many others a host tries loss and packet sizes."""
SUSPECTS = 3
LOOKS = 3
"""How often a pair that looks slow is measured: the fastest counts, for nothing makes a link look faster than it is."""
FAR_SUSPECTS = 16
"""How many pairs that seem far have their round trips tried again."""
SUSPECT_S = 0.5
SLOW = 1 / 3
FAST_MBPS = 1000.0
"""A pair whose first MiB is as fast as this is not suspected of a slow link."""
THREADS = 64

Ordered = tuple[str, str]
"""Source and target."""
_A = TypeVar("_A")
_B = TypeVar("_B")


def probe_pairs(
    cluster: Cluster,
    inventory: Inventory,
    transports: Mapping[str, Transport],
    *,
    tier: Tier = "quick",
    rendezvous_port: int | None = None,
) -> Pairs:
    """Try every ordered pair of hosts. What cannot be tried is listed with the reason, never raised.

    rendezvous_port: where the ranks will meet; None: the first free port of the cluster's range, on each host.
    """
    hosts, skipped = askable(cluster, inventory)
    found = Pairs(measured=now(), tier=tier, skipped=tuple(skipped))
    if len(hosts) < 2:
        return found
    with listening(cluster, hosts, transports, seconds=OPEN_S[tier], port=rendezvous_port) as ears:
        with ThreadPoolExecutor(max_workers=1) as pool:
            outside = pool.submit(_outside, cluster, ears)
            probe = Probe(ears=ears, transports=transports)
            pairs = probe.with_rates(probe.looked_again(probe.every_pair()), tier=tier)
        tried, seen_from, untried = outside.result()
        dead = [Skipped(what=name, why=why) for name, why in ears.problems.items()]
        return dataclasses.replace(
            found,
            ears=tuple(opened.ear for opened in ears.up.values()),
            pairs=tuple(pairs),
            clocks=tuple(clocks(cluster, pairs, ears.clocks_by_ssh(cluster.head.name))),
            outside=tuple(tried),
            outside_from=seen_from,
            skipped=(*skipped, *dead, *probe.skipped, *untried),
        )


def askable(cluster: Cluster, inventory: Inventory) -> tuple[list[Host], list[Skipped]]:
    """The hosts that can try the network, each machine once, and why the others cannot."""
    failed = {failure.host: failure.why for failure in inventory.failures}
    hosts: dict[str, Host] = {}
    skipped: list[Skipped] = []
    for host in cluster.hosts:
        if host.name in failed:
            skipped.append(Skipped(what=host.name, why=failed[host.name].partition("\n")[0]))
        elif host.address in hosts:
            why = f"the same address as {hosts[host.address].name}: {host.address}"
            skipped.append(Skipped(what=host.name, why=why))
        else:
            hosts[host.address] = host
    if len(hosts) < 2:
        skipped.append(Skipped(what="pairs of hosts", why="there is one machine, or only one that can be asked"))
    return list(hosts.values()), skipped


@dataclasses.dataclass(slots=True, kw_only=True)
class Probe:
    """Asks hosts about each other while their ports are open."""

    ears: Ears
    transports: Mapping[str, Transport]
    measure: tuple[str, ...] = ("time", "packets", "burst")
    """Of every pair; see `reach` of the agent."""
    skipped: list[Skipped] = dataclasses.field(default_factory=list)

    def every_pair(self) -> list[Pair]:
        """Every host asked about all others, all hosts at the same time."""
        names = list(self.ears.up)
        jobs = [(name, [*names[index + 1 :], *names[:index]]) for index, name in enumerate(names)]
        if len(names) > THOROUGH + 1 and "packets" in self.measure:
            why = f"each host tries them with {THOROUGH} of the {len(names) - 1} others"
            self.skipped.append(Skipped(what="packet loss and sizes of every pair", why=why))
        pairs = [pair for pairs in at_once(self._all_of_one, jobs) for pair in pairs]
        # a host whose ports were closed meanwhile is not to be blamed for it
        return [pair for pair in pairs if pair.target in self.ears.up]

    def _all_of_one(self, job: tuple[str, list[str]]) -> list[Pair]:
        source, names = job
        up = self.ears.up
        targets = [{**up[name].target, "brief": index >= THOROUGH} for index, name in enumerate(names) if name in up]
        return self._ask(source, targets, self.measure)

    def _ask(
        self, source: str, targets: Sequence[dict[str, Any]], measure: Sequence[str], seconds: float = 1.0
    ) -> list[Pair]:
        try:
            return ask(self.transports[source], self.ears.token, targets, measure=measure, seconds=seconds)
        except CannotAsk as error:
            self.skipped.append(Skipped(what=f"what {source} reaches", why=str(error)))
            return []

    def looked_again(self, pairs: list[Pair]) -> list[Pair]:
        """The pairs, with the round trips of those that seem far tried again now that nothing else is measured."""
        found = {(pair.source, pair.target): pair for pair in pairs}
        for _ in range(LOOKS - 1):
            suspects = once(pair for pair in far(list(found.values())) if not pair.is_closed)[:FAR_SUSPECTS]
            if not suspects:
                break
            for again in at_once(lambda pair: self._measure(pair, ("time",)), suspects):
                found[again.source, again.target] = with_quicker(found[again.source, again.target], again)
        return list(found.values())

    def with_rates(self, pairs: list[Pair], *, tier: Tier) -> list[Pair]:
        """The pairs, with the throughput of all of them, or in the quick tier of those that look slow."""
        open_pairs = {(pair.source, pair.target): pair for pair in pairs if not pair.is_closed}
        if tier == "quick":
            schedule = [[suspect] for suspect in suspects(list(open_pairs.values()))]
            rates = self.rates(open_pairs, schedule, seconds=SUSPECT_S)
            seconds = SUSPECT_S
        else:
            meetings = rounds(list(self.ears.up))
            most = int(RATE_BUDGET_S[tier] / RATE_S[tier] / 2)
            if len(meetings) > most:
                why = f"{most} of {len(meetings)} rounds fit into {RATE_BUDGET_S[tier]:.0f} s"
                self.skipped.append(Skipped(what="throughput of every pair", why=why))
            schedule = [half for meeting in sample(meetings, most) for half in both_ways(meeting)]
            rates = self._looks(open_pairs, schedule, tier=tier)
            seconds = RATE_S[tier]
        rates = self._again(rates, seconds=seconds)
        return [rates.get((pair.source, pair.target), pair) for pair in pairs]

    def _looks(
        self, pairs: Mapping[Ordered, Pair], schedule: Sequence[Sequence[Ordered]], *, tier: Tier
    ) -> dict[Ordered, Pair]:
        """Measure all of the schedule once, in the burn tier over and over until its time is up."""
        begun = time.monotonic()
        looks: dict[Ordered, list[Pair]] = {}
        while True:
            round_begun = time.monotonic()
            for ordered, pair in self.rates(pairs, schedule, seconds=RATE_S[tier]).items():
                looks.setdefault(ordered, []).append(pair)
            ended = time.monotonic()
            if tier != "burn" or not looks or (ended - begun) + (ended - round_begun) > RATE_BUDGET_S[tier]:
                return {ordered: median_of(each) for ordered, each in looks.items()}

    def _again(self, rates: dict[Ordered, Pair], *, seconds: float) -> dict[Ordered, Pair]:
        """Measure again what was much slower than the fastest, the slowest first and a few only."""
        found = dict(rates)
        best = max((rate_of(pair) for pair in rates.values()), default=0.0)
        slow = sorted((pair for pair in rates.values() if _is_slow(pair, best)), key=rate_of)[:SUSPECTS]
        for pair in slow:
            ordered = (pair.source, pair.target)
            for _ in range(LOOKS - 1):
                again = self._rate(pair, seconds)
                found[ordered] = max(found[ordered], again, key=rate_of)
                if rate_of(found[ordered]) >= best * SLOW:
                    break
        return found

    def rates(
        self, pairs: Mapping[Ordered, Pair], schedule: Iterable[Sequence[Ordered]], *, seconds: float
    ) -> dict[Ordered, Pair]:
        """Measure throughput; the pairs of one entry of the schedule at the same time. What was measured, added."""
        found: dict[Ordered, Pair] = {}
        for entry in schedule:
            jobs = [pairs[ordered] for ordered in entry if ordered in pairs]
            for pair in at_once(lambda pair: self._rate(pair, seconds), jobs):
                if pair.throughput_mbps is not None:
                    found[pair.source, pair.target] = pair
        return found

    def _rate(self, pair: Pair, seconds: float) -> Pair:
        return with_quicker(self._measure(pair, ("time", "throughput"), seconds), pair)

    def _measure(self, pair: Pair, measure: Sequence[str], seconds: float = 1.0) -> Pair:
        """Look at one pair again; itself where that comes to nothing."""
        opened = self.ears.up.get(pair.target)
        door = [attempt for attempt in pair.tries if attempt.ok][-1]
        if opened is None:
            return pair
        place = {"kind": door.kind, "address": door.address, "port": door.port}
        answers = self._ask(pair.source, [{**opened.target, "doors": [place]}], measure, seconds)
        if not answers:
            return pair
        return dataclasses.replace(answers[0], **{name: getattr(pair, name) for name in _KEPT})


def median_of(looks: Sequence[Pair]) -> Pair:
    """The median of several looks at one pair, which knows of the worst; a link may get slow as it gets warm."""
    middle = sorted(looks, key=rate_of)[len(looks) // 2]
    if len(looks) == 1:
        return middle
    return dataclasses.replace(middle, worst_mbps=min(look.possible_mbps for look in looks))


def _is_slow(pair: Pair, best_mbps: float) -> bool:
    """Whether one look more may help; of several the median is what it is."""
    return pair.worst_mbps is None and rate_of(pair) < best_mbps * SLOW


def rate_of(pair: Pair) -> float:
    """The measured throughput in Mbit/s, 0 where there is none."""
    return pair.throughput_mbps or 0.0


_KEPT = (
    "tries",
    "neighbour",
    "full_segment",
    "own_mtu",
    "largest_packet",
    "told_mtu",
    "packets_sent",
    "packets_answered",
    "burst_mbps",
)
"""What a look at the throughput does not measure again."""


def suspects(pairs: Sequence[Pair]) -> list[Ordered]:
    """Pairs whose first MiB was much slower than the fastest one, slowest first; then the fastest, to compare with."""
    known = sorted((pair.burst_mbps, pair.source, pair.target) for pair in pairs if pair.burst_mbps is not None)
    if not known:
        return []
    limit = min(known[-1][0] * SLOW, FAST_MBPS)
    slow = [(source, target) for mbps, source, target in known if mbps < limit]
    return [*slow[:SUSPECTS], known[-1][1:]] if slow else []


def clocks(cluster: Cluster, pairs: Sequence[Pair], by_ssh: Mapping[str, Clock]) -> list[Clock]:
    """Every host's clock against the head's: from the quicker of the two ways, else as ssh saw it."""
    head = cluster.head.name
    found: dict[str, Clock] = {}
    for pair in pairs:
        if head not in {pair.source, pair.target} or pair.ahead_s is None or pair.latency_min_s is None:
            continue
        name, ahead_s = (pair.target, pair.ahead_s) if pair.source == head else (pair.source, -pair.ahead_s)
        clock = Clock(host=name, ahead_s=ahead_s, uncertainty_s=pair.latency_min_s / 2)
        if name not in found or clock.uncertainty_s < found[name].uncertainty_s:
            found[name] = clock
    known = {**by_ssh, **found}
    return [known[host.name] for host in cluster.hosts if host.name != head and host.name in known]


def at_once(work: Callable[[_A], _B], jobs: Sequence[_A]) -> list[_B]:
    """The work for every job, at the same time; in the order of the jobs."""
    with ThreadPoolExecutor(max_workers=max(1, min(THREADS, len(jobs)))) as pool:
        return list(pool.map(work, jobs))


def now() -> str:
    """The time, in ISO format."""
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")


def _outside(cluster: Cluster, ears: Ears) -> tuple[list[Outside], str | None, list[Skipped]]:
    if is_member(cluster):
        why = "this computer is a host of the cluster; run the check from another one to try it"
        return [], None, [Skipped(what="who outside the cluster reaches the ports", why=why)]
    tried = probe_outsider(ears.token, [opened.target for opened in ears.up.values()])
    return tried, next(filter(None, (own_address(host.address) for host in cluster.hosts)), None), []
