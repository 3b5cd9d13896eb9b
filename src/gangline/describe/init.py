"""The path of `gangline init`, as a column of named steps.

collect   names, a hostfile, questions   -> hosts
scan      every host                     -> the key that it shows
trust     the user                       -> the keys to pin; a no ends it
look      every host, keys pinned        -> facts, and the network between them
settle    facts                          -> the cluster, without the hosts that failed
write     the cluster                    -> cluster.yaml, whole or not at all
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.describe import keys, tables
from gangline.describe.cluster_file import cluster_text
from gangline.describe.keys import Scan, scan_all
from gangline.describe.names import ask_for_names, collect
from gangline.describe.probe import Found, look
from gangline.describe.seams import REAL, Seams
from gangline.describe.settle import refuse_twins, settled
from gangline.describe.talk import Talk, counted, says_yes
from gangline.errors import GanglineError, HostUnreachable, UsageError
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_atomic
from gangline.spec.load import read_cluster_text, require_name
from gangline.spec.named import NamedHost


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user typed."""

    home: Path
    """The controller's own folder."""
    output: Path
    names: tuple[str, ...] = ()
    hostfile: Path | None = None
    name: str | None = None
    """Of the cluster; None: that of the file."""
    yes: bool = False
    """Trust new keys without a question."""
    force: bool = False
    """Replace a file, and do without hosts that failed."""
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What `init` found and wrote."""

    cluster: Cluster
    scans: tuple[Scan, ...]
    found: Found
    failed: dict[str, str]
    """Host -> why it is not in the file."""
    text: str
    path: Path | None
    """None: nothing was written."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "file": None if self.path is None else str(self.path),
            "cluster": self.cluster.to_json(),
            "keys": [scan.to_json() for scan in self.scans],
            "network": {"name": self.found.network.name or None, "why": self.found.why},
            "inventory": self.found.inventory.to_json(),
            "failed": self.failed,
        }


def init(asked: Asked, *, talk: Talk, seams: Seams = REAL) -> Described:
    """Describe a cluster and write it down.

    Raises UsageError for bad names, for keys that the user does not trust, and for a file that is there already;
    HostUnreachable where no host answers, or where some do not and the user does not want to go on without them.
    """
    require_room(asked)
    require_name(asked.name)
    named = collect(
        asked.names,
        asked.hostfile,
        home=asked.home,
        ask=lambda: ask_for_names(seams.ssh_config, user_of=seams.user_of, talk=talk),
    )
    scans = scan_keys(named, talk=talk, seams=seams)
    keys.trust(scans, yes=asked.yes, talk=talk)
    failed = {scan.host.name: scan.problem for scan in scans if scan.problem}
    pinned = with_keys([each.host for each in named if each.host.name not in failed], scans)
    require_some(pinned, failed)
    used = addresses_of(scans, seams)
    found = look(Cluster(name="cluster", hosts=pinned), used, talk=talk, seams=seams)
    failed |= {failure.host: failure.why for failure in found.inventory.failures}
    require_some(found.inventory.hosts, failed)
    refuse_twins(found.inventory)
    show_hosts(found, failed, talk)
    settle_failed(failed, force=asked.force, talk=talk)
    cluster, notes = settled(named, pinned, found.inventory, found.network)
    text = cluster_text(cluster, notes, name=asked.name, network=found.said)
    cluster = verified(text, cluster, asked)
    path = None if asked.dry_run else write(asked, text, talk=talk)
    return Described(cluster=cluster, scans=tuple(scans), found=found, failed=failed, text=text, path=path)


def require_room(asked: Asked) -> None:
    """Refuse to replace a file that somebody wrote; raises UsageError."""
    path = asked.output
    if asked.dry_run or asked.force or not os.path.lexists(path):
        if not asked.dry_run and not path.absolute().parent.is_dir():
            raise UsageError(f"{path} cannot be written", seen=f"no folder {path.absolute().parent}", fix="make it")
        return
    raise UsageError(
        f"{path} is there already",
        seen="expected a name that is free: the file may have been changed by hand",
        fix=f"see what would change: gangline init ... --dry-run | diff {path} -; then --force replaces it, --output "
        f"writes another; new host keys only: gangline init --pin {path}",
    )


def scan_keys(named: Sequence[NamedHost], *, talk: Talk, seams: Seams) -> list[Scan]:
    """Ask every host over SSH for its key, and show what they say."""
    hosts = [each.host for each in named if each.host.transport == "ssh"]
    talk.tick(f"asking {counted(len(hosts), 'host')} for the host key")
    scans = scan_all(hosts, seams.scan)
    if any(scan.key for scan in scans):
        keys.show(scans, talk)
    return scans


def with_keys(hosts: Sequence[Host], scans: Sequence[Scan]) -> tuple[Host, ...]:
    """The hosts with the keys that they showed."""
    shown = {scan.host.name: scan.key for scan in scans}
    return tuple(dataclasses.replace(host, host_key=shown.get(host.name)) for host in hosts)


def addresses_of(scans: Sequence[Scan], seams: Seams) -> dict[str, str]:
    """Host -> the address by which ssh reaches it, as far as this computer can tell."""
    found = {scan.host.name: seams.address_of(scan.address) for scan in scans if scan.key}
    return {name: address for name, address in found.items() if address is not None}


def require_some(hosts: Sequence[object], failed: dict[str, str]) -> None:
    """Raise HostUnreachable where no host is left."""
    if not hosts:
        raise HostUnreachable(
            "no host answers, nothing was written" if len(failed) > 1 else "the host does not answer",
            seen="; ".join(tables.failure(name, why) for name, why in failed.items()),
            fix="log in to one by hand: ssh " + next(iter(failed)),
        )


def show_hosts(found: Found, failed: dict[str, str], talk: Talk) -> None:
    """The table of what is there, and what is not."""
    talk.table(tables.HEADER, [tables.row(facts, found.network) for facts in found.inventory.hosts])
    for name, why in failed.items():
        talk.say(f"failed: {tables.failure(name, why)}")
    if found.why:
        talk.say(f"{'warning' if found.is_warning else 'network'}: {found.said}")


def settle_failed(failed: dict[str, str], *, force: bool, talk: Talk) -> None:
    """Go on without hosts that failed, if the user wants to; raises HostUnreachable."""
    if not failed or force:
        return
    names = ", ".join(failed)
    answer = talk.ask(f"write the file without {names}? [y/N]")
    if answer is None or not says_yes(answer):
        raise HostUnreachable(
            f"nothing was written: {counted(len(failed), 'host')} failed",
            seen="; ".join(tables.failure(name, why) for name, why in failed.items()),
            fix=f"repair what is said, or go on without {names}: --force",
        )


def verified(text: str, cluster: Cluster, asked: Asked) -> Cluster:
    """Read the text as the next command will; what it says has to be what was found."""
    read = read_cluster_text(text, asked.output, home=asked.home)
    if read.hosts != cluster.hosts:
        raise GanglineError(
            "this is a bug in gangline: the cluster file that it would write says something else than what it found",
            seen=f"expected {cluster.hosts}, saw {read.hosts}",
            fix="report it; nothing was written",
        )
    return read


def write(asked: Asked, text: str, *, talk: Talk) -> Path:
    """Write the file, whole or not at all."""
    require_room(asked)
    write_atomic(asked.output, text.encode(), mode=0o644)
    talk.say(f"wrote {asked.output}")
    return asked.output
