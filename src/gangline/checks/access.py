"""Can every host be asked?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gangline.checks.rules import Finding, Rule, Seen, apply
from gangline.inventory.facts import HostFailure, Inventory
from gangline.inventory.pairs import Outside, examples, say_tries
from gangline.runs.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessFailure:
    """One way in which a host cannot be asked."""

    id: str
    title: str
    meaning: str
    fix: str
    """What to do where the transport has no better idea."""


KINDS = {
    "unreachable": AccessFailure(
        id="E-ACC-01",
        title="does not answer",
        meaning="nothing can be started there",
        fix="check that the host is on and reachable, or take it out of the cluster file",
    ),
    "no-facts": AccessFailure(
        id="E-ACC-02",
        title="cannot say its facts",
        meaning="gangline's agent does not run there",
        fix="look at what it said; a login that prints or asks something, or a full disk, are the usual causes",
    ),
    "no-python": AccessFailure(
        id="E-ACC-02",
        title="has no Python 3.8 or newer",
        meaning="gangline's agent needs a Python there; nothing else has to be installed",
        fix="install one there: sudo apt install python3 (or dnf, zypper)",
    ),
    "key-changed": AccessFailure(
        id="E-ACC-03",
        title="shows another host key than the pinned one",
        meaning="it was installed anew, or somebody is in between; nothing was sent to it",
        fix="compare the fingerprint on its own console; only if it is the new one: gangline init",
    ),
    "key-unpinned": AccessFailure(
        id="E-ACC-04",
        title="has no pinned host key",
        meaning="nothing tells who answers, so nothing is sent",
        fix="gangline init shows its key and writes it down",
    ),
    "denied": AccessFailure(
        id="E-ACC-05",
        title="refuses your ssh key",
        meaning="nothing can be started there",
        fix="ssh-copy-id to it; a key with a passphrase has to be in your agent (ssh-add)",
    ),
    "unknown-name": AccessFailure(
        id="E-ACC-06",
        title="has an ssh name that nobody knows",
        meaning="ssh cannot find it",
        fix="put the name into ~/.ssh/config, or write its address into the cluster file",
    ),
    "refused": AccessFailure(
        id="E-ACC-07",
        title="refuses the connection",
        meaning="the machine is there, but no ssh server listens",
        fix="there: sudo systemctl start ssh (or sshd); or set `port` of this host in the cluster file",
    ),
}


def check_access(inventory: Inventory, _cluster: Cluster) -> list[Finding]:
    """A host that does not answer, is not trusted, or cannot say its facts."""
    return [_finding(failure) for failure in inventory.failures]


def _finding(failure: HostFailure) -> Finding:
    fallback = "unreachable" if failure.unreachable else "no-facts"
    kind = KINDS.get(failure.kind, KINDS[fallback])
    return Finding(
        id=kind.id,
        severity="fail",
        hosts=(failure.host,),
        title=kind.title,
        evidence=failure.why,
        meaning=kind.meaning,
        fix=failure.fix or kind.fix,
    )


# Who outside the cluster reaches the ports of a run?


def check_security(inventory: Inventory, cluster: Cluster) -> list[Finding]:
    """Ports that a machine reached which is no host of the cluster."""
    return apply(RULES, inventory, cluster)


def _reached_from_outside(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    pairs = inventory.pairs
    reached = [outside for outside in (pairs.outside if pairs else ()) if any(attempt.ok for attempt in outside.tries)]
    if pairs is None or not reached:
        return
    who = pairs.outside_from or "no host of the cluster"
    addresses = [host.address for host in cluster.hosts]
    yield Seen(
        hosts=tuple(outside.host for outside in reached),
        evidence=examples(
            [f"this computer ({who}) -> {outside.host} {say_tries(outside.tries)}" for outside in reached]
        ),
        words={"ports": _ports(reached), "addresses": ", ".join(addresses[:8]) + (", ..." if addresses[8:] else "")},
    )


def _ports(reached: list[Outside]) -> str:
    open_ones = [attempt for outside in reached for attempt in outside.tries if attempt.ok]
    words = [f"port {port}" for port in sorted({each.port for each in open_ones if each.kind == "rendezvous"})]
    if any(attempt.kind == "ephemeral" for attempt in open_ones):
        words.append("the ports of the data")
    return " and ".join(words)


RULES = (
    Rule(
        id="E-SEC-04",
        severity="warn",
        title="reachable from outside the cluster: {ports}",
        meaning="torch, gloo and NCCL ask nobody who they are: while a run lasts, who reaches these ports can run code "
        "as you",
        fix="let only {addresses} in: sudo ufw allow from ADDRESS for each, sudo ufw allow ssh, sudo ufw enable; or "
        "train in a network of their own",
        look=_reached_from_outside,
    ),
)
