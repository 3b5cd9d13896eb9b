"""Are the packages there, new enough to be safe, and the same everywhere?"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gangline.checks.finding import Finding
from gangline.inventory.facts import HostFacts, Inventory
from gangline.runs.cluster import Cluster

NEEDED = ("gangline", "torch", "transformers", "peft", "datasets", "safetensors", "tokenizers")
"""What a rank imports."""

EQUAL = ("gangline", "torch", "transformers", "peft", "safetensors", "numpy")
"""What must be the same version on every host: ranks of different builds can disagree on layouts and rounding, and on
the order of the samples, which every rank draws for itself with numpy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The lowest version that is safe to use."""

    package: str
    version: str
    cve: str
    meaning: str
    id: str


FLOORS = (
    Floor(
        package="torch",
        version="2.10",
        cve="CVE-2026-24747",
        meaning="older versions can run code hidden in a checkpoint even when loaded with weights_only",
        id="E-SW-02",
    ),
    Floor(
        package="transformers",
        version="5.3.0",
        cve="CVE-2026-4372",
        meaning="older versions can run code named in a model's config even with trust_remote_code off",
        id="E-SW-03",
    ),
)
"""Floors with their reason (shared facts: ux-security, finding 10)."""


def check_versions(inventory: Inventory, _cluster: Cluster) -> list[Finding]:
    """Missing packages, versions below a security floor, versions that differ between hosts."""
    found: list[Finding] = []
    for facts in inventory.hosts:
        found += _missing(facts)
        found += [_too_old(facts, floor) for floor in FLOORS if _below(facts, floor)]
    return found + _differing(inventory)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: "2.13.0+cu128" -> (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _missing(facts: HostFacts) -> list[Finding]:
    absent = [name for name in NEEDED if not facts.packages.get(name)]
    if not absent:
        return []
    return [
        Finding(
            id="E-SW-01",
            severity="fail",
            hosts=(facts.host,),
            title=f"{', '.join(absent)} not installed",
            evidence="not among the packages of the host's Python",
            meaning="no rank can start there",
            fix="in that environment: pip install 'gangline[train]'",
        )
    ]


def _below(facts: HostFacts, floor: Floor) -> bool:
    version = facts.packages.get(floor.package)
    return version is not None and release(version) < release(floor.version)


def _too_old(facts: HostFacts, floor: Floor) -> Finding:
    return Finding(
        id=floor.id,
        severity="fail",
        hosts=(facts.host,),
        title=f"{floor.package} is older than {floor.version} ({floor.cve})",
        evidence=f"{floor.package} {facts.packages[floor.package]}",
        meaning=floor.meaning,
        fix=f"in that environment: pip install -U '{floor.package}>={floor.version}'",
    )


def _differing(inventory: Inventory) -> list[Finding]:
    found = []
    for package in EQUAL:
        by_version: dict[str, list[str]] = {}
        for facts in inventory.hosts:
            if version := facts.packages.get(package):
                by_version.setdefault(version, []).append(facts.host)
        if len(by_version) > 1:
            found.append(_difference(package, by_version))
    return found


def _difference(package: str, by_version: dict[str, list[str]]) -> Finding:
    return Finding(
        id="E-SW-04",
        severity="fail",
        hosts=tuple(host for hosts in by_version.values() for host in hosts),
        title=f"different versions of {package}",
        evidence=", ".join(f"{version} on {' '.join(hosts)}" for version, hosts in by_version.items()),
        meaning="ranks of different versions may disagree on numbers or on the layout of messages",
        fix=f"install one version of {package} on all hosts",
    )
