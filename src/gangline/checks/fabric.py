"""Can InfiniBand or RoCE be used, on all hosts?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gangline.checks.rules import Finding, Rule, Seen, apply, difference, each, grouped
from gangline.inventory.facts import HostFacts, Inventory
from gangline.runs.cluster import Cluster, Host

INFINIBAND = "InfiniBand"


def check_fabric(inventory: Inventory, cluster: Cluster) -> list[Finding]:
    """Ports that are down, hosts without, and what keeps GPUs and adapters apart."""
    return apply(RULES, inventory, cluster)


def _down(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    """A port that nobody plugged in on any host is no finding, unless the host has no other."""
    most = max((len(facts.rdma.active) for facts in inventory.hosts), default=0)
    for facts in inventory.hosts:
        rdma = facts.rdma
        idle = [port for port in rdma.ports if not port.is_active]
        lonely = not rdma.active and any(port.link_layer == INFINIBAND for port in idle)
        if idle and (len(rdma.active) < most or lonely):
            words = [f"{port.name} is {port.state or '?'} ({port.physical_state or '?'})" for port in idle[:4]]
            yield Seen(
                hosts=(facts.host,), evidence=f"{', '.join(words)}; {len(rdma.active)} active, others have {most}"
            )


def _on_some_only(layer_is_infiniband: bool) -> Callable[[Inventory, Cluster], Iterator[Seen]]:
    """Many ordinary network cards can do RoCE that nobody set up: that is no news."""

    def look(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
        having = [facts for facts in inventory.hosts if facts.rdma.active]
        lacking = tuple(facts.host for facts in inventory.hosts if not facts.rdma.active)
        infiniband = any(port.link_layer == INFINIBAND for facts in having for port in facts.rdma.active)
        if having and lacking and infiniband == layer_is_infiniband:
            yield Seen(hosts=lacking, evidence=f"active on {', '.join(facts.host for facts in having)} only")

    return look


def _no_peer_memory(facts: HostFacts, _host: Host) -> Iterator[str]:
    """The open kernel module shares memory with adapters by itself (DMA-BUF)."""
    if facts.gpus and facts.rdma.active and facts.rdma.peer_memory is False and not facts.gpu_driver.open_module:
        yield f"{facts.rdma.active[0].name} is active; neither nvidia_peermem nor the open kernel module is loaded"


def _kind(facts: HostFacts) -> str | None:
    return "+".join(sorted({port.link_layer or "?" for port in facts.rdma.active})) or None


def _rate(facts: HostFacts) -> str | None:
    rates = [port.rate_gbps for port in facts.rdma.active if port.rate_gbps is not None]
    return f"{len(rates)} x {max(rates):g} Gbit/s" if rates else None


def _closed(facts: HostFacts, _host: Host) -> Iterator[str]:
    if facts.rdma.active and facts.rdma.may_open is False:
        yield "/dev/infiniband/uverbs* may not be opened by this user"


RULES = (
    Rule(
        id="E-IB-01",
        severity="warn",
        title="an InfiniBand or RoCE port is down",
        meaning="its traffic goes through fewer ports, or over Ethernet for all hosts",
        fix="there: check the cable and the switch port; without a subnet manager, ports stay in INIT (ibstat)",
        look=_down,
    ),
    Rule(
        id="E-IB-02",
        severity="warn",
        title="has no active InfiniBand, and other hosts have",
        meaning="all ranks have to go the same way, so NCCL uses Ethernet on all hosts",
        fix="bring its InfiniBand up, or train on the other hosts only",
        look=_on_some_only(layer_is_infiniband=True),
    ),
    Rule(
        id="E-IB-02",
        severity="info",
        title="has no active RoCE, and other hosts have",
        meaning="all ranks have to go the same way, so NCCL uses plain TCP on all hosts",
        fix="nothing, unless you set RoCE up on purpose",
        look=_on_some_only(layer_is_infiniband=False),
    ),
    Rule(
        id="E-IB-03",
        severity="warn",
        title="GPUs and adapters do not share memory",
        meaning="everything between hosts is copied through the memory of the CPU",
        fix="there: sudo modprobe nvidia_peermem, or install NVIDIA's open kernel module",
        look=each(_no_peer_memory),
    ),
    Rule(
        id="E-IB-04",
        severity="warn",
        title="different kinds of ports",
        meaning="InfiniBand and RoCE do not talk with each other",
        fix="use hosts with one kind, or set the ports to one: mlxconfig",
        look=lambda inventory, _cluster: difference(grouped(inventory, _kind)),
    ),
    Rule(
        id="E-IB-04",
        severity="warn",
        title="ports of different speed",
        meaning="the slowest host rules the speed of every all-reduce",
        fix="check cables and switch ports of the slower hosts: a bad cable trains down (ibstat)",
        look=lambda inventory, _cluster: difference(grouped(inventory, _rate)),
    ),
    Rule(
        id="E-IB-05",
        severity="fail",
        title="this user may not use InfiniBand",
        meaning="NCCL sees the adapter, cannot open it, and ends",
        fix="there: give the user the group of /dev/infiniband; in a container: --device=/dev/infiniband",
        look=each(_closed),
    ),
)
