"""The path of `gangline init`, as a column of named steps.

collect   names, a hostfile, questions   -> hosts
scan      every host                     -> the key that it shows
trust     the user                       -> the keys to pin; a no ends it
look      every host, keys pinned        -> facts, and the network between them
settle    facts                          -> the cluster, without the hosts that failed
write     the cluster                    -> cluster.yaml, whole or not at all
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from gangline.config.host_file import WORKDIR
from gangline.config.load import NamedHost, read_cluster_text, require_name
from gangline.config.mistakes import printable
from gangline.errors import GanglineError, HostUnreachable, UsageError
from gangline.init import dependencies
from gangline.init.dependencies import (
    REAL,
    InitConsole,
    InitDependencies,
    Scan,
    Transports,
    ask_for_found,
    ask_for_names,
    collect,
    says_yes,
    scan_all,
)
from gangline.inventory.facts import Gpu, HostFacts, Inventory, Nic
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_atomic
from gangline.transport.transport import Transport, below_home
from gangline.units import counted, format_bytes

# Where do the hosts reach each other? Chosen from the networks that they say they are in. Pure.


Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface


class Quality(IntEnum):
    """How fit an interface is for the ranks' traffic, the best first."""

    WIRED = 0
    WIFI = 1
    OTHER = 2
    TUNNEL = 3
    VIRTUAL = 4


_QUALITY = {
    "ethernet": Quality.WIRED,
    "infiniband": Quality.WIRED,
    "bond": Quality.WIRED,
    "vlan": Quality.WIRED,
    "macvlan": Quality.WIRED,
    "wifi": Quality.WIFI,
    "tunnel": Quality.TUNNEL,
    "veth": Quality.VIRTUAL,
}
_OF_CONTAINERS = re.compile(r"docker|br-[0-9a-f]{6}|virbr|lxcbr|lxdbr|podman|cni|flannel|cali|vmnet|vboxnet")
"""Networks inside one machine: every machine has one with the same numbers, and they are not connected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAddress:
    """Where one host is reached by the others."""

    address: str
    interface: str | None
    """None: an address that ssh uses, and that no interface of the host has."""
    quality: Quality = Quality.OTHER
    speed_mbps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedNetwork:
    """A network that every host has an address in."""

    name: str
    """As in 192.168.1.0/24; "" where the addresses have none in common."""
    places: Mapping[str, HostAddress]
    """By host."""

    @property
    def quality(self) -> Quality:
        """That of its worst interface."""
        return max((place.quality for place in self.places.values()), default=Quality.OTHER)

    @property
    def speed_mbps(self) -> int | None:
        """That of its slowest interface, None if one does not say."""
        speeds = [place.speed_mbps for place in self.places.values()]
        known = [speed for speed in speeds if speed is not None]
        return min(known) if known and len(known) == len(speeds) else None


def shared_networks(hosts: Sequence[HostFacts]) -> list[SharedNetwork]:
    """The networks that all hosts are in, the best for training first.

    Wired before wireless, IPv4 before IPv6, fast before slow; tunnels and what lies inside a machine come last.
    """
    found: dict[str, dict[str, HostAddress]] = {}
    for facts in hosts:
        for name, place in places_of(facts).items():
            found.setdefault(name, {})[facts.host] = place
    networks = [SharedNetwork(name=name, places=places) for name, places in found.items() if len(places) == len(hosts)]
    return sorted(filter(_is_one_network, networks), key=_rank)


def addresses_of_ssh(hosts: Sequence[HostFacts], used: Mapping[str, str]) -> SharedNetwork:
    """Where ssh reaches each host, for hosts that have no network in common; without ssh, a host's best address."""
    places = {}
    for facts in hosts:
        own = sorted(
            places_of(facts).items(), key=lambda item: _rank(SharedNetwork(name=item[0], places={"": item[1]}))
        )
        best = own[0][1] if own else HostAddress(address="127.0.0.1", interface=None)
        address = used.get(facts.host, best.address)
        same = [place for _, place in own if place.address == address]
        places[facts.host] = same[0] if same else HostAddress(address=address, interface=None)
    return SharedNetwork(name="", places=places)


def _rank(network: SharedNetwork) -> tuple[bool, bool, Quality, int, str]:
    last_resort = network.quality >= Quality.TUNNEL
    return (last_resort, ":" in network.name, network.quality, -(network.speed_mbps or 0), network.name)


def _is_one_network(network: SharedNetwork) -> bool:
    """Two hosts with one address are in two networks that look alike."""
    addresses = [place.address for place in network.places.values()]
    return len(set(addresses)) == len(addresses)


def places_of(facts: HostFacts) -> dict[str, HostAddress]:
    """Network -> the host's best interface in it: wired before wireless, fast before slow."""
    best: dict[str, HostAddress] = {}
    by_name = {nic.name: nic for nic in facts.nics}
    for nic in facts.nics:
        if nic.kind == "loopback" or nic.up is False or nic.carrier is False:
            continue
        quality, speed_mbps = _quality(nic, by_name)
        for interface in [seen for text in nic.addresses if (seen := _interface(text)) is not None]:
            place = HostAddress(address=str(interface.ip), interface=nic.name, quality=quality, speed_mbps=speed_mbps)
            name = str(interface.network)
            other = best.setdefault(name, place)
            if (place.quality, -(place.speed_mbps or 0)) < (other.quality, -(other.speed_mbps or 0)):
                best[name] = place
    return best


def _quality(nic: Nic, others: Mapping[str, Nic]) -> tuple[Quality, int | None]:
    """A bridge is as good as the best card in it: on a host of virtual machines it has the host's own address."""
    if _OF_CONTAINERS.match(nic.name):
        return Quality.VIRTUAL, None
    if nic.kind != "bridge":
        return _QUALITY.get(nic.kind, Quality.OTHER), nic.speed_mbps
    cards = [others[port] for port in nic.ports if port in others and others[port].kind != "bridge"]
    ranked = sorted((_QUALITY.get(card.kind, Quality.OTHER), -(card.speed_mbps or 0)) for card in cards)
    quality, speed = ranked[0] if ranked else (Quality.VIRTUAL, 0)
    return quality, -speed or None


def _interface(text: str) -> Interface | None:
    """An address with its prefix, unless it is of use inside the host or on one cable only."""
    try:
        interface = ipaddress.ip_interface(text)
    except ValueError:
        return None
    ip = interface.ip
    return None if ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified else interface


# What is there? Every host is asked for its facts, and how the others reach it is chosen and tried.


THREADS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsFound:
    """What was seen of the hosts that answered."""

    inventory: Inventory
    network: SharedNetwork
    why: str
    """Why this network and no other."""
    is_warning: bool = False
    """Whether `why` is a reason to look closer."""

    @property
    def said(self) -> str:
        """The network and why, in one row; empty where there was nothing to choose."""
        return f"{self.network.name}: {self.why}" if self.network.name and self.why else self.why


def look(cluster: Cluster, used: Mapping[str, str], *, console: InitConsole, deps: InitDependencies) -> HostsFound:
    """The facts of all hosts, and the network in which they reach each other.

    used: the addresses by which ssh reaches them, for want of a better one.
    """
    with _connected(cluster, deps) as transports:
        console.progress(f"looking at {counted(len(cluster.hosts), 'host')}")
        located = _located(cluster, transports)
        inventory = deps.gather(located, transports)
        alive = tuple(host for host in located.hosts if inventory.of(host.name) is not None)
        networks = shared_networks(inventory.hosts)
        if not networks:
            return _without_network(inventory, used)
        if len(networks) == 1 or len(alive) == 1:
            why = "the only network that all hosts share" if len(alive) > 1 else ""
            return HostsFound(inventory=inventory, network=networks[0], why=why)
        console.progress(f"trying {counted(len(networks), 'shared network')}")
        return _tried(dataclasses.replace(located, hosts=alive), inventory, networks, transports=transports, deps=deps)


def _tried(
    cluster: Cluster,
    inventory: Inventory,
    networks: list[SharedNetwork],
    *,
    transports: Transports,
    deps: InitDependencies,
) -> HostsFound:
    """The best network in which all hosts reach each other."""
    for number, network in enumerate(networks):
        addressed = tuple(
            dataclasses.replace(host, address=network.places[host.name].address) for host in cluster.hosts
        )
        if deps.reaches(dataclasses.replace(cluster, hosts=addressed), inventory, transports):
            passed = f"; in {networks[0].name} they do not reach each other" if number else ""
            why = f"the {'next best' if number else 'best'} of {len(networks)} networks that all hosts share{passed}"
            return HostsFound(inventory=inventory, network=network, why=why, is_warning=number > 0)
    why = f"the hosts share {len(networks)} networks and reach each other in none of them; gangline check says why"
    return HostsFound(inventory=inventory, network=networks[0], why=why, is_warning=True)


def _without_network(inventory: Inventory, used: Mapping[str, str]) -> HostsFound:
    network = addresses_of_ssh(inventory.hosts, used)
    if len(inventory.hosts) < 2:
        return HostsFound(inventory=inventory, network=network, why="")
    why = "the hosts share no network: these are the addresses that ssh uses; gangline check tries them"
    return HostsFound(inventory=inventory, network=network, why=why, is_warning=True)


@contextlib.contextmanager
def _connected(cluster: Cluster, deps: InitDependencies) -> Iterator[dict[str, Transport]]:
    transports = deps.connect(cluster)
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


# The text of a cluster.yaml: what was found, with the reasons as comments. Pure.


_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9._@/-]*|[0-9]+(\.[0-9]+){3}|[a-z0-9@.-]+ [A-Za-z0-9+/]+=*")
"""Texts that YAML reads as they are; the last is a host key."""
_WORDS = {"null", "true", "false", "none", "yes", "no", "on", "off", "y", "n"}

_HEAD = """\
# The machines that train together, found by `gangline init`. The file is yours; docs/cluster.md has every key.
"""
_TAIL = """
# More keys, for those who need them:
# environment: {conda: /opt/conda/envs/train}  # on all hosts; left out: a virtual environment that gangline builds
# shared: [/mnt/nas]    # folders that are one and the same on all hosts
# ports: 29500-29599    # where ranks may meet, for a firewall; left out: any free port
# interface: eno1       # at a host: the network card for the ranks; left out: the one that has the address
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What a reader wants to know beside the values of one host."""

    address: str = ""
    slots: str = ""
    workdir: str = ""


def cluster_text(cluster: Cluster, notes: Mapping[str, Notes], *, name: str | None, network: str = "") -> str:
    """The file; reading it gives the same cluster again.

    notes: by host. name: None leaves it to the file's name. network: which one the addresses are in, and why.
    """
    rows = [_HEAD.rstrip("\n")]
    rows += [f"# addresses: {printable(network, limit=300)}"] if network else []
    rows += [f"name: {scalar(name)}"] if name else []
    rows += ["hosts:"]
    for number, host in enumerate(cluster.hosts):
        first, *others = host_rows(host, notes.get(host.name, Notes()))
        rows += ["  # the head, which has rank 0" if number == 0 and len(cluster.hosts) > 1 else ""]
        rows += [f"  - {first}", *(f"    {row}" for row in others)]
    text = "\n".join(rows).replace("hosts:\n\n", "hosts:\n")
    return f"{text}\n{_TAIL}"


def host_rows(host: Host, notes: Notes) -> Iterator[str]:
    """The lines of one host, without indentation."""
    yield f"name: {scalar(host.name)}"
    if host.transport == "local":
        yield "transport: local  # this computer"
    if host.ssh is not None:
        yield f"ssh: {scalar(host.ssh)}"
    if host.ssh_port is not None:
        yield f"port: {host.ssh_port}"
    if host.host_key is not None:
        yield f"host_key: {scalar(host.host_key)}"
    yield _noted(f"address: {scalar(host.address)}", notes.address)
    if host.transport == "ssh" and host.workdir != WORKDIR:
        yield _noted(f"workdir: {scalar(host.workdir)}", notes.workdir)
    if host.interface is not None:
        yield f"interface: {scalar(host.interface)}"
    yield _noted(f"slots: {host.slots}", notes.slots)
    if host.env:
        yield "env:"
        yield from (f"  {name}: {json.dumps(value, ensure_ascii=False)}" for name, value in host.env.items())


def _noted(row: str, note: str) -> str:
    """A row with a comment. A note may come from a host: what is no plain text would end the comment."""
    return f"{row}  # {printable(note, limit=100)}" if note else row


def scalar(text: str) -> str:
    """A text as one YAML value, in quotes where YAML would read something else."""
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if plain else json.dumps(text, ensure_ascii=False)


# What was found, as rows that people read.


HEADER = ("host", "GPU", "memory", "driver", "link", "disk free", "Python")
SLOW_MBPS = 1000
"""A slower link makes ranks wait for each other."""
_SPOKEN = {Quality.WIFI: "wireless", Quality.TUNNEL: "a tunnel", Quality.VIRTUAL: "virtual"}


def row(facts: HostFacts, network: SharedNetwork) -> tuple[str, ...]:
    """One host."""
    return (
        facts.host,
        f"{cards(facts.gpus)}{simulated(facts)}" if facts.gpus else no_cards(facts),
        ", ".join(dict.fromkeys(format_bytes(gpu.memory_total_bytes) for gpu in facts.gpus)) or "-",
        facts.gpu_driver.version or "-",
        link(network.places[facts.host]),
        format_bytes(facts.disk_free_bytes) if facts.disk_free_bytes else "?",
        facts.system.agent_python or "?",
    )


def cards(gpus: Sequence[Gpu]) -> str:
    """The cards of a host, equal ones folded: "2 x NVIDIA RTX A6000"."""
    counted = Counter(gpu.name for gpu in gpus)
    return ", ".join(f"{number} x {name}" if number > 1 else name for name, number in counted.items())


def no_cards(facts: HostFacts) -> str:
    """Why a host has no cards, if it should have some."""
    if facts.foreign_cards:
        return f"none that trains: {', '.join(gpu.name for gpu in facts.foreign_cards)}"
    return f"none: {facts.gpu_reason}" if facts.gpu_driver.on_the_bus else "none"


def link(place: HostAddress) -> str:
    """An interface and its speed: "eno1 1 Gb/s"."""
    speed = "" if place.speed_mbps is None else rate(place.speed_mbps)
    slow = "!" if place.speed_mbps is not None and place.speed_mbps < SLOW_MBPS else ""
    return " ".join(filter(None, (place.interface or "?", speed, _SPOKEN.get(place.quality), slow)))


def rate(mbps: int) -> str:
    """The speed of a link: "100 Mb/s", "2.5 Gb/s"."""
    return f"{mbps} Mb/s" if mbps < 1000 else f"{mbps / 1000:g} Gb/s"


def slots_note(facts: HostFacts) -> str:
    """What a host's slots stand for."""
    if not facts.gpus:
        return "no GPU"
    sizes = ", ".join(dict.fromkeys(format_bytes(gpu.memory_total_bytes) for gpu in facts.gpus))
    return f"{cards(facts.gpus)}, {sizes}{simulated(facts)}"


def simulated(facts: HostFacts) -> str:
    """Says so where the cards are a stand-in for tests."""
    return " (simulated)" if facts.gpu_driver.simulated else ""


def failure(host: str, why: str) -> str:
    """What went wrong with a host, which is named once."""
    return why if why.startswith((f"{host}:", f"{host} ")) else f"{host}: {why}"


# From what was found to the cluster that is written down. Pure.


NETWORK_DRIVES = {
    "nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "fuse.glusterfs", "9p", "afs",
}  # fmt: skip
"""Kinds of file systems on which one folder is seen by several machines."""


def settled(
    named: Sequence[NamedHost], pinned: Sequence[Host], inventory: Inventory, network: SharedNetwork
) -> tuple[Cluster, dict[str, Notes]]:
    """The cluster of the hosts that answered, and what is said beside the values."""
    with_slots = {each.host.name for each in named if each.has_slots}
    in_one_folder = one_folder(inventory.hosts)
    hosts: list[Host] = []
    notes: dict[str, Notes] = {}
    for host in pinned:
        facts = inventory.of(host.name)
        if facts is None:
            continue
        own_folder = host.transport == "ssh" and host.name in in_one_folder
        hosts.append(
            dataclasses.replace(
                host,
                address=network.places[host.name].address,
                slots=host.slots if host.name in with_slots else max(1, len(facts.gpus)),
                workdir=f"{WORKDIR}/{host.name}" if own_folder else host.workdir,
            )
        )
        notes[host.name] = _notes(facts, network)
    return Cluster(name="cluster", hosts=tuple(hosts)), notes


def _notes(facts: HostFacts, network: SharedNetwork) -> Notes:
    return Notes(
        address=link(network.places[facts.host]),
        slots=slots_note(facts),
        workdir="its own: the home folder is one and the same on several hosts",
    )


def refuse_twins(inventory: Inventory) -> None:
    """Raise UsageError where two names lead to one machine: its ranks would be counted twice."""
    seen: dict[tuple[str, str], str] = {}
    for facts in inventory.hosts:
        machine = facts.system.machine
        if machine.boot is None or machine.network is None:
            continue
        other = seen.setdefault((machine.boot, machine.network), facts.host)
        if other != facts.host:
            raise UsageError(
                f"{other} and {facts.host} are one machine",
                seen=f"both call themselves {facts.hostname} and have been up since the same moment",
                fix="name it once; for more ranks on it write slots in the file",
            )


def one_folder(hosts: Sequence[HostFacts]) -> set[str]:
    """Hosts whose work folder, on a network drive, is that of another one, too."""
    places: dict[tuple[str | None, str | None], list[str]] = {}
    for facts in hosts:
        folder = facts.work_folder
        if folder is not None and folder.filesystem in NETWORK_DRIVES:
            places.setdefault((folder.source, folder.real_path), []).append(facts.host)
    return {name for names in places.values() if len(names) > 1 for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class InitQuestion:
    """What the user typed."""

    home: Path
    """The controller's own folder."""
    output: Path
    names: tuple[str, ...] = ()
    hostfile: Path | None = None
    listed: str = ""
    """What the hostfile says in the words of cluster.yaml, where it is another tool's list."""
    name: str | None = None
    """Of the cluster; None: that of the file."""
    yes: bool = False
    """Trust new keys without a question."""
    force: bool = False
    """Replace a file, and do without hosts that failed."""
    dry_run: bool = False
    discover: bool = False
    """Offer the hosts of this computer's networks, where none are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What `init` found and wrote."""

    cluster: Cluster
    scans: tuple[Scan, ...]
    found: HostsFound
    failed: dict[str, str]
    """Host -> why it is not in the file."""
    text: str
    path: Path | None
    """None: nothing was written."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "file": None if self.path is None else str(self.path),
            "cluster": self.cluster.to_json(),
            "keys": [scan.to_json() for scan in self.scans],
            "network": {"name": self.found.network.name or None, "why": self.found.why},
            "inventory": self.found.inventory.to_json(),
            "failed": self.failed,
        }


def init(asked: InitQuestion, *, console: InitConsole, deps: InitDependencies = REAL) -> Described:
    """Describe a cluster and write it down.

    Raises UsageError for bad names, for keys that the user does not trust, and for a file that is there already;
    HostUnreachable where no host answers, or where some do not and the user does not want to go on without them.
    """
    require_room(asked)
    require_name(asked.name)
    named = collect(
        asked.names,
        asked.hostfile,
        listed_as=asked.listed,
        home=asked.home,
        ask=lambda: (
            ask_for_found(deps.discover, console=console)
            if asked.discover
            else ask_for_names(deps.ssh_config, user_of=deps.user_of, console=console)
        ),
    )
    scans = scan_keys(named, console=console, deps=deps)
    dependencies.trust(scans, yes=asked.yes, console=console)
    failed = {scan.host.name: scan.problem for scan in scans if scan.problem}
    pinned = with_keys([each.host for each in named if each.host.name not in failed], scans)
    require_some(pinned, failed)
    used = addresses_of(scans, deps)
    found = look(Cluster(name="cluster", hosts=pinned), used, console=console, deps=deps)
    failed |= {failure.host: failure.why for failure in found.inventory.failures}
    require_some(found.inventory.hosts, failed)
    refuse_twins(found.inventory)
    show_hosts(found, failed, console)
    settle_failed(failed, force=asked.force, console=console)
    cluster, notes = settled(named, pinned, found.inventory, found.network)
    text = cluster_text(cluster, notes, name=asked.name, network=found.said)
    cluster = verified(text, cluster, asked)
    path = None if asked.dry_run else write(asked, text, console=console)
    return Described(cluster=cluster, scans=tuple(scans), found=found, failed=failed, text=text, path=path)


def require_room(asked: InitQuestion) -> None:
    """Refuse to replace a file that somebody wrote; raises UsageError."""
    path = asked.output
    if asked.dry_run or asked.force or not os.path.lexists(path):
        if not asked.dry_run and not path.absolute().parent.is_dir():
            raise UsageError(f"{path} cannot be written", seen=f"no folder {path.absolute().parent}", fix="make it")
        return
    raise UsageError(
        f"{path} is there already",
        seen="expected a name that is free: the file may have been changed by hand",
        fix=f"more hosts: gangline init --add HOST; new host keys only: gangline init --pin {path}; all anew: see "
        f"what would change with gangline init ... --dry-run | diff {path} -; then --force replaces it, --output "
        "writes another",
    )


def scan_keys(named: Sequence[NamedHost], *, console: InitConsole, deps: InitDependencies) -> list[Scan]:
    """Ask every host over SSH for its key, and show what they say."""
    hosts = [each.host for each in named if each.host.transport == "ssh"]
    console.progress(f"asking {counted(len(hosts), 'host')} for the host key")
    scans = scan_all(hosts, deps.scan)
    if any(scan.key for scan in scans):
        dependencies.show(scans, console)
    return scans


def with_keys(hosts: Sequence[Host], scans: Sequence[Scan]) -> tuple[Host, ...]:
    """The hosts with the keys that they showed."""
    shown = {scan.host.name: scan.key for scan in scans}
    return tuple(dataclasses.replace(host, host_key=shown.get(host.name)) for host in hosts)


def addresses_of(scans: Sequence[Scan], deps: InitDependencies) -> dict[str, str]:
    """Host -> the address by which ssh reaches it, as far as this computer can tell."""
    found = {scan.host.name: deps.address_of(scan.address) for scan in scans if scan.key}
    return {name: address for name, address in found.items() if address is not None}


def require_some(hosts: Sequence[object], failed: dict[str, str]) -> None:
    """Raise HostUnreachable where no host is left."""
    if not hosts:
        raise HostUnreachable(
            "no host answers, nothing was written" if len(failed) > 1 else "the host does not answer",
            seen="; ".join(failure(name, why) for name, why in failed.items()),
            fix=how_to_log_in(next(iter(failed)), failed),
        )


def how_to_log_in(host: str, failed: Mapping[str, str]) -> str:
    """What to do about hosts that do not let us in: the command that brings a key."""
    if not any("permission denied" in why.lower() for why in failed.values()):
        return f"log in to one by hand: ssh {host}"
    denied = " ".join(name for name, why in failed.items() if "permission denied" in why.lower())
    locked = "a key with a passphrase has to be in your agent (ssh-add)"
    return f"gangline prepare access {denied}: asks for the password once and brings your key there; {locked}"


def show_hosts(found: HostsFound, failed: dict[str, str], console: InitConsole) -> None:
    """The table of what is there, and what is not."""
    console.table(HEADER, [row(facts, found.network) for facts in found.inventory.hosts])
    for name, why in failed.items():
        console.report(f"failed: {failure(name, why)}")
    if found.why:
        console.report(f"{'warning' if found.is_warning else 'network'}: {found.said}")


def settle_failed(failed: dict[str, str], *, force: bool, console: InitConsole) -> None:
    """Go on without hosts that failed, if the user wants to; raises HostUnreachable."""
    if not failed or force:
        return
    names = ", ".join(failed)
    answer = console.ask(f"write the file without {names}? [y/N]")
    if answer is None or not says_yes(answer):
        raise HostUnreachable(
            f"nothing was written: {counted(len(failed), 'host')} failed",
            seen="; ".join(failure(name, why) for name, why in failed.items()),
            fix=f"{how_to_log_in(next(iter(failed)), failed)}; or go on without {names}: --force",
        )


def verified(text: str, cluster: Cluster, asked: InitQuestion) -> Cluster:
    """Read the text as the next command will; what it says has to be what was found."""
    read = read_cluster_text(text, asked.output, home=asked.home)
    if read.hosts != cluster.hosts:
        raise GanglineError(
            "this is a bug in gangline: the cluster file that it would write says something else than what it found",
            seen=f"expected {cluster.hosts}, saw {read.hosts}",
            fix="report it; nothing was written",
        )
    return read


def write(asked: InitQuestion, text: str, *, console: InitConsole) -> Path:
    """Write the file, whole or not at all."""
    require_room(asked)
    write_atomic(asked.output, text.encode(), mode=0o644)
    console.report(f"wrote {asked.output}")
    return asked.output
