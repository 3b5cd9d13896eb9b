"""Is there memory left to work in?"""

from __future__ import annotations

from gangline.checks.finding import Finding
from gangline.inventory.facts import Inventory
from gangline.runs.cluster import Cluster
from gangline.units import format_bytes

WARN_BYTES = 1 << 30
"""Importing torch and transformers alone takes about half of this per rank."""


def check_memory(inventory: Inventory, _cluster: Cluster) -> list[Finding]:
    """Hosts with little memory available."""
    return [
        Finding(
            id="E-MEM-01",
            severity="warn",
            hosts=(facts.host,),
            title="little memory available",
            evidence=f"{format_bytes(facts.memory_available_bytes)} available",
            meaning="a rank may be ended by the kernel while it loads the model",
            fix="end other programs there, or give this host fewer slots",
        )
        for facts in inventory.hosts
        if facts.memory_available_bytes is not None and facts.memory_available_bytes < WARN_BYTES
    ]
