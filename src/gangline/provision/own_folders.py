"""Folders of our own: made before anything is written to them, and looked at then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gangline.provision.ask import ask_agent, in_parallel
from gangline.runs.cluster import Cluster, Host
from gangline.transport.local import LocalTransport
from gangline.transport.transport import Transport

TIMEOUT_S = 60.0


def claim_folders(home: Path, cluster: Cluster, transports: Mapping[str, Transport]) -> None:
    """Make gangline's home on this computer and the work folder of every host, for this user alone.

    Raises RunFailed where one of them is somebody else's, or leads to what somebody else chose.
    """
    here: Transport = LocalTransport(Host(name="this computer", workdir="", python=""))
    local = [host.workdir for host in cluster.hosts if host.transport == "local"]
    wanted = [(here, [str(home), *local])]
    wanted += [(transports[host.name], [host.workdir]) for host in cluster.hosts if host.transport != "local"]
    in_parallel(lambda each: ask_agent(each[0], "claim", {"folders": each[1]}, timeout_s=TIMEOUT_S), wanted)
