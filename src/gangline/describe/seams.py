"""What `init` needs of the world, and what tests put in its place."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gangline.describe import names
from gangline.describe.keys import Scan, scan
from gangline.inventory.facts import Inventory
from gangline.inventory.gather import gather
from gangline.inventory.probe import probe_pairs
from gangline.remote.connect import connect_all
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster, Host

Transports = Mapping[str, Transport]


def address_of(name: str) -> str | None:
    """The first address of a name, IPv4 before IPv6, as this computer sees it; None where it has none to offer."""
    try:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    found = [str(row[4][0]).partition("%")[0] for row in sorted(rows, key=lambda row: row[0] != socket.AF_INET)]
    return next((address for address in found if not address.startswith("127.") and address != "::1"), None)


def all_reach_each_other(cluster: Cluster, inventory: Inventory, transports: Transports) -> bool:
    """Whether every host reaches every other at its address, on some port."""
    pairs = probe_pairs(cluster, inventory, transports).pairs
    num_hosts = len(cluster.hosts)
    return len(pairs) == num_hosts * (num_hosts - 1) and not any(pair.is_closed for pair in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """What touches the world."""

    user_of: Callable[[str], str] = names.user_of
    scan: Callable[[Host], Scan] = scan
    connect: Callable[[Cluster], dict[str, Transport]] = connect_all
    gather: Callable[[Cluster, Transports], Inventory] = gather
    reaches: Callable[[Cluster, Inventory, Transports], bool] = all_reach_each_other
    address_of: Callable[[str], str | None] = address_of
    ssh_config: Path = Path("~/.ssh/config")


REAL = Seams()
"""Real hosts, and the user's own ssh_config."""
