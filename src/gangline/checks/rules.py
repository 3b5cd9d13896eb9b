"""A rule: what is looked for, and what there is to say when it is found. The families are tables of these."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gangline.inventory.facts import HostFacts, Inventory
from gangline.runs.cluster import Cluster, Host

# A finding: one result of a check, with its evidence, its meaning and its fix.


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One case of what a rule looks for."""

    hosts: tuple[str, ...]
    evidence: str
    words: dict[str, str] = field(default_factory=dict)
    """What stands for {name} in the rule's texts."""


Look = Callable[[Inventory, Cluster], Iterable[Seen]]
"""Finds every case in the facts. Pure."""
Evidence = str | tuple[str, dict[str, str]]
"""What was seen on a host, and words for the rule's texts if it has gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What may be wrong, as data."""

    id: str
    severity: Severity
    title: str
    meaning: str
    fix: str
    look: Look


def apply(rules: Sequence[Rule], inventory: Inventory, cluster: Cluster) -> list[Finding]:
    """A finding for every case of every rule."""
    return [_finding(rule, seen) for rule in rules for seen in rule.look(inventory, cluster)]


def each(look: Callable[[HostFacts, Host], Iterable[Evidence]]) -> Look:
    """A look at one host after the other."""

    def all_hosts(inventory: Inventory, cluster: Cluster) -> list[Seen]:
        found = []
        for facts, host in pairs(inventory, cluster):
            for evidence in look(facts, host):
                text, words = evidence if isinstance(evidence, tuple) else (evidence, {})
                found.append(Seen(hosts=(facts.host,), evidence=text, words=words))
        return found

    return all_hosts


def pairs(inventory: Inventory, cluster: Cluster) -> list[tuple[HostFacts, Host]]:
    """The hosts whose facts are known, with what the cluster says of them."""
    hosts = {host.name: host for host in cluster.hosts}
    return [(facts, hosts[facts.host]) for facts in inventory.hosts if facts.host in hosts]


def grouped(inventory: Inventory, value: Callable[[HostFacts], str | None]) -> dict[str, tuple[str, ...]]:
    """Hosts by a value; hosts that do not know theirs are left out."""
    groups: dict[str, tuple[str, ...]] = {}
    for facts in inventory.hosts:
        if (key := value(facts)) is not None:
            groups[key] = (*groups.get(key, ()), facts.host)
    return groups


def difference(groups: dict[str, tuple[str, ...]], words: dict[str, str] | None = None) -> list[Seen]:
    """The one case that not all hosts are in one group."""
    if len(groups) < 2:
        return []
    hosts = tuple(host for group in groups.values() for host in group)
    evidence = ", ".join(f"{value} on {' '.join(group)}" for value, group in groups.items())
    return [Seen(hosts=hosts, evidence=evidence, words=words or {})]


def _finding(rule: Rule, seen: Seen) -> Finding:
    def filled(text: str) -> str:
        return text.format(**seen.words) if seen.words else text

    return Finding(
        id=rule.id,
        severity=rule.severity,
        hosts=seen.hosts,
        title=filled(rule.title),
        evidence=seen.evidence,
        meaning=filled(rule.meaning),
        fix=filled(rule.fix),
    )
