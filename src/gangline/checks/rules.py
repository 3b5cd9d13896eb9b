"""A rule: a fault that a check looks for, and its texts. The modules of this folder are tables of rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from gangline.inventory.facts import HostFacts, Inventory
from gangline.runs.cluster import Cluster, Host
from gangline.units import fold_names

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
    step: str = ""
    """The step of `gangline prepare` that does it; "" where none does."""

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
            *([f"  or        gangline prepare {self.step}, which shows every change first"] if self.step else []),
        ]


def fold(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Worst first; findings that differ in nothing but the host become one."""
    merged: dict[Finding, list[str]] = {}
    for finding in findings:
        merged.setdefault(dataclasses.replace(finding, hosts=()), []).extend(finding.hosts)
    folded = [dataclasses.replace(finding, hosts=tuple(hosts)) for finding, hosts in merged.items()]
    return tuple(sorted(folded, key=lambda finding: (ORDER[finding.severity], finding.id)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One case of what a rule looks for."""

    hosts: tuple[str, ...]
    evidence: str
    words: dict[str, str] = field(default_factory=dict)
    """What stands for {name} in the rule's texts."""
    fix: str = ""
    """Stands in the place of the rule's fix: the host itself says what to do."""


Look = Callable[[Inventory, Cluster], Iterable[Seen]]
"""Finds every case in the facts. Pure."""
Evidence = str | tuple[str, dict[str, str]]
"""The fault on one host as seen, and words for the rule's texts if it has gaps."""
HostLook = Callable[[HostFacts, Host], Iterable[Evidence]]
"""Finds every case on one host. Pure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What may be wrong, as data."""

    id: str
    severity: Severity
    title: str
    meaning: str
    fix: str
    look: Look
    step: str = ""
    """The step of `gangline prepare` that mends it; "" where none does."""


def apply(rules: Sequence[Rule], inventory: Inventory, cluster: Cluster) -> list[Finding]:
    """A finding for every case of every rule."""
    return [_finding(rule, seen) for rule in rules for seen in rule.look(inventory, cluster)]


def each(look: HostLook) -> Look:
    """A look at one host after the other."""

    def all_hosts(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
        for facts, host in pairs(inventory, cluster):
            for evidence in look(facts, host):
                text, words = evidence if isinstance(evidence, tuple) else (evidence, {})
                yield Seen(hosts=(facts.host,), evidence=text, words=words)

    return all_hosts


_L = TypeVar("_L")


class Adder(Generic[_L]):
    """Adds rules to a table: `@each_host.warn("E-LIM-01", title=...)` above the function that finds the cases."""

    def __init__(self, rules: list[Rule], to_look: Callable[[_L], Look]) -> None:
        self._rules = rules
        self._to_look = to_look

    def fail(self, name: str, *, title: str, meaning: str, fix: str, step: str = "") -> Callable[[_L], _L]:
        """Add a rule whose findings stop the start."""
        return self._add("fail", name, (title, meaning, fix), step)

    def warn(self, name: str, *, title: str, meaning: str, fix: str, step: str = "") -> Callable[[_L], _L]:
        """Add a rule whose findings do not stop the start."""
        return self._add("warn", name, (title, meaning, fix), step)

    def info(self, name: str, *, title: str, meaning: str, fix: str, step: str = "") -> Callable[[_L], _L]:
        """Add a rule whose findings tell only."""
        return self._add("info", name, (title, meaning, fix), step)

    def _add(self, severity: Severity, name: str, texts: tuple[str, str, str], step: str) -> Callable[[_L], _L]:
        def decorated(look: _L) -> _L:
            title, meaning, fix = texts
            found = self._to_look(look)
            rule = Rule(id=name, severity=severity, title=title, meaning=meaning, fix=fix, look=found, step=step)
            self._rules.append(rule)
            return look

        return decorated


def differing_by(value: Callable[[HostFacts], str | None]) -> Look:
    """A look for hosts that differ in a value."""
    return lambda inventory, _cluster: difference(grouped(inventory, value))


def adders(rules: list[Rule]) -> tuple[Adder[HostLook], Adder[Look]]:
    """Two ways to add to a table: rules that look at each host, and rules that look at the whole cluster."""
    return Adder(rules, each), Adder(rules, lambda look: look)


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
        fix=seen.fix or filled(rule.fix),
        step=rule.step,
    )
