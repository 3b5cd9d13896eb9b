"""The addresses of this host's interfaces, asked of the C library."""

from __future__ import annotations

import ctypes
import ctypes.util
import ipaddress
import json
import socket
from typing import Any, Dict, Iterator, List, Optional, Tuple

from gangline.agent.bounded import run


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
