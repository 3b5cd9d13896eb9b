"""Look at a cluster as thoroughly as its tier says: facts, shared folders, the network between hosts, disks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from gangline.inventory.disk import WriteTry, probe_disks
from gangline.inventory.facts import Inventory
from gangline.inventory.gather import gather
from gangline.inventory.nics import is_one_machine
from gangline.inventory.pairs import Tier
from gangline.inventory.probe import probe_pairs
from gangline.inventory.shared import probe_shared
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster


def survey(cluster: Cluster, transports: Mapping[str, Transport], *, tier: Tier = "quick") -> Inventory:
    """The facts of all hosts, and then what takes several of them; a host that fails is recorded, never raised.

    quick: markers in shared folders, small packets between all hosts. full and burn: files are really written, too.
    """
    inventory = gather(cluster, transports)
    answering = {facts.host: transports[facts.host] for facts in inventory.hosts}
    folders = () if is_one_machine(cluster) else cluster.shared
    with ThreadPoolExecutor(max_workers=2 + len(folders)) as pool:
        shared = [pool.submit(probe_shared, folder, answering) for folder in folders]
        writes = pool.submit(_writes, cluster, answering, tier)
        pairs = None if is_one_machine(cluster) else probe_pairs(cluster, inventory, transports, tier=tier)
        return dataclasses.replace(
            inventory, shared=tuple(probe.result() for probe in shared), writes=writes.result(), pairs=pairs
        )


def _writes(cluster: Cluster, answering: Mapping[str, Transport], tier: Tier) -> tuple[WriteTry, ...]:
    hosts = tuple(host for host in cluster.hosts if host.name in answering)
    return probe_disks(dataclasses.replace(cluster, hosts=hosts), answering) if hosts and tier != "quick" else ()
