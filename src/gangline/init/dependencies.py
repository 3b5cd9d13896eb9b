"""What `init` needs of the world, and what tests put in its place."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gangline.config.document import is_destination
from gangline.config.load import NamedHost, hostfile_hosts, listed_hosts, named_hosts
from gangline.config.mistakes import listed
from gangline.discovery.search import HEADER, Discovery, discover, remarks, row, spoken
from gangline.discovery.sources import NOT_FOR_TRAINING, config_hosts
from gangline.errors import GanglineError, HostKeyRefused, UsageError
from gangline.inventory.facts import Inventory
from gangline.inventory.gather import gather
from gangline.inventory.probe import probe_pairs
from gangline.provision.console import Console
from gangline.runs.cluster import Cluster, Host
from gangline.transport.connect import connect_all
from gangline.transport.hostkeys import known_fingerprints, resolve, scan_key
from gangline.transport.transport import Transport
from gangline.units import counted

# What `init` says to the user, and asks.


class InitConsole(Console, Protocol):
    """The user's terminal."""

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows in columns."""
        ...

    def ask(self, question: str) -> str | None:
        """What the user answers; None where nobody is there to answer."""
        ...


def says_yes(answer: str) -> bool:
    """Whether an answer is a clear yes."""
    return answer.strip().lower() in {"y", "yes"}


# Who answers? The host keys that were shown, and the user's word that they are the right ones.


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


def show(scans: Sequence[Scan], console: InitConsole) -> None:
    """The table of keys that a careful person compares."""
    rows = [
        (scan.host.name, scan.where, scan.key.partition(" ")[0], scan.fingerprint, _standing(scan)) for scan in scans
    ]
    console.table(("host", "where", "key", "fingerprint", ""), [row for row in rows if row[2]])


def _standing(scan: Scan) -> str:
    if scan.is_known:
        return "known to your ssh"
    return f"NOT the known {scan.known_key}" if scan.known_key else "new"


def trust(scans: Sequence[Scan], *, yes: bool, console: InitConsole) -> None:
    """Return if all keys are trusted; raises UsageError if not, HostKeyRefused for one that ssh knows otherwise."""
    strange = [scan for scan in scans if scan.key and scan.known_key and not scan.is_known]
    if strange:
        raise _refused(strange[0])
    new = [scan for scan in scans if scan.key and not scan.is_known]
    if new and yes:
        console.report(f"trusted without a question (--yes): {', '.join(scan.host.name for scan in new)}")
    elif new:
        confirm(new, f"trust {counted(len(new), 'new key')}?", console=console)


def confirm(scans: Sequence[Scan], question: str, *, console: InitConsole) -> None:
    """Return if the user says yes; raises UsageError with the fingerprints if not, or if nobody is there to ask."""
    answer = console.ask(f"{question} [y/N]")
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


# Which hosts? Named on the command line or in a hostfile, or asked for.


HERE = {"localhost", "127.0.0.1"}


def collect(
    names: Sequence[str], hostfile: Path | None, *, home: Path, ask: Callable[[], Sequence[str]], listed_as: str = ""
) -> list[NamedHost]:
    """The hosts that the user names; `ask` is for when there are none yet. Raises SpecError with all mistakes.

    listed_as: the hostfile in the words of cluster.yaml, where it is another tool's list.
    """
    if names and hostfile is not None:
        raise UsageError(
            "hosts are named twice",
            seen=f"{listed(list(names))} and the hostfile {hostfile}",
            fix="give names, or a hostfile",
        )
    if hostfile and listed_as:
        found = listed_hosts(listed_as, str(hostfile), home=home)
    else:
        found = hostfile_hosts(hostfile, home=home) if hostfile else named_hosts(names or ask(), home=home)
    return [_with_own_name(named, {other.host.name for other in found}) for named in found]


def ask_for_names(path: Path, *, user_of: Callable[[str], str], console: InitConsole) -> list[str]:
    """Offer what the user's ssh_config names; raises UsageError where nobody answers."""
    path = path.expanduser()
    offered = [name for name in config_hosts(path) if user_of(name) not in NOT_FOR_TRAINING]
    if offered:
        console.report(f"hosts in {path}: {listed(offered, limit=50)}")
    enter = f" [{' '.join(offered[:3])}{' ...' if len(offered) > 3 else ''}]" if offered else ""
    answer = console.ask(f"which hosts (names or user@address with blanks between, localhost is this computer)?{enter}")
    named = (answer or "").replace(",", " ").split() or (offered if answer is not None else [])
    if not named:
        raise UsageError(
            "no hosts are named",
            seen=f"your ssh_config has {listed(offered)}" if offered else "your ssh_config names none either",
            fix="gangline init pc1 alice@192.168.1.11, or gangline init --hostfile FILE; gangline discover finds hosts",
        )
    return named


def ask_for_found(search: Callable[..., Discovery], *, console: InitConsole) -> list[str]:
    """Offer the hosts of this computer's networks, which are scanned only after a yes.

    Raises UsageError where none is named.
    """
    found = search(scan=False, cluster=None, console=console)
    if found.unscanned:
        answer = console.ask(f"try port 22 of every address of {spoken(found.unscanned)}, too? [y/N]")
        if answer is not None and says_yes(answer):
            found = search(scan=True, cluster=None, console=console)
    offered = found.offered
    if offered:
        console.table(HEADER[:-1], [row(host)[:-1] for host in offered])
    for line in remarks(found):
        console.report(line)
    if not offered:
        raise UsageError(
            "no host with sshd was found on this computer's networks",
            seen=f"looked at {listed([str(each.network) for each in found.networks])}",
            fix="is sshd installed there (sudo apt install openssh-server)? Or name them: "
            "gangline init alice@192.168.1.11",
        )
    answer = console.ask("which of them (names or user@address with blanks between, or all)?")
    words = (answer or "").replace(",", " ").split()
    if words == ["all"]:
        return [host.destination for host in offered]
    if not words:
        raise UsageError(
            "no hosts are named",
            seen=f"found {listed([host.name for host in offered])}",
            fix=f"gangline init {' '.join(host.destination for host in offered)}",
        )
    named = {word: host.destination for host in offered for word in (host.name, *host.names, host.address)}
    return [named.get(word, word) for word in words]


def user_of(name: str) -> str:
    """The user whom `ssh` would log in as; "" where it does not say."""
    try:
        return resolve(name).user
    except GanglineError:
        return ""


def _with_own_name(named: NamedHost, taken: set[str]) -> NamedHost:
    """`localhost` has a name that tells it from others."""
    host, own = named.host, socket.gethostname().partition(".")[0]
    if host.transport != "local" or host.name not in HERE or own in taken or not is_destination(own):
        return named
    workdir = str(Path(host.workdir).with_name(own))
    return dataclasses.replace(named, host=dataclasses.replace(host, name=own, workdir=workdir))


Transports = Mapping[str, Transport]


def address_of(name: str) -> str | None:
    """The first address of a name, IPv4 before IPv6, as this computer sees it; None where it has none to offer."""
    try:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    found = [str(row[4][0]).partition("%")[0] for row in sorted(rows, key=lambda row: row[0] != socket.AF_INET)]
    return next((address for address in found if not address.startswith("127.") and address != "::1"), None)


def all_reach_each_other(cluster: Cluster, inventory: Inventory, transports: Transports) -> bool:
    """Whether every host reaches every other at its address, on some port."""
    pairs = probe_pairs(cluster, inventory, transports).pairs
    num_hosts = len(cluster.hosts)
    return len(pairs) == num_hosts * (num_hosts - 1) and not any(pair.is_closed for pair in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitDependencies:
    """What touches the world."""

    user_of: Callable[[str], str] = user_of
    scan: Callable[[Host], Scan] = scan
    connect: Callable[[Cluster], dict[str, Transport]] = connect_all
    gather: Callable[[Cluster, Transports], Inventory] = gather
    reaches: Callable[[Cluster, Inventory, Transports], bool] = all_reach_each_other
    address_of: Callable[[str], str | None] = address_of
    ssh_config: Path = Path("~/.ssh/config")
    discover: Callable[..., Discovery] = discover


REAL = InitDependencies()
"""Real hosts, and the user's own ssh_config."""
