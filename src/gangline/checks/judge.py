"""All checks, all findings, worst first; and what was not checked, with the reason."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gangline.checks import access, clocks, gpus, limits, links, names, network, nics, storage, variables, versions
from gangline.checks.rules import Finding, Rule, apply, fold
from gangline.errors import CheckFailed, HostUnreachable, PluginError, UsageError
from gangline.inventory.facts import Inventory
from gangline.inventory.pairs import Skipped
from gangline.plugins import Table, shown_type
from gangline.runs.cluster import Cluster

_MODULES = (access, names, clocks, versions, gpus, network, nics, links, storage, limits, variables)
_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "access": ("E-ACC-",),
    "names": ("E-NAME-",),
    "clocks": ("E-CLOCK-",),
    "versions": ("E-SW-",),
    "gpus": ("E-GPU-",),
    "topology": ("E-TOPO-",),
    "network": ("E-NET-", "E-PORT-"),
    "fabric": ("E-IB-",),
    "security": ("E-SEC-",),
    "storage": ("E-DISK-",),
    "memory": ("E-MEM-",),
    "limits": ("E-LIM-",),
    "variables": ("E-ENV-",),
    "data": ("E-DATA-",),
}
"""How the ids of a family's findings begin."""

Family = tuple[Rule, ...]
"""Rules that belong together."""
_TRAINER = (*versions.TRAINER, *gpus.TRAINER)
_RULES = tuple(rule for module in _MODULES for rule in module.RULES)
_ALL = (*versions.TRAINER, *versions.OWN_PROGRAM, *_RULES, *gpus.TRAINER)
_BUILT_IN: Mapping[str, Family] = {
    name: tuple(rule for rule in _ALL if rule.id.startswith(starts)) for name, starts in _PREFIXES.items()
}


def _read_family(_name: str, found: Any) -> Family:
    """The family of a plug-in, which is a sequence of rules."""
    rules = tuple(found)
    strange = [rule for rule in rules if not isinstance(rule, Rule)]
    if not rules or strange:
        raise TypeError(
            f"expected a sequence of gangline.checks.rules.Rule, found {shown_type((strange or [found])[0])}"
        )
    taken = (*itertools.chain(*_PREFIXES.values()), _BROKEN)
    for rule in rules:
        if not _ID.fullmatch(rule.id) or rule.id.startswith(taken):
            raise ValueError(f"the id {rule.id!r} is no id such as E-MINE-01 with letters of its own")
    return rules


def family_prefixes(family: Family) -> tuple[str, ...]:
    """How the ids of a family's findings begin."""
    return tuple(dict.fromkeys(rule.id.rpartition("-")[0] + "-" for rule in family))


def _broken(error: PluginError) -> Finding:
    return Finding(
        id=_BROKEN + "01",
        severity="warn",
        hosts=(),
        title=error.what,
        evidence=error.seen,
        meaning="nothing of it was checked; all other checks are as always",
        fix=error.fix,
    )


_ID = re.compile(r"E-[A-Z]+-[0-9]{2}")
_BROKEN = "E-PLUGIN-"

FAMILIES: Table[Family] = Table("gangline.checks", _BUILT_IN, read=_read_family)
"""Every family of checks; their names are what `--only` takes."""


def judge(
    inventory: Inventory, cluster: Cluster, *, only: Sequence[str] = (), own_worker: bool = True
) -> tuple[Finding, ...]:
    """Every finding of every check, worst first, equal ones of several hosts folded.

    only: names of families, or ids of findings and their beginnings (E-NET, E-NET-07); UsageError for others. A host
        that cannot be asked is told in any case.
    own_worker: whether gangline's trainer will run; the user's own command needs no package of ours, only
        torchrun.
    """
    wanted, left_out = prefixes(only), tuple(versions.OWN_PROGRAM) if own_worker else _TRAINER
    families, found = _families(only)
    for name, family in families.items():
        for rule in family:
            is_wanted = rule.id.startswith(wanted) or name == "access"
            if is_wanted and rule not in left_out:
                try:
                    with FAMILIES.guard(name):
                        found += apply((rule,), inventory, cluster)
                except PluginError as error:
                    found.append(_broken(error))
    return fold(found)


def _families(only: Sequence[str]) -> tuple[dict[str, Family], list[Finding]]:
    """The families that are asked for, and a finding for each plug-in that cannot be used.

    A plug-in is imported where its family is asked for by name, where everything is, or an id that is none of ours.
    """
    ours = tuple(itertools.chain(*_PREFIXES.values()))
    words = [word for word in only if not (word in _BUILT_IN or (word.startswith("E-") and _overlap([word], ours)))]
    families, broken = dict(_BUILT_IN), []
    for name, plugin in FAMILIES.plugins().items() if words or not only else ():
        if not only or name in words or any(word.startswith("E-") for word in words):
            try:
                families[name] = FAMILIES.load(plugin)
            except PluginError as error:
                broken.append(_broken(error))
    return families, broken


def prefixes(only: Sequence[str]) -> tuple[str, ...]:
    """How the ids begin that somebody wants to see; all without words. Raises UsageError for a word nobody knows."""
    found: list[str] = []
    for word in only:
        if word in FAMILIES:
            try:
                found += family_prefixes(FAMILIES[word])
            except PluginError:  # `judge` tells of it
                found.append(_BROKEN)
        elif word.startswith("E-"):
            found.append(word)
        else:
            near = difflib.get_close_matches(word, list(FAMILIES), n=1)
            raise UsageError(
                f"no family of checks is called {word!r}",
                seen=f"known: {', '.join(FAMILIES)}; or the id of a finding, such as E-NET-07",
                fix=f"did you mean {near[0]!r}?" if near else "choose one of these",
            )
    return tuple(found) or ("E-",)


def skipped(inventory: Inventory, cluster: Cluster, *, only: Sequence[str] = ()) -> tuple[Skipped, ...]:
    """What was not checked, and why."""
    wanted = prefixes(only)
    families = [name for name, starts in _PREFIXES.items() if _overlap(starts, wanted)]
    rows = [*_by_host(inventory, cluster), *_by_family(inventory, cluster, families)]
    lost = {failure.host for failure in inventory.failures}
    more = inventory.pairs.skipped if inventory.pairs and "network" in families else ()
    return tuple(dict.fromkeys((*rows, *(row for row in more if row.what not in lost))))


def require(findings: Sequence[Finding]) -> None:
    """Stop where a finding says so: HostUnreachable if a host does not answer, else CheckFailed."""
    failed = [finding for finding in findings if finding.severity == "fail"]
    if not failed:
        return
    kind = HostUnreachable if any(is_unreachable(finding.id) for finding in failed) else CheckFailed
    raise kind(
        f"{'a check stops' if len(failed) == 1 else f'{len(failed)} checks stop'} the start: "
        f"{', '.join(dict.fromkeys(finding.id for finding in failed))}",
        seen=f"{failed[0].title} ({failed[0].evidence})",
        fix=failed[0].fix,
    )


def is_unreachable(name: str) -> bool:
    """Whether a finding of that id is a host that does not answer; E-ACC-02 alone is one that does."""
    return name.startswith("E-ACC-") and name != "E-ACC-02"


def _overlap(some: Sequence[str], others: Sequence[str]) -> bool:
    return any(one.startswith(other) or other.startswith(one) for one in some for other in others)


def _by_host(inventory: Inventory, cluster: Cluster) -> Iterator[Skipped]:
    for failure in inventory.failures:
        yield Skipped(what=f"everything else about {failure.host}", why=failure.why.partition("\n")[0])
    for facts in inventory.hosts:
        for section in facts.unread:
            if section.section != "packages":  # which has a finding of its own
                yield Skipped(what=f"{section.section} of {facts.host}", why=section.why)
        if facts.building is not None and facts.building.error is not None:
            yield Skipped(what=f"what builds the environment of {facts.host}", why=facts.building.error)
    for host in cluster.hosts:
        facts_of = inventory.of(host.name)
        if facts_of is not None and facts_of.python_reason is not None and not host.python:
            yield Skipped(what=f"packages of {host.name}", why="its environment is made at the start")


def _by_family(inventory: Inventory, cluster: Cluster, families: Sequence[str]) -> Iterator[Skipped]:
    several = len(cluster.hosts) > 1 and not cluster.is_one_machine
    hosts = inventory.hosts
    reasons = {
        "gpus": None if any(facts.gpus for facts in hosts) else _no_gpus(inventory),
        "topology": None if any(facts.topology for facts in hosts) else "no host has nvidia-smi",
        "fabric": None if any(facts.rdma.ports for facts in hosts) else "no InfiniBand or RoCE adapter on any host",
        "network": _no_network(several, inventory),
        "clocks": None if several else "all ranks are on one machine",
        "security": None if several else "no port is open for other machines",
        "data": None if inventory.data else "nothing was compared: name a model or data set with --same",
    }
    for name, why in reasons.items():
        if why is not None and name in families:
            yield Skipped(what=name, why=why)
    if "storage" in families and not inventory.shared:
        why_not = "nothing was written there" if cluster.shared else "the cluster file names none"
        yield Skipped(what="shared folder", why=why_not)


def _no_gpus(inventory: Inventory) -> str:
    if any(facts.gpu_driver.trouble not in {None, "no-library"} for facts in inventory.hosts):
        return "no host has a GPU that works"
    return "no host has an NVIDIA driver"


def _no_network(several: bool, inventory: Inventory) -> str | None:
    if not several:
        return "all ranks are on one machine"
    return None if inventory.pairs else "nothing was sent between the hosts; only what they say of themselves is known"
