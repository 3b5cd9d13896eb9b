"""A rule: what is looked for, and what there is to say when it is found. The families are tables of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gangline.checks.finding import Finding, Severity
from gangline.inventory.facts import HostFacts, Inventory
from gangline.runs.cluster import Cluster, Host


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
