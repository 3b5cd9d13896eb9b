"""Look at the hosts of a cluster and say what is good and what is not. Changes nothing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangline.checks.judge import FAMILIES, family_prefixes, judge, prefixes, skipped
from gangline.checks.rules import Finding
from gangline.context import Context, Transports
from gangline.decide.told_before import start_lines
from gangline.errors import GanglineError
from gangline.inventory.facts import BuildFacts, Inventory
from gangline.inventory.folders import Compared, CopyOnHost, plain, probe_disks, probe_shared
from gangline.inventory.gather import gather, probe_building
from gangline.inventory.measured import age_s, forget_pairs, keep_pairs, recent_pairs
from gangline.inventory.pairs import Skipped, Tier
from gangline.inventory.probe import probe_pairs
from gangline.inventory.rank_interface import NetworkChoice, rank_network
from gangline.provision.console import Console
from gangline.provision.requirements import lock_of
from gangline.provision.trees import How, Mark, Spot, look, spot_on
from gangline.runs.cluster import Cluster, Host
from gangline.transport.fanout import in_parallel

# What the hosts have to build their environments with.


def with_building(cluster: Cluster, inventory: Inventory, transports: Transports) -> Inventory:
    """Ask the hosts whose environment gangline builds; raises UsageError for a lock that cannot be read."""
    wanted = {host.name: (host, _by_lock(host)) for host in cluster.hosts if host.environment.kind == "locked"}
    return probe_building(inventory, wanted, transports)


def _by_lock(host: Host) -> BuildFacts:
    lock = lock_of(host.environment)
    return BuildFacts(lock=lock.hash, torch=next((pin.version for pin in lock.pins if pin.name == "torch"), None))


WITHIN_AN_HOUR = How(timeout_s=3600.0)
"""A disk reads 300 GB in that time."""
NUM_NAMES = 10
"""Of files that differ between hosts."""
TRAFFIC = ("network", "clocks", "security")
"""Families that need traffic between the hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """How closely to look."""

    tier: Tier = "quick"
    only: tuple[str, ...] = ()
    """Names of families, or beginnings of ids; empty: everything."""
    own_worker: bool = True
    """Whether gangline's trainer will run, which needs packages."""
    paths: tuple[str, ...] = ()
    """Models or data that should be the same on every host."""
    anew: bool = True
    """Whether the network has to be tried now; False: what was found to be good minutes ago is good enough."""

    def wants(self, *families: str) -> bool:
        """Whether anything of these families is asked for."""
        wanted = prefixes(self.only)
        ours = [prefix for family in families for prefix in family_prefixes(FAMILIES[family])]
        return any(one.startswith(other) or other.startswith(one) for one in ours for other in wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectResult:
    """What was seen of a cluster, and what it means."""

    cluster: Cluster
    inventory: Inventory
    findings: tuple[Finding, ...]
    skipped: tuple[Skipped, ...]
    """What was not checked, and why."""
    networks: Mapping[str, NetworkChoice]
    """Which interface each host's ranks use, and the variables that say so."""
    seconds: float
    """How long it took to look."""

    @property
    def rank_variables(self) -> dict[str, dict[str, str]]:
        """The variables alone, by host."""
        return {host: dict(choice.env) for host, choice in self.networks.items()}

    def documents(self) -> dict[str, Any]:
        """The files of the run directory that say so."""
        return {
            "inventory": self.inventory.to_json(),
            "findings": {"findings": [finding.to_json() for finding in self.findings]},
            "networks": {host: dataclasses.asdict(choice) for host, choice in self.networks.items()},
        }


START = InspectOptions(anew=False)
"""For a start of our trainer."""
OWN_PROGRAM = InspectOptions(own_worker=False, anew=False)
"""For a start of the user's own command."""


def inspect(cluster: Cluster, options: InspectOptions, context: Context, *, silent: bool = False) -> InspectResult:
    """Read every host, try what lies between them, judge, and tell what is not as it should be; `silent`: do not."""
    begun, transports, console = time.monotonic(), context.transports, context.console
    console.progress(f"looking at {len(cluster.hosts)} {'host' if len(cluster.hosts) == 1 else 'hosts'}")
    inventory = gather(cluster, transports)
    if options.wants("versions", "storage"):
        inventory = with_building(cluster, inventory, transports)
    recent = None
    if options.wants(*TRAFFIC) and not cluster.is_one_machine:
        recent = None if options.anew else recent_pairs(context.home, cluster, inventory)
        if (pairs := recent) is None:
            console.progress(f"trying the network between {len(cluster.hosts)} hosts")
            pairs = probe_pairs(cluster, inventory, transports, tier=options.tier)
        inventory = dataclasses.replace(inventory, pairs=pairs)
    inventory = _with_disks(cluster, inventory, transports, options, console=console)
    inspection = InspectResult(
        cluster=cluster,
        inventory=inventory,
        findings=judge(inventory, cluster, only=options.only, own_worker=options.own_worker),
        skipped=skipped(inventory, cluster, only=options.only),
        networks=rank_network(cluster, inventory),
        seconds=time.monotonic() - begun,
    )
    if recent is not None:
        console.report(
            f"network    as measured {max(1, round(age_s(recent) / 60))} min ago; gangline check measures it again"
        )
    elif not options.only:
        _keep(inspection, context)
    for line in () if silent else start_lines(inspection.findings, cluster, context.home):
        console.report(line)
    return inspection


def _keep(inspection: InspectResult, context: Context) -> None:
    """Keep what was tried, if all is well: a start in the next minutes need not try it."""
    if any(finding.severity == "fail" for finding in inspection.findings):
        forget_pairs(context.home, inspection.cluster)
    elif inspection.inventory.pairs is not None:
        keep_pairs(context.home, inspection.cluster, inspection.inventory)


def _with_disks(
    cluster: Cluster, inventory: Inventory, transports: Transports, options: InspectOptions, *, console: Console
) -> Inventory:
    """What is only known by writing and by reading everything."""
    known = {facts.host: transports[facts.host] for facts in inventory.hosts}
    if options.wants("storage"):
        if cluster.shared and known:
            probed = in_parallel(lambda folder: probe_shared(folder, known), cluster.shared, at_once=8)
            inventory = dataclasses.replace(inventory, shared=tuple(probed))
        if options.tier != "quick":
            inventory = dataclasses.replace(inventory, writes=probe_disks(cluster, transports))
    if options.paths and options.wants("data"):
        console.progress("comparing models and data")
        hosts = [host for host in cluster.hosts if host.name in known]
        compared = [compare(path, [spot_on(host, known, path) for host in hosts]) for path in options.paths]
        inventory = dataclasses.replace(inventory, data=tuple(compared))
    return inventory


def compare(what: str, spots: Sequence[Spot]) -> Compared:
    """Hash what lies at each spot, all at the same time, and name the files that are not everywhere the same."""
    looked = in_parallel(_copy_at, spots, at_once=64)
    marks = [files for copy, files in looked if copy.tree is not None]
    names = sorted({name for files in marks for name in files})
    unlike = [name for name in names if len({files.get(name) for files in marks}) > 1]
    return Compared(
        what=what,
        copies=tuple(copy for copy, _ in looked),
        differing=tuple(plain(name) or "." for name in unlike[:NUM_NAMES]),
    )


def _copy_at(spot: Spot) -> tuple[CopyOnHost, Mapping[str, Mark]]:
    """The copy of a host, and its files by name."""
    copy = CopyOnHost(host=spot.host.name, path=str(spot.path))
    try:
        tree = look(spot, WITHIN_AN_HOUR)
    except (GanglineError, OSError) as error:
        return dataclasses.replace(copy, error=plain(str(error).partition("\n")[0])), {}
    if tree.odd:
        name, why = next(iter(tree.odd.items()))
        return dataclasses.replace(copy, error=plain(f"{name}: {why}")), {}
    found = dataclasses.replace(copy, tree=tree.hash, num_files=len(tree.files), num_bytes=tree.num_bytes)
    return found, tree.files
