"""`bench network`: links, then collectives, in bounded time; the result is kept for the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gangline
from gangline.bench.collective import BenchOrder, Collectives, backend_for, measure_collectives
from gangline.inventory.facts import Inventory
from gangline.inventory.measured import Link, Network, save_network
from gangline.inventory.pairs import Pair, Skipped, both_ways, rounds, sample, say_tries
from gangline.inventory.probe import Probe, askable, listening, now
from gangline.launch.backend import Networks
from gangline.launch.poll import free_port
from gangline.runs.cluster import Cluster
from gangline.transport.transport import Transport

# Latency and throughput of every ordered pair of hosts: one pair per host at a time.


LONGEST_S, SHORTEST_S = 1.0, 0.3
"""How long the throughput of one ordered pair is measured."""
START_S = 0.35
"""What it takes to start that on a host."""
OPEN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The ways that were measured, and those that were not."""

    links: tuple[Link, ...] = ()
    closed: tuple[str, ...] = ()
    """Pairs that do not reach each other, in words."""
    skipped: tuple[Skipped, ...] = ()


def measure_links(
    cluster: Cluster, inventory: Inventory, transports: Mapping[str, Transport], *, seconds: float
) -> Links:
    """Measure in about `seconds`; with many hosts a sample of the pairs, spread evenly, which is said."""
    hosts, skipped = askable(cluster, inventory)
    if len(hosts) < 2:
        return Links(skipped=tuple(skipped))
    with listening(cluster, hosts, transports, seconds=OPEN_S + seconds) as ears:
        probe = Probe(ears=ears, transports=transports, measure=("time",))
        pairs = {(pair.source, pair.target): pair for pair in probe.every_pair()}
        meetings, each_s = schedule(list(ears.up), seconds)
        if len(meetings) < len(rounds(list(ears.up))):
            why = f"{len(meetings)} of {len(rounds(list(ears.up)))} rounds fit into {seconds:.0f} s"
            skipped.append(Skipped(what="throughput of some pairs", why=why))
        open_pairs = {ordered: pair for ordered, pair in pairs.items() if not pair.is_closed}
        halves = [half for meeting in meetings for half in both_ways(meeting)]
        measured = {**pairs, **probe.rates(open_pairs, halves, seconds=each_s)}
        skipped += [Skipped(what=name, why=why) for name, why in ears.problems.items()]
    return Links(
        links=tuple(_link(pair) for pair in measured.values() if not pair.is_closed),
        closed=tuple(
            f"{pair.source} -> {pair.target} {say_tries(pair.tries)}" for pair in pairs.values() if not pair.is_open
        ),
        skipped=(*skipped, *probe.skipped),
    )


def schedule(hosts: list[str], seconds: float) -> tuple[list[list[tuple[str, str]]], float]:
    """Who meets whom, and for how long each way, so that all of it takes `seconds`."""
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


METHOD = (
    "links: one TCP connection of a Python program, each direction alone, the least of 20 round trips of an open "
    "connection; collectives: torch.distributed all_reduce of float32, median over iterations of the slowest rank"
)
LINKS_PART = 0.5
"""Of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchHosts:
    """Hosts on which ranks can be started."""

    cluster: Cluster
    inventory: Inventory
    transports: Mapping[str, Transport]
    networks: Networks


def measure_network(hosts: BenchHosts, *, home: Path, seconds: float, tell: Callable[[str], None]) -> Network:
    """Measure, keep and return it. What cannot be measured is listed with the reason."""
    tell(f"measuring the ways between {len(hosts.cluster.hosts)} hosts")
    links = measure_links(hosts.cluster, hosts.inventory, hosts.transports, seconds=seconds * LINKS_PART)
    tell("starting ranks, which import torch")
    collectives = _collectives(hosts, links, seconds=seconds * (1 - LINKS_PART))
    network = Network(
        cluster=hosts.cluster.name,
        measured=now(),
        method=METHOD,
        addresses={host.name: host.address for host in hosts.cluster.hosts},
        slots={host.name: host.slots for host in hosts.cluster.hosts},
        versions=versions(hosts.inventory),
        links=links.links,
        collectives=collectives.figures,
        skipped=(
            *links.skipped,
            *(Skipped(what="a pair of hosts", why=words) for words in links.closed),
            *collectives.skipped,
        ),
        notes=tuple(busy_cards(hosts.inventory)),
    )
    save_network(home, network)
    return network


def _collectives(hosts: BenchHosts, links: Links, *, seconds: float) -> Collectives:
    why = _why_not(hosts, links)
    if why is not None:
        return Collectives(skipped=(Skipped(what="collectives", why=why),))
    cluster = hosts.cluster
    port = free_port(cluster, hosts.transports[cluster.head.name])
    order = BenchOrder(backend=backend_for(cluster, hosts.inventory), port=port, seconds=seconds)
    head = hosts.inventory.of(cluster.head.name)
    num_cpus = head.num_cpus if head is not None and cluster.is_one_machine else None
    return measure_collectives(cluster, hosts.transports, order, networks=hosts.networks, num_cpus=num_cpus)


def _why_not(hosts: BenchHosts, links: Links) -> str | None:
    """What would keep ranks from meeting; without looking they would wait for minutes."""
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
    """What measured; where hosts differ, all of it."""
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
