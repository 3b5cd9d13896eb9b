"""What is there? Every host is asked for its facts, and how the others reach it is chosen and tried."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gangline.describe.addresses import Network, addresses_of_ssh, shared_networks
from gangline.describe.seams import Seams, Transports
from gangline.describe.talk import Talk, counted
from gangline.errors import GanglineError
from gangline.inventory.facts import Inventory
from gangline.remote.transport import Transport, below_home
from gangline.runs.cluster import Cluster, Host

THREADS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was seen of the hosts that answered."""

    inventory: Inventory
    network: Network
    why: str
    """Why this network and no other."""
    is_warning: bool = False
    """Whether `why` is a reason to look closer."""

    @property
    def said(self) -> str:
        """The network and why, in one row; empty where there was nothing to choose."""
        return f"{self.network.name}: {self.why}" if self.network.name and self.why else self.why


def look(cluster: Cluster, used: Mapping[str, str], *, talk: Talk, seams: Seams) -> Found:
    """The facts of all hosts, and the network in which they reach each other.

    used: the addresses by which ssh reaches them, for want of a better one.
    """
    with _connected(cluster, seams) as transports:
        talk.tick(f"looking at {counted(len(cluster.hosts), 'host')}")
        located = _located(cluster, transports)
        inventory = seams.gather(located, transports)
        alive = tuple(host for host in located.hosts if inventory.of(host.name) is not None)
        networks = shared_networks(inventory.hosts)
        if not networks:
            return _without_network(inventory, used)
        if len(networks) == 1 or len(alive) == 1:
            why = "the only network that all hosts share" if len(alive) > 1 else ""
            return Found(inventory=inventory, network=networks[0], why=why)
        talk.tick(f"trying {counted(len(networks), 'shared network')}")
        return _tried(
            dataclasses.replace(located, hosts=alive), inventory, networks, transports=transports, seams=seams
        )


def _tried(
    cluster: Cluster, inventory: Inventory, networks: list[Network], *, transports: Transports, seams: Seams
) -> Found:
    """The best network in which all hosts reach each other."""
    for number, network in enumerate(networks):
        addressed = tuple(
            dataclasses.replace(host, address=network.places[host.name].address) for host in cluster.hosts
        )
        if seams.reaches(dataclasses.replace(cluster, hosts=addressed), inventory, transports):
            passed = f"; in {networks[0].name} they do not reach each other" if number else ""
            why = f"the {'next best' if number else 'best'} of {len(networks)} networks that all hosts share{passed}"
            return Found(inventory=inventory, network=network, why=why, is_warning=number > 0)
    why = f"the hosts share {len(networks)} networks and reach each other in none of them; gangline check says why"
    return Found(inventory=inventory, network=networks[0], why=why, is_warning=True)


def _without_network(inventory: Inventory, used: Mapping[str, str]) -> Found:
    network = addresses_of_ssh(inventory.hosts, used)
    if len(inventory.hosts) < 2:
        return Found(inventory=inventory, network=network, why="")
    why = "the hosts share no network: these are the addresses that ssh uses; gangline check tries them"
    return Found(inventory=inventory, network=network, why=why, is_warning=True)


@contextlib.contextmanager
def _connected(cluster: Cluster, seams: Seams) -> Iterator[dict[str, Transport]]:
    transports = seams.connect(cluster)
    try:
        yield transports
    finally:
        with _threads(cluster) as pool:
            list(pool.map(lambda transport: transport.close(), transports.values()))


def _located(cluster: Cluster, transports: Transports) -> Cluster:
    with _threads(cluster) as pool:
        hosts = pool.map(lambda host: _at_home(host, transports[host.name]), cluster.hosts)
        return dataclasses.replace(cluster, hosts=tuple(hosts))


def _at_home(host: Host, transport: Transport) -> Host:
    """The host with its work folder written out; one that does not answer is told of later."""
    if not host.workdir.startswith("~/"):
        return host
    try:
        return dataclasses.replace(host, workdir=below_home(host.workdir, transport.home()))
    except (GanglineError, OSError):
        return host


def _threads(cluster: Cluster) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, min(THREADS, len(cluster.hosts))))
