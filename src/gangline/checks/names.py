"""Does every host have a place of its own?"""

from __future__ import annotations

from gangline.checks.finding import Finding
from gangline.inventory.facts import Inventory
from gangline.runs.cluster import Cluster


def check_names(inventory: Inventory, _cluster: Cluster) -> list[Finding]:
    """Hosts of the cluster that are one machine and share a work folder, links resolved."""
    places: dict[tuple[str, str], list[str]] = {}
    for facts in inventory.hosts:
        places.setdefault((facts.hostname, facts.workdir), []).append(facts.host)
    return [
        Finding(
            id="E-NAME-01",
            severity="fail",
            hosts=tuple(hosts),
            title="the same work folder",
            evidence=f"{workdir} on {hostname}",
            meaning="their checkpoints and logs would overwrite each other",
            fix="give each host a `workdir` of its own, or make them one host with more slots",
        )
        for (hostname, workdir), hosts in places.items()
        if len(hosts) > 1
    ]
