"""The environment of ranks: what every backend sets, and why."""

from __future__ import annotations

from collections.abc import Mapping

from gangline.launch.program import WORKER, Program
from gangline.runs.cluster import Cluster, Host


def num_threads(cluster: Cluster, *, num_cpus: int | None) -> int:
    """Threads of one rank's CPU kernels.

    Where all hosts are one machine, its cores are dealt evenly to all ranks on it (more threads than cores make
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
