"""The backend `slurm`: one `srun` in an allocation starts the host agent of every node.

Nodes are reached by srun, too (gangline.transport.srun): no ssh between them, no daemon, and whatever gangline starts
is a step of the user's job, so that Slurm ends it with the job. Slurm gives out GPUs and cores: gangline takes no
leases here.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, ClassVar

from gangline.errors import UsageError
from gangline.launch.backend import JobLauncher, LaunchRequest, Promises
from gangline.launch.job_launcher import AGENT_FILE, JobLauncherBackend
from gangline.runs.cluster import IN_ALLOCATION, Cluster, Host, SlurmRequest
from gangline.transport.bootstrap import compiled_agent_zipapp
from gangline.transport.slurm_commands import OVERLAP, component_words, job_name, node_names, own_job, slurm

PICK = (
    "import os, sys; "
    "place = dict(zip(sys.argv[1::2], sys.argv[2::2]))[os.environ['SLURMD_NODENAME']]; "
    f"os.execv(sys.executable, [sys.executable, place + '/{AGENT_FILE}', 'foreground', 'step', place])"
)
"""What srun starts on every node; behind it stand pairs of a node and the folder of its agent."""


class SlurmBackend(JobLauncherBackend):
    """The agents are tasks of one step of the job: Slurm ends them with it, and after a notice."""

    name: ClassVar[str] = "slurm"
    promises: ClassVar[Promises] = Promises(warm_restart=False)
    program: ClassVar[str] = "srun"
    remedy: ClassVar[str] = "`squeue` and `sinfo` on {host} say how the job and its nodes stand"

    def agent(self) -> bytes:
        """See `JobLauncherBackend.agent`: nodes are near."""
        return compiled_agent_zipapp()

    def hosts(self, cluster: Cluster, variables: Mapping[str, str]) -> Cluster:
        """See `Backend.hosts`: the nodes of the allocation that we are in."""
        if any(host.transport != "srun" for host in cluster.hosts):
            raise UsageError(
                "the hosts of this cluster file are no nodes of Slurm",
                seen=f"backend: slurm, with {cluster.hosts[0].name} and others",
                fix="write the key `slurm` in place of `hosts`; in an allocation no cluster file is needed",
            )
        job = variables.get(IN_ALLOCATION)
        if job is None:
            raise UsageError(
                "this runs inside an allocation of Slurm only",
                seen=f"no {IN_ALLOCATION} here",
                fix="gangline train and gangline run submit a job by themselves; for the others: salloc first",
            )
        if cluster.hosts and all((host.allocation or "").partition("+")[0] == job for host in cluster.hosts):
            return cluster  # some of its nodes, as somebody has chosen
        return allocated(cluster, job, listed=own_job(variables))

    def render(self, cluster: Cluster, *words: Any, **how: Any) -> LaunchRequest:
        """See `Backend.render`."""
        request = super().render(cluster, *words, **how)
        return replace(request, hosts=tuple(replace(part, leases=None) for part in request.hosts))

    def launcher(self, cluster: Cluster, request: LaunchRequest) -> JobLauncher:
        """See `AgentBackend.launcher`."""
        head, parts = request.hosts[0], dict[tuple[str, str], list[Host]]()
        for host in map(cluster.host, request.names):
            # with a number of GPUs in all, Slurm gives a step over several nodes one of each
            parts.setdefault((host.allocation or "", host.name if host.job_options else ""), []).append(host)
        places = [word for part in request.hosts for word in (part.host, part.folder)]
        argv = ["srun"]
        for number, ((allocation, _), hosts) in enumerate(parts.items()):
            argv += [
                *([":"] if number else []),
                *component_words(allocation)[0 if number == 0 else 1 :],
                f"--nodelist={','.join(host.name for host in hosts)}",
                f"--nodes={len(hosts)}",
                f"--ntasks={len(hosts)}",
                "--ntasks-per-node=1",
                *OVERLAP,
                *hosts[0].job_options,
                f"--job-name={job_name(request.run_id)}",
                *("python3", "-c", PICK),
                *places,
            ]
        return JobLauncher(host=head.host, folder=str(PurePath(head.rank_files) / "srun"), argv=tuple(argv))


# The nodes of an allocation.


def allocated(cluster: Cluster, job: str, *, listed: str | None = None) -> Cluster:
    """The cluster with the nodes of a job as its hosts; raises what `slurm` does.

    listed: its id for `scontrol`, which shows every task of an array for the number of one of them.
    """
    asked = cluster.slurm or SlurmRequest(nodes=1)
    said = slurm("scontrol", "--details", "show", "job", listed or job)
    found = [
        (name, component, count)
        for component, nodes in enumerate(read_components(said))
        for some, count in nodes
        for name in node_names(some)
    ]
    if not found:
        raise UsageError(
            f"Slurm's job {job} has no nodes", seen="it waits, or has ended", fix=f"squeue -j {job} says how it stands"
        )
    names = [name for name, _, _ in found]
    if len(set(names)) < len(names):
        raise UsageError(
            f"two components of Slurm's job {job} have the same node",
            seen=f"its nodes: {', '.join(names)}",
            fix="ask for whole nodes: --exclusive in the `options` of each component",
        )
    addresses = read_addresses(slurm("scontrol", "--oneliner", "show", "node", ",".join(names)))
    is_het = any(component for _, component, _ in found)
    in_all = GPUS_IN_ALL in said  # a step asks for as many on one node, unless it is told otherwise
    kinds = asked.kinds
    hosts = tuple(
        _node(
            kinds[component] if component < len(kinds) else asked,
            name,
            f"{job}+{component}" if is_het else job,
            address=addresses[name],
            gpus=count,
            options=(f"--gpus={count}",) if in_all and count else (),
        )
        for name, component, count in found
    )
    return replace(cluster, hosts=hosts, backend="slurm")


def _node(asked: SlurmRequest, name: str, job: str, *, address: str, gpus: int, options: tuple[str, ...]) -> Host:
    return Host(
        name=name,
        workdir=f"{asked.workdir.rstrip('/')}/{name}",
        python=asked.python,
        transport="srun",
        allocation=job,
        job_options=options,
        environment=asked.environment,
        address=_as_ip(address),
        slots=gpus or asked.slots,
        env=dict(asked.env),
    )


def read_components(said: str) -> list[list[tuple[str, int]]]:
    """What `read_nodes` says of each component of a job, from `scontrol --details show job`; of most jobs one."""
    return [read_nodes(f"\n{part}") for part in re.split(r"^JobId=", said, flags=re.MULTILINE)[1:]]


NODES = re.compile(r"^\s+Nodes=(\S+) (.*)$", re.MULTILINE)
GPUS_IN_ALL = "TresPerJob=gres:gpu"
"""What scontrol says of a job with `--gpus`, whose nodes may have unequal numbers of them."""
GPUS = re.compile(r"gpu(?::[\w.-]+)?:(\d+)(?:\(|$|,)")


def read_nodes(said: str) -> list[tuple[str, int]]:
    """Lists of nodes and the GPUs that the job has on each of them, from `scontrol --details show job`."""
    return [
        (listed, sum(int(count) for count in GPUS.findall(rest.partition("GRES=")[2])))
        for listed, rest in NODES.findall(said)
    ]


def read_addresses(said: str) -> dict[str, str]:
    """The address of each node, from `scontrol --oneliner show node`."""
    rows = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in said.splitlines() if line]
    return {row["NodeName"]: row.get("NodeAddr", row["NodeName"]) for row in rows}


def _as_ip(address: str) -> str:
    """The IP address of a node, as this computer resolves it; its name where that fails."""
    try:
        found: Sequence[Any] = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return address
    return str(found[0][4][0])
