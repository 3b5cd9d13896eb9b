"""Warnings at a start: told in full once per cluster, then in one line each; acknowledged ones in one line for all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from gangline.checks.rules import Finding
from gangline.inventory.measured import keep
from gangline.runs.cluster import Cluster
from gangline.runs.files import read_json
from gangline.units import fold_names

MOST_KEPT = 200
"""Of these the last are remembered."""


def start_lines(findings: Sequence[Finding], cluster: Cluster, home: Path) -> list[str]:
    """What a start says of findings, worst first; what was said in full is remembered in `home`.

    A failure is always told in full. A warning that was told for the same hosts is one line, as long as its title is
    the same.
    """
    path = home / "clusters" / cluster.name / "warnings.json"
    known = _known(path)
    told = [_key(finding) for finding in findings if finding.severity == "warn"]
    lines = [line for finding in findings for line in _lines(finding, cluster, known)]
    fresh = [key for key in told if key not in known]
    if fresh:
        keep(path, {"told": [*known, *fresh][-MOST_KEPT:]})
    return [*lines, *acknowledged_line(findings, cluster)]


def is_acknowledged(finding: Finding, cluster: Cluster) -> bool:
    """Whether the cluster file says that a warning is known; a failure stays one."""
    return finding.severity == "warn" and finding.id in cluster.acknowledged


def acknowledged_line(findings: Sequence[Finding], cluster: Cluster) -> list[str]:
    """The acknowledged warnings, in one line."""
    found = [finding for finding in findings if is_acknowledged(finding, cluster)]
    words = [f"{each.id} {fold_names(each.hosts)}".strip() for each in found]
    return [f"known      {', '.join(words)} (acknowledged in the cluster file)"] if words else []


def _lines(finding: Finding, cluster: Cluster, known: Sequence[str]) -> Iterator[str]:
    if is_acknowledged(finding, cluster):
        return
    if finding.severity != "warn" or _key(finding) not in known:
        yield from finding.lines()
        return
    yield f"{finding.lines()[0]} (gangline check says more; quiet with `acknowledged: [{finding.id}]` in the file)"


def _key(finding: Finding) -> str:
    return json.dumps([finding.id, sorted(finding.hosts), finding.title])


def _known(path: Path) -> list[str]:
    try:
        return [str(key) for key in read_json(path)["told"]]
    except (OSError, ValueError, TypeError, LookupError):
        return []
