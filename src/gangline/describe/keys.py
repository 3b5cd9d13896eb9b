"""Who answers? The host keys that were shown, and the user's word that they are the right ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gangline.describe.talk import Talk, counted, says_yes
from gangline.errors import GanglineError, HostKeyRefused, UsageError
from gangline.remote.hostkeys import known_fingerprints, resolve, scan_key
from gangline.runs.cluster import Host

THREADS = 32
LOOK = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a host showed when it was asked who it is."""

    host: Host
    where: str
    """What ssh makes of its destination: alice@192.168.1.10."""
    address: str
    """The part of `where` that the others may reach it by."""
    key: str = ""
    """Empty where it showed none."""
    fingerprint: str = ""
    known_key: str = ""
    """The fingerprint that the user's own known_hosts has for it; empty where it has none."""
    problem: str = ""
    """Why it showed none."""

    @property
    def is_known(self) -> bool:
        """Whether the user's ssh trusts this very key already."""
        return bool(self.key) and self.known_key == self.fingerprint

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "host": self.host.name,
            "where": self.where,
            "host_key": self.key or None,
            "fingerprint": self.fingerprint or None,
            "known": self.is_known,
            "problem": self.problem or None,
        }


def scan(host: Host) -> Scan:
    """Ask a host for its key, as the user's ssh would go there; raises HostUnreachable, or UsageError."""
    destination = host.ssh or host.name
    way = resolve(destination, host.ssh_port)
    key = scan_key(destination, host.ssh_port)
    known = known_fingerprints(destination, key.line, host.ssh_port)
    port = f":{way.port}" if way.port != 22 else ""
    return Scan(
        host=host,
        where=f"{way.user}@{way.hostname}{port}" if way.user else f"{way.hostname}{port}",
        address=way.hostname,
        key=key.line,
        fingerprint=key.fingerprint,
        known_key=key.fingerprint if key.fingerprint in known else ", ".join(known),
    )


def scan_all(hosts: Sequence[Host], scan: Callable[[Host], Scan]) -> list[Scan]:
    """The keys of all hosts, asked at the same time."""
    with ThreadPoolExecutor(max_workers=max(1, min(THREADS, len(hosts)))) as pool:
        return list(pool.map(lambda host: _scanned(host, scan), hosts))


def _scanned(host: Host, scan: Callable[[Host], Scan]) -> Scan:
    try:
        return scan(host)
    except GanglineError as error:
        where = host.ssh or host.name
        problem = "; ".join(part for part in (error.what, error.seen) if part)
        return Scan(host=host, where=where, address=where.rpartition("@")[2], problem=problem)


def show(scans: Sequence[Scan], talk: Talk) -> None:
    """The table of keys that a careful person compares."""
    rows = [
        (scan.host.name, scan.where, scan.key.partition(" ")[0], scan.fingerprint, _standing(scan)) for scan in scans
    ]
    talk.table(("host", "where", "key", "fingerprint", ""), [row for row in rows if row[2]])


def _standing(scan: Scan) -> str:
    if scan.is_known:
        return "known to your ssh"
    return f"NOT the known {scan.known_key}" if scan.known_key else "new"


def trust(scans: Sequence[Scan], *, yes: bool, talk: Talk) -> None:
    """Return if all keys are trusted; raises UsageError if not, HostKeyRefused for one that ssh knows otherwise."""
    strange = [scan for scan in scans if scan.key and scan.known_key and not scan.is_known]
    if strange:
        raise _refused(strange[0])
    new = [scan for scan in scans if scan.key and not scan.is_known]
    if new and yes:
        talk.say(f"trusted without a question (--yes): {', '.join(scan.host.name for scan in new)}")
    elif new:
        confirm(new, f"trust {counted(len(new), 'new key')}?", talk=talk)


def confirm(scans: Sequence[Scan], question: str, *, talk: Talk) -> None:
    """Return if the user says yes; raises UsageError with the fingerprints if not, or if nobody is there to ask."""
    answer = talk.ask(f"{question} [y/N]")
    if answer is not None and says_yes(answer):
        return
    shown = "; ".join(f"{scan.host.name} ({scan.where}) {scan.fingerprint}" for scan in scans)
    if answer is None:
        raise UsageError(
            f"nobody is here to say whether {counted(len(scans), 'host key')} can be trusted",
            seen=shown,
            fix=f"compare on each host: {LOOK}; then again with --yes",
        )
    raise UsageError(
        "the keys are not trusted, nothing was written",
        seen=shown,
        fix=f"compare on each host: {LOOK}",
    )


def _refused(scan: Scan) -> HostKeyRefused:
    return HostKeyRefused(
        f"{scan.host.name} ({scan.where}) shows another key than your ssh knows: it was installed anew, or somebody is "
        "in between",
        seen=f"known_hosts has {scan.known_key}, it shows {scan.fingerprint}",
        fix=f"look on its own console: {LOOK}; only if that shows the new key: ssh-keygen -R {scan.address}",
        reason="key-changed",
    )
