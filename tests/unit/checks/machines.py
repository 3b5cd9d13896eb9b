"""Healthy machines, as their agents would describe them. Written by hand after the public formats, not recorded.

answer = pc("pc1")                               # what `gangline-agent facts` prints there
answer["limits"]["nofile_soft"] = 256            # one thing is wrong
found({"pc1": answer, "pc2": pc("pc2")})         # ids, severities and hosts of the findings
"""

import copy
import json
from typing import Any

from gangline.checks.judge import judge
from gangline.inventory.facts import HostFailure, Inventory
from gangline.inventory.gather import read_facts
from gangline.runs.cluster import Cluster, Host

GIB = 1 << 30
MIB = 1 << 20
TORCH = {
    "torch": "2.13.0+cu128",
    "transformers": "5.23.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "safetensors": "0.8.0",
    "tokenizers": "0.23.3",
    "numpy": "2.3.4",
    "gangline": "0.1.0",
    "nvidia-nccl-cu12": "2.27.5",
    "nvidia-nccl-cu13": None,
}


def card(name, gib, capability, *, index=0, **more) -> dict[str, Any]:
    return {
        "index": index,
        "name": name,
        "uuid": f"GPU-{index:08x}",
        "memory_total_bytes": gib * GIB,
        "memory_free_bytes": gib * GIB - 400 * MIB,
        "compute_capability": capability,
        "pci": f"00000000:{index + 1:02x}:00.0",
        "numa_node": 0,
        "pcie_generation": 1,
        "pcie_generation_max": 4,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "temperature_c": 41,
        "power_w": 25.0,
        "power_limit_w": 320.0,
        "throttle": [],
        "utilization_percent": 0,
        "ecc_uncorrected": None,
        "mig": None,
        "processes": [],
        **more,
    }


def nic(name="enp5s0", address=None, *, kind="ethernet", speed=1000, **more) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "up": True,
        "carrier": True,
        "mtu": 1500,
        "speed_mbps": speed,
        "duplex": "full",
        "mac": "02:00:00:00:01:" + (address or "x.255").rpartition(".")[2].zfill(2)[-2:],
        "driver": "r8169",
        "addresses": [f"{address}/24"] if address else [],
        "numa_node": 0,
        "ports": [],
        **more,
    }


LOOPBACK = {
    "name": "lo",
    "kind": "loopback",
    "up": True,
    "carrier": True,
    "mtu": 65536,
    "mac": "00:00:00:00:00:00",
    "addresses": ["127.0.0.1/8", "::1/128"],
}


def number_of(name: str) -> int:
    return int("".join(letter for letter in name if letter.isdigit()) or 1)


def address_of(name: str) -> str:
    return f"192.168.1.{10 + number_of(name)}"


def folder(path: str, **more) -> dict[str, Any]:
    return {
        "path": path,
        "real_path": path,
        "exists": True,
        "filesystem": "ext4",
        "mount": "/",
        "source": "/dev/nvme0n1p2",
        "total_bytes": 900 * GIB,
        "free_bytes": 400 * GIB,
        "inodes_total": 60_000_000,
        "inodes_free": 55_000_000,
        "read_only": False,
        "writable": True,
        **more,
    }


def machine(name: str, **more) -> dict[str, Any]:
    """A computer without GPU on Ethernet."""
    number = number_of(name)
    answer = {
        "schema_version": 2,
        "system": {
            "hostname": name,
            "machine": {"id": f"id{number}", "boot": f"boot{number}", "network": "net:[4026531840]"},
            "kernel": "6.8.0-45-generic",
            "os": "Ubuntu 24.04.1 LTS",
            "arch": "x86_64",
            "libc": "glibc 2.39",
            "agent_python": "3.12.3",
            "uptime_s": 90000.0,
            "time_s": 1_790_000_000.0,
            "num_cpus": 16,
            "memory_total_bytes": 32 * GIB,
            "memory_available_bytes": 27 * GIB,
            "memory_limit_bytes": None,
            "swap_total_bytes": 2 * GIB,
            "wsl": False,
            "container": None,
            "linger": False,
            "kill_user_processes": False,
        },
        "names": {"own": name, "addresses": {name: [address_of(name)]}},
        "nics": [nic(address=address_of(name), mac=f"02:00:00:00:00:{number:02x}"), LOOPBACK],
        "routes": {},
        "rdma": {"ports": [], "peer_memory": False, "may_open": None},
        "gpus": {
            "source": None,
            "simulated": False,
            "driver": None,
            "cards": [],
            "faults": [],
            "reason": {"kind": "no-library", "text": "libnvidia-ml.so.1: cannot open shared object file"},
            "on_the_bus": 0,
        },
        "topology": None,
        "storage": [folder(f"/home/u/gangline-{name}"), folder("/tmp")],
        "limits": {
            "nofile_soft": 1024,
            "nofile_hard": 1048576,
            "memlock_soft": 4 * GIB,
            "memlock_hard": 4 * GIB,
            "nproc_soft": 127000,
            "nproc_hard": 127000,
            "shm_total_bytes": 16 * GIB,
            "shm_free_bytes": 16 * GIB,
        },
        "variables": [],
        "programs": {"found": {"rsync": "/usr/bin/rsync"}, "pythons": ["/usr/bin/python3"]},
        "packages": {
            "python": "3.12.3",
            "implementation": "CPython",
            "executable": "/home/u/env/bin/python",
            "arch": "x86_64",
            "packages": dict(TORCH),
            "torch": {"cuda": "12.8", "hip": None, "git_version": "abc"},
        },
        "files": [],
    }
    answer = copy.deepcopy(answer)
    answer.update(more)
    return answer


def with_gpus(answer, cards, *, driver="575.57.08", cuda="12.9", **more) -> dict[str, Any]:
    answer["gpus"] = {
        "source": "libnvidia-ml.so.1",
        "simulated": False,
        "driver": driver,
        "cuda": cuda,
        "cards": [{**one, "index": index} for index, one in enumerate(cards)],
        "faults": [],
        "reason": None,
        "module": driver,
        "open_module": True,
        "on_the_bus": len(cards),
        **more,
    }
    return answer


def pc(name="pc1", cards=None, **more) -> dict[str, Any]:
    """A home PC; by itself with one RTX 4090."""
    return with_gpus(machine(name), cards or [card("NVIDIA GeForce RTX 4090", 24, "8.9")], **more)


def laptop(name="pc2") -> dict[str, Any]:
    """A laptop with a small card and a cable."""
    answer = with_gpus(
        machine(name), [card("NVIDIA GeForce RTX 3070 Laptop GPU", 8, "8.6", pcie_width=8, pcie_width_max=8)]
    )
    answer["nics"].append(nic("wlp4s0", f"192.168.2.{number_of(name)}", kind="wifi", speed=None, duplex=None))
    return answer


def ib_port(number: int, **more) -> dict[str, Any]:
    return {
        "device": f"mlx5_{number}",
        "port": 1,
        "state": "ACTIVE",
        "physical_state": "LinkUp",
        "link_layer": "InfiniBand",
        "rate_gbps": 400.0,
        "interface": f"ib{number}",
        "gids": ["fe80:0000:0000:0000:a088:c203:00b2:0001"],
        "numa_node": number // 4,
        **more,
    }


def nvlink_table(num_gpus=8, num_nics=8) -> str:
    names = [f"GPU{index}" for index in range(num_gpus)] + [f"NIC{index}" for index in range(num_nics)]
    lines = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"]
    for one in names:
        cells = []
        for other in names:
            near = number_of(one) == number_of(other)
            same_half = number_of(one) // 4 == number_of(other) // 4
            both = one.startswith("GPU") and other.startswith("GPU")
            cells.append(
                " X " if one == other else "NV18" if both else "PXB" if near else "NODE" if same_half else "SYS"
            )
        half = number_of(one) // 4
        tail = [f"{half * 56}-{half * 56 + 55}", str(half), "", "N/A"] if one.startswith("GPU") else []
        lines.append("\t".join([one, *cells, *tail]))
    legend = [f"  NIC{index}: mlx5_{index}" for index in range(num_nics)]
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "", "NIC Legend:", "", *legend, ""])


def server(name="gpu1", **more) -> dict[str, Any]:
    """A server with eight H100 and eight InfiniBand adapters."""
    cards = [
        card("NVIDIA H100 80GB HBM3", 80, "9.0", ecc_uncorrected=0, mig=False, pcie_generation=5, pcie_generation_max=5)
        for _ in range(8)
    ]
    answer = with_gpus(machine(name), cards, driver="570.124.06", cuda="12.8", **more)
    answer["gpus"]["open_module"] = False
    answer["system"] |= {"memory_total_bytes": 2048 * GIB, "memory_available_bytes": 1900 * GIB, "num_cpus": 224}
    answer["nics"][0] |= {"name": "eno1", "speed_mbps": 25000}
    answer["nics"].append(nic("ib0", f"10.10.0.{number_of(name)}", kind="infiniband", speed=400000, mtu=4092))
    answer["rdma"] = {"ports": [ib_port(number) for number in range(8)], "peer_memory": True, "may_open": True}
    answer["topology"] = nvlink_table()
    answer["limits"] |= {"memlock_soft": -1, "memlock_hard": -1, "nofile_soft": 1048576, "nproc_soft": -1}
    return answer


def cpu_torch(answer) -> dict[str, Any]:
    """The same with the CPU build of torch."""
    answer["packages"]["packages"] |= {"torch": "2.13.0+cpu", "nvidia-nccl-cu12": None}
    answer["packages"]["torch"] = {"cuda": None, "hip": None, "git_version": "abc"}
    return answer


def cpu_only(name="pc1") -> dict[str, Any]:
    return cpu_torch(machine(name))


def wsl(name="pc1") -> dict[str, Any]:
    """Ubuntu under Windows: the driver's version is that of Windows, the network one of Hyper-V."""
    answer = pc(name, [card("NVIDIA GeForce RTX 4070", 12, "8.9", pcie_generation=4)], driver="566.36", cuda="12.7")
    answer["gpus"] |= {
        "module": None,
        "open_module": None,
        "on_the_bus": 0,
        "source": "/usr/lib/wsl/lib/libnvidia-ml.so.1",
    }
    answer["system"] |= {"kernel": "5.15.167.4-microsoft-standard-WSL2", "wsl": True, "linger": None}
    answer["nics"][0] |= {"name": "eth0", "driver": "hv_netvsc", "speed_mbps": 10000}
    answer["storage"][0] |= {"source": "/dev/sdc"}
    return answer


def container(name="pc1", **limits) -> dict[str, Any]:
    """A container that was given one card of eight, and enough of everything."""
    answer = pc(
        name, [card("NVIDIA A100-SXM4-80GB", 80, "8.0", mig=False, ecc_uncorrected=0)], driver="550.54.15", cuda="12.4"
    )
    answer["gpus"] |= {"on_the_bus": 8, "open_module": False}
    answer["system"] |= {"container": "docker", "memory_limit_bytes": 64 * GIB, "memory_total_bytes": 1024 * GIB}
    answer["nics"][0] |= {"name": "eth0", "kind": "veth", "driver": "veth", "speed_mbps": 10000}
    answer["storage"][0] |= {"filesystem": "overlay", "source": "overlay", "mount": "/"}
    answer["limits"] |= limits
    return answer


def host(name: str, **more) -> Host:
    given = {
        "name": name,
        "workdir": f"/home/u/gangline-{name}",
        "python": "/home/u/env/bin/python",
        "transport": "ssh",
        "address": address_of(name),
        "code": "/home/u/gangline/code/1",
    }
    return Host(**{**given, **more})


def cluster(*hosts: Host) -> Cluster:
    return Cluster(name="c", hosts=hosts)


def inventory(answers: dict[str, dict[str, Any]], *, failures: tuple[HostFailure, ...] = (), **more) -> Inventory:
    read = [read_facts(name, json.loads(json.dumps(answer))) for name, answer in answers.items()]
    return Inventory(gathered="2026-11-01T00:00:00+00:00", hosts=tuple(read), failures=failures, **more)


def findings(answers, *hosts: Host, failures=(), only=(), **more):
    """Everything that is found; hosts that are not given are made for the answers."""
    given = {one.name: one for one in hosts}
    members = [given.get(name) or host(name) for name in answers]
    members += [one for one in hosts if one.name not in answers]
    return judge(inventory(answers, failures=failures, **more), cluster(*members), only=only)


def found(answers, *hosts: Host, **more) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(one.id, one.severity, one.hosts) for one in findings(answers, *hosts, **more)]
