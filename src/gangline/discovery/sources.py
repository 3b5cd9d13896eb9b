"""Where hosts may be known from: ssh_config, known_hosts, the neighbour table, mDNS. Reading them asks no host.

Also this computer's own networks, which bound whom `gangline discover` may ask at all.
"""

from __future__ import annotations

import glob
import ipaddress
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.config.document import is_destination
from gangline.errors import GanglineError
from gangline.transport.hostkeys import resolve

SSH_PORT = 22
READ_S = 8.0
"""Longest time for a program of this computer that lists something; avahi-browse waits for answers for some seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostHint:
    """One place that says there may be a host."""

    source: str
    """ssh_config, known_hosts, neighbours, mDNS, or scan."""
    address: str
    """An address, or a name to look up."""
    name: str = ""
    """What it is called there; the alias for ssh_config."""
    port: int = SSH_PORT
    hardware: str = ""
    """The address of its network card, where the source knows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNetwork:
    """A network that this computer has an address in."""

    interface: str
    address: ipaddress.IPv4Interface

    @property
    def network(self) -> ipaddress.IPv4Network:
        """As in 192.168.1.0/24."""
        return self.address.network


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNetworks:
    """This computer's networks, and its ways out of them."""

    networks: tuple[OwnNetwork, ...]
    gateways: frozenset[str] = frozenset()
    """Addresses of routers."""
    own: frozenset[str] = frozenset()
    """All addresses of this computer."""

    def has(self, address: str) -> bool:
        """Whether an address lies in one of the networks."""
        try:
            ip = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        return isinstance(ip, ipaddress.IPv4Address) and any(ip in each.network for each in self.networks)


Run = Callable[[Sequence[str]], str | None]
"""Runs a program of this computer; None where it is not installed, fails or does not end in time."""


def run(argv: Sequence[str]) -> str | None:
    """What a program prints. See `Run`."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=READ_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


# This computer's networks.


_INSIDE = re.compile(r"docker|br-[0-9a-f]{6}|virbr|lxcbr|lxdbr|podman|cni|flannel|cali|vmnet|vboxnet|veth")
"""Interfaces of networks inside this computer."""
_LEAVES_OUT = {"LOOPBACK", "POINTOPOINT"}
"""Flags of interfaces without neighbours."""


def read_networks(run: Run = run) -> LocalNetworks | None:
    """This computer's networks, from iproute2; None where it has no `ip`."""
    addresses, routes = run(["ip", "-json", "address", "show"]), run(["ip", "-json", "route", "show", "default"])
    return None if addresses is None else networks_of(addresses, routes or "[]")


def networks_of(addresses: str, routes: str) -> LocalNetworks:
    """From the JSON of `ip address` and of `ip route`."""
    networks, own = [], set()
    for link in _rows(addresses):
        found = [each for each in link.get("addr_info", ()) if isinstance(each, dict) and each.get("local")]
        own |= {str(each["local"]) for each in found}
        name = str(link.get("ifname", ""))
        if _LEAVES_OUT & set(link.get("flags", ())) or "UP" not in link.get("flags", ()) or _INSIDE.match(name):
            continue
        for each in found:
            if each.get("family") == "inet" and each.get("scope") == "global" and each.get("prefixlen", 32) < 31:
                address = ipaddress.IPv4Interface(f"{each['local']}/{each['prefixlen']}")
                networks.append(OwnNetwork(interface=name, address=address))
    gateways = {str(route["gateway"]) for route in _rows(routes) if route.get("gateway")}
    return LocalNetworks(networks=tuple(networks), gateways=frozenset(gateways), own=frozenset(own))


def _rows(text: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(text)
    except ValueError:
        return []
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


# The neighbour table: machines of the same network that this computer has talked to.


ARP = Path("/proc/net/arp")
_GONE = {"FAILED", "INCOMPLETE", "NONE"}


def read_neighbours(run: Run = run, arp: Path = ARP) -> list[HostHint] | None:
    """From iproute2, else from Linux' own table, else from `arp` (macOS); None where nothing has one."""
    if (said := run(["ip", "-json", "neighbour", "show"])) is not None:
        return neighbours_of(said)
    try:
        return arp_table(arp.read_text(encoding="ascii", errors="replace"))
    except OSError:
        said = run(["arp", "-an"])
    return None if said is None else bsd_arp(said)


def neighbours_of(text: str) -> list[HostHint]:
    """The JSON of `ip neighbour`; IPv4 only, for a machine has its IPv6 addresses besides."""
    found = []
    for row in _rows(text):
        states = row.get("state", ())
        if _GONE & set(states if isinstance(states, list) else [states]) or ":" in str(row.get("dst", ":")):
            continue
        if not _INSIDE.match(str(row.get("dev", ""))):
            found.append(_neighbour(str(row["dst"]), str(row.get("lladdr", ""))))
    return found


def arp_table(text: str) -> list[HostHint]:
    """/proc/net/arp: address, type, flags (0x2: complete), hardware address, mask, device."""
    rows = [line.split() for line in text.splitlines()[1:]]
    return [
        _neighbour(row[0], row[3])
        for row in rows
        if len(row) >= 6 and int(row[2], 16) & 2 and not _INSIDE.match(row[5])
    ]


def bsd_arp(text: str) -> list[HostHint]:
    """`arp -an` of macOS: ? (192.168.1.1) at a4:91:b1:0:1:2 on en0 ifscope [ethernet]."""
    found = re.findall(r"\(([0-9.]+)\) at ([0-9a-f]{1,2}(?::[0-9a-f]{1,2}){5}) ", text)
    return [_neighbour(address, hardware) for address, hardware in found]


def _neighbour(address: str, hardware: str) -> HostHint:
    return HostHint(source="neighbours", address=address, hardware=hardware)


# mDNS: machines that announce themselves.


SERVICES = ("_ssh._tcp", "_sftp-ssh._tcp", "_workstation._tcp")


def read_announced(run: Run = run) -> list[HostHint] | None:
    """From avahi-browse; None where it is not installed, or no avahi-daemon runs."""
    said = [run(["avahi-browse", "--resolve", "--terminate", "--parsable", name]) for name in SERVICES]
    if all(each is None for each in said):
        return None
    return [hint for each in said if each is not None for hint in announced(each)]


def announced(text: str) -> list[HostHint]:
    """Lines of avahi-browse: =;eth0;IPv4;label;_ssh._tcp;local;pc1.local;192.168.1.10;22;text."""
    found = []
    for line in text.splitlines():
        words = line.split(";")
        if len(words) < 9 or words[0] != "=" or words[2] != "IPv4":
            continue
        kind, name, address, port = words[4], words[6], words[7], words[8]
        found.append(
            HostHint(
                source="mDNS",
                name=name if is_destination(name) else "",
                address=address,
                port=int(port)
                if kind != "_workstation._tcp" and port.isdigit() and 0 < int(port) < 65536
                else SSH_PORT,
            )
        )
    return found


# The user's own ssh: its configuration, and the keys that it knows.


def known_hosts_of(text: str) -> tuple[list[HostHint], int]:
    """The hosts of a known_hosts file, and how many of its lines have a hashed name, which cannot be read."""
    found: list[HostHint] = []
    num_hashed = 0
    for line in text.splitlines():
        words = line.split()
        if len(words) < 3 or words[0].startswith(("#", "@")):
            continue
        if words[0].startswith("|"):
            num_hashed += 1
            continue
        found += _known_names(words[0].split(","))
    return list(dict.fromkeys(found)), num_hashed


def _known_names(names: Sequence[str]) -> Iterator[HostHint]:
    """A line may have a name and the address that it had: one host."""
    places = [_place(name) for name in names if not set(name) & set("*?!")]
    addresses = [place for place in places if is_address(place[0])]
    others = [place for place in places if not is_address(place[0]) and is_destination(place[0])]
    if len(addresses) == 1 and others:
        (address, port), (name, _) = addresses[0], others[0]
        yield HostHint(source="known_hosts", name=name, address=address, port=port)
        return
    yield from (HostHint(source="known_hosts", address=address, port=port) for address, port in addresses)
    yield from (HostHint(source="known_hosts", name=name, address=name, port=port) for name, port in others)


def _place(name: str) -> tuple[str, int]:
    """`[10.0.0.5]:2222` or `pc1`."""
    found = re.fullmatch(r"\[([^\]]+)\]:(\d{1,5})", name)
    return (found.group(1), int(found.group(2))) if found else (name, SSH_PORT)


def is_address(text: str) -> bool:
    """Whether a text is an address, and no name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_local_name(name: str) -> bool:
    """Whether a name is one that a home or an office gives: pc1, pc1.local; names of the internet are not looked up."""
    return "." not in name or name.endswith((".local", ".lan", ".home", ".home.arpa", ".internal", ".localdomain"))


# The hosts that the user's ssh_config names one by one. What their words mean is for `ssh -G` to say.


MAX_DEPTH = 16
"""As ssh itself: files that include each other have an end."""
MAX_BYTES = 1 << 20
_FIRST_EQUALS = re.compile(r"^(\w+)\s*=\s*")


def config_hosts(path: Path) -> list[str]:
    """The names behind `Host`, in order, without patterns; [] where there is no such file.

    Included files count where they stand; `Match` blocks do not.
    """
    return [name for name in dict.fromkeys(_names(path, folder=path.parent, depth=0)) if is_destination(name)]


def _names(path: Path, *, folder: Path, depth: int) -> Iterator[str]:
    for keyword, values in _lines(path):
        if keyword == "host":
            yield from (value for value in values if not set(value) & set("*?!"))
        elif keyword == "include" and depth < MAX_DEPTH:
            for file in (file for value in values for file in _included(value, folder)):
                yield from _names(file, folder=folder, depth=depth + 1)


def _lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return
    for line in text.splitlines():
        keyword, values = _words(line.strip())
        if values:
            yield keyword, values


def _words(line: str) -> tuple[str, list[str]]:
    """`Host a "b c"` and `Host=a`; a line that cannot be read has no words."""
    if not line or line.startswith("#"):
        return "", []
    try:
        keyword, *values = shlex.split(_FIRST_EQUALS.sub(r"\1 ", line), comments=True)
    except ValueError:
        return "", []
    return keyword.lower(), values


def _included(pattern: str, folder: Path) -> list[Path]:
    path = Path(pattern).expanduser()
    return [Path(found) for found in sorted(glob.glob(str(path if path.is_absolute() else folder / path)))]  # noqa: PTH207


NOT_FOR_TRAINING = {"git"}
"""Users under whom ssh reaches a forge and no machine."""


def configured(name: str) -> HostHint | None:
    """A name of ssh_config, with what ssh makes of it; None for what is no machine."""
    try:
        way = resolve(name)
    except GanglineError:
        return None
    if way.user in NOT_FOR_TRAINING:
        return None
    return HostHint(source="ssh_config", name=name, address=way.hostname, port=way.port)
