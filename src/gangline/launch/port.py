"""The port at which ranks meet, chosen on the head."""

from __future__ import annotations

import json
from pathlib import PurePath

from gangline.errors import HostUnreachable, RunFailed
from gangline.launch.env import is_one_machine
from gangline.remote.transport import AGENT, Transport
from gangline.runs.cluster import Cluster

PORTS = (29500, 29999)
"""Where a port is looked for if the cluster file says nothing: torch's own default and what follows it, below the ports
that kernels give to who asks for any."""
HOLD_S = 120.0
"""How long a port that was given to one run is given to no other: torch listens on it only once it is imported."""
LOOPBACK = "127.0.0.1"


def free_port(cluster: Cluster, head: Transport) -> int:
    """A TCP port of the head on which nobody listens and which no other run was given just now; raises RunFailed."""
    low, high = cluster.ports or PORTS
    asked = {
        "address": LOOPBACK if is_one_machine(cluster) else cluster.head.address,
        "range": [low, high],
        "claims": str(PurePath(cluster.head.workdir, "ports")),
        "hold_s": HOLD_S,
    }
    result = head.run((AGENT, "ports", "free"), stdin=json.dumps(asked).encode())
    if result.returncode:
        raise HostUnreachable(f"{head.host}: no port can be looked for", seen=result.stderr[-2000:])
    port = json.loads(result.stdout)["port"]
    if port is None:
        raise RunFailed(
            f"{head.host}: no port is free from {low} to {high}",
            seen="all are listened on, or were given to runs that are about to start",
            fix="end what listens there, or write another range in cluster.yaml: ports",
        )
    return int(port)
