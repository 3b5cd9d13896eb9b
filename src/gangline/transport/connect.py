"""From a host of the cluster to a transport that reaches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gangline.errors import UsageError
from gangline.runs.cluster import Cluster, Host
from gangline.transport.local import LocalTransport
from gangline.transport.transport import Transport


def _ssh(host: Host) -> Transport:
    # its modules cost 30 ms, which who trains on this computer alone does not pay
    from gangline.transport.ssh import SshTransport

    return SshTransport(host)


def _srun(host: Host) -> Transport:
    from gangline.transport.srun import SrunTransport

    return SrunTransport(host)


TRANSPORTS: Mapping[str, Callable[[Host], Transport]] = {"local": LocalTransport, "ssh": _ssh, "srun": _srun}
"""Every way to reach a host, by the name that cluster.yaml gives it."""


def connect(host: Host) -> Transport:
    """The transport to one host; raises UsageError for a name that is not in the table."""
    make = TRANSPORTS.get(host.transport)
    if make is None:
        known = ", ".join(sorted(TRANSPORTS))
        raise UsageError(
            f"host {host.name}: no transport is called {host.transport!r}", seen=f"known: {known}", fix="set transport"
        )
    return make(host)


def connect_all(cluster: Cluster) -> dict[str, Transport]:
    """Transports to every host of a cluster and to its witness, by name. Nothing is connected yet: that waits for the
    first call.
    """
    return {host.name: connect(host) for host in cluster.reached}
