"""What the hosts have to build their environments with."""

from __future__ import annotations

from gangline.inventory.building import probe_building
from gangline.inventory.facts import Inventory
from gangline.inventory.pythons import BuildFacts
from gangline.runs.cluster import Cluster, Host
from gangline.steps.seams import Transports
from gangline.sync.lock import load_lock


def with_building(cluster: Cluster, inventory: Inventory, transports: Transports) -> Inventory:
    """Ask the hosts whose environment gangline builds; raises UsageError for a lock that cannot be read."""
    wanted = {host.name: (host, _by_lock(host)) for host in cluster.hosts if host.environment.kind == "locked"}
    return probe_building(inventory, wanted, transports)


def _by_lock(host: Host) -> BuildFacts:
    lock = load_lock(host.environment.path)
    return BuildFacts(lock=lock.hash, torch=next((pin.version for pin in lock.pins if pin.name == "torch"), None))
