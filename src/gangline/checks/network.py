"""Do the hosts reach each other on every port that a run uses, and is it the right host that answers?"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from gangline.checks.rules import Rule, Seen, adders
from gangline.inventory.facts import Inventory
from gangline.inventory.pairs import RENDEZVOUS_PORTS, Blame, ListenerFacts, Pair, Pairs, blame, examples, say_tries
from gangline.runs.cluster import Cluster, Host

NOTHING = Pairs(measured="", tier="quick")
LET_IN = (
    "let the hosts ({addresses}) in on {targets}: sudo ufw allow from ADDRESS for each; or "
    "sudo firewall-cmd --zone=trusted --add-source=ADDRESS"
)


RULES: list[Rule] = []
_, whole_cluster = adders(RULES)


# --- which pairs a rule looks at: a pair has one cause at the most


def _is_strange(pair: Pair, pairs: Pairs) -> bool:
    """Whether something else than the target answers for its address."""
    if any(attempt.outcome in {"other", "stranger"} for attempt in pair.tries):
        return True
    listener = pairs.listener(pair.target)
    refused = any(attempt.outcome == "refused" for attempt in pair.tries)
    if listener is None or not pair.is_closed:
        return False
    if not listener.has_address:
        return refused
    if pair.neighbour is None or not listener.macs or pair.neighbour in listener.macs:
        return False
    # A Wi-Fi repeater answers with a MAC of its own, so that alone proves nothing.
    return refused or any(pair.neighbour in other.macs for other in pairs.listeners if other.host != pair.target)


def _clear(pairs: Pairs) -> list[Pair]:
    """Pairs whose target is who it should be. An address that is nobody's is told by the check of names."""
    unclear = {pair.target for pair in pairs.pairs if _is_strange(pair, pairs)}
    unclear |= {listener.host for listener in pairs.listeners if not listener.has_address}
    return [pair for pair in pairs.pairs if pair.target not in unclear or not pair.is_closed]


def _closed(inventory: Inventory) -> list[Pair]:
    return [pair for pair in _clear(inventory.pairs or NOTHING) if pair.is_closed]


def _partly(inventory: Inventory) -> list[Pair]:
    pairs = inventory.pairs or NOTHING
    strange = {pair.target for pair in pairs.pairs if _is_strange(pair, pairs)}
    part = [pair for pair in pairs.pairs if not pair.is_closed and not pair.is_open]
    return [pair for pair in part if pair.target not in strange]


def _unreached(inventory: Inventory) -> list[str]:
    """Hosts that none of several others reaches."""
    clear = _clear(inventory.pairs or NOTHING)
    ways = {pair.target: [way for way in clear if way.target == pair.target] for pair in _closed(inventory)}
    return [name for name, to in ways.items() if len(to) > 1 and all(way.is_closed for way in to)]


# --- the looks


@whole_cluster.fail(
    "E-NET-04",
    title="another machine answers at its address",
    meaning="ranks would connect to the wrong machine, or wait",
    fix="set `address` of this host to its own, or end the other use of it: two machines may have the same one",
)
def _another_machine(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    pairs = inventory.pairs or NOTHING
    for group in _by_target([pair for pair in pairs.pairs if _is_strange(pair, pairs)]):
        yield Seen(hosts=group.hosts, evidence=examples([_strange_words(pair) for pair in group.pairs]))


def _strange_words(pair: Pair) -> str:
    told = any(attempt.outcome in {"other", "stranger"} for attempt in pair.tries)
    mac = "" if told or pair.neighbour is None else f", by a machine with the MAC {pair.neighbour}"
    return say(pair) + mac


@whole_cluster.fail(
    "E-NET-01",
    title="no port answers the other hosts",
    meaning="the ranks cannot meet: each would wait for minutes and then give up",
    fix=LET_IN,
    step="firewall",
)
def _nobody_reaches(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    names = _unreached(inventory)
    if names:
        pairs = [pair for pair in _closed(inventory) if pair.target in names]
        yield _seen(Blame(hosts=_in_order(names, cluster), pairs=tuple(pairs)), cluster)


@whole_cluster.fail(
    "E-NET-01",
    title="no port answers, in either direction",
    meaning="the ranks cannot meet: each would wait for minutes and then give up",
    fix=LET_IN,
    step="firewall",
)
def _neither_reaches(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    told, closed = _unreached(inventory), _closed(inventory)
    ways = {(pair.source, pair.target) for pair in closed}
    rest = [pair for pair in closed if pair.target not in told and pair.source not in told]
    for group in blame(pair for pair in rest if (pair.target, pair.source) in ways):
        yield _seen(group, cluster)


@whole_cluster.fail(
    "E-NET-05",
    title="reached in one direction only",
    meaning="which rank calls which is up to gloo and NCCL: it may work today and hang tomorrow",
    fix=LET_IN,
    step="firewall",
)
def _one_way(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    told, closed = _unreached(inventory), _closed(inventory)
    ways = {(pair.source, pair.target) for pair in closed}
    rest = [pair for pair in closed if pair.target not in told and (pair.target, pair.source) not in ways]
    for group in blame(rest):
        yield _seen(group, cluster, words="; {target} reaches {source}")


@whole_cluster.fail(
    "E-NET-02",
    title="port {port}, where the ranks meet, is closed; others are open",
    meaning="torchrun on the other hosts would call there for 15 minutes",
    fix=f"{LET_IN}; or set `ports` to an open range",
    step="firewall",
)
def _no_rendezvous(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    """Where ranks meet is on the head; on the others that port is not needed."""
    head = cluster.head.name
    to_head = [pair for pair in _partly(inventory) if pair.target == head]
    bad = [pair for pair in to_head if not all(attempt.ok for attempt in pair.of_kind("rendezvous"))]
    if bad:
        port = str(bad[0].of_kind("rendezvous")[0].port)
        yield _seen(Blame(hosts=(head,), pairs=tuple(bad)), cluster, port=port)


@whole_cluster.fail(
    "E-NET-03",
    title="the ports of the data are closed, others are open",
    meaning="gloo and NCCL take any port from {low} to {high}: the ranks would meet and then hang",
    fix=LET_IN,
    step="firewall",
)
def _no_data(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    bad = [pair for pair in _data_closed(inventory) if not _is_elsewhere(pair, inventory)]
    if bad:
        targets = _in_order([pair.target for pair in bad], cluster)
        listener = (inventory.pairs or NOTHING).listener(targets[0])
        low, high = listener.ephemeral if listener else (32768, 60999)
        yield _seen(Blame(hosts=targets, pairs=tuple(bad)), cluster, low=str(low), high=str(high))


@whole_cluster.fail(
    "E-NET-09",
    title="the others do not reach its interface {interface}",
    meaning="the cluster file sends the data through {interface}, where it does not arrive",
    fix="set `interface` of this host to the one that has {address}, or leave it out",
)
def _wrong_interface(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    for group in _by_target([pair for pair in _data_closed(inventory) if _is_elsewhere(pair, inventory)]):
        host = cluster.host(group.hosts[0])
        yield _seen(group, cluster, interface=str(host.interface), address=host.address)


def _data_closed(inventory: Inventory) -> list[Pair]:
    return [pair for pair in _partly(inventory) if not all(attempt.ok for attempt in pair.of_kind("ephemeral"))]


def _is_elsewhere(pair: Pair, inventory: Inventory) -> bool:
    """Whether the data goes to another address than the rest, and none of it arrives."""
    listener = (inventory.pairs or NOTHING).listener(pair.target)
    return bool(listener and listener.data_address) and not any(attempt.ok for attempt in pair.of_kind("ephemeral"))


@whole_cluster.fail(
    "E-NET-10",
    title="IPv4 and IPv6 addresses in one cluster",
    meaning="gloo takes one address of each host: ranks with addresses of different kinds do not meet",
    fix="give every host an `address` of the same kind",
)
def _mixed_families(_inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    families: dict[int, list[Host]] = {}
    for host in cluster.hosts:
        if (version := _version(host.address)) is not None:
            families.setdefault(version, []).append(host)
    if len(families) > 1:
        fewer = min(families.values(), key=len)
        yield Seen(
            hosts=tuple(host.name for host in fewer),
            evidence=", ".join(f"{host.name} {host.address}" for hosts in families.values() for host in hosts),
        )


# --- words


def say(pair: Pair) -> str:
    """What happened between two hosts, port by port."""
    return f"{pair.source} -> {pair.target} " + say_tries(pair.tries)


def _seen(group: Blame, cluster: Cluster, words: str = "", **more: str) -> Seen:
    targets = list(dict.fromkeys(pair.target for pair in group.pairs))
    addresses = [host.address for host in cluster.hosts if len(targets) > 1 or host.name not in targets]
    evidence = [say(pair) + words.format(source=pair.source, target=pair.target) for pair in group.pairs]
    return Seen(
        hosts=group.hosts,
        evidence=examples(evidence),
        words={"targets": _list(targets), "addresses": _list(addresses), **more},
    )


def _in_order(names: Sequence[str], cluster: Cluster) -> tuple[str, ...]:
    return tuple(host.name for host in cluster.hosts if host.name in names)


def _list(words: Sequence[str]) -> str:
    return ", ".join(words[:8]) + (", ..." if len(words) > 8 else "")


def _version(address: str) -> int | None:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).version
    except ValueError:  # a name
        return None


def _by_target(pairs: Sequence[Pair]) -> list[Blame]:
    targets = dict.fromkeys(pair.target for pair in pairs)
    return [Blame(hosts=(name,), pairs=tuple(pair for pair in pairs if pair.target == name)) for name in targets]


# Is there a port for the ranks to meet at, and will nobody else take it?


FEW_PORTS = 1000
"""gloo opens a port per process and group, and a connection to every other rank."""


def _head(inventory: Inventory, cluster: Cluster) -> ListenerFacts | None:
    return inventory.pairs.listener(cluster.head.name) if inventory.pairs else None


def _range(cluster: Cluster) -> str:
    return "-".join(map(str, cluster.ports or RENDEZVOUS_PORTS))


@whole_cluster.fail(
    "E-PORT-01",
    title="no port is free for the ranks to meet at",
    meaning="torchrun on the head would end at once, and the others would wait for it",
    fix="end what listens there (ss -ltnp on {head}), or set `ports` of the cluster file to another range",
)
def _none_free(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    head = _head(inventory, cluster)
    if head is not None and head.rendezvous_port is None:
        evidence = f"{_range(cluster)} on {'; '.join(head.problems) or head.address}"
        yield Seen(hosts=(head.host,), evidence=evidence, words={"head": head.host})


@whole_cluster.warn(
    "E-PORT-02",
    title="any program may be given port {port} at any time",
    meaning="between the look for a free port and the start of the ranks, another program may have it",
    fix="set `ports` of the cluster file to a range outside, or take it out of the kernel's: "
    "sudo sysctl -w net.ipv4.ip_local_reserved_ports={range}",
)
def _exposed(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    head = _head(inventory, cluster)
    if head is None or head.rendezvous_port is None:
        return
    low, high = head.ephemeral
    if low <= head.rendezvous_port <= high:
        yield Seen(
            hosts=(head.host,),
            evidence=f"the kernel gives ports from {low} to {high} to who asks for any",
            words={"port": str(head.rendezvous_port), "range": _range(cluster)},
        )


@whole_cluster.warn(
    "E-PORT-03",
    title="few ports for connections",
    meaning="ranks may fail to connect once they are used up",
    fix="sudo sysctl -w net.ipv4.ip_local_port_range='32768 60999'",
)
def _few(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for listener in inventory.pairs.listeners if inventory.pairs else ():
        low, high = listener.ephemeral
        if high - low < FEW_PORTS:
            yield Seen(
                hosts=(listener.host,), evidence=f"the kernel gives ports from {low} to {high}: {high - low + 1}"
            )
