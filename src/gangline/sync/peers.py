"""How one host logs in to another, for what they send each other directly."""

from __future__ import annotations

from typing import Any

from gangline.remote.hostkeys import resolve
from gangline.runs.cluster import Host

LOOPBACK = frozenset({"", "localhost", "127.0.0.1", "::1"})


def peer_of(host: Host) -> dict[str, Any] | None:
    """User, address, port and pinned key by which another host reaches this one; None without a key or an address.

    Names of this computer's ssh_config mean nothing on another one, so they are resolved here.
    """
    if host.transport == "local" or host.host_key is None or host.address in LOOPBACK:
        return None
    found = resolve(host.ssh or host.name, host.ssh_port)
    return {
        "name": host.name,
        "user": found.user,
        "address": host.address,
        "port": found.port,
        "host_key": host.host_key,
    }
