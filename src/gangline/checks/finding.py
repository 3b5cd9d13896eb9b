"""A finding: one result of a check, with its evidence, its meaning and its fix."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["fail", "warn", "info"]
"""`fail` stops the start, `warn` does not, `info` tells."""

LONG = 100
"""More characters than this do not stay on one line of a terminal."""

ORDER: dict[str, int] = {"fail": 0, "warn": 1, "info": 2}
"""Worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a check."""

    id: str
    """Stable, such as E-SW-01."""
    severity: Severity
    hosts: tuple[str, ...]
    title: str
    evidence: str
    """What was seen."""
    meaning: str
    """Why it matters."""
    fix: str
    """What to do."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for findings.json."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """The finding for people; long evidence with one example a line."""
        where = f"{fold_names(self.hosts)}: " if self.hosts else ""
        evidence, *more = self.evidence.split("; ") if len(self.evidence) > LONG else [self.evidence]
        return [
            f"{self.severity} {self.id}  {where}{self.title}",
            f"  evidence  {evidence}",
            *(f"            {each}" for each in more),
            f"  means     {self.meaning}",
            f"  fix       {self.fix}",
        ]


def fold(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Worst first; findings that differ in nothing but the host become one."""
    merged: dict[Finding, list[str]] = {}
    for finding in findings:
        merged.setdefault(dataclasses.replace(finding, hosts=()), []).extend(finding.hosts)
    folded = [dataclasses.replace(finding, hosts=tuple(hosts)) for finding, hosts in merged.items()]
    return tuple(sorted(folded, key=lambda finding: (ORDER[finding.severity], finding.id)))


def fold_names(names: Sequence[str]) -> str:
    """Names with runs of numbers folded: gpu01, gpu02, gpu03, nas -> "gpu[01-03], nas"."""
    groups: list[tuple[str, list[str]]] = []
    for name in names:
        stem, digits = _split(name)
        last = groups[-1] if groups else None
        if last and digits and last[1] and last[0] == stem and _follows(last[1][-1], digits):
            last[1].append(digits)
        else:
            groups.append((stem, [digits] if digits else []))
    return ", ".join(_folded(stem, numbers) for stem, numbers in groups)


def _split(name: str) -> tuple[str, str]:
    found = re.fullmatch(r"(.*?)([0-9]*)", name, re.DOTALL)
    return (found[1], found[2]) if found else (name, "")


def _follows(before: str, after: str) -> bool:
    return len(before) == len(after) and int(after) == int(before) + 1


def _folded(stem: str, numbers: list[str]) -> str:
    if len(numbers) < 2:
        return stem + "".join(numbers)
    return f"{stem}[{numbers[0]}-{numbers[-1]}]"
