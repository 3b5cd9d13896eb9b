"""The machines of a cluster as a plan sees them: seats with their free memory, links as they were measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gangline.catalog.gpus import find_gpu
from gangline.catalog.links import find_link, nvlink_of
from gangline.inventory.facts import HostFacts, Inventory
from gangline.inventory.network import Network, load_network
from gangline.inventory.nics import choose_nic
from gangline.planning.links import LinkModel, fit_all_reduce, slowest_of_ring
from gangline.planning.plan import devices_of
from gangline.planning.shares import rank_hosts
from gangline.planning.world import ASSUMED_LINK, Seat, World, link
from gangline.runs.cluster import Cluster, Host

MEMORY_BYTES_PER_S = 2e9
"""Between ranks of one host without GPUs: what gloo moved over loopback on a machine with two cores."""
LOOPBACK_S = 50e-6


def world_of(cluster: Cluster, inventory: Inventory, home: Path) -> World:
    """Seats and links of a cluster that was looked at."""
    gpus = {facts.host: [gpu.name for gpu in facts.gpus] for facts in inventory.hosts}
    devices = devices_of(cluster, gpus)
    hosts = rank_hosts(cluster)
    places = [(host.address, device) for host, device in zip(hosts, devices, strict=True)]
    seats = tuple(
        _seat(host, inventory.of(host.name), device, num_sharing=places.count((host.address, device)))
        for host, device in zip(hosts, devices, strict=True)
    )
    network = load_network(home, cluster)
    inside = _inside(inventory)
    wire = inside if cluster.is_one_machine else _wire(cluster, inventory, network)
    return World(seats=seats, wire=wire, inside=inside)


def _seat(host: Host, facts: HostFacts | None, device: int, *, num_sharing: int) -> Seat:
    weight = None if host.share is None else host.share / host.slots
    if facts is None or not facts.gpus:
        free = _free_memory(facts)
        return Seat(
            host=host.name,
            free_bytes=None if free is None else free // max(1, num_sharing),
            memory_from="unknown" if free is None else "measured",
            weight=weight,
            slowdown=host.slowdown,
        )
    gpu = facts.gpus[device]
    return Seat(
        host=host.name,
        device=device,
        gpu=gpu.name,
        spec=find_gpu(gpu.name, total_bytes=gpu.memory_total_bytes),
        free_bytes=gpu.memory_free_bytes // max(1, num_sharing),
        memory_from="measured",
        power_limit_w=gpu.power_limit_w,
        weight=weight,
        slowdown=host.slowdown,
    )


def _free_memory(facts: HostFacts | None) -> int | None:
    """Of a host without GPUs: what programs can get, within the limit of its control group."""
    if facts is None or facts.memory_available_bytes is None:
        return None
    limit = facts.system.memory_limit_bytes
    return facts.memory_available_bytes if limit is None else min(limit, facts.memory_available_bytes)


def _wire(cluster: Cluster, inventory: Inventory, network: Network | None) -> LinkModel:
    """Between hosts: as `bench network` measured it, else as fast as the slowest interface says that it is."""
    if network is not None and (measured := _measured(cluster, network)) is not None:
        return measured
    speeds = [speed for host in cluster.hosts if (speed := _nic_mbps(host, inventory.of(host.name)))]
    if len(speeds) == len(cluster.hosts) and (spec := find_link(f"{min(speeds)}mbit")) is not None:
        return LinkModel(
            latency_s=spec.latency_s,
            bytes_per_s=spec.payload_bytes_per_s,
            source=f"assumed from the interfaces' {min(speeds)} Mbit/s; gangline bench network measures it",
            spread=0.15,
        )
    assumed = link(ASSUMED_LINK)
    return LinkModel(
        latency_s=assumed.latency_s,
        bytes_per_s=assumed.bytes_per_s,
        source=f"assumed to be {ASSUMED_LINK}; gangline bench network measures it",
        spread=1.0,
    )


def _measured(cluster: Cluster, network: Network) -> LinkModel | None:
    reduced = [each for each in network.collectives if each.operation == "all_reduce" and each.world_size > 1]
    slots = [host.slots for host in cluster.hosts]
    when = network.measured[:10]
    if reduced and reduced[0].world_size == sum(slots):
        points = [(float(each.num_bytes), each.seconds) for each in reduced]
        fitted = fit_all_reduce(points, reduced[0].world_size, source=f"measured {when}")
        if fitted is not None:
            return fitted
    rates = {
        (way.source, way.target): way.throughput_mbps * 125e3
        for way in network.links
        if way.throughput_mbps is not None
    }
    latencies = [way.latency_s for way in network.links if way.latency_s is not None]
    latency_s = max(latencies, default=2e-4) / 2  # a round trip is two ways
    return slowest_of_ring(
        rates, [host.name for host in cluster.hosts], latency_s=latency_s, source=f"measured {when}, pair by pair"
    )


def _nic_mbps(host: Host, facts: HostFacts | None) -> int | None:
    if facts is None:
        return None
    nic, _ = choose_nic(host, facts)
    return nic.speed_mbps if nic is not None else None


def _inside(inventory: Inventory) -> LinkModel:
    """Between cards of a host: NVLink where the table of the host shows it, else the bus."""
    known = [facts for facts in inventory.hosts if len(facts.gpus) > 1]
    if not known:
        return LinkModel(
            latency_s=LOOPBACK_S,
            bytes_per_s=MEMORY_BYTES_PER_S,
            source="this machine's own memory, assumed",
            spread=1.0,
        )
    slowest = min((link(_bus(facts)) for facts in known), key=lambda model: model.bytes_per_s)
    return LinkModel(
        latency_s=slowest.latency_s,
        bytes_per_s=slowest.bytes_per_s,
        source=slowest.source,
        spread=slowest.spread or 0.3,
    )


def _bus(facts: HostFacts) -> str:
    """The catalogue's name of what joins a host's cards."""
    if _all_nvlink(facts):
        found = nvlink_of(facts.gpus[0].name)
        if found is not None:
            return found
    generations = [gpu.pcie_generation_max or 3 for gpu in facts.gpus]
    widths = [gpu.pcie_width_max or 16 for gpu in facts.gpus]
    generation, width = max(3, min(5, *generations)), 16 if min(widths) >= 16 else 8
    return f"pcie{generation}-x{width}"


def _all_nvlink(facts: HostFacts) -> bool:
    topology = facts.topology
    if topology is None:
        return False
    cards = topology.gpus
    pairs: Sequence[tuple[str, str]] = [(one, other) for one in cards for other in cards if one < other]
    return bool(pairs) and all((topology.joint(*pair) or "").startswith("NV") for pair in pairs)
