"""Is the interface that each host's ranks use the right one? What it says of itself; traffic is tried elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from gangline.checks.rules import Evidence, Finding, Look, Rule, Seen, apply, each, pairs
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


def check_nics(inventory: Inventory, cluster: Cluster) -> list[Finding]:
    """The chosen interface of every host, alone and beside the others'."""
    return apply(RULES, inventory, cluster)


def chosen(inventory: Inventory, cluster: Cluster) -> list[tuple[HostFacts, Nic]]:
    """The interface of every host where there is one; none where the ranks do not leave this computer."""
    if len(cluster.hosts) < 2 or cluster.is_one_machine:
        return []
    rows = [(facts, choose_nic(host, facts)[0]) for facts, host in pairs(inventory, cluster)]
    return [(facts, nic) for facts, nic in rows if nic is not None and nic.kind != "loopback"]


def _absent(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    if host.interface is not None and facts.nics and facts.nic(host.interface) is None:
        yield f"it has {_list(facts)}", {"interface": host.interface}


def _list(facts: HostFacts) -> str:
    return ", ".join(nic.name for nic in facts.nics[:8])


def _without_address(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    nic = facts.nic(host.interface) if host.interface is not None else None
    if nic is not None and not _usable(nic):
        yield f"{nic.name} has {', '.join(nic.addresses) or 'no address'}", {"interface": nic.name}


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


def _slow(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    speeds = _speeds(inventory, cluster)
    best = max((speed for *_, speed in speeds), default=0)
    for facts, nic, speed in speeds:
        if speed < SLOW_MBPS or speed * MUCH_SLOWER <= best:
            others = f"; the fastest of the others {best}" if best > speed else ""
            yield Seen(hosts=(facts.host,), evidence=f"{nic.name} runs at {speed} Mbit/s{others}")


def _slower(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    speeds = _speeds(inventory, cluster)
    best = max((speed for *_, speed in speeds), default=0)
    for facts, nic, speed in speeds:
        if SLOW_MBPS <= speed < best < speed * MUCH_SLOWER:
            yield Seen(hosts=(facts.host,), evidence=f"{nic.name} runs at {speed} Mbit/s, others at {best}")


def _chosen_that(look: Callable[[Nic], str | None]) -> Look:
    """A look at the chosen interfaces, one after the other."""

    def all_hosts(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
        for facts, nic in chosen(inventory, cluster):
            if (words := look(nic)) is not None:
                yield Seen(hosts=(facts.host,), evidence=f"{nic.name} {words}")

    return all_hosts


def _is_wifi(nic: Nic) -> str | None:
    return "is a wireless interface" if nic.kind == "wifi" else None


def _is_inner(nic: Nic) -> str | None:
    """A bridge with a real port is how a host of virtual machines has its address."""
    lonely = nic.kind == "bridge" and not any(not port.startswith(("veth", "vnet", "tap")) for port in nic.ports)
    if INNER.fullmatch(nic.name) or lonely:
        return "is a bridge inside that host, for containers or virtual machines"
    return None


def _is_tunnel(nic: Nic) -> str | None:
    return "is a tunnel" if nic.kind == "tunnel" else None


def _is_half(nic: Nic) -> str | None:
    return "runs half duplex" if nic.duplex == "half" else None


def _same_address(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    groups: dict[str, list[str]] = {}
    for facts, host in pairs(inventory, cluster):
        if len(cluster.hosts) > 1 and not cluster.is_one_machine and facts.holder(host.address):
            groups.setdefault(host.address, []).append(facts.host)
    for address, hosts in groups.items():
        if len(hosts) > 1 and not address.startswith("127.") and address != "::1" and _are_machines(inventory, hosts):
            yield Seen(hosts=tuple(hosts), evidence=f"all of them have {address}")


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


RULES = (
    Rule(
        id="E-NET-06",
        severity="warn",
        title="interfaces with different MTU",
        meaning="large packets may vanish on the way: connections open, and hang once data flows",
        fix="give all of them one MTU, and the switch between them, too: sudo ip link set DEV mtu 1500",
        look=_mtu,
    ),
    Rule(
        id="E-NET-07",
        severity="warn",
        title="a slow link",
        meaning="every all-reduce goes at the speed of the slowest link",
        fix="exchange the cable or the switch port: a cable with four wires is the usual cause of 100 Mbit/s",
        look=_slow,
    ),
    Rule(
        id="E-NET-07",
        severity="info",
        title="a link that is slower than others",
        meaning="every all-reduce goes at the speed of the slowest link",
        fix="nothing; or join all hosts by their fastest interfaces",
        look=_slower,
    ),
    Rule(
        id="E-NET-08",
        severity="fail",
        title="has no interface {interface}",
        meaning="the ranks there end at their start: gloo and NCCL are told to use it",
        fix="correct `interface` of this host in the cluster file, or delete the line for the one with its address",
        look=each(_absent),
    ),
    Rule(
        id="E-NET-09",
        severity="fail",
        title="{interface} has no address that others can use",
        meaning="the ranks there cannot be reached through it",
        fix="correct `interface` of this host in the cluster file, or give {interface} an address",
        look=each(_without_address),
    ),
    Rule(
        id="E-NET-09",
        severity="warn",
        title="{interface} does not have the address {address}",
        meaning="the ranks send their data over another network than the one where they meet",
        fix="delete `interface` of this host, or write the address of {interface} as its `address`",
        look=each(_other_address),
    ),
    Rule(
        id="E-NET-13",
        severity="warn",
        title="is on Wi-Fi",
        meaning="slow, and slower whenever others use the air; a lost link ends the training",
        fix="use a cable; USB adapters with 1 or 2.5 Gbit/s cost little",
        look=_chosen_that(_is_wifi),
    ),
    Rule(
        id="E-NET-14",
        severity="warn",
        title="its address is inside that host",
        meaning="other hosts have networks of the same kind and cannot reach it there",
        fix="write the address of its real network into the cluster file: ip addr shows it there",
        look=_chosen_that(_is_inner),
    ),
    Rule(
        id="E-NET-14",
        severity="warn",
        title="its traffic goes through a tunnel",
        meaning="encryption and detours make it slow; all-reduce needs the plain network",
        fix="write the address of its real network into the cluster file: ip addr shows it there",
        look=_chosen_that(_is_tunnel),
    ),
    Rule(
        id="E-NET-15",
        severity="warn",
        title="a half duplex link",
        meaning="it cannot send and receive at once, and loses packets under load",
        fix="let both ends negotiate: sudo ethtool -s DEV autoneg on; exchange the cable",
        look=_chosen_that(_is_half),
    ),
    Rule(
        id="E-NET-16",
        severity="fail",
        title="several hosts have one address",
        meaning="packets reach one of them, by chance",
        fix="give each an address of its own; a fixed one in the router's DHCP table lasts",
        look=_same_address,
    ),
    Rule(
        id="E-NET-16",
        severity="warn",
        title="several hosts have one hardware address",
        meaning="switches send packets to one of them, by chance; copied virtual machines are the usual cause",
        fix="give each virtual machine a MAC of its own",
        look=_same_mac,
    ),
)
