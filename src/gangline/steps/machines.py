"""The machines of a cluster as a plan sees them: seats with their free memory, links as they were measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gangline.catalog.gpus import find_gpu
from gangline.catalog.links import LinkSpec, find_link, nvlink_of
from gangline.checks.names import NETWORK_FILESYSTEMS
from gangline.inventory.facts import HostFacts, Inventory
from gangline.inventory.network import Network, load_network
from gangline.inventory.nics import choose_nic, rank_network
from gangline.planning.links import LinkModel, fit_all_reduce, slowest_of_ring
from gangline.planning.plan import devices_of
from gangline.planning.saves import DISK, Rate
from gangline.planning.shares import rank_hosts
from gangline.planning.world import ASSUMED_LINK, Seat, World, link
from gangline.runs.cluster import Cluster, Host

MEMORY_BYTES_PER_S = 2e9
"""Between ranks of one host without GPUs: what gloo moved over loopback on a machine with two cores."""
LOOPBACK_S = 50e-6
RDMA_HOP_S, RDMA_PAYLOAD_SHARE = 14e-6, 0.96
"""As the catalogue's rows of InfiniBand: 24 GB/s of 200 Gbit/s."""
GUESSED_SPREAD = 1.0
"""Of a link that nobody measured and whose interface does not tell its speed, or not all that decides about it."""


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
    free = _free_memory(facts)
    if facts is None or not facts.gpus:
        return Seat(
            host=host.name,
            free_bytes=None if free is None else free // max(1, num_sharing),
            ram_bytes=free,
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
        ram_bytes=free,
        memory_from="measured",
        power_limit_w=gpu.power_limit_w,
        weight=weight,
        slowdown=host.slowdown,
        num_sharing=num_sharing,
    )


def _free_memory(facts: HostFacts | None) -> int | None:
    """What programs can get of a machine's memory, within the limit of its control group."""
    if facts is None or facts.memory_available_bytes is None:
        return None
    limit = facts.system.memory_limit_bytes
    return facts.memory_available_bytes if limit is None else min(limit, facts.memory_available_bytes)


def disk_rate(world: World, inventory: Inventory | None) -> Rate:
    """How fast a host writes a checkpoint: a folder on a file server is no faster than the way there.

    Hosts write at the same time; at worst one server, with a link like theirs, has to take it all.
    """
    folders = [] if inventory is None else [facts.work_folder for facts in inventory.hosts]
    kinds = [(folder.filesystem or "") for folder in folders if folder is not None]
    away = [kind for kind in kinds if kind.startswith(NETWORK_FILESYSTEMS)]
    if not away:
        return DISK
    most = world.wire.bytes_per_s
    return Rate(
        low=min(DISK.low, most / len(away)),
        likely=min(DISK.likely, most / len(away)),
        high=min(DISK.high, most),
        source=f"work folders on a file server ({', '.join(sorted(set(away)))}), as fast as the network at the most",
    )


def _wire(cluster: Cluster, inventory: Inventory, network: Network | None) -> LinkModel:
    """Between hosts: as `bench network` measured it, else as fast as the slowest interface says that it is.

    A ring passes every host, and every way of it carries the same bytes. Of an interface that says nothing the usual
    speed is assumed, unless another is slower than that.
    """
    if network is not None and (measured := _measured(cluster, network)) is not None:
        return measured
    if (fabric := _rdma(cluster, inventory)) is not None:
        return fabric
    known = {host.name: way for host in cluster.hosts if (way := _way(host, inventory.of(host.name))) is not None}
    silent = [host.name for host in cluster.hosts if host.name not in known]
    slowest = min(known, key=lambda name: known[name].payload_bytes_per_s, default=None)
    assumed = link(ASSUMED_LINK)
    if slowest is None or (silent and known[slowest].payload_bytes_per_s > assumed.bytes_per_s):
        return LinkModel(
            latency_s=assumed.latency_s,
            bytes_per_s=assumed.bytes_per_s,
            source=f"assumed to be {ASSUMED_LINK}; gangline bench network measures it",
            spread=GUESSED_SPREAD,
        )
    way = known[slowest]
    speed = "Wi-Fi" if way.warning else f"{way.line_gbps * 1000:.0f} Mbit/s"
    return LinkModel(
        latency_s=way.latency_s,
        bytes_per_s=way.payload_bytes_per_s,
        source=f"assumed from the {speed} of {slowest}'s interface, none is slower; gangline bench network measures it",
        spread=GUESSED_SPREAD if silent or way.warning else 0.15,
    )


def _rdma(cluster: Cluster, inventory: Inventory) -> LinkModel | None:
    """InfiniBand or RoCE, where NCCL will take it, whatever interface has the hosts' addresses; None where not.

    A host sends through all of its ports at once, as long as each has a card beside it.
    """
    choices = rank_network(cluster, inventory)
    rates: dict[str, float] = {}
    for host in cluster.hosts:
        facts = inventory.of(host.name)
        off = {**(choices[host.name].env if host.name in choices else {}), **host.env}.get("NCCL_IB_DISABLE") == "1"
        if facts is None or off or not facts.gpus or facts.rdma.may_open is False:
            return None
        ports = sorted((port.rate_gbps or 0.0 for port in facts.rdma.active), reverse=True)
        rates[host.name] = sum(ports[: len(facts.gpus)])
    slowest = min(rates, key=lambda name: rates[name])
    if not rates[slowest]:
        return None
    return LinkModel(
        latency_s=RDMA_HOP_S,
        bytes_per_s=rates[slowest] / 8 * 1e9 * RDMA_PAYLOAD_SHARE,
        source=f"assumed from the {rates[slowest]:g} Gbit/s of {slowest}'s InfiniBand or RoCE ports, no host has less; "
        "gangline bench network measures it",
        spread=GUESSED_SPREAD,
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


def _way(host: Host, facts: HostFacts | None) -> LinkSpec | None:
    """What the catalogue expects of the interface through which a host's ranks talk; None where it says no speed."""
    nic = None if facts is None else choose_nic(host, facts)[0]
    if nic is not None and nic.kind == "wifi":
        return find_link("wifi")
    return None if nic is None or not nic.speed_mbps else find_link(f"{nic.speed_mbps}mbit")


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
