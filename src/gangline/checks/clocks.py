"""Do the clocks agree? The ranks do not mind, but whoever asks what happened first, and when a certificate is valid."""

from __future__ import annotations

from collections.abc import Iterator

from gangline.checks.rules import Rule, Seen, adders
from gangline.inventory.facts import HostFacts, Inventory
from gangline.inventory.pairs import Clock
from gangline.runs.cluster import Cluster
from gangline.units import format_duration

WARN_S = 2.0
"""Ranks notice each other's end within seconds: with clocks further apart, an echo looks older than the cause."""
FAIL_S = 300.0
"""From here on others refuse: Kerberos after 5 minutes, signed addresses of downloads after 15, certificates later.
Below that, training works, and only the times in the logs are wrong: not a reason to keep anybody from starting."""
SET_CLOCK = "sudo timedatectl set-ntp true; timedatectl says whether it is synchronized"


RULES: list[Rule] = []
_, whole_cluster = adders(RULES)


@whole_cluster.warn(
    "E-CLOCK-01",
    title="its clock is {ahead_of_or_behind} that of {head}",
    meaning="times in logs and events do not match: what failed first cannot be told",
    fix=SET_CLOCK,
    step="clock",
)
def _off(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    return _between(inventory, cluster, WARN_S, FAIL_S)


@whole_cluster.fail(
    "E-CLOCK-01",
    title="its clock is {ahead_of_or_behind} that of {head}",
    meaning="certificates, tokens and signed downloads are refused as not valid yet, or not any more",
    fix=SET_CLOCK,
    step="clock",
)
def _far_off(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    return _between(inventory, cluster, FAIL_S, float("inf"))


def _between(inventory: Inventory, cluster: Cluster, low_s: float, high_s: float) -> Iterator[Seen]:
    for clock in _worst(inventory, cluster):
        if low_s < _sure_s(clock) <= high_s:
            side = "ahead of" if clock.ahead_s > 0 else "behind"
            yield Seen(
                hosts=(clock.host,),
                evidence=f"{clock.ahead_s:+.3f} s, give or take {clock.uncertainty_s:.3f} s",
                words={
                    "ahead_of_or_behind": f"{format_duration(abs(clock.ahead_s))} {side}",
                    "head": cluster.head.name,
                },
            )


def _worst(inventory: Inventory, cluster: Cluster) -> list[Clock]:
    """Of what was measured over the network and what the facts say, the larger difference of every host."""
    measured = inventory.pairs.clocks if inventory.pairs else ()
    found: dict[str, Clock] = {}
    for clock in (*measured, *_read(inventory, cluster)):
        if clock.host not in found or _sure_s(clock) > _sure_s(found[clock.host]):
            found[clock.host] = clock
    return list(found.values())


def _sure_s(clock: Clock) -> float:
    """By how much a clock is wrong at the least."""
    return abs(clock.ahead_s) - clock.uncertainty_s


def _read(inventory: Inventory, cluster: Cluster) -> Iterator[Clock]:
    """The clocks as the facts have them: each was read some time between question and answer."""
    head = inventory.of(cluster.head.name)
    base = _against_ours(head) if head is not None else None
    for facts in inventory.hosts:
        mine = _against_ours(facts)
        if base is not None and mine is not None and facts.host != cluster.head.name:
            yield Clock(host=facts.host, ahead_s=mine[0] - base[0], uncertainty_s=mine[1] + base[1], method="ssh")


def _against_ours(facts: HostFacts) -> tuple[float, float] | None:
    """By how much a clock is ahead of this computer's, and by how much that may be wrong."""
    if facts.system.time_s is None or facts.asked_s is None or facts.answered_s is None:
        return None
    return facts.system.time_s - (facts.asked_s + facts.answered_s) / 2, (facts.answered_s - facts.asked_s) / 2
