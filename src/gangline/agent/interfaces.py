"""What the tries between hosts need to know of this host's interfaces. Read only.

Asked by ioctl: /sys may be that of another network namespace.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from pathlib import Path

from gangline.agent.addresses import addresses

ARP = Path("/proc/net/arp")
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
COMPLETE = 2
SIOCGIFMTU, SIOCGIFHWADDR = 0x8921, 0x8927
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
    try:
        return int(struct.unpack_from("i", _asked(interface, SIOCGIFMTU))[0])
    except OSError:
        return None


def macs() -> list[str]:
    """The hardware addresses of all interfaces."""
    found = set()
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            kind, raw = struct.unpack_from("H6s", _asked(name, SIOCGIFHWADDR))
            if kind == ETHERNET:
                found.add(":".join(f"{byte:02x}" for byte in raw))
    return sorted(found - {NO_MAC})


def neighbour(address: str) -> str | None:
    """The MAC from which an IPv4 address of the same network last answered; None where that is not known."""
    with contextlib.suppress(OSError, ValueError):
        for line in ARP.read_text(encoding="ascii").splitlines()[1:]:
            ip, _, flags, mac = line.split()[:4]
            if ip == address and int(flags, 16) & COMPLETE:
                return mac.lower()
    return None


def ephemeral_range() -> list[int]:
    """The ports that the kernel gives to who asks for any."""
    try:
        low, high = EPHEMERAL.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return [32768, 60999]
    return [int(low), int(high)]


def _asked(interface: str, number: int) -> bytes:
    """What an ioctl says of an interface, after its name; raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe.fileno(), number, struct.pack("16s240x", interface.encode()[:15]))[16:]
