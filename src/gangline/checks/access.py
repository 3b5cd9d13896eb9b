"""Can every host be asked?"""

from __future__ import annotations

from gangline.checks.finding import Finding
from gangline.inventory.facts import HostFailure, Inventory
from gangline.runs.cluster import Cluster


def check_access(inventory: Inventory, _cluster: Cluster) -> list[Finding]:
    """A host that does not answer, or whose Python cannot say its facts."""
    return [_finding(failure) for failure in inventory.failures]


def _finding(failure: HostFailure) -> Finding:
    if failure.unreachable:
        return Finding(
            id="E-ACC-01",
            severity="fail",
            hosts=(failure.host,),
            title="does not answer",
            evidence=failure.why,
            meaning="nothing can be started there",
            fix="check that the host is on and reachable, or take it out of the cluster file",
        )
    return Finding(
        id="E-ACC-02",
        severity="fail",
        hosts=(failure.host,),
        title="cannot say its facts",
        evidence=failure.why,
        meaning="the Python that the cluster file names there is missing, or has no gangline",
        fix="set `python` of this host to an environment with gangline[train] installed",
    )
