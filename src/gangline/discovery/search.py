"""The path of `gangline discover`, as a column of named steps.

hints     ssh_config, known_hosts, neighbours, mDNS   -> places that may be hosts; nobody is asked
scan      this computer's own networks, if asked for  -> who answers on port 22
merge     one row for each address and port, in this computer's networks only
ask       every row, for the first line of its sshd and for its host key; nobody logs in
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gangline.config.document import is_destination
from gangline.discovery import sources
from gangline.discovery.sources import (
    SSH_PORT,
    HostHint,
    LocalNetworks,
    OwnNetwork,
    config_hosts,
    configured,
    is_address,
    is_local_name,
    known_hosts_of,
)
from gangline.errors import GanglineError, UsageError
from gangline.runs.cluster import Cluster, Host
from gangline.transport.hostkeys import Key, known_fingerprints, scan_key
from gangline.transport.ssh_options import printable
from gangline.units import listed

AT_ONCE = 16
"""Hosts that are asked at the same time."""
SCANS_AT_ONCE = 32
ANSWER_S = 3.0
"""Longest time for a host to accept a connection and to send the first line of its sshd."""
SCAN_S = 1.0
"""The same in a scan, in which most addresses have nobody."""
MAX_ADDRESSES = 1022
"""The hosts of a /22: a scan tries no more."""
MAX_NAMES = 500
"""Longest list of names and of neighbours that is looked at."""
BANNER_BYTES = 255
"""Longest first line of an sshd (RFC 4253)."""


class DiscoveryConsole(Protocol):
    """The user's terminal."""

    def report(self, line: str) -> None:
        """A line that stays."""
        ...

    def progress(self, line: str) -> None:
        """The progress of a long step; the next line takes its place."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkHost:
    """A host with sshd on one of this computer's networks."""

    destination: str
    """What ssh is told to reach it: an alias of ssh_config, else its address."""
    address: str
    port: int
    names: tuple[str, ...]
    """What it is called, by whom it was found."""
    sources: tuple[str, ...]
    """Who knew of it: ssh_config, known_hosts, neighbours, mDNS, scan."""
    software: str
    """The first line of its sshd: SSH-2.0-OpenSSH_9.2p1."""
    key: str = ""
    """"ssh-ed25519 AAAA..."; empty where it shows none that gangline would pin."""
    fingerprint: str = ""
    known: str = "new"
    """new; known: the user's ssh has this key for it; changed: it has another one."""
    in_cluster: str = ""
    """The host of the cluster file that it is."""
    cluster_key: str = ""
    """pinned: the cluster file has this key; other: it has another one for this host; empty: not in the file."""
    is_router: bool = False
    problem: str = ""
    """Why it shows no key."""

    @property
    def name(self) -> str:
        """What people call it."""
        return self.names[0] if self.names else self.address

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "destination": self.destination,
            "address": self.address,
            "port": self.port,
            "names": list(self.names),
            "sources": list(self.sources),
            "software": self.software,
            "host_key": self.key or None,
            "fingerprint": self.fingerprint or None,
            "known": self.known,
            "in_cluster": self.in_cluster or None,
            "cluster_key": self.cluster_key or None,
            "router": self.is_router,
            "problem": self.problem or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """What was found, and what was not looked at."""

    hosts: tuple[NetworkHost, ...]
    networks: tuple[OwnNetwork, ...]
    scanned: tuple[ipaddress.IPv4Network, ...]
    unscanned: tuple[ipaddress.IPv4Network, ...]
    """Networks that a scan would try."""
    elsewhere: tuple[str, ...]
    """Names of ssh_config that are on none of this computer's networks; they were not asked."""
    gaps: tuple[str, ...]
    """Sources that could not be read, with the reason."""

    @property
    def offered(self) -> tuple[NetworkHost, ...]:
        """Those that a cluster may be made of: no routers, and with a key to pin."""
        return tuple(host for host in self.hosts if host.key and not host.is_router)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "hosts": [host.to_json() for host in self.hosts],
            "networks": [{"interface": each.interface, "network": str(each.network)} for each in self.networks],
            "scanned": [str(network) for network in self.scanned],
            "unscanned": [str(network) for network in self.unscanned],
            "elsewhere": list(self.elsewhere),
            "not_read": list(self.gaps),
        }


def software_of(address: str, port: int, timeout_s: float) -> str:
    """The first line of whatever listens there, if it speaks SSH; empty if nothing does. Nothing is sent."""
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            line = b""
            while b"\n" not in line and len(line) < BANNER_BYTES:
                piece = connection.recv(BANNER_BYTES - len(line))
                if not piece:
                    break
                line += piece
    except OSError:
        return ""
    text = line.partition(b"\n")[0].decode("ascii", "replace").strip()
    return text if text.startswith("SSH-") else ""


def address_of(name: str) -> str | None:
    """The first IPv4 address of a name, as this computer sees it."""
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return None


def name_of_address(address: str) -> str:
    """What the hosts file or the router's DNS calls an address; empty where they do not."""
    try:
        return socket.gethostbyaddr(address)[0]
    except (OSError, UnicodeError):
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryDependencies:
    """What touches the world; tests put fakes here."""

    networks: Callable[[], LocalNetworks | None] = sources.read_networks
    neighbours: Callable[[], list[HostHint] | None] = sources.read_neighbours
    announced: Callable[[], list[HostHint] | None] = sources.read_announced
    configured: Callable[[str], HostHint | None] = configured
    software: Callable[[str, int, float], str] = software_of
    address_of: Callable[[str], str | None] = address_of
    name_of: Callable[[str], str] = name_of_address
    key: Callable[[str, int | None], Key] = scan_key
    known: Callable[[str, str, int | None], tuple[str, ...]] = known_fingerprints
    ssh_config: Path = Path("~/.ssh/config")
    known_hosts: Path = Path("~/.ssh/known_hosts")


REAL_DISCOVERY = DiscoveryDependencies()
"""This computer, its networks, and the user's own ssh."""


def discover(
    *,
    scan: bool,
    cluster: Cluster | None,
    console: DiscoveryConsole,
    deps: DiscoveryDependencies = REAL_DISCOVERY,
) -> Discovery:
    """The hosts with sshd on this computer's networks. Nobody logs in.

    scan: try port 22 of every address of this computer's own private networks, of 1,022 at most; else only places
    that something knows of are asked. cluster: its hosts are named in the result. Raises UsageError for a scan
    where this computer's networks cannot be read.
    """
    local = deps.networks()
    if scan and local is None:
        raise UsageError(
            "this computer's networks cannot be read, so that nothing bounds a scan",
            seen="`ip -json address show` does not work here",
            fix="install iproute2; or name the hosts: gangline init alice@192.168.1.11",
        )
    local = local or LocalNetworks(networks=())
    console.progress("reading ssh_config, known_hosts, the neighbour table and mDNS")
    hints, gaps = _read_hints(deps)
    places = [each for each in _located(hints, deps) if each.address not in local.own]
    near = [each for each in places if each.source == "neighbours" or local.has(each.address)]
    elsewhere = [each.name for each in places if each.source == "ssh_config" and each not in near]
    ranges = scan_ranges(local)
    if scan:
        near += _scan(ranges, local, console=console, deps=deps)
    rows = _merged(near)
    console.progress(f"asking {len(rows)} places for sshd and its host key")
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        asked = list(pool.map(lambda row: _ask(row, local=local, cluster=cluster, deps=deps), rows))
    found = sorted((host for host in asked if host is not None), key=_order)
    return Discovery(
        hosts=tuple(found),
        networks=local.networks,
        scanned=ranges if scan else (),
        unscanned=() if scan else ranges,
        elsewhere=tuple(dict.fromkeys(elsewhere)),
        gaps=tuple(gaps),
    )


def _order(host: NetworkHost) -> tuple[int, int]:
    return int(ipaddress.IPv4Address(host.address)), host.port


# Hints.


def _read_hints(deps: DiscoveryDependencies) -> tuple[list[HostHint], list[str]]:
    gaps: list[str] = []
    names = config_hosts(deps.ssh_config.expanduser())[:MAX_NAMES]
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        announced = pool.submit(deps.announced)
        hints = [hint for hint in pool.map(deps.configured, names) if hint is not None]
    try:
        text = deps.known_hosts.expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    known, num_hashed = known_hosts_of(text)
    hints += [hint for hint in known if is_address(hint.address) or is_local_name(hint.address)][:MAX_NAMES]
    if num_hashed:
        gaps.append(f"known_hosts: the names in {num_hashed} of its lines are hashed")
    neighbours = deps.neighbours()
    if neighbours is None:
        gaps.append("neighbour table: neither `ip` nor `arp` works here")
    hints += (neighbours or [])[:MAX_NAMES]
    said = announced.result()
    if said is None:
        gaps.append("mDNS: avahi-browse (package avahi-utils) is not installed here, or avahi-daemon does not run")
    return hints + (said or [])[:MAX_NAMES], gaps


def _located(hints: Sequence[HostHint], deps: DiscoveryDependencies) -> list[HostHint]:
    """The hints with an IPv4 address for their name; one without is no host of a network here."""
    names = list(dict.fromkeys(hint.address for hint in hints if not is_address(hint.address)))
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        addresses = dict(zip(names, pool.map(deps.address_of, names), strict=True))
    found = [(hint, addresses.get(hint.address, hint.address)) for hint in hints]
    return [_at(hint, address or hint.address) for hint, address in found if address or hint.source == "ssh_config"]


def _at(hint: HostHint, address: str) -> HostHint:
    return HostHint(source=hint.source, address=address, name=hint.name, port=hint.port, hardware=hint.hardware)


# The scan.


def scan_ranges(local: LocalNetworks) -> tuple[ipaddress.IPv4Network, ...]:
    """The networks that a scan may try: private ones, of a large one the /22 around this computer; 1,022 in all."""
    ranges: list[ipaddress.IPv4Network] = []
    left = MAX_ADDRESSES
    for each in local.networks:
        network = each.network
        if not network.is_private:
            continue
        if network.prefixlen < 22:
            network = ipaddress.IPv4Network((each.address.ip, 22), strict=False)
        if network not in ranges and network.num_addresses - 2 <= left:
            ranges.append(network)
            left -= network.num_addresses - 2
    return tuple(ranges)


def _scan(
    ranges: Sequence[ipaddress.IPv4Network],
    local: LocalNetworks,
    *,
    console: DiscoveryConsole,
    deps: DiscoveryDependencies,
) -> Iterator[HostHint]:
    addresses = [str(ip) for network in ranges for ip in network.hosts() if str(ip) not in local.own]
    if not addresses:
        return
    with ThreadPoolExecutor(max_workers=SCANS_AT_ONCE) as pool:
        answers = pool.map(lambda address: deps.software(address, SSH_PORT, SCAN_S), addresses)
        for number, (address, software) in enumerate(zip(addresses, answers, strict=True), 1):
            if number % SCANS_AT_ONCE == 0:
                console.progress(f"trying port 22: {number} of {len(addresses)} addresses")
            if software:
                yield HostHint(source="scan", address=address)


# Each place once, and what it answers.


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostPlace:
    """An address and a port, with all that was said of it."""

    address: str
    port: int
    hints: tuple[HostHint, ...]

    def named(self, source: str) -> list[str]:
        return [hint.name for hint in self.hints if hint.source == source and hint.name]


_NAMERS = ("ssh_config", "mDNS", "known_hosts")
"""Sources with names, the best first."""


def _merged(hints: Sequence[HostHint]) -> list[_HostPlace]:
    """One row for each place. What knows an address only adds to the rows of that address."""
    by_place: dict[tuple[str, int], list[HostHint]] = {}
    for hint in hints:
        if hint.source != "neighbours":
            by_place.setdefault((hint.address, hint.port), []).append(hint)
    addresses = {address for address, _ in by_place}
    for hint in (hint for hint in hints if hint.source == "neighbours"):
        if hint.address not in addresses:
            by_place.setdefault((hint.address, SSH_PORT), [])
        for (address, _), found in by_place.items():
            if address == hint.address:
                found.append(hint)
    return [_HostPlace(address=place[0], port=place[1], hints=tuple(found)) for place, found in by_place.items()]


def _ask(
    place: _HostPlace, *, local: LocalNetworks, cluster: Cluster | None, deps: DiscoveryDependencies
) -> NetworkHost | None:
    """The host at that place; None where no sshd answers."""
    software = deps.software(place.address, place.port, ANSWER_S)
    if not software:
        return None
    names = [name for source in _NAMERS for name in place.named(source)]
    names = names or [name for name in [deps.name_of(place.address)] if is_destination(name)]
    destination, port = _told(place, names, deps)
    key, problem, known = Key(line="", fingerprint=""), "", "new"
    try:
        key = deps.key(destination, port)
        fingerprints = {*deps.known(destination, key.line, port), *deps.known(place.address, key.line, place.port)}
        known = "known" if key.fingerprint in fingerprints else "changed" if fingerprints else "new"
    except GanglineError as error:
        problem = "; ".join(part for part in (error.what, error.seen) if part)
    member = _member({place.address, destination, *names}, key=key.line, cluster=cluster)
    return NetworkHost(
        destination=destination,
        address=place.address,
        port=place.port,
        names=tuple(dict.fromkeys(name.removesuffix(".local") for name in names)),
        sources=tuple(dict.fromkeys(hint.source for hint in place.hints)),
        software=printable(software),
        key=key.line,
        fingerprint=key.fingerprint,
        known=known,
        in_cluster=member.name if member else "",
        cluster_key="" if member is None else "pinned" if key.line and member.host_key == key.line else "other",
        is_router=place.address in local.gateways,
        problem=problem,
    )


def _told(place: _HostPlace, names: Sequence[str], deps: DiscoveryDependencies) -> tuple[str, int | None]:
    """What ssh is told, and the port: an alias knows its own; a name has to lead to this very address."""
    if aliases := place.named("ssh_config"):
        return aliases[0], None
    port = place.port if place.port != SSH_PORT else None
    leads_there = (name for name in names if deps.address_of(name) == place.address)
    return next(leads_there, place.address), port


def _member(words: AbstractSet[str], *, key: str, cluster: Cluster | None) -> Host | None:
    """The host of the cluster file that this is: by its key, else by its address or the name that ssh is told."""
    hosts = [host for host in cluster.hosts if host.transport == "ssh"] if cluster else []
    by_key = [host for host in hosts if key and host.host_key == key]
    by_word = [host for host in hosts if {(host.ssh or host.name).rpartition("@")[2], host.address} & words]
    return next(iter(by_key + by_word), None)


# What was found, as rows that people read.


HEADER = ("host", "address", "known from", "host key", "", "cluster")
_STANDING = {"new": "new", "known": "known to your ssh", "changed": "NOT the key that your ssh knows"}
_PINNED = {"pinned": "{}", "other": "{}, with ANOTHER KEY", "": "-"}


def row(host: NetworkHost) -> tuple[str, ...]:
    """One host."""
    return (
        host.name,
        host.address if host.port == SSH_PORT else f"{host.address} port {host.port}",
        ", ".join(host.sources),
        host.fingerprint or f"none: {host.problem}",
        "router" if host.is_router else _STANDING[host.known] if host.key else "-",
        _PINNED[host.cluster_key].format(host.in_cluster),
    )


def remarks(found: Discovery) -> list[str]:
    """What a reader should know beside the rows."""
    lines = []
    by_key: dict[str, list[str]] = {}
    for host in found.hosts:
        by_key.setdefault(host.key, []).append(host.address)
    for key, addresses in by_key.items():
        if key and len(addresses) > 1:
            lines.append(
                f"{listed(addresses)} show one key: one machine, or copies of one disk, which need keys of their own"
            )
    if found.elsewhere:
        lines.append(f"not asked, on none of this computer's networks: {listed(found.elsewhere)}")
    lines += [f"not read: {gap}" for gap in found.gaps]
    if found.scanned:
        lines.append(f"scanned port 22: {spoken(found.scanned)}")
    return lines


def spoken(networks: Sequence[ipaddress.IPv4Network]) -> str:
    """192.168.1.0/24 (254 addresses)."""
    return listed([f"{network} ({network.num_addresses - 2} addresses)" for network in networks])
