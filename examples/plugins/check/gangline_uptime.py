"""The family of checks `uptime`: hosts that have not been restarted for a long time."""

from __future__ import annotations

from collections.abc import Iterator

from gangline.checks.rules import Rule, each
from gangline.inventory.facts import HostFacts
from gangline.runs.cluster import Host

LONG_DAYS = 180


def _long(facts: HostFacts, _host: Host) -> Iterator[str]:
    days = (facts.system.uptime_s or 0) / 86400
    if days > LONG_DAYS:
        yield f"up for {days:.0f} days"


RULES = (
    Rule(
        id="E-UPTIME-01",
        severity="info",
        title="it has not been restarted for a long time",
        meaning="updates of its kernel and its drivers are installed but not in use",
        fix="restart it when nothing runs there",
        look=each(_long),
    ),
)
