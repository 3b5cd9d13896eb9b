"""Is there memory to work in?"""

from __future__ import annotations

from collections.abc import Iterator

from gangline.checks.rules import Finding, Rule, apply, each
from gangline.inventory.facts import HostFacts, Inventory
from gangline.runs.cluster import Cluster, Host
from gangline.units import format_bytes

WARN_BYTES = 1 << 30
"""Importing torch and transformers alone takes about half of this per rank."""
SMALL_LIMIT_BYTES = 8 << 30


def check_memory(inventory: Inventory, cluster: Cluster) -> list[Finding]:
    """Hosts with little memory available, and limits that `free` does not show."""
    return apply(RULES, inventory, cluster)


def _little(facts: HostFacts, _host: Host) -> Iterator[str]:
    available = facts.memory_available_bytes
    if available is not None and available < WARN_BYTES:
        yield f"{format_bytes(available)} available"


def _limited(facts: HostFacts, _host: Host) -> Iterator[str]:
    """A container with a limit that is large enough is nothing to talk about."""
    limit, total = facts.system.memory_limit_bytes, facts.memory_total_bytes
    if limit is not None and total is not None and limit < min(total / 2, SMALL_LIMIT_BYTES):
        yield f"{format_bytes(limit)} of {format_bytes(total)}, by a control group"


RULES = (
    Rule(
        id="E-MEM-01",
        severity="warn",
        title="little memory available",
        meaning="a rank may be ended by the kernel while it loads the model",
        fix="end other programs there, or give this host fewer slots",
        look=each(_little),
    ),
    Rule(
        id="E-MEM-02",
        severity="warn",
        title="far less memory may be used than there is",
        meaning="a rank that reaches the limit is killed, although `free` shows room",
        fix="raise the memory limit of the container or service, or give this host fewer slots",
        look=each(_limited),
    ),
)
