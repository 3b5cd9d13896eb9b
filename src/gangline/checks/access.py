"""Can every host be asked?"""

from __future__ import annotations

from collections.abc import Iterator

from gangline.checks.rules import Adder, Look, Rule, Seen, adders
from gangline.inventory.facts import Inventory
from gangline.inventory.pairs import Outside, examples, say_tries
from gangline.runs.cluster import Cluster

KINDS = {"no-python", "key-changed", "key-unpinned", "denied", "unknown-name", "refused"}
"""Failures with a rule of their own; of all others it only counts whether the host answers."""


def _failed_with(kind: str) -> Look:
    """Hosts that cannot be asked for one reason. Where the transport knows what to do, its words count."""

    def look(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
        for failure in inventory.failures:
            fallback = "unreachable" if failure.unreachable else "no-facts"
            if kind == (failure.kind if failure.kind in KINDS else fallback):
                yield Seen(hosts=(failure.host,), evidence=failure.why, fix=failure.fix)

    return look


RULES: list[Rule] = []
_, whole_cluster = adders(RULES)
failure = Adder(RULES, _failed_with)

failure.fail(
    "E-ACC-01",
    title="does not answer",
    meaning="nothing can be started there",
    fix="check that the host is on and reachable, or take it out of the cluster file",
)("unreachable")
failure.fail(
    "E-ACC-02",
    title="cannot say its facts",
    meaning="gangline's agent does not run there",
    fix="look at what it said; a login that prints or asks something, or a full disk, are the usual causes",
)("no-facts")
failure.fail(
    "E-ACC-02",
    title="has no Python 3.8 or newer",
    meaning="gangline's agent needs a Python there; nothing else has to be installed",
    fix="install one there: sudo apt install python3 (or dnf, zypper)",
)("no-python")
failure.fail(
    "E-ACC-03",
    title="shows another host key than the pinned one",
    meaning="it was installed anew, or somebody is in between; nothing was sent to it",
    fix="compare the fingerprint on its own console; only if it is the new one: gangline init",
)("key-changed")
failure.fail(
    "E-ACC-04",
    title="has no pinned host key",
    meaning="the host cannot be identified, so nothing is sent to it",
    fix="gangline init shows its key and writes it down",
)("key-unpinned")
failure.fail(
    "E-ACC-05",
    title="refuses your ssh key",
    meaning="nothing can be started there",
    fix="ssh-copy-id HOST brings your key to it; a key with a passphrase has to be in your agent (ssh-add)",
    step="access",
)("denied")
failure.fail(
    "E-ACC-06",
    title="has an unknown ssh name",
    meaning="ssh finds no address for it",
    fix="put the name into ~/.ssh/config, or write its address into the cluster file",
)("unknown-name")
failure.fail(
    "E-ACC-07",
    title="refuses the connection",
    meaning="the machine is there, but no ssh server listens",
    fix="there: sudo systemctl start ssh (or sshd); or set `port` of this host in the cluster file",
)("refused")


# Who outside the cluster reaches the ports of a run?


@whole_cluster.warn(
    "E-SEC-04",
    title="reachable from outside the cluster: {ports}",
    meaning="torch, gloo and NCCL do not authenticate: during a run, anybody who reaches these ports can run code "
    "as you",
    fix="let only {addresses} in: sudo ufw allow from ADDRESS for each, sudo ufw allow ssh, sudo ufw enable; or "
    "train in a network of their own",
    step="firewall",
)
def _reached_from_outside(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    if cluster.backend != "slurm":
        yield from _outsiders(inventory, cluster)


@whole_cluster.info(
    "E-SEC-05",
    title="reachable from the login host: {ports}",
    meaning="torch, gloo and NCCL do not authenticate: during a run, users of the site who reach these ports can run "
    "code as you",
    fix="the site decides who reaches its nodes: ask for a partition whose nodes others do not reach, if that matters",
)
def _reached_on_site(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    if cluster.backend == "slurm":
        yield from _outsiders(inventory, cluster)


def _outsiders(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    """Whoever is none of the hosts and reaches their ports."""
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
