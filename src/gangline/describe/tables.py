"""What was found, as rows that people read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gangline.describe.addresses import Network, Place, Quality
from gangline.inventory.facts import HostFacts
from gangline.inventory.hardware import Gpu
from gangline.units import format_bytes

HEADER = ("host", "GPU", "memory", "driver", "link", "disk free", "Python")
SLOW_MBPS = 1000
"""A slower link makes ranks wait for each other."""
_SPOKEN = {Quality.WIFI: "wireless", Quality.TUNNEL: "a tunnel", Quality.VIRTUAL: "virtual"}


def row(facts: HostFacts, network: Network) -> tuple[str, ...]:
    """One host."""
    return (
        facts.host,
        f"{cards(facts.gpus)}{simulated(facts)}" if facts.gpus else no_cards(facts),
        ", ".join(dict.fromkeys(format_bytes(gpu.memory_total_bytes) for gpu in facts.gpus)) or "-",
        facts.gpu_driver.version or "-",
        link(network.places[facts.host]),
        format_bytes(facts.disk_free_bytes) if facts.disk_free_bytes else "?",
        facts.system.agent_python or "?",
    )


def cards(gpus: Sequence[Gpu]) -> str:
    """The cards of a host, equal ones folded: "2 x NVIDIA RTX A6000"."""
    counted = Counter(gpu.name for gpu in gpus)
    return ", ".join(f"{number} x {name}" if number > 1 else name for name, number in counted.items())


def no_cards(facts: HostFacts) -> str:
    """Why a host has no cards, if it should have some."""
    return f"none: {facts.gpu_reason}" if facts.gpu_driver.on_the_bus else "none"


def link(place: Place) -> str:
    """An interface and its speed: "eno1 1 Gb/s"."""
    speed = "" if place.speed_mbps is None else rate(place.speed_mbps)
    slow = "!" if place.speed_mbps is not None and place.speed_mbps < SLOW_MBPS else ""
    return " ".join(filter(None, (place.interface or "?", speed, _SPOKEN.get(place.quality), slow)))


def rate(mbps: int) -> str:
    """The speed of a link: "100 Mb/s", "2.5 Gb/s"."""
    return f"{mbps} Mb/s" if mbps < 1000 else f"{mbps / 1000:g} Gb/s"


def slots_note(facts: HostFacts) -> str:
    """What a host's slots stand for."""
    if not facts.gpus:
        return "no GPU"
    sizes = ", ".join(dict.fromkeys(format_bytes(gpu.memory_total_bytes) for gpu in facts.gpus))
    return f"{cards(facts.gpus)}, {sizes}{simulated(facts)}"


def simulated(facts: HostFacts) -> str:
    """Says so where the cards are a stand-in for tests."""
    return " (simulated)" if facts.gpu_driver.simulated else ""


def failure(host: str, why: str) -> str:
    """What went wrong with a host, which is named once."""
    return why if why.startswith((f"{host}:", f"{host} ")) else f"{host}: {why}"
