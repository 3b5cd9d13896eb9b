"""`gangline init --pin CLUSTER`: the keys of a cluster file read again, shown beside the old ones, and put in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.config.document import pin_keys
from gangline.config.load import read_cluster_text, read_text
from gangline.errors import HostUnreachable, UsageError
from gangline.init import describe
from gangline.init.dependencies import LOOK, REAL, InitConsole, InitDependencies, Scan, confirm, scan_all
from gangline.runs.files import write_atomic
from gangline.runs.registry import renew_keys
from gangline.transport.hostkeys import fingerprint
from gangline.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """What `--pin` found and changed."""

    scans: tuple[Scan, ...]
    text: str
    """The file as it would be, or is now."""
    changed: tuple[str, ...]
    """Hosts whose key is another than the file had."""
    path: Path | None
    """None: nothing was written."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        keys = [{**scan.to_json(), "pinned_before": pinned_fingerprint(scan) or None} for scan in self.scans]
        return {"file": str(self.path) if self.path else None, "keys": keys, "changed": list(self.changed)}


def pin(
    path: Path, *, home: Path, yes: bool, dry_run: bool, console: InitConsole, deps: InitDependencies = REAL
) -> Pinned:
    """Read the keys of a cluster file's hosts again and put those in that the user trusts; nothing else changes, but
    for runs that still have the old key of a host.

    Raises SpecError for the file's mistakes, UsageError where the user says no or is not there, HostUnreachable where
    no host answers.
    """
    text = read_text(path, kind="cluster")
    hosts = [host for host in read_cluster_text(text, path, home=home).reached if host.transport == "ssh"]
    if not hosts:
        raise UsageError(f"{path} has no hosts over SSH", seen="nothing to pin", fix="gangline init HOST... finds some")
    console.progress(f"asking {counted(len(hosts), 'host')} for the host key")
    scans = scan_all(hosts, deps.scan)
    show(scans, console)
    require_answers(scans, console)
    changed = [scan for scan in scans if scan.key and scan.key != scan.host.host_key]
    if not changed:
        console.report("every key that was shown is the pinned one")
        return Pinned(scans=tuple(scans), text=text, changed=(), path=None)
    if yes:
        console.report(f"trusted without a question (--yes): {', '.join(scan.host.name for scan in changed)}")
    else:
        confirm(changed, f"trust {counted(len(changed), 'changed key')}?", console=console)
    pinned = pin_keys(text, str(path), {scan.host.name: scan.key for scan in changed})
    if not dry_run:
        real = path.resolve()  # a link stays one
        write_atomic(real, pinned.encode(), mode=real.stat().st_mode & 0o777)
        console.report(f"wrote {path}: {counted(len(changed), 'key')}")
        runs = renew_keys(home, {scan.host.host_key: scan.key for scan in changed if scan.host.host_key})
        if runs:
            console.report(f"and in the records of {counted(len(runs), 'run')}: {', '.join(runs)}")
    names = tuple(scan.host.name for scan in changed)
    return Pinned(scans=tuple(scans), text=pinned, changed=names, path=None if dry_run else path)


def show(scans: Sequence[Scan], console: InitConsole) -> None:
    """Old and new fingerprints."""
    rows = [(scan.host.name, scan.where, pinned_fingerprint(scan) or "-", _now(scan)) for scan in scans]
    console.table(("host", "where", "pinned", "now"), rows)
    if any(scan.key and scan.host.host_key not in {None, scan.key} for scan in scans):
        console.report(f"another key: the host was reinstalled, or somebody is in between; on its own console: {LOOK}")


def pinned_fingerprint(scan: Scan) -> str:
    """Of the key that the file has; empty where it has none."""
    return fingerprint(scan.host.host_key) if scan.host.host_key else ""


def require_answers(scans: Sequence[Scan], console: InitConsole) -> None:
    """Tell which hosts showed no key; raises HostUnreachable where none did."""
    failed = [scan for scan in scans if not scan.key]
    for scan in failed:
        console.report(f"left as it is: {describe.failure(scan.host.name, scan.problem)}")
    if len(failed) == len(scans):
        raise HostUnreachable(
            "no host answers, nothing was written",
            seen="; ".join(describe.failure(scan.host.name, scan.problem) for scan in failed),
            fix=f"log in to one by hand: ssh {failed[0].host.ssh or failed[0].host.name}",
        )


def _now(scan: Scan) -> str:
    if not scan.key:
        return "no answer"
    if scan.key == scan.host.host_key:
        return "the same"
    return f"{scan.fingerprint}{' (known to your ssh)' if scan.is_known else ''}"
