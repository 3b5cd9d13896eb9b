"""All checks, all findings, worst first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gangline.checks.access import check_access
from gangline.checks.finding import Finding, fold
from gangline.checks.memory import check_memory
from gangline.checks.names import check_names
from gangline.checks.storage import check_storage
from gangline.checks.versions import check_versions
from gangline.errors import CheckFailed, HostUnreachable
from gangline.inventory.facts import Inventory
from gangline.runs.cluster import Cluster

CHECKS: tuple[Callable[[Inventory, Cluster], list[Finding]], ...] = (
    check_access,
    check_names,
    check_versions,
    check_storage,
    check_memory,
)
"""One family per entry."""


def judge(inventory: Inventory, cluster: Cluster) -> tuple[Finding, ...]:
    """Every finding of every check, worst first, equal ones of several hosts folded."""
    return fold(finding for check in CHECKS for finding in check(inventory, cluster))


def require(findings: Sequence[Finding]) -> None:
    """Stop where a finding says so: HostUnreachable if a host does not answer, else CheckFailed."""
    failed = [finding for finding in findings if finding.severity == "fail"]
    if not failed:
        return
    kind = HostUnreachable if any(finding.id == "E-ACC-01" for finding in failed) else CheckFailed
    raise kind(
        f"{'a check stops' if len(failed) == 1 else f'{len(failed)} checks stop'} the start: "
        f"{', '.join(finding.id for finding in failed)}",
        seen=f"{failed[0].title} ({failed[0].evidence})",
        fix=failed[0].fix,
    )
