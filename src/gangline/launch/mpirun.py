"""The backend `mpirun`: one OpenMPI `mpirun` on the head starts the host agent of every host.

For clusters where mpirun is the way onto the hosts. MPI itself is not used: ranks meet as under `direct`. The head
logs in to the other hosts by ssh, without a password, by the addresses in the cluster file.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address
from pathlib import PurePath
from typing import ClassVar

from gangline.errors import UsageError
from gangline.launch.backend import JobLauncher, LaunchRequest, Promises
from gangline.launch.job_launcher import AGENT_FILE, JobLauncherBackend
from gangline.runs.cluster import Cluster, Host

OPTIONS = (
    *("--bind-to", "none"),  # else every rank of a host is bound to one core
    "--oversubscribe",
    *("--mca", "plm_rsh_agent", "ssh"),
    # A lost host is noticed within 30 s, not after the system's two hours.
    *("--mca", "oob_tcp_keepalive_time", "15"),
    *("--mca", "oob_tcp_keepalive_intvl", "5"),
    *("--mca", "oob_tcp_keepalive_probes", "3"),
)


class MpirunBackend(JobLauncherBackend):
    """The agents are children of mpirun."""

    name: ClassVar[str] = "mpirun"
    promises: ClassVar[Promises] = Promises(survives_lost_host=False, warm_restart=False, orderly_queue=False)
    program: ClassVar[str] = "mpirun"
    remedy: ClassVar[str] = (
        "on {host}, `ssh ADDRESS true` has to work for the address of every other host, and OpenMPI has "
        "to be installed on all of them; or write `backend: direct`"
    )

    def launcher(self, cluster: Cluster, request: LaunchRequest) -> JobLauncher:
        """See `AgentBackend.launcher`. Raises UsageError where one mpirun cannot reach all hosts."""
        return job_launcher(cluster, request)


def job_launcher(cluster: Cluster, request: LaunchRequest) -> JobLauncher:
    """The mpirun that starts the host agents of a request; raises UsageError where one cannot reach all hosts."""
    hosts = [cluster.host(name) for name in request.names]
    argv = ["mpirun", *OPTIONS, *_network(cluster, hosts)]
    for number, (host, part) in enumerate(zip(hosts, request.hosts, strict=True)):
        address = "localhost" if cluster.is_one_machine else host.address
        below = ("python3", f"{part.folder}/{AGENT_FILE}", "foreground", "below", part.folder)
        argv += [*([":"] if number else []), "-np", "1", "--host", address, *below]
    head = request.hosts[0]
    folder = str(PurePath(head.rank_files) / "mpirun")
    return JobLauncher(host=head.host, folder=folder, argv=tuple(argv))


def _network(cluster: Cluster, hosts: Sequence[Host]) -> list[str]:
    """How mpirun reaches the hosts: one user and one port for all of them, and only the addresses that are known."""
    if cluster.is_one_machine:
        return []
    others = hosts[1:]
    users = {(host.ssh or "").rpartition("@")[0] for host in others}
    ports = {host.ssh_port for host in others}
    if len(users) > 1 or len(ports) > 1:
        raise UsageError(
            "mpirun cannot reach all hosts of this cluster",
            seen="their users or ssh ports differ; it uses the same ones for every host",
            fix="write the same user and port at every host, or `backend: direct`",
        )
    ssh = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=15"]
    ssh += [word for user in users if user for word in ("-l", user)]
    ssh += [word for port in ports if port for word in ("-p", str(port))]
    words = ["--mca", "plm_rsh_args", " ".join(ssh)]
    if all(_is_ipv4(host.address) for host in hosts):
        words += ["--mca", "oob_tcp_if_include", ",".join(f"{host.address}/32" for host in hosts)]
    return words


def _is_ipv4(address: str) -> bool:
    try:
        IPv4Address(address)
    except ValueError:
        return False
    return True
