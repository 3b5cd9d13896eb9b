"""Step `names`: every host has a name of its own, and every host means the same by it."""

from __future__ import annotations

import re

from gangline.prepare.prepare_step import (
    Asks,
    Change,
    CommandChange,
    FileChange,
    PrepareStep,
    StepPlan,
    StepView,
    activated,
    with_block,
)
from gangline.runs.cluster import Host
from gangline.units import is_address

HOSTS, HOSTNAME = "/etc/hosts", "/etc/hostname"
LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
GENERIC = frozenset(
    {"localhost", "localhost.localdomain", "debian", "ubuntu", "fedora", "linux", "archlinux", "pop-os", "raspberrypi"}
)
"""Names that an installer gave, and that say nothing of the machine."""
LOOPBACK = re.compile(r"127\.|::1$")
KEPT = frozenset({"localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"})
MARK = "# gangline prepare names: "
MDNS = "avahi-daemon.service"
ASKS = Asks(
    files=(HOSTS, HOSTNAME),
    commands={"nodename": ("uname", "-n"), "mdns": ("systemctl", "is-active", MDNS)},
    programs=("hostname", "hostnamectl"),
)


def plan(view: StepView) -> StepPlan:
    """A hostname of its own, and the addresses of all hosts in /etc/hosts, without the trap of 127.0.1.1."""
    if len(view.cluster.hosts) < 2 or view.cluster.is_one_machine:
        return StepPlan(remains=("a cluster of one machine needs no names",))
    reading = view.reading
    old, new = reading.output("nodename"), _hostname(view)
    changes: list[Change] = []
    reasons: list[str] = []
    if new != old:
        renamed = tuple(_renamed(view, old, new))
        announces = len(renamed) > 1 and reading.output("mdns") == "active"
        changes += activated(renamed, ("systemctl", "restart", MDNS)) if announces else renamed
        announced = f"; by mDNS it becomes {new}.local" if announces else ""
        reasons.append(f"its hostname {old} is {_fault(view, old)}{announced}")
    before = reading.files[HOSTS]
    wanted = _hosts_text(view, new, old)
    if before.text != wanted:
        changes.append(FileChange(path=HOSTS, before=before.content, content=wanted.encode("utf-8", "surrogateescape")))
        reasons.append("each host has to mean the same by a name, and no host 127.x by its own")
    return StepPlan(
        changes=tuple(changes),
        reason="; ".join(reasons),
        risk="the addresses of cluster.yaml are written down: give each host a fixed one first (a lease of the "
        "router, or gangline prepare address)"
        if changes
        else "",
        remains=_not_named(view),
    )


def _fault(view: StepView, name: str) -> str:
    return "the name of other hosts, too" if _is_shared(view, name) else "what an installer chose"


def _hostname(view: StepView) -> str:
    """The hostname that it has to have: its own one, unless that is shared, or says nothing."""
    name = view.reading.output("nodename")
    bad = _is_shared(view, name) or name.lower() in GENERIC
    return view.host.name if bad and _is_name(view.host) else name


def _is_shared(view: StepView, name: str) -> bool:
    others = [each for host, each in view.readings.items() if host != view.host.name]
    return name in [each.output("nodename") for each in others]


def _is_name(host: Host) -> bool:
    return LABEL.fullmatch(host.name) is not None and not is_address(host.name)


def _renamed(view: StepView, old: str, new: str) -> list[Change]:
    before = view.reading.files[HOSTNAME]
    written = FileChange(path=HOSTNAME, before=before.content, content=f"{new}\n".encode())
    set_now = _set_name(view)
    if not set_now:
        return [written]
    return [
        written,
        CommandChange(argv=(*set_now, new), undo=(*set_now, old), probe=("uname", "-n"), before=old, after=new),
    ]


def _set_name(view: StepView) -> tuple[str, ...]:
    """The command that sets the name of the running system; () where there is none: it takes a reboot."""
    if view.reading.has("hostname"):
        return ("hostname",)
    return ("hostnamectl", "set-hostname", "--transient") if view.reading.has("hostnamectl") else ()


def _not_named(view: StepView) -> tuple[str, ...]:
    """Hosts that cannot stand in /etc/hosts."""
    rows = [f"{host.name} has no address in cluster.yaml: {host.address}" for host in view.cluster.hosts]
    return tuple(
        row for row, host in zip(rows, view.cluster.hosts, strict=True) if _is_name(host) and not _has_address(host)
    )


def _has_address(host: Host) -> bool:
    return is_address(host.address) and not LOOPBACK.match(host.address)


def _hosts_text(view: StepView, own: str, old: str) -> str:
    """/etc/hosts with a line for each host, and without lines that give one of their names another address."""
    rows: list[str] = []
    full: list[str] = []
    for line in view.reading.files[HOSTS].text.splitlines():
        gone = _gone(line, view, {own, old, view.host.name} - KEPT)
        rows += _left(line, gone)
        is_own = LOOPBACK.match(line.removeprefix(MARK)) is not None
        taken = line.removeprefix(MARK).split()[1:] if line.startswith(MARK) else gone
        full += [f"{own}.{name.partition('.')[2]}" for name in taken if is_own and "." in name and name not in KEPT]
    lines = []
    for host in view.cluster.hosts:
        names = _names_of(view, host, own, full)
        lines += [f"{host.address} {' '.join(names)}"] if names and _has_address(host) else []
    return with_block("".join(f"{row}\n" for row in rows), "names", lines)


def _gone(line: str, view: StepView, own_names: set[str]) -> list[str]:
    """Names that this line of /etc/hosts must not have: ours beside 127.x, a host's beside another address."""
    address, *names = line.partition("#")[0].split() or [""]
    if LOOPBACK.match(address):
        wrong = own_names | {host.name for host in view.cluster.hosts}
    elif "." in address:
        wrong = {host.name for host in view.cluster.hosts if _has_address(host) and host.address != address}
    else:
        return []
    return [name for name in names if name.partition(".")[0] in wrong and name not in KEPT]


def _left(line: str, gone: list[str]) -> list[str]:
    """What stays of a line; it stays whole as a comment."""
    if not gone:
        return [line]
    address, *names = line.partition("#")[0].split()
    left = [name for name in names if name not in gone]
    return [*([f"{address} {' '.join(left)}"] if left else []), MARK + line]


def _names_of(view: StepView, host: Host, own: str, full: list[str]) -> list[str]:
    """The names of a host, the full ones first."""
    names = [host.name] if _is_name(host) else []
    if host.name == view.host.name:
        names = [*full, own, *names]
    elif (reading := view.readings.get(host.name)) is not None:
        other = StepView(host=host, cluster=view.cluster, reading=reading, readings=view.readings)
        names = [_hostname(other), *names]
    return [name for name in dict.fromkeys(names) if name and name not in KEPT]


NAMES = PrepareStep(
    name="names", summary="a hostname of its own; the addresses of all hosts in /etc/hosts", asks=ASKS, plan=plan
)
