"""Is the interface that each host's ranks use the right one? What it says of itself; traffic is tried elsewhere."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator

from gangline.checks.rules import Adder, Evidence, Look, Rule, Seen, adders, differing_by, pairs
from gangline.inventory.facts import HostFacts, Inventory, Nic
from gangline.inventory.gather import is_address
from gangline.inventory.rank_interface import choose_nic
from gangline.runs.cluster import Cluster, Host

SLOW_MBPS = 1000
MUCH_SLOWER = 10
WIRED = {"ethernet", "bond", "vlan", "infiniband"}
VIRTUAL = {"hv_netvsc", "virtio_net", "vmxnet3", "xen_netfront", "ena", "veth", "dummy"}
"""Drivers of interfaces that say any speed, or none."""
INNER = re.compile(r"docker\d*|br-[0-9a-f]{6,}|virbr\d+|lxcbr\d+|lxdbr\d+|cni\d*|podman\d*|cbr\d+|flannel.*|cali.*")
"""Networks of containers and virtual machines inside one host."""


def chosen(inventory: Inventory, cluster: Cluster) -> list[tuple[HostFacts, Nic]]:
    """The interface of every host where there is one; none where the ranks do not leave this computer."""
    if len(cluster.hosts) < 2 or cluster.is_one_machine:
        return []
    rows = [(facts, choose_nic(host, facts)[0]) for facts, host in pairs(inventory, cluster)]
    return [(facts, nic) for facts, nic in rows if nic is not None and nic.kind != "loopback"]


def _of_chosen(look: Callable[[Nic], str | None]) -> Look:
    """A look at the chosen interfaces, one after the other; the function says a fault of one."""

    def all_hosts(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
        for facts, nic in chosen(inventory, cluster):
            if (words := look(nic)) is not None:
                yield Seen(hosts=(facts.host,), evidence=f"{nic.name} {words}")

    return all_hosts


RULES: list[Rule] = []
each_host, whole_cluster = adders(RULES)
chosen_nic = Adder(RULES, _of_chosen)
same_everywhere = Adder(RULES, differing_by)


@each_host.fail(
    "E-NET-08",
    title="has no interface {interface}",
    meaning="the ranks there end at their start: gloo and NCCL get this name",
    fix="correct `interface` of this host in the cluster file, or delete the line for the one with its address",
)
def _absent(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    if host.interface is not None and facts.nics and facts.nic(host.interface) is None:
        yield f"it has {_list(facts)}", {"interface": host.interface}


def _list(facts: HostFacts) -> str:
    return ", ".join(nic.name for nic in facts.nics[:8])


@each_host.fail(
    "E-NET-09",
    title="{interface} has no address that others can use",
    meaning="the ranks there cannot be reached through it",
    fix="correct `interface` of this host in the cluster file, or give {interface} an address",
)
def _without_address(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    nic = facts.nic(host.interface) if host.interface is not None else None
    if nic is not None and not _usable(nic):
        yield f"{nic.name} has {', '.join(nic.addresses) or 'no address'}", {"interface": nic.name}


@each_host.warn(
    "E-NET-09",
    title="{interface} does not have the address {address}",
    meaning="the ranks send their data over another network than the one where they meet",
    fix="delete `interface` of this host, or write the address of {interface} as its `address`",
)
def _other_address(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    nic = facts.nic(host.interface) if host.interface is not None else None
    if nic is None or not _usable(nic) or not is_address(host.address) or nic.holds(host.address):
        return
    holder = facts.holder(host.address)
    elsewhere = f"; {host.address} is on {holder.name}" if holder else ""
    yield f"{nic.name} has {', '.join(_usable(nic))}{elsewhere}", {"interface": nic.name, "address": host.address}


def _usable(nic: Nic) -> list[str]:
    """Addresses that others can use without knowing an interface."""
    texts = [text.partition("/")[0] for text in nic.addresses]
    return [text for text in texts if not text.lower().startswith(("fe80:", "169.254."))]


@whole_cluster.warn(
    "E-NET-06",
    title="interfaces with different MTU",
    meaning="large packets may vanish on the way: connections open, and hang once data flows",
    fix="give all of them one MTU, and the switch between them, too: sudo ip link set DEV mtu 1500",
    step="address",
)
def _mtu(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    groups: dict[int, list[str]] = {}
    for facts, nic in chosen(inventory, cluster):
        if nic.mtu is not None:
            groups.setdefault(nic.mtu, []).append(f"{facts.host} ({nic.name})")
    if len(groups) > 1:
        evidence = "; ".join(f"{mtu} on {', '.join(places)}" for mtu, places in groups.items())
        yield Seen(hosts=tuple(facts.host for facts, nic in chosen(inventory, cluster) if nic.mtu), evidence=evidence)


def _speeds(inventory: Inventory, cluster: Cluster) -> list[tuple[HostFacts, Nic, int]]:
    return [
        (facts, nic, nic.speed_mbps)
        for facts, nic in chosen(inventory, cluster)
        if nic.kind in WIRED and nic.driver not in VIRTUAL and nic.speed_mbps is not None
    ]


@whole_cluster.warn(
    "E-NET-07",
    title="a slow link",
    meaning="every all-reduce goes at the speed of the slowest link",
    fix="exchange the cable or the switch port: a cable with four wires is the usual cause of 100 Mbit/s",
)
def _slow(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    speeds = _speeds(inventory, cluster)
    best = max((speed for *_, speed in speeds), default=0)
    for facts, nic, speed in speeds:
        if speed < SLOW_MBPS or speed * MUCH_SLOWER <= best:
            others = f"; the fastest of the others {best}" if best > speed else ""
            yield Seen(hosts=(facts.host,), evidence=f"{nic.name} runs at {speed} Mbit/s{others}")


@whole_cluster.info(
    "E-NET-07",
    title="a link that is slower than others",
    meaning="every all-reduce goes at the speed of the slowest link",
    fix="nothing; or join all hosts by their fastest interfaces",
)
def _slower(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    speeds = _speeds(inventory, cluster)
    best = max((speed for *_, speed in speeds), default=0)
    for facts, nic, speed in speeds:
        if SLOW_MBPS <= speed < best < speed * MUCH_SLOWER:
            yield Seen(hosts=(facts.host,), evidence=f"{nic.name} runs at {speed} Mbit/s, others at {best}")


@chosen_nic.warn(
    "E-NET-13",
    title="is on Wi-Fi",
    meaning="slow, and slower whenever others use the air; a lost link ends the training",
    fix="use a cable; USB adapters with 1 or 2.5 Gbit/s cost little",
)
def _is_wifi(nic: Nic) -> str | None:
    return "is a wireless interface" if nic.kind == "wifi" else None


@chosen_nic.warn(
    "E-NET-14",
    title="its address is inside that host",
    meaning="other hosts have networks of the same kind and cannot reach it there",
    fix="write the address of its real network into the cluster file: ip addr shows it there",
)
def _is_inner(nic: Nic) -> str | None:
    """A bridge with a real port is how a host of virtual machines has its address."""
    lonely = nic.kind == "bridge" and not any(not port.startswith(("veth", "vnet", "tap")) for port in nic.ports)
    if INNER.fullmatch(nic.name) or lonely:
        return "is a bridge inside that host, for containers or virtual machines"
    return None


@chosen_nic.warn(
    "E-NET-14",
    title="its traffic goes through a tunnel",
    meaning="encryption and detours make it slow; all-reduce needs the plain network",
    fix="write the address of its real network into the cluster file: ip addr shows it there",
)
def _is_tunnel(nic: Nic) -> str | None:
    return "is a tunnel" if nic.kind == "tunnel" else None


NAT_OF_WSL = ipaddress.ip_network("172.16.0.0/12")
"""Windows takes the network behind which it puts WSL from here."""


@whole_cluster.warn(
    "E-NET-17",
    title="is WSL behind Windows' own network",
    meaning="the other hosts cannot open a connection to it, so that no rank there can be reached",
    fix="on Windows: `networkingMode=mirrored` in .wslconfig, and rules of its firewall: docs/guides/wsl2.md",
)
def _behind_windows(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    for facts, host in pairs(inventory, cluster):
        others = [other.address for other in cluster.hosts if other.name != host.name and is_address(other.address)]
        if not (facts.system.wsl and others and is_address(host.address)):
            continue
        address = ipaddress.ip_address(host.address)
        near = ipaddress.ip_network(f"{address}/20" if address.version == 4 else address, strict=False)
        if address in NAT_OF_WSL and not any(ipaddress.ip_address(other) in near for other in others):
            yield Seen(hosts=(facts.host,), evidence=f"{address} is an address that Windows gave to WSL")


@chosen_nic.warn(
    "E-NET-15",
    title="a half duplex link",
    meaning="it cannot send and receive at once, and loses packets under load",
    fix="let both ends negotiate: sudo ethtool -s DEV autoneg on; exchange the cable",
)
def _is_half(nic: Nic) -> str | None:
    return "runs half duplex" if nic.duplex == "half" else None


@whole_cluster.fail(
    "E-NET-16",
    title="several hosts have one address",
    meaning="packets reach one of them, by chance",
    fix="give each an address of its own; a fixed one in the router's DHCP table lasts",
)
def _same_address(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    groups: dict[str, list[str]] = {}
    for facts, host in pairs(inventory, cluster):
        if len(cluster.hosts) > 1 and not cluster.is_one_machine and facts.holder(host.address):
            groups.setdefault(host.address, []).append(facts.host)
    for address, hosts in groups.items():
        if len(hosts) > 1 and not address.startswith("127.") and address != "::1" and _are_machines(inventory, hosts):
            yield Seen(hosts=tuple(hosts), evidence=f"all of them have {address}")


@whole_cluster.warn(
    "E-NET-16",
    title="several hosts have one hardware address",
    meaning="switches send packets to one of them, by chance; copied virtual machines are the usual cause",
    fix="give each virtual machine a MAC of its own",
)
def _same_mac(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    groups: dict[str, list[str]] = {}
    for facts, nic in chosen(inventory, cluster):
        if nic.mac and nic.mac.strip("0:"):
            groups.setdefault(nic.mac.lower(), []).append(facts.host)
    for mac, hosts in groups.items():
        if len(hosts) > 1 and _are_machines(inventory, hosts):
            yield Seen(hosts=tuple(hosts), evidence=f"all of them have {mac}")


def _are_machines(inventory: Inventory, hosts: list[str]) -> bool:
    """Whether they are different ones: of a machine that is listed twice, another rule tells."""
    machines = [facts.system.machine for facts in inventory.hosts if facts.host in hosts]
    return len({(machine.boot, machine.network) for machine in machines}) > 1


# Can InfiniBand or RoCE be used, on all hosts?


INFINIBAND = "InfiniBand"


@whole_cluster.warn(
    "E-IB-01",
    title="an InfiniBand or RoCE port is down",
    meaning="its traffic goes through fewer ports, or over Ethernet for all hosts",
    fix="there: check the cable and the switch port; without a subnet manager, ports stay in INIT (ibstat)",
)
def _down(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    """A port that nobody plugged in on any host is no finding, unless the host has no other."""
    most = max((len(facts.rdma.active) for facts in inventory.hosts), default=0)
    for facts in inventory.hosts:
        rdma = facts.rdma
        idle = [port for port in rdma.ports if not port.is_active]
        lonely = not rdma.active and any(port.link_layer == INFINIBAND for port in idle)
        if idle and (len(rdma.active) < most or lonely):
            words = [f"{port.name} is {port.state or '?'} ({port.physical_state or '?'})" for port in idle[:4]]
            yield Seen(
                hosts=(facts.host,), evidence=f"{', '.join(words)}; {len(rdma.active)} active, others have {most}"
            )


@whole_cluster.warn(
    "E-IB-02",
    title="has no active InfiniBand, and other hosts have",
    meaning="all ranks have to go the same way, so NCCL uses Ethernet on all hosts",
    fix="bring its InfiniBand up, or train on the other hosts only",
)
def _infiniband_on_some(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    return _on_some_only(inventory, is_infiniband=True)


@whole_cluster.info(
    "E-IB-02",
    title="has no active RoCE, and other hosts have",
    meaning="all ranks have to go the same way, so NCCL uses plain TCP on all hosts",
    fix="nothing, unless you set RoCE up on purpose",
)
def _roce_on_some(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    """Many ordinary network cards can do RoCE that nobody set up, so this only tells."""
    return _on_some_only(inventory, is_infiniband=False)


def _on_some_only(inventory: Inventory, *, is_infiniband: bool) -> Iterator[Seen]:
    having = [facts for facts in inventory.hosts if facts.rdma.active]
    lacking = tuple(facts.host for facts in inventory.hosts if not facts.rdma.active)
    infiniband = any(port.link_layer == INFINIBAND for facts in having for port in facts.rdma.active)
    if having and lacking and infiniband == is_infiniband:
        yield Seen(hosts=lacking, evidence=f"active on {', '.join(facts.host for facts in having)} only")


@each_host.warn(
    "E-IB-03",
    title="GPUs and adapters do not share memory",
    meaning="everything between hosts is copied through the memory of the CPU",
    fix="there: sudo modprobe nvidia_peermem, or install NVIDIA's open kernel module",
)
def _no_peer_memory(facts: HostFacts, _host: Host) -> Iterator[str]:
    """The open kernel module shares memory with adapters by itself (DMA-BUF)."""
    if facts.gpus and facts.rdma.active and facts.rdma.peer_memory is False and not facts.gpu_driver.open_module:
        yield f"{facts.rdma.active[0].name} is active; neither nvidia_peermem nor the open kernel module is loaded"


@same_everywhere.warn(
    "E-IB-04",
    title="different kinds of ports",
    meaning="InfiniBand and RoCE do not talk with each other",
    fix="use hosts with one kind, or set the ports to one: mlxconfig",
)
def _kind(facts: HostFacts) -> str | None:
    return "+".join(sorted({port.link_layer or "?" for port in facts.rdma.active})) or None


@same_everywhere.warn(
    "E-IB-04",
    title="ports of different speed",
    meaning="the slowest host rules the speed of every all-reduce",
    fix="check cables and switch ports of the slower hosts: a bad cable trains down (ibstat)",
)
def _rate(facts: HostFacts) -> str | None:
    rates = [port.rate_gbps for port in facts.rdma.active if port.rate_gbps is not None]
    return f"{len(rates)} x {max(rates):g} Gbit/s" if rates else None


@each_host.fail(
    "E-IB-05",
    title="this user may not use InfiniBand",
    meaning="NCCL sees the adapter, cannot open it, and ends",
    fix="there: give the user the group of /dev/infiniband; in a container: --device=/dev/infiniband",
)
def _closed(facts: HostFacts, _host: Host) -> Iterator[str]:
    if facts.rdma.active and facts.rdma.may_open is False:
        yield "/dev/infiniband/uverbs* may not be opened by this user"
