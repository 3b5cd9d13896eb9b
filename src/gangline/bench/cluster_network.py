"""`bench network`: links, then collectives, in bounded time; the result is kept for the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gangline
from gangline.bench.torchrun import BenchHosts
from gangline.inventory.facts import Inventory
from gangline.inventory.measured import Collective, Link, Network, save_network
from gangline.inventory.pairs import Pair, Skipped, both_ways, rounds, sample, say_tries
from gangline.inventory.probe import Probe, askable, listening, now
from gangline.runs.cluster import Cluster
from gangline.runs.decode import known_part
from gangline.units import format_bytes

LONGEST_S, SHORTEST_S = 1.0, 0.3
"""How long the throughput of one ordered pair is measured."""
START_S = 0.35
"""How long the start of that measurement takes on a host."""
OPEN_S = 60.0
SIZES = (4 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20)
"""Bytes of an all-reduce. The last is tried only where time and free memory allow."""
METHOD = (
    "links: one TCP connection of a Python program, each direction alone, the least of 20 round trips of an open "
    "connection; collectives: torch.distributed all_reduce of float32, median over iterations of the slowest rank"
)
LINKS_PART = 0.5
"""The part of the time that links take; collectives have the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The ordered pairs that were measured, and those that were not."""

    links: tuple[Link, ...] = ()
    closed: tuple[str, ...] = ()
    """Pairs that do not reach each other, in words."""
    skipped: tuple[Skipped, ...] = ()


def measure_network(hosts: BenchHosts, *, home: Path, seconds: float, report: Callable[[str], None]) -> Network:
    """Measure, keep and return it. Measurements that are not possible are listed with the reason."""
    report(f"measuring the links between {len(hosts.cluster.hosts)} hosts")
    links = measure_links(hosts, seconds=seconds * LINKS_PART)
    report("starting ranks, which import torch")
    why_not = _obstacle(hosts, links)
    if why_not is None:
        collectives, skipped = measure_collectives(hosts, seconds=seconds * (1 - LINKS_PART))
    else:
        collectives, skipped = [], [Skipped(what="collectives", why=why_not)]
    network = Network(
        cluster=hosts.cluster.name,
        measured=now(),
        method=METHOD,
        addresses={host.name: host.address for host in hosts.cluster.hosts},
        slots={host.name: host.slots for host in hosts.cluster.hosts},
        versions=versions(hosts.inventory),
        links=links.links,
        collectives=tuple(collectives),
        skipped=(*links.skipped, *(Skipped(what="a pair of hosts", why=pair) for pair in links.closed), *skipped),
        notes=tuple(busy_cards(hosts.inventory)),
    )
    save_network(home, network)
    return network


def measure_links(hosts: BenchHosts, *, seconds: float) -> Links:
    """Measure latency and throughput of every ordered pair of hosts in about `seconds`, one pair per host at a time.

    With many hosts an even sample of the pairs is measured, and the result says so.
    """
    names, skipped = askable(hosts.cluster, hosts.inventory)
    if len(names) < 2:
        return Links(skipped=tuple(skipped))
    with listening(hosts.cluster, names, hosts.transports, seconds=OPEN_S + seconds) as listeners:
        probe = Probe(listeners=listeners, transports=hosts.transports, measure=("time",))
        pairs = {(pair.source, pair.target): pair for pair in probe.every_pair()}
        meetings, each_s = schedule(list(listeners.up), seconds)
        if len(meetings) < len(rounds(list(listeners.up))):
            why = f"{len(meetings)} of {len(rounds(list(listeners.up)))} rounds fit into {seconds:.0f} s"
            skipped.append(Skipped(what="throughput of some pairs", why=why))
        open_pairs = {ordered: pair for ordered, pair in pairs.items() if not pair.is_closed}
        halves = [half for meeting in meetings for half in both_ways(meeting)]
        measured = {**pairs, **probe.rates(open_pairs, halves, seconds=each_s)}
        skipped += [Skipped(what=name, why=why) for name, why in listeners.problems.items()]
    return Links(
        links=tuple(_link(pair) for pair in measured.values() if not pair.is_closed),
        closed=tuple(
            f"{pair.source} -> {pair.target} {say_tries(pair.tries)}" for pair in pairs.values() if not pair.is_open
        ),
        skipped=(*skipped, *probe.skipped),
    )


def schedule(hosts: list[str], seconds: float) -> tuple[list[list[tuple[str, str]]], float]:
    """The rounds of pairs, and the seconds of each direction, so that all of it takes `seconds`."""
    meetings = rounds(hosts)
    most = max(1, int(seconds / 2 / (SHORTEST_S + START_S)))
    meetings = sample(meetings, most)
    each_s = seconds / 2 / max(1, len(meetings)) - START_S
    return meetings, min(LONGEST_S, max(SHORTEST_S, each_s))


def _link(pair: Pair) -> Link:
    return Link(
        source=pair.source,
        target=pair.target,
        latency_s=pair.latency_min_s,
        latency_median_s=pair.latency_median_s,
        throughput_mbps=pair.throughput_mbps,
        retransmits=pair.retransmits,
    )


def measure_collectives(hosts: BenchHosts, *, seconds: float) -> tuple[list[Collective], list[Skipped]]:
    """All-reduces over all ranks of the cluster, as a training step does them, and those that were left out."""
    backend = backend_for(hosts.cluster, hosts.inventory)
    gang = hosts.run_ranks("bench-collective", {"backend": backend, "sizes": SIZES, "seconds": seconds}, work_s=seconds)
    found, skipped = [], []
    for record in gang.records():
        if record["kind"] == "collective":
            found.append(Collective(**known_part(Collective, record), backend=backend))
        else:
            skipped.append(Skipped(what=f"all_reduce of {format_bytes(record['num_bytes'])}", why=record["why"]))
    if gang.first_failure or not found:
        why = ": ".join(gang.first_failure) if gang.first_failure else "no rank said anything"
        skipped.append(Skipped(what="collectives", why=why))
    return found, skipped


def backend_for(cluster: Cluster, inventory: Inventory) -> str:
    """NCCL where every rank has a GPU of its own, else gloo."""
    known = [(host, inventory.of(host.name)) for host in cluster.hosts]
    return "nccl" if all(facts is not None and len(facts.gpus) >= host.slots for host, facts in known) else "gloo"


def _obstacle(hosts: BenchHosts, links: Links) -> str | None:
    """Why ranks could not meet, where that is known: they would wait for minutes."""
    if sum(host.slots for host in hosts.cluster.hosts) < 2:
        return "there is one rank"
    if hosts.inventory.failures:
        return f"{hosts.inventory.failures[0].host} cannot be asked"
    if links.closed:
        return f"ports are closed: {links.closed[0]}; gangline check says more"
    for facts in hosts.inventory.hosts:
        if not facts.packages.get("torch"):
            return f"{facts.host} has no torch" + (f" ({facts.python_reason})" if facts.python_reason else "")
    return None


def versions(inventory: Inventory) -> dict[str, str]:
    """The versions that measured; where hosts differ, all of them."""
    found = {"gangline": gangline.__version__}
    for name in ("torch", "python"):
        values = [facts.python if name == "python" else facts.packages.get(name) for facts in inventory.hosts]
        known = list(dict.fromkeys(value for value in values if value))
        if known:
            found[name] = ", ".join(known)
    return found


def busy_cards(inventory: Inventory) -> Iterator[str]:
    """In words, cards on which other programs compute."""
    for facts in inventory.hosts:
        busy = [str(gpu.index) for gpu in facts.gpus if gpu.processes]
        if busy:
            yield f"{facts.host}: other programs computed on GPU {', '.join(busy)} meanwhile"
