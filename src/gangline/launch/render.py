"""The command and the environment of each host: torchrun with a static rendezvous by IP address. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gangline.launch.backend import HostRequest, LaunchRequest, Networks, WarmPool
from gangline.launch.program import SHIM, WORKER, Program, rank_words
from gangline.runs.cluster import Cluster, Host
from gangline.runs.gang import Gang
from gangline.runs.layout import RunLayout

LOOPBACK = "127.0.0.1"
TORCHRUN = ("-m", "torch.distributed.run")
ON_LOOPBACK = ("-m", "gangline.worker", "launch")
"""In front of it where all hosts are this computer and their environments know gangline: its store is for us alone."""
CONTROL = "prefork"
"""The folder, in that of the host agent, for its messages to the warm pool (gangline.agent.supervise.warm_pool)."""
MEETING_LETTERS = 12
IMPORT_S = 300
"""Launchers that are ready wait so long for the others: hosts import torch at very different speeds."""
JOIN_TIMEOUT_S = 600.0
"""Added to the ranks' own limit: after it a host agent ends ranks that have not joined. The supervisor is faster."""


def render(
    cluster: Cluster, gang: Gang, *, port: int, networks: Networks, program: Program, num_cpus: int | None
) -> LaunchRequest:
    """See `Backend.render`."""
    hosts = {host.name: host for host in cluster.hosts}
    parts = []
    for name in gang.hosts:
        env = rank_env(cluster, hosts[name], network=networks.get(name), program=program, num_cpus=num_cpus)
        parts.append(_part(cluster, gang, hosts[name], port=port, env=env, program=program))
    size, stall = gang.world_size, program.stall
    return LaunchRequest(run_id=gang.run_id, attempt=gang.attempt, hosts=tuple(parts), world_size=size, stall=stall)


def _part(
    cluster: Cluster, gang: Gang, host: Host, *, port: int, env: Mapping[str, str], program: Program
) -> HostRequest:
    layout = RunLayout(Path(host.workdir), gang.run_id)
    attempt = layout.attempt(gang.attempt)
    folder = attempt / host.name
    ranks = [number for number, rank in enumerate(gang.ranks) if rank.host == host.name]
    master = LOOPBACK if cluster.is_one_machine else cluster.head.address
    warm_pool = _warm_pool(layout, gang, program)
    is_alone = warm_pool is not None and program.alone
    launcher = (
        _alone(cluster, gang, host, folder)
        if is_alone
        else _torchrun(cluster, gang, host, folder, port=port, is_ours=program.kind == "worker")
    )
    if warm_pool is not None:
        words: tuple[str, ...] = ("-m", "gangline.worker", "prefork", str(folder / CONTROL), *warm_pool.words)
    elif program.kind == "worker":
        words = ("-m", "gangline.worker", *_worker(layout, gang.attempt))
    else:
        words = _command(host, program, attempt, folder)
    return HostRequest(
        host=host.name,
        folder=str(folder),
        rank_files=str(attempt),
        argv=(*launcher, *words),
        env=dict(env),
        run_id=gang.run_id,
        attempt=gang.attempt,
        cwd=None if program.cwd is None else str(Path(host.workdir, program.cwd)),
        program=program.kind,
        join_timeout_s=gang.init_timeout_s + JOIN_TIMEOUT_S if program.kind == "worker" else None,
        ranks=tuple(ranks),
        devices=tuple(gang.ranks[rank].device for rank in ranks),
        slots=host.slots,
        leases=str(Path(host.workdir, "leases", host.name)),
        samples=str(layout.samples(host.name)),
        meet=(master, port),
        alone=is_alone,
        warm_pool=warm_pool,
    )


def _warm_pool(layout: RunLayout, gang: Gang, program: Program) -> WarmPool | None:
    if program.kind != "worker" or program.rest_s <= 0:
        return None
    return WarmPool(rest_s=program.rest_s, words=_worker(layout, gang.attempt), world_size=gang.world_size)


def _torchrun(cluster: Cluster, gang: Gang, host: Host, folder: Path, *, port: int, is_ours: bool) -> tuple[str, ...]:
    one_machine = cluster.is_one_machine
    options: dict[str, object] = {
        "--nnodes": len(gang.hosts),
        "--nproc-per-node": gang.num_ranks(host.name),
        "--node-rank": gang.hosts.index(host.name),
        "--rdzv-backend": "static",
        "--rdzv-id": "-".join(filter(None, (gang.run_id, str(gang.attempt), gang.meeting[:MEETING_LETTERS]))),
        "--rdzv-conf": f"timeout={round(gang.init_timeout_s) + IMPORT_S}",
        "--master-addr": LOOPBACK if one_machine else cluster.head.address,
        "--master-port": port,
        "--local-addr": LOOPBACK if one_machine else host.address,
        **_watching(folder),
    }
    return host.argv(*(ON_LOOPBACK if one_machine and is_ours else ()), *TORCHRUN, *_words(options))


def _alone(cluster: Cluster, gang: Gang, host: Host, folder: Path) -> tuple[str, ...]:
    """A launcher without rendezvous; the loopback address avoids a look-up of the host's name."""
    options = {"--nnodes": 1, "--nproc-per-node": gang.num_ranks(host.name), "--local-addr": LOOPBACK}
    ours = ON_LOOPBACK if cluster.is_one_machine else ()
    return host.argv(*ours, *TORCHRUN, "--standalone", *_words({**options, **_watching(folder)}))


def _watching(folder: Path) -> dict[str, object]:
    return {
        "--max-restarts": 0,
        "--monitor-interval": 0.1,
        "--shutdown-timeout": 10,
        # Else torchrun leaves a folder in /tmp.
        "--log-dir": folder / "torchrun",
    }


def _words(options: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(str(word) for option in options.items() for word in option)


def _worker(layout: RunLayout, attempt: int) -> tuple[str, ...]:
    return ("train", str(layout.job), str(layout.gang(attempt)), str(layout.root))


def _command(host: Host, program: Program, rank_files: Path, folder: Path) -> tuple[str, ...]:
    words = rank_words((*program.argv, *program.host_words.get(host.name, ())), python=host.python)
    return ("--no-python", host.python, str(folder / SHIM), str(rank_files), *words)


def num_threads(cluster: Cluster, *, num_cpus: int | None) -> int:
    """Threads of one rank's CPU kernels.

    Where all hosts are one machine, its cores are divided evenly among all ranks on it (more threads than cores make
    CPU training several times slower); else 1, which is torchrun's own choice and enough for ranks on a GPU.
    """
    if num_cpus is None or not cluster.is_one_machine:
        return 1
    return max(1, num_cpus // sum(host.slots for host in cluster.hosts))


def rank_env(
    cluster: Cluster,
    host: Host,
    *,
    network: Mapping[str, str] | None = None,
    program: Program = WORKER,
    num_cpus: int | None = None,
) -> dict[str, str]:
    """Variables of the ranks on one host, on top of the host's own; `host.env` has the last word.

    network: variables that name its network interfaces; an `interface` of the cluster file counts more.
    HF_HUB_OFFLINE and tokens stay as the host has them: nothing secret is read or written here.
    """
    env = {
        "GANGLINE_HOST": host.name,
        # GPU 0 is the one that nvidia-smi calls 0, also where the cards differ.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": str(num_threads(cluster, num_cpus=num_cpus)),
        # Threads that spin at a barrier while another process has their core made small steps up to 60 times slower.
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
    }
    if program.kind == "worker":
        # Stale keys in the agent's store break a second process group (torch 2.13).
        env |= {"TOKENIZERS_PARALLELISM": "false", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **host.code_env}
    if cluster.is_one_machine:
        # The host name may resolve to an address that no interface has; loopback always works.
        env["GLOO_SOCKET_IFNAME"] = "lo"
    env |= network or {}
    if host.interface is not None:
        # NCCL takes a name as a beginning, unless it is told that it is the whole.
        env |= {"GLOO_SOCKET_IFNAME": host.interface, "NCCL_SOCKET_IFNAME": f"={host.interface}"}
    return env | program.env | host.env
