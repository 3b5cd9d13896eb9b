"""Who outside the cluster reaches the ports of a run?"""

from __future__ import annotations

from collections.abc import Iterator

from gangline.checks.rules import Finding, Rule, Seen, apply
from gangline.inventory.facts import Inventory
from gangline.inventory.pairs import Outside, examples, say_tries
from gangline.runs.cluster import Cluster


def check_security(inventory: Inventory, cluster: Cluster) -> list[Finding]:
    """Ports that a machine reached which is no host of the cluster."""
    return apply(RULES, inventory, cluster)


def _reached_from_outside(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    pairs = inventory.pairs
    reached = [outside for outside in (pairs.outside if pairs else ()) if any(attempt.ok for attempt in outside.tries)]
    if pairs is None or not reached:
        return
    who = pairs.outside_from or "no host of the cluster"
    addresses = [host.address for host in cluster.hosts]
    yield Seen(
        hosts=tuple(outside.host for outside in reached),
        evidence=examples(
            [f"this computer ({who}) -> {outside.host} {say_tries(outside.tries)}" for outside in reached]
        ),
        words={"ports": _ports(reached), "addresses": ", ".join(addresses[:8]) + (", ..." if addresses[8:] else "")},
    )


def _ports(reached: list[Outside]) -> str:
    open_ones = [attempt for outside in reached for attempt in outside.tries if attempt.ok]
    words = [f"port {port}" for port in sorted({each.port for each in open_ones if each.kind == "rendezvous"})]
    if any(attempt.kind == "ephemeral" for attempt in open_ones):
        words.append("the ports of the data")
    return " and ".join(words)


RULES = (
    Rule(
        id="E-SEC-04",
        severity="warn",
        title="reachable from outside the cluster: {ports}",
        meaning="torch, gloo and NCCL ask nobody who they are: while a run lasts, who reaches these ports can run code "
        "as you",
        fix="let only {addresses} in: sudo ufw allow from ADDRESS for each, sudo ufw allow ssh, sudo ufw enable; or "
        "train in a network of their own",
        look=_reached_from_outside,
    ),
)
