"""The network interfaces of this host, and which of them the kernel takes to reach the others."""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Any, Dict, List, Optional

from gangline.agent.addresses import addresses
from gangline.agent.system import resolve_all

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
    holders = {text.partition("/")[0]: name for name, held in addresses().items() for text in held}
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
    flags = _flags(name)
    driver = _link_name(place / "device" / "driver") or _driver(name)
    speed = _number(place / "speed")
    return {
        "name": name,
        "kind": kind(place, driver),
        "up": bool(flags & 1) if flags is not None else None,
        "carrier": bool(flags & 0x40) if flags is not None else None,
        "mtu": _mtu(name) or _number(place / "mtu"),
        "speed_mbps": speed if speed and 0 < speed < 1 << 30 else None,
        "duplex": _known(_text(place / "duplex")),
        "mac": _text(place / "address"),
        "driver": driver,
        "addresses": held[:16],
        "numa_node": _number(place / "device" / "numa_node"),
        "ports": sorted(path.name for path in (place / "brif").glob("*"))[:16],
    }


def kind(place: Path, driver: Optional[str]) -> str:
    """What kind of interface this is, from its folder in sysfs."""
    hardware = _number(place / "type")
    said = dict(line.partition("=")[::2] for line in (_text(place / "uevent") or "").splitlines()).get("DEVTYPE")
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


def _request(name: str, number: int) -> Optional[bytes]:
    """What an ioctl for an interface answers, after its name; None where it cannot be asked."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe.fileno(), number, struct.pack("16s240x", name.encode()[:15]))[16:]
        except OSError:
            return None


def _mtu(name: str) -> Optional[int]:
    answer = _request(name, 0x8921)  # SIOCGIFMTU
    return int(struct.unpack_from("i", answer)[0]) if answer else None


def _flags(name: str) -> Optional[int]:
    answer = _request(name, 0x8913)  # SIOCGIFFLAGS
    return int(struct.unpack_from("H", answer)[0]) if answer else None


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


def _text(path: Path) -> Optional[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()[:4096]
    except OSError:  # also where the driver does not know: speed of an interface that is down
        return None


def _number(path: Path) -> Optional[int]:
    try:
        return int(_text(path) or "")
    except ValueError:
        return None


def _known(text: Optional[str]) -> Optional[str]:
    return None if text in {None, "", "unknown"} else text


def _link_name(path: Path) -> Optional[str]:
    try:
        return os.path.basename(os.readlink(path))  # noqa: PTH115, PTH119 - Path.readlink is of Python 3.9
    except OSError:
        return None
