"""The backends `mpirun` and `mpiexec.hydra`: one MPI launcher on the head starts the host agent of every host.

For clusters where MPI is the way onto the hosts. MPI itself is not used: ranks meet as under `direct`. The head logs in
to the other hosts by ssh, without a password, by the addresses in the cluster file. Whether the program is OpenMPI's,
MPICH's or Intel MPI's is found on the head, from its version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import PurePath
from typing import ClassVar

from gangline.errors import UsageError
from gangline.launch.backend import JobLauncher, LauncherDialect, LaunchRequest, Promises
from gangline.launch.job_launcher import AGENT_FILE, SSH, JobLauncherBackend
from gangline.runs.cluster import Cluster, Host

SSH_NOTICES = ("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
"""A lost host ends its ssh within 40 s."""


class MpirunBackend(JobLauncherBackend):
    """The agents are children of mpirun."""

    name: ClassVar[str] = "mpirun"
    promises: ClassVar[Promises] = Promises(survives_lost_host=False, warm_restart=False, orderly_queue=False)
    program: ClassVar[str] = "mpirun"
    remedy: ClassVar[str] = (
        "on {host}, `ssh ADDRESS true` has to work for the address of every other host, and the same MPI has "
        "to be installed on all of them; or write `backend: direct`"
    )

    def launcher(self, cluster: Cluster, request: LaunchRequest) -> JobLauncher:
        """See `AgentBackend.launcher`. Raises UsageError where one launcher cannot reach all hosts."""
        return job_launcher(cluster, request, self.program)


class HydraBackend(MpirunBackend):
    """The same with the launcher of MPICH and Intel MPI, where `mpirun` is of another MPI."""

    name: ClassVar[str] = "mpiexec.hydra"
    program: ClassVar[str] = "mpiexec.hydra"


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the agents are started, for one launcher."""

    program: str
    addresses: tuple[str, ...]
    """() if all hosts are this computer."""
    ssh: tuple[str, ...]
    """Options of ssh."""
    commands: tuple[tuple[str, ...], ...]
    """What starts each host's agent."""
    remote_shell: str
    """The file for `LauncherDialect.remote_shell`."""


def job_launcher(cluster: Cluster, request: LaunchRequest, program: str) -> JobLauncher:
    """The launcher of the host agents of a request; raises UsageError where one cannot reach all hosts."""
    hosts = [cluster.host(name) for name in request.names]
    commands = tuple(
        ("python3", f"{part.folder}/{AGENT_FILE}", "foreground", "below", part.folder) for part in request.hosts
    )
    addresses = () if cluster.is_one_machine else tuple(host.address for host in hosts)
    head = request.hosts[0]
    folder = PurePath(head.rank_files) / program
    places = Places(
        program=program,
        addresses=addresses,
        ssh=_ssh(hosts, program) if addresses else (),
        commands=commands,
        remote_shell=str(folder / "remote-shell"),
    )
    dialects = [_openmpi(places)]
    if not any(":" in address for address in addresses):  # Hydra takes no IPv6 addresses
        dialects += [_intel(places), _mpich(places)]
    return JobLauncher(host=head.host, folder=str(folder), argv=dialects[0].argv, dialects=tuple(dialects))


def _ssh(hosts: Sequence[Host], program: str) -> tuple[str, ...]:
    """Options of ssh: one user and one port for all hosts but the head."""
    others = hosts[1:]
    users = {(host.ssh or "").rpartition("@")[0] for host in others}
    ports = {host.ssh_port for host in others}
    if len(users) > 1 or len(ports) > 1:
        raise UsageError(
            f"{program} cannot reach all hosts of this cluster",
            seen="their users or ssh ports differ; it uses the same ones for every host",
            fix="write the same user and port at every host, or `backend: direct`",
        )
    words = [word for user in users if user for word in ("-l", user)]
    words += [word for port in ports if port for word in ("-p", str(port))]
    return (*SSH, *words)


# The words of each make. Intel's launcher is a Hydra, too, so its mark is looked for first.

LOST_HOST_NOTICED = (
    # Within 30 s, not after the system's two hours.
    *("--mca", "oob_tcp_keepalive_time", "15"),
    *("--mca", "oob_tcp_keepalive_intvl", "5"),
    *("--mca", "oob_tcp_keepalive_probes", "3"),
)


def _openmpi(places: Places) -> LauncherDialect:
    argv = [places.program, "--bind-to", "none"]  # else every rank of a host is bound to one core
    argv += ["--oversubscribe", "--mca", "plm_rsh_agent", "ssh", *LOST_HOST_NOTICED]
    if places.addresses:
        argv += ["--mca", "plm_rsh_args", " ".join(places.ssh)]
        if all(map(_is_ipv4, places.addresses)):  # only the addresses that are known
            argv += ["--mca", "oob_tcp_if_include", ",".join(f"{address}/32" for address in places.addresses)]
    for number, command in enumerate(places.commands):
        address = places.addresses[number] if places.addresses else "localhost"
        argv += [*([":"] if number else []), "-np", "1", "--host", address, *command]
    return LauncherDialect(mark="Open MPI", argv=tuple(argv))


def _mpich(places: Places) -> LauncherDialect:
    # Else every host gets the variables of the head, and its proxy connects to the name of the head.
    argv = [places.program, "-genvnone", "-bind-to", "none", "-wdir", "/"]
    if not places.addresses:
        argv += ["-launcher", "fork", "-hosts", f"localhost:{len(places.commands)}"]
        return LauncherDialect(mark="HYDRA", argv=(*argv, *_one_each(places)))
    argv += ["-localhost", places.addresses[0], "-launcher", "ssh", "-launcher-exec", places.remote_shell]
    argv += ["-hosts", ",".join(f"{address}:1" for address in places.addresses)]
    return LauncherDialect(
        mark="HYDRA",
        argv=(*argv, *_one_each(places)),
        env={"HYDRA_LAUNCHER_EXTRA_ARGS": " ".join((*places.ssh, *SSH_NOTICES))},
        remote_shell=places.remote_shell,
    )


def _intel(places: Places) -> LauncherDialect:
    """By its reference (2021.14); nothing here has run it."""
    argv = [places.program, "-genvnone", "-genv", "I_MPI_PIN", "off"]
    if not places.addresses:
        argv += ["-bootstrap", "fork"]
        return LauncherDialect(mark="Intel(R) MPI", argv=(*argv, *_one_each(places)))
    argv += ["-bootstrap", "ssh", "-bootstrap-exec", places.remote_shell]
    argv += ["-bootstrap-exec-args", " ".join((*places.ssh, *SSH_NOTICES))]
    argv += ["-hosts", ",".join(places.addresses), "-ppn", "1", *_one_each(places)]
    return LauncherDialect(mark="Intel(R) MPI", argv=tuple(argv), remote_shell=places.remote_shell)


def _one_each(places: Places) -> list[str]:
    """Sets of arguments with one process each, which Hydra gives to the hosts in their order."""
    words: list[str] = []
    for number, command in enumerate(places.commands):
        words += [*([":"] if number else []), "-n", "1", *command]
    return words


def _is_ipv4(address: str) -> bool:
    try:
        IPv4Address(address)
    except ValueError:
        return False
    return True
