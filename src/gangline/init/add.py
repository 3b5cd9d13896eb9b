"""`gangline init --add HOST...`: hosts put into a cluster file that is there; nothing else in it changes."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.config.document import insert_hosts
from gangline.config.load import named_hosts, read_cluster_text, read_text
from gangline.errors import GanglineError, UsageError
from gangline.init import dependencies, describe
from gangline.init.dependencies import REAL, InitConsole, InitDependencies, Scan
from gangline.init.describe import HostAddress, HostsFound, SharedNetwork
from gangline.inventory.facts import HostFacts
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_atomic
from gangline.units import listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What `--add` found and wrote."""

    hosts: tuple[Host, ...]
    """The new ones."""
    scans: tuple[Scan, ...]
    failed: dict[str, str]
    """Host -> why it is not in the file."""
    text: str
    """The file as it would be, or is now."""
    path: Path | None
    """None: nothing was written."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "file": None if self.path is None else str(self.path),
            "added": [host.name for host in self.hosts],
            "keys": [scan.to_json() for scan in self.scans],
            "failed": self.failed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AddQuestion:
    """What the user typed."""

    path: Path
    home: Path
    names: tuple[str, ...]
    yes: bool = False
    """Trust new keys without a question."""
    force: bool = False
    """Do without hosts that failed."""
    dry_run: bool = False


def add(asked: AddQuestion, *, console: InitConsole, deps: InitDependencies = REAL) -> Added:
    """Look at the new hosts and put them behind those of the file.

    Raises SpecError for mistakes of the file, UsageError for names that it has already and for keys that the user does
    not trust, HostUnreachable where no new host answers, or where some do not and the user does not want to go on.
    """
    text = read_text(asked.path, kind="cluster")
    before = read_cluster_text(text, asked.path, home=asked.home)
    named = named_hosts(asked.names, home=asked.home)
    refuse_known([each.host.name for each in named], before, asked.path)
    scans = describe.scan_keys(named, console=console, deps=deps)
    dependencies.trust(scans, yes=asked.yes, console=console)
    failed = {scan.host.name: scan.problem for scan in scans if scan.problem}
    pinned = describe.with_keys([each.host for each in named if each.host.name not in failed], scans)
    describe.require_some(pinned, failed)
    new = Cluster(name=before.name, hosts=pinned)
    found = describe.look(new, describe.addresses_of(scans, deps), console=console, deps=deps)
    failed |= {failure.host: failure.why for failure in found.inventory.failures}
    describe.require_some(found.inventory.hosts, failed)
    found = beside(before, found)
    describe.show_hosts(found, failed, console)
    describe.settle_failed(failed, force=asked.force, console=console)
    settled, notes = describe.settled(named, pinned, found.inventory, found.network)
    rows = [describe.host_rows(host, notes.get(host.name, describe.Notes())) for host in settled.hosts]
    fresh = insert_hosts(text, str(asked.path), rows)
    require_same_others(before, settled, read_cluster_text(fresh, asked.path, home=asked.home))
    path = None if asked.dry_run else asked.path
    if path is not None:
        real = path.resolve()  # a link stays one
        write_atomic(real, fresh.encode(), mode=real.stat().st_mode & 0o777)
        console.report(f"wrote {path}: added {listed([host.name for host in settled.hosts])}")
    return Added(hosts=settled.hosts, scans=tuple(scans), failed=failed, text=fresh, path=path)


def refuse_known(names: Sequence[str], cluster: Cluster, path: Path) -> None:
    """Raise UsageError for hosts that the file has."""
    known = {host.name for host in cluster.hosts}
    if again := [name for name in names if name in known]:
        raise UsageError(
            f"{path} has {listed(again)} already",
            seen=f"its hosts: {listed([host.name for host in cluster.hosts])}",
            fix=f"leave the name away; another key of a host: gangline init --pin {path}",
        )


def beside(before: Cluster, found: HostsFound) -> HostsFound:
    """The same with the addresses of the new hosts in the network in which the file's hosts have theirs."""
    places: dict[str, HostAddress] = {}
    for facts in found.inventory.hosts:
        place = _place_beside(before, facts)
        if place is None:
            why = f"{facts.host} has no address in the network of the file's hosts; gangline check tries the one below"
            return dataclasses.replace(found, why=why, is_warning=True)
        places[facts.host] = place
    return dataclasses.replace(found, network=SharedNetwork(name="", places=places), why="", is_warning=False)


def _place_beside(before: Cluster, facts: HostFacts) -> HostAddress | None:
    for name, place in describe.places_of(facts).items():
        network = ipaddress.ip_network(name, strict=False)
        if any(_is_in(host.address, network) for host in before.hosts):
            return place
    return None


def _is_in(address: str, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    try:
        return ipaddress.ip_address(address) in network
    except ValueError:  # a name
        return False


def require_same_others(before: Cluster, new: Cluster, read: Cluster) -> None:
    """Raise GanglineError unless the new file says of its hosts what was there and what was found."""
    if read.hosts != (*before.hosts, *new.hosts):
        raise GanglineError(
            "this is a bug in gangline: the cluster file that it would write says something else than what it found",
            seen=f"expected {(*before.hosts, *new.hosts)}, saw {read.hosts}",
            fix="report it; nothing was written",
        )
