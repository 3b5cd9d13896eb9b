"""Are the model and the data there, and the same on all hosts?"""

from __future__ import annotations

from collections.abc import Iterator

from gangline.checks.rules import Finding, Rule, Seen, apply
from gangline.inventory.facts import Inventory
from gangline.inventory.folders import CopyOnHost
from gangline.runs.cluster import Cluster
from gangline.units import format_bytes


def check_data(inventory: Inventory, cluster: Cluster) -> list[Finding]:
    """What was compared by content."""
    return apply(RULES, inventory, cluster)


def _absent(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for compared in inventory.data:
        missing = [copy for copy in compared.copies if copy.tree is None and copy.error is None]
        there = [copy.host for copy in compared.copies if copy.tree is not None]
        if missing and there:
            evidence = (
                f"nothing at {', '.join(dict.fromkeys(copy.path for copy in missing))}; {', '.join(there)} has it"
            )
            yield Seen(hosts=tuple(copy.host for copy in missing), evidence=evidence, words={"what": compared.what})


def _nowhere(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for compared in inventory.data:
        if compared.copies and all(copy.tree is None and copy.error is None for copy in compared.copies):
            paths = ", ".join(dict.fromkeys(copy.path for copy in compared.copies))
            hosts = tuple(copy.host for copy in compared.copies)
            yield Seen(hosts=hosts, evidence=f"nothing at {paths}", words={"what": compared.what})


def _unreadable(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for compared in inventory.data:
        for copy in compared.copies:
            if copy.error is not None:
                yield Seen(hosts=(copy.host,), evidence=f"{copy.path}: {copy.error}", words={"what": compared.what})


def _different(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for compared in inventory.data:
        groups: dict[str, list[CopyOnHost]] = {}
        for copy in compared.copies:
            if copy.tree is not None:
                groups.setdefault(copy.tree, []).append(copy)
        if len(groups) > 1:
            files = f"; not the same: {', '.join(compared.differing)}" if compared.differing else ""
            parts = [f"{_size(copies[0])} on {', '.join(copy.host for copy in copies)}" for copies in groups.values()]
            hosts = tuple(copy.host for copies in groups.values() for copy in copies)
            yield Seen(hosts=hosts, evidence="; ".join(parts) + files, words={"what": compared.what})


def _size(copy: CopyOnHost) -> str:
    files = "1 file" if copy.num_files == 1 else f"{copy.num_files} files"
    return f"{files}, {format_bytes(copy.num_bytes)}, {(copy.tree or '')[:8]}"


RULES = (
    Rule(
        id="E-DATA-01",
        severity="info",
        title="the {what} is not on all hosts",
        meaning="the start takes longer: it is brought there first",
        fix="nothing: gangline train brings it",
        look=_absent,
    ),
    Rule(
        id="E-DATA-02",
        severity="fail",
        title="the {what} is not the same on all hosts",
        meaning="ranks would train different models, or on different samples, and nothing would say so",
        fix="decide which is right, and delete the others: gangline train brings it",
        look=_different,
    ),
    Rule(
        id="E-DATA-03",
        severity="fail",
        title="the {what} is on no host",
        meaning="nothing can be trained",
        fix="correct its path in the job, or bring it to the head",
        look=_nowhere,
    ),
    Rule(
        id="E-DATA-03",
        severity="fail",
        title="the {what} cannot be read",
        meaning="a rank there would end, or train on something else",
        fix="correct its rights there, or copy it anew",
        look=_unreadable,
    ),
)
