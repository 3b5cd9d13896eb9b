"""The network interfaces of this host, and which of them the kernel takes to reach the others."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import fcntl
import ipaddress
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from gangline.agent.bounded import run
from gangline.agent.host_facts.system import resolve_all
from gangline.agent.host_files import read_link, read_number, read_text

# The addresses of this host's interfaces, asked of the C library.


class _Row(ctypes.Structure):
    """struct ifaddrs."""


_Row._fields_ = [
    ("next", ctypes.POINTER(_Row)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]

_PLACES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""Where in a sockaddr the address begins, and how long it is."""


def addresses() -> Dict[str, List[str]]:
    """Interface -> addresses with their prefix, such as 10.0.0.1/24; raises OSError."""
    try:
        return _by_interface(_from_library())
    except (OSError, AttributeError, ValueError):
        return _by_interface(_from_program())


def _by_interface(rows: Iterator[Tuple[str, str]]) -> Dict[str, List[str]]:
    found: Dict[str, List[str]] = {}
    for name, address in rows:
        found.setdefault(name, []).append(address)
    return found


def _from_library() -> Iterator[Tuple[str, str]]:
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Row)()
    if library.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    try:
        row = first
        while row:
            address = _read(row.contents.address)
            mask = _read(row.contents.netmask)
            if address is not None:
                bits = format(int(ipaddress.ip_address(mask)), "b").count("1") if mask is not None else 8 * len(address)
                yield row.contents.name.decode(errors="replace"), f"{ipaddress.ip_address(address)}/{bits}"
            row = row.contents.next
    finally:
        library.freeifaddrs(first)


def _read(place: Optional[int]) -> Optional[bytes]:
    """The address in a sockaddr; None for families that are not IP."""
    if not place:
        return None
    family = ctypes.c_ushort.from_address(place).value
    if family not in _PLACES:
        return None
    offset, size = _PLACES[socket.AddressFamily(family)]
    return ctypes.string_at(place + offset, size)


def _from_program() -> Iterator[Tuple[str, str]]:
    rows: List[Dict[str, Any]] = json.loads(run(["ip", "-j", "addr"], timeout_s=5.0).stdout)
    for row in rows:
        for info in row.get("addr_info", []):
            if "local" in info:
                yield str(row.get("ifname")), f"{info['local']}/{info.get('prefixlen', '')}"


TUNNELS = {"wireguard", "vxlan", "geneve", "ppp"}
SYSFS = "/sys/class/net"
NUM_NICS = 128
TUNNEL_TYPES = {512, 768, 769, 776, 778, 65534}
"""ARPHRD numbers: ppp, IP in IP, sit, GRE, and no hardware at all (tun, WireGuard)."""


def nics(_request: Dict[str, Any]) -> List[Dict[str, Any]]:
    """Every interface; a host with many containers has hundreds, of which those without an address come last."""
    held = addresses()
    found = [_nic(name, held.get(name, [])) for _, name in socket.if_nameindex()]
    return sorted(found, key=lambda nic: not nic["addresses"])[:NUM_NICS]


def routes(request: Dict[str, Any]) -> Dict[str, Any]:
    """Address -> the source address, and the interface that holds it, with which the kernel goes there.

    Nothing is sent: connecting a datagram socket only chooses a route.
    """
    holders = owners()
    asked = [str(name) for name in request.get("names") or []]
    found: Dict[str, Any] = {}
    for name, answer in resolve_all([name for name in asked if not _is_address(name)]).items():
        found[name] = _route(answer[0], holders) if isinstance(answer, list) and answer else {"error": "no address"}
    return {**found, **{name: _route(name, holders) for name in asked if _is_address(name)}}


def _route(address: str, holders: Dict[str, str]) -> Dict[str, Any]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            source = str(probe.getsockname()[0]).partition("%")[0]
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"source": source, "interface": holders.get(source)}


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _nic(name: str, held: List[str]) -> Dict[str, Any]:
    place = Path(SYSFS) / name
    flags = _asked(name, SIOCGIFFLAGS, "H")
    target = read_link(place / "device" / "driver")
    driver = target.rpartition("/")[2] if target else _driver(name)
    speed, duplex = read_number(place / "speed"), read_text(place / "duplex")
    return {
        "name": name,
        "kind": kind(place, driver),
        "up": bool(flags[0] & 1) if flags else None,
        "carrier": bool(flags[0] & 0x40) if flags else None,
        "mtu": mtu_of(name) or read_number(place / "mtu"),
        "speed_mbps": speed if speed and 0 < speed < 1 << 30 else None,
        "duplex": None if duplex in {"", "unknown"} else duplex,
        "mac": read_text(place / "address"),
        "driver": driver,
        "addresses": held[:16],
        "numa_node": read_number(place / "device" / "numa_node"),
        "ports": sorted(path.name for path in (place / "brif").glob("*"))[:16],
    }


def kind(place: Path, driver: Optional[str]) -> str:
    """What kind of interface this is, from its folder in sysfs."""
    hardware = read_number(place / "type")
    said = dict(line.partition("=")[::2] for line in (read_text(place / "uevent") or "").splitlines()).get("DEVTYPE")
    marks = {
        "loopback": hardware == 772,
        "wifi": said == "wlan" or (place / "wireless").exists() or (place / "phy80211").exists(),
        "bridge": (place / "bridge").exists(),
        "bond": (place / "bonding").exists(),
        "infiniband": hardware == 32,
        "tunnel": (place / "tun_flags").exists() or hardware in TUNNEL_TYPES or said in TUNNELS,
        "vlan": said in {"vlan", "macvlan"},
        "veth": driver == "veth",
        "ethernet": hardware == 1,
    }
    return next((name for name, is_it in marks.items() if is_it), "other")


def _driver(name: str) -> Optional[str]:
    """The driver as ethtool would say it, which virtual interfaces have no other place for."""
    info = ctypes.create_string_buffer(struct.pack("I252x", 3), 256)  # ETHTOOL_GDRVINFO
    words = struct.pack("16sP232x", name.encode()[:15], ctypes.addressof(info))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe.fileno(), 0x8946, words)  # SIOCETHTOOL
        except OSError:
            return None
    return info.raw[4:36].partition(b"\0")[0].decode(errors="replace") or None


# What the tries between hosts need to know of this host's interfaces. Read only.


ARP = Path("/proc/net/arp")
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
COMPLETE = 2
SIOCGIFFLAGS, SIOCGIFMTU, SIOCGIFHWADDR = 0x8913, 0x8921, 0x8927
ETHERNET = 1
NO_MAC = "00:00:00:00:00:00"


def owners() -> dict[str, str]:
    """Address -> the interface that has it."""
    return {text.partition("/")[0]: name for name, held in addresses().items() for text in held}


def data_address(interface: str | None) -> str | None:
    """The address of an interface that gloo and NCCL take: an IPv4 one where there is one."""
    own = [address for address, name in owners().items() if name == interface]
    return min(own, key=lambda address: (":" in address, address.startswith("fe80:")), default=None)


def mtu_of(interface: str) -> int | None:
    """The size of packets on an interface."""
    answer = _asked(interface, SIOCGIFMTU, "i")
    return int(answer[0]) if answer else None


def macs() -> list[str]:
    """The hardware addresses of all interfaces."""
    answers = [_asked(name, SIOCGIFHWADDR, "H6s") for _, name in socket.if_nameindex()]
    found = {":".join(f"{byte:02x}" for byte in answer[1]) for answer in answers if answer and answer[0] == ETHERNET}
    return sorted(found - {NO_MAC})


def neighbour(address: str) -> str | None:
    """The MAC from which an IPv4 address of the same network last answered; None where that is not known."""
    with contextlib.suppress(ValueError):
        for line in (read_text(ARP) or "").splitlines()[1:]:
            ip, _, flags, mac = line.split()[:4]
            if ip == address and int(flags, 16) & COMPLETE:
                return mac.lower()
    return None


def ephemeral_range() -> list[int]:
    """The first and the last port that the kernel gives to a program that asks for any port."""
    limits = (read_text(EPHEMERAL) or "32768 60999").split()
    return [int(limits[0]), int(limits[1])]


def _asked(interface: str, number: int, layout: str) -> Optional[Tuple[Any, ...]]:
    """The fields of an ioctl's answer for an interface, behind its name; None where it cannot be asked."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), number, struct.pack("16s240x", interface.encode()[:15]))
        except OSError:
            return None
    return struct.unpack_from(layout, answer, 16)


# InfiniBand and RoCE, as sysfs shows them.


RDMA_SYSFS = "/sys/class/infiniband"
PEER_MODULES = {"nvidia_peermem", "nv_peer_mem"}
NUM_PORTS = 64
NUM_GIDS = 16
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def rdma(_request: Dict[str, Any]) -> Dict[str, Any]:
    """Every port of every adapter, and whether a program of ours may use them."""
    devices = sorted(Path("/dev/infiniband").glob("uverbs*"))
    return {
        "ports": ports(Path(RDMA_SYSFS)),
        "peer_memory": bool(PEER_MODULES & _modules()),
        "may_open": all(os.access(device, os.R_OK | os.W_OK) for device in devices) if devices else None,
    }


def ports(root: Path) -> List[Dict[str, Any]]:
    """The ports below a folder like /sys/class/infiniband."""
    folders = sorted(root.glob("*/ports/*"), key=lambda path: (path.parts[-3], path.name.zfill(4)))
    return [_port(folder) for folder in folders[:NUM_PORTS]]


def _port(folder: Path) -> Dict[str, Any]:
    device = folder.parents[1]
    interfaces = sorted(path.name for path in device.glob("device/net/*"))
    return {
        "device": device.name,
        "port": int(folder.name) if folder.name.isdigit() else None,
        "state": _word(folder / "state"),
        "physical_state": _word(folder / "phys_state"),
        "link_layer": read_text(folder / "link_layer"),
        "rate_gbps": _rate(read_text(folder / "rate")),
        "interface": read_text(folder / "gid_attrs/ndevs/0") or (interfaces[0] if interfaces else None),
        "gids": _gids(folder),
        "numa_node": read_number(device / "device/numa_node"),
    }


def _gids(folder: Path) -> List[str]:
    texts = [read_text(path) for path in sorted(folder.glob("gids/*"), key=lambda path: path.name.zfill(4))[:256]]
    return [text for text in texts if text and text != NO_GID][:NUM_GIDS]


def _word(path: Path) -> Optional[str]:
    """The word of "4: ACTIVE"."""
    text = read_text(path)
    return text.rpartition(":")[2].strip() if text else None


def _rate(text: Optional[str]) -> Optional[float]:
    """The number of "400 Gb/sec (4X NDR)"."""
    words = (text or "").split()
    try:
        return float(words[0]) if words else None
    except ValueError:
        return None


def _modules() -> Set[str]:
    """Loaded modules by both lists: containers and hardened kernels often have one of them only."""
    listed = (read_text("/proc/modules") or "").splitlines()
    return {line.partition(" ")[0] for line in listed} | {folder.name for folder in Path("/sys/module").glob("*")}
