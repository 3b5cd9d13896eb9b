"""The port at which ranks meet, chosen on the head."""

from __future__ import annotations

import json
from pathlib import PurePath

from gangline.errors import HostUnreachable, RunFailed
from gangline.inventory.pairs import CLAIMS_FOLDER, HOLD_S, RENDEZVOUS_PORTS
from gangline.remote.said import understood, whole
from gangline.remote.transport import AGENT, Transport
from gangline.runs.cluster import Cluster

LOOPBACK = "127.0.0.1"


def free_port(cluster: Cluster, head: Transport, *, claim: bool = True) -> int:
    """A TCP port of the head on which nobody listens and which no other run was given just now; raises RunFailed.

    claim: keep it for a while from other runs, with a file in the work folder; else nothing is written.
    """
    low, high = cluster.ports or RENDEZVOUS_PORTS
    asked = {
        "address": LOOPBACK if cluster.is_one_machine else cluster.head.address,
        "range": [low, high],
        "claims": str(PurePath(cluster.head.workdir, CLAIMS_FOLDER)) if claim else None,
        "hold_s": HOLD_S,
    }
    try:
        result = head.run((AGENT, "ports", "free"), stdin=json.dumps(asked).encode())
    except TimeoutError as error:
        raise HostUnreachable(
            f"{head.host}: no port can be looked for", seen=str(error), fix="look at the load of that host, try again"
        ) from error
    if result.returncode:
        raise HostUnreachable(f"{head.host}: no port can be looked for", seen=result.stderr[-2000:])
    with understood(head.host, "which port is free"):
        port = json.loads(result.stdout)["port"]
        port = None if port is None else whole(port)
    if port is None:
        raise RunFailed(
            f"{head.host}: no port is free from {low} to {high}",
            seen="all are listened on, or were given to runs that are about to start",
            fix="end what listens there, or write another range in cluster.yaml: ports",
        )
    return port
