"""How are the GPUs of a host joined, and does the topology file that NCCL is given fit?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations

from gangline.checks.rules import Finding, Rule, apply, each
from gangline.inventory.facts import HostFacts, Inventory
from gangline.inventory.rank_interface import choose_nic
from gangline.runs.cluster import Cluster, Host

BUS_ID = re.compile(r"<pci\b[^>]*\bbusid=\"([0-9A-Fa-f:.]+)\"[^>]*\bclass=\"0x03", re.DOTALL)
"""Display adapters of NCCL's topology file. Read as text: an XML parser would follow what the file tells it to."""
GPU_MARK = re.compile(r"<gpu\b")


def check_topology(inventory: Inventory, cluster: Cluster) -> list[Finding]:
    """Long ways between devices, and files that describe another machine."""
    return apply(RULES, inventory, cluster)


def _far_apart(facts: HostFacts, _host: Host) -> Iterator[str]:
    topology = facts.topology
    if topology is None:
        return
    ways = {(one, other): topology.joint(one, other) for one, other in combinations(topology.gpus, 2)}
    far = [f"{one}-{other}" for (one, other), kind in ways.items() if kind == "SYS"]
    if far:
        yield f"SYS between {', '.join(far[:4])}" + (f" and {len(far) - 4} more" if len(far) > 4 else "")


def _adapter_far(facts: HostFacts, host: Host) -> Iterator[str]:
    topology = facts.topology
    active = {port.device for port in facts.rdma.active}
    if topology is not None and active:
        adapters = tuple(name for name in topology.adapters if name in active)
        far = [gpu for gpu in topology.gpus if adapters and topology.nearest(gpu, adapters) == "SYS"]
        if far:
            yield f"{', '.join(far)} to {', '.join(adapters[:4])}: SYS"
        return
    nic, _ = choose_nic(host, facts)
    nodes = {gpu.numa_node for gpu in facts.gpus if gpu.numa_node is not None and gpu.numa_node >= 0}
    if nic is not None and nic.numa_node is not None and nic.numa_node >= 0 and nodes and nic.numa_node not in nodes:
        yield f"{nic.name} is on NUMA node {nic.numa_node}, the GPUs on {', '.join(map(str, sorted(nodes)))}"


def _other_machine(facts: HostFacts, _host: Host) -> Iterator[str]:
    for file in facts.files:
        if "topo" not in file.path.lower() and file.text is not None and not GPU_MARK.search(file.text):
            continue
        if file.error is not None:
            yield f"{file.path}: {file.error}"
            continue
        named = {_short(text) for text in BUS_ID.findall(file.text or "")}
        held = {_short(gpu.pci) for gpu in facts.gpus if gpu.pci}
        if held and named and not held <= named:
            missing = ", ".join(sorted(held - named)[:4])
            yield f"{file.path} has {', '.join(sorted(named)[:4])}; the GPUs of this host are at {missing}"


def _short(bus_id: str) -> str:
    """NVML writes the domain with eight digits, NCCL with four."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


RULES = (
    Rule(
        id="E-TOPO-01",
        severity="info",
        title="GPUs that are joined through both processors only",
        meaning="they exchange gradients over the link between the sockets, the slowest way inside a machine",
        fix="nothing, or put the cards on one socket, or join them by NVLink",
        look=each(_far_apart),
    ),
    Rule(
        id="E-TOPO-02",
        severity="info",
        title="the network adapter is far from the GPUs",
        meaning="traffic to other hosts crosses the link between the sockets",
        fix="nothing, or put the adapter into a slot of the GPUs' socket",
        look=each(_adapter_far),
    ),
    Rule(
        id="E-TOPO-03",
        severity="warn",
        title="the topology file describes another machine",
        meaning="NCCL plans its rings by it: it ends, or is slow",
        fix="take NCCL_TOPO_FILE away, or write the file anew on this host: NCCL_TOPO_DUMP_FILE",
        look=each(_other_machine),
    ),
)
