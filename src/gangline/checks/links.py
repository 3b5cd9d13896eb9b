"""How good are the ways between the hosts: large packets, lost packets, latency, speed?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from gangline.checks.rules import Rule, Seen, adders
from gangline.inventory.facts import Inventory
from gangline.inventory.pairs import Blame, Pair, blame, examples, far
from gangline.runs.cluster import Cluster

JUMBO_BYTES = 9000
"""Larger packets are not tried."""
LOSS_WARN, LOSS_FAIL = 0.01, 0.1
"""From 1 % TCP crawls. A few hundred packets are a small sample, so only what nobody could work with fails."""
SLOW_TO_OTHERS = 1 / 3
SLOW_TO_CARD = 1 / 2
FADING = 1 / 2
"""How much of its usual speed a link has to keep at any time."""
FAST_MBPS = 4000.0
"""One connection of a small Python program is not faster everywhere, so faster pairs are not judged."""
VIRTUAL_DRIVERS = {"veth", "virtio_net", "vmxnet3", "hv_netvsc", "xen_netfront", "tun", "bridge"}
"""Their speed is invented."""


RULES: list[Rule] = []
_, whole_cluster = adders(RULES)


def _open(inventory: Inventory) -> list[Pair]:
    return [pair for pair in inventory.pairs.pairs if not pair.is_closed] if inventory.pairs else []


@whole_cluster.fail(
    "E-NET-06",
    title="large packets vanish on the way",
    meaning="connections open and then hang as soon as there is much to send",
    fix="use one MTU on all cards and switches of this network; behind a tunnel set the smaller one: "
    "sudo ip link set INTERFACE mtu 1400",
)
def _holes(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for group in blame(pair for pair in _open(inventory) if pair.full_segment is False):
        yield _seen(group, lambda pair: f"a TCP packet of full size was not answered{_sizes(pair)}")


@whole_cluster.warn(
    "E-NET-06",
    title="packets as large as the card sends them vanish on the way",
    meaning="TCP agrees on smaller ones here; RoCE and other protocols hang",
    fix="give all cards and switches of this network the same MTU",
)
def _jumbo(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    swallowed = [pair for pair in _open(inventory) if pair.full_segment is not False and _swallows(pair)]
    for group in blame(pair for pair in swallowed if not _cards_differ(inventory, pair)):
        yield _seen(group, lambda pair: f"TCP gets through{_sizes(pair)}")


def _swallows(pair: Pair) -> bool:
    """Whether packets as large as the source's own card sends them vanish, and nobody on the way says so."""
    if pair.own_mtu is None or pair.largest_packet is None or pair.told_mtu is not None:
        return False
    return pair.largest_packet < min(pair.own_mtu, JUMBO_BYTES)


def _cards_differ(inventory: Inventory, pair: Pair) -> bool:
    """Whether the target's card takes smaller packets; then the check of the interfaces has told it."""
    facts = inventory.of(pair.target)
    nic = facts.holder(pair.tries[-1].address) if facts else None
    return nic is not None and nic.mtu is not None and pair.own_mtu is not None and nic.mtu < pair.own_mtu


def _sizes(pair: Pair) -> str:
    if pair.largest_packet is None:
        return ""
    return f"; of UDP up to {pair.largest_packet} bytes arrive, {pair.interface} has MTU {pair.own_mtu}"


@whole_cluster.warn(
    "E-NET-07",
    title="the link is slow",
    meaning="every step waits for the slowest link: all hosts exchange gradients at its speed",
    fix="replace cable and port (a cable with 4 wires does 100 Mbit/s only), use a cable in place of Wi-Fi; then "
    "gangline bench network",
)
def _slow(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    """Pairs whose throughput is far below that of the fastest one, or of the cards at both ends."""
    measured = [pair for pair in _open(inventory) if pair.throughput_mbps is not None]
    if not measured:
        return
    fastest = max(measured, key=_rate)
    for group in blame(pair for pair in measured if pair.possible_mbps < _limit(inventory, pair, _rate(fastest))):
        against = f"; {fastest.source} -> {fastest.target} {_rate(fastest):.0f} Mbit/s"
        seen = _seen(group, lambda pair: _speed_words(inventory, pair))
        yield seen if fastest in group.pairs else Seen(hosts=seen.hosts, evidence=seen.evidence + against)


@whole_cluster.warn(
    "E-NET-07",
    title="the link is slow at times",
    meaning="every step waits for the slowest link; a card or switch that gets warm may do this after a while",
    fix="see that nothing else uses it; look at cable, port and cooling, and at the counters: ethtool -S INTERFACE",
)
def _fading(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    """Pairs that were much slower at times than else."""
    measured = [pair for pair in _open(inventory) if pair.worst_mbps is not None]
    for group in blame(pair for pair in measured if (pair.worst_mbps or 0.0) < min(_rate(pair) * FADING, FAST_MBPS)):
        yield _seen(group, lambda pair: f"{pair.worst_mbps or 0.0:.0f} to {_rate(pair):.0f} Mbit/s")


def _limit(inventory: Inventory, pair: Pair, best_mbps: float) -> float:
    card = card_mbps(inventory, pair) or 0.0
    return min(max(best_mbps * SLOW_TO_OTHERS, card * SLOW_TO_CARD), FAST_MBPS)


def _rate(pair: Pair) -> float:
    return pair.throughput_mbps or 0.0


def _speed_words(inventory: Inventory, pair: Pair) -> str:
    card = card_mbps(inventory, pair)
    return f"{_rate(pair):.0f} Mbit/s" + (f", the cards can {card:.0f}" if card else "")


def card_mbps(inventory: Inventory, pair: Pair) -> float | None:
    """What the cards at both ends say that they can; None where one is virtual or does not say."""
    speeds = []
    for host, address in ((pair.source, pair.source_address), (pair.target, pair.tries[-1].address)):
        facts = inventory.of(host)
        nic = facts.holder(address) if facts and address else None
        if nic is None or nic.kind != "ethernet" or nic.driver in VIRTUAL_DRIVERS or nic.speed_mbps is None:
            return None
        speeds.append(nic.speed_mbps)
    return float(min(speeds))


@whole_cluster.warn(
    "E-NET-12",
    title="packets are lost",
    meaning="each loss may stop a step for 0.2 s and more, until TCP sends again",
    fix="look at cable, port and Wi-Fi signal, and at the error counters: ip -s link",
)
def _lossy(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    return _lost(inventory, LOSS_WARN, LOSS_FAIL)


@whole_cluster.fail(
    "E-NET-12",
    title="many packets are lost",
    meaning="TCP stands still most of the time",
    fix="look at cable, port and Wi-Fi signal, and at the error counters: ip -s link",
)
def _very_lossy(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    return _lost(inventory, LOSS_FAIL, 1.0)


def _lost(inventory: Inventory, low: float, high: float) -> Iterator[Seen]:
    """Groups of lossy pairs whose worst loses from `low` to `high`."""
    for group in blame(pair for pair in _open(inventory) if (pair.loss or 0.0) >= LOSS_WARN):
        if low <= max(pair.loss or 0.0 for pair in group.pairs) < high:
            yield _seen(
                group, lambda pair: f"{pair.packets_sent - pair.packets_answered} of {pair.packets_sent} UDP packets"
            )


@whole_cluster.warn(
    "E-NET-11",
    title="far away",
    meaning="every exchange of every step waits for this; through a VPN or a relay it can be most of the step",
    fix="put all hosts on one switch, and give them the addresses of that network",
)
def _far(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for group in blame(far(_open(inventory))):
        yield _seen(group, lambda pair: f"{1000 * (pair.latency_min_s or 0.0):.1f} ms there and back")


def _seen(group: Blame, words: Callable[[Pair], str]) -> Seen:
    return Seen(hosts=group.hosts, evidence=_each(group.pairs, words))


def _each(pairs: Iterable[Pair], words: Callable[[Pair], str]) -> str:
    return examples([f"{pair.source} -> {pair.target} {words(pair)}" for pair in pairs])
