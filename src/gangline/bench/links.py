"""Latency and throughput of every ordered pair of hosts: one pair per host at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gangline.inventory.ears import listening
from gangline.inventory.facts import Inventory
from gangline.inventory.network import Link
from gangline.inventory.pairs import Pair, Skipped, say_tries
from gangline.inventory.probe import Probe, askable
from gangline.inventory.rounds import both_ways, rounds, sample
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster

LONGEST_S, SHORTEST_S = 1.0, 0.3
"""How long the throughput of one ordered pair is measured."""
START_S = 0.35
"""What it takes to start that on a host."""
OPEN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The ways that were measured, and those that were not."""

    links: tuple[Link, ...] = ()
    closed: tuple[str, ...] = ()
    """Pairs that do not reach each other, in words."""
    skipped: tuple[Skipped, ...] = ()


def measure_links(
    cluster: Cluster, inventory: Inventory, transports: Mapping[str, Transport], *, seconds: float
) -> Links:
    """Measure in about `seconds`; with many hosts a sample of the pairs, spread evenly, which is said."""
    hosts, skipped = askable(cluster, inventory)
    if len(hosts) < 2:
        return Links(skipped=tuple(skipped))
    with listening(cluster, hosts, transports, seconds=OPEN_S + seconds) as ears:
        probe = Probe(ears=ears, transports=transports, measure=("time",))
        pairs = {(pair.source, pair.target): pair for pair in probe.every_pair()}
        meetings, each_s = schedule(list(ears.up), seconds)
        if len(meetings) < len(rounds(list(ears.up))):
            why = f"{len(meetings)} of {len(rounds(list(ears.up)))} rounds fit into {seconds:.0f} s"
            skipped.append(Skipped(what="throughput of some pairs", why=why))
        open_pairs = {ordered: pair for ordered, pair in pairs.items() if not pair.is_closed}
        halves = [half for meeting in meetings for half in both_ways(meeting)]
        measured = {**pairs, **probe.rates(open_pairs, halves, seconds=each_s)}
        skipped += [Skipped(what=name, why=why) for name, why in ears.problems.items()]
    return Links(
        links=tuple(_link(pair) for pair in measured.values() if not pair.is_closed),
        closed=tuple(
            f"{pair.source} -> {pair.target} {say_tries(pair.tries)}" for pair in pairs.values() if not pair.is_open
        ),
        skipped=(*skipped, *probe.skipped),
    )


def schedule(hosts: list[str], seconds: float) -> tuple[list[list[tuple[str, str]]], float]:
    """Who meets whom, and for how long each way, so that all of it takes `seconds`."""
    meetings = rounds(hosts)
    most = max(1, int(seconds / 2 / (SHORTEST_S + START_S)))
    meetings = sample(meetings, most)
    each_s = seconds / 2 / max(1, len(meetings)) - START_S
    return meetings, min(LONGEST_S, max(SHORTEST_S, each_s))


def _link(pair: Pair) -> Link:
    return Link(
        source=pair.source,
        target=pair.target,
        latency_s=pair.latency_min_s,
        latency_median_s=pair.latency_median_s,
        throughput_mbps=pair.throughput_mbps,
        retransmits=pair.retransmits,
    )
