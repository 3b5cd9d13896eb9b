"""Is there room for checkpoints in the work folder?"""

from __future__ import annotations

from gangline.checks.finding import Finding
from gangline.inventory.facts import HostFacts, Inventory
from gangline.runs.cluster import Cluster
from gangline.units import format_bytes

WARN_BYTES = 2 << 30
"""Below this, two checkpoints of a small model may not fit."""

FAIL_BYTES = 200 << 20
"""Below this, logs and token files alone may fill the disk."""


def check_storage(inventory: Inventory, _cluster: Cluster) -> list[Finding]:
    """Hosts whose work folder has little room left."""
    return [_finding(facts) for facts in inventory.hosts if facts.disk_free_bytes < WARN_BYTES]


def _finding(facts: HostFacts) -> Finding:
    fail = facts.disk_free_bytes < FAIL_BYTES
    return Finding(
        id="E-DISK-01" if fail else "E-DISK-02",
        severity="fail" if fail else "warn",
        hosts=(facts.host,),
        title="no room in the work folder" if fail else "little room in the work folder",
        evidence=f"{format_bytes(facts.disk_free_bytes)} free in {facts.workdir}",
        meaning="a checkpoint cannot be saved" if fail else "a save may fail once the disk is full",
        fix="free some space there, or set `workdir` of this host to a larger disk",
    )
