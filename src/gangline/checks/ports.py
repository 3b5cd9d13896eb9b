"""Is there a port for the ranks to meet at, and will nobody else take it?"""

from __future__ import annotations

from collections.abc import Iterator

from gangline.checks.rules import Finding, Rule, Seen, apply
from gangline.inventory.facts import Inventory
from gangline.inventory.pairs import RENDEZVOUS_PORTS, Ear
from gangline.runs.cluster import Cluster

FEW_PORTS = 1000
"""gloo opens a port per process and group, and a connection to every other rank."""


def check_ports(inventory: Inventory, cluster: Cluster) -> list[Finding]:
    """The port of the head, and the range of the kernel on every host."""
    return apply(RULES, inventory, cluster)


def _head(inventory: Inventory, cluster: Cluster) -> Ear | None:
    return inventory.pairs.ear(cluster.head.name) if inventory.pairs else None


def _range(cluster: Cluster) -> str:
    return "-".join(map(str, cluster.ports or RENDEZVOUS_PORTS))


def _none_free(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    head = _head(inventory, cluster)
    if head is not None and head.rendezvous_port is None:
        evidence = f"{_range(cluster)} on {'; '.join(head.problems) or head.address}"
        yield Seen(hosts=(head.host,), evidence=evidence, words={"head": head.host})


def _exposed(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    head = _head(inventory, cluster)
    if head is None or head.rendezvous_port is None:
        return
    low, high = head.ephemeral
    if low <= head.rendezvous_port <= high:
        yield Seen(
            hosts=(head.host,),
            evidence=f"the kernel gives ports from {low} to {high} to who asks for any",
            words={"port": str(head.rendezvous_port), "range": _range(cluster)},
        )


def _few(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for ear in inventory.pairs.ears if inventory.pairs else ():
        low, high = ear.ephemeral
        if high - low < FEW_PORTS:
            yield Seen(hosts=(ear.host,), evidence=f"the kernel gives ports from {low} to {high}: {high - low + 1}")


RULES = (
    Rule(
        id="E-PORT-01",
        severity="fail",
        title="no port is free for the ranks to meet at",
        meaning="torchrun on the head would end at once, and the others would wait for it",
        fix="end what listens there (ss -ltnp on {head}), or set `ports` of the cluster file to another range",
        look=_none_free,
    ),
    Rule(
        id="E-PORT-02",
        severity="warn",
        title="any program may be given port {port} at any time",
        meaning="between the look for a free port and the start of the ranks, another program may have it",
        fix="set `ports` of the cluster file to a range outside, or take it out of the kernel's: "
        "sudo sysctl -w net.ipv4.ip_local_reserved_ports={range}",
        look=_exposed,
    ),
    Rule(
        id="E-PORT-03",
        severity="warn",
        title="few ports for connections",
        meaning="ranks may fail to connect once they are used up",
        fix="sudo sysctl -w net.ipv4.ip_local_port_range='32768 60999'",
        look=_few,
    ),
)
