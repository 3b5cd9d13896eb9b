"""`bench network`: links, then collectives, in bounded time; the result is kept for the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gangline
from gangline.bench.collective import Collectives, Order, backend_for, measure_collectives
from gangline.bench.links import Links, measure_links
from gangline.inventory.facts import Inventory
from gangline.inventory.network import Network, save_network
from gangline.inventory.pairs import Skipped
from gangline.inventory.probe import now
from gangline.launch.backend import Networks
from gangline.launch.port import free_port
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster

METHOD = (
    "links: one TCP connection of a Python program, each direction alone, the least of 20 round trips of an open "
    "connection; collectives: torch.distributed all_reduce of float32, median over iterations of the slowest rank"
)
LINKS_PART = 0.5
"""Of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Hosts on which ranks can be started."""

    cluster: Cluster
    inventory: Inventory
    transports: Mapping[str, Transport]
    networks: Networks


def measure_network(hosts: Hosts, *, home: Path, seconds: float, tell: Callable[[str], None]) -> Network:
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


def _collectives(hosts: Hosts, links: Links, *, seconds: float) -> Collectives:
    why = _why_not(hosts, links)
    if why is not None:
        return Collectives(skipped=(Skipped(what="collectives", why=why),))
    cluster = hosts.cluster
    port = free_port(cluster, hosts.transports[cluster.head.name])
    order = Order(backend=backend_for(cluster, hosts.inventory), port=port, seconds=seconds)
    head = hosts.inventory.of(cluster.head.name)
    num_cpus = head.num_cpus if head is not None and cluster.is_one_machine else None
    return measure_collectives(cluster, hosts.transports, order, networks=hosts.networks, num_cpus=num_cpus)


def _why_not(hosts: Hosts, links: Links) -> str | None:
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
