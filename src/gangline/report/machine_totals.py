"""What hosts have in sum, and what of their cards' memory a model can use under each strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gangline.inventory.facts import Gpu, HostFacts
from gangline.strategies.base import PlanHalf
from gangline.strategies.table import ALONE, STRATEGIES, plan_half
from gangline.units import counted, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTotals:
    """Sums over hosts that told what they are; those on one machine, and a card that two of them see, count once."""

    hosts: int
    machines: int
    cards: Sequence[Sequence[int]]
    """Bytes of each card, by machine; machines without one are left out."""
    cpus: int
    ram_bytes: int

    @property
    def num_cards(self) -> int:
        """On all machines."""
        return sum(map(len, self.cards))

    @property
    def card_bytes(self) -> int:
        """Of all cards."""
        return sum(map(sum, self.cards))

    def words(self, *, silent: int = 0) -> list[str]:
        """3 hosts, 3 cards 28 GiB, 48 CPUs, 96 GiB RAM. silent: hosts besides, of which nothing is known."""
        hosts, machines = self.hosts + silent, self.machines + silent
        size = f" {format_bytes(self.card_bytes)}" if self.num_cards else ""
        among = [f"on {counted(machines, 'machine')}"] if machines < hosts else []
        if not self.hosts:
            return [counted(hosts, "host")]
        rest = [
            counted(self.num_cards, "card") + size,
            counted(self.cpus, "CPU"),
            f"{format_bytes(self.ram_bytes)} RAM",
        ]
        return [counted(hosts, "host"), *among, *rest]

    def weights_bytes(self) -> dict[str, int]:
        """Strategy -> the memory that a model's weights and what is kept beside them can use, of all cards.

        A model that lies whole on each card is limited by the smallest one; one in equal parts by as many times the
        smallest; layers lie as cards have room. Built-in strategies that run on these cards, for two cards and more.
        """
        kinds = [kind for kind in STRATEGIES.built_in if kind != ALONE and self.num_cards > 1]
        found = {kind: _weights_bytes(plan_half(kind), self.cards) for kind in kinds}
        return {kind: num_bytes for kind, num_bytes in found.items() if num_bytes is not None}

    def weights_line(self) -> str:
        """Room for a model: 8 GiB by ddp · 28 GiB by pipeline; empty for fewer than two cards."""
        by_size: dict[int, list[str]] = {}
        for kind, num_bytes in self.weights_bytes().items():
            by_size.setdefault(num_bytes, []).append(kind)
        parts = [f"{format_bytes(size)} by {', '.join(kinds)}" for size, kinds in sorted(by_size.items())]
        return f"room for a model: {' · '.join(parts)}" if parts else ""

    def to_json(self) -> dict[str, Any]:
        """Sizes in bytes."""
        return {
            "hosts": self.hosts,
            "machines": self.machines,
            "cards": self.num_cards,
            "card_bytes": self.card_bytes,
            "cpus": self.cpus,
            "ram_bytes": self.ram_bytes,
            "weights_bytes": self.weights_bytes(),
        }


def totals_of(hosts: Sequence[HostFacts]) -> MachineTotals:
    """The sums over the facts of hosts."""
    machines: dict[str, HostFacts] = {facts.system.machine.boot or facts.host: facts for facts in hosts}
    cards: dict[str, dict[str, int]] = {}
    seen: set[str] = set()
    for facts in hosts:
        here = cards.setdefault(facts.system.machine.boot or facts.host, {})
        of_host = {_known_id(facts.host, gpu): gpu.memory_total_bytes for gpu in facts.gpus}
        here.update({name: size for name, size in of_host.items() if name not in seen})
        seen.update(here)
    return MachineTotals(
        hosts=len(hosts),
        machines=len(machines),
        cards=[list(sizes.values()) for sizes in cards.values() if sizes],
        cpus=sum(facts.num_cpus for facts in machines.values()),
        ram_bytes=sum(facts.memory_total_bytes or 0 for facts in machines.values()),
    )


def _known_id(host: str, gpu: Gpu) -> str:
    """Of a card; one whose driver does not tell it is taken for one that no other host sees."""
    return f"{host} {gpu.index}" if gpu.uuid == "?" else gpu.uuid


def _weights_bytes(half: PlanHalf, cards: Sequence[Sequence[int]]) -> int | None:
    """None: it does not run on these cards."""
    sizes = [size for machine in cards for size in machine]
    if half.layers == "staged":
        return sum(sizes)
    if half.layers == "sliced" or (half.parts == "weights" and half.shards_per_host):
        counts = {len(machine) for machine in cards}
        alike = len(counts) == 1 and min(counts) > 1
        return min(len(machine) * min(machine) for machine in cards) if alike else None
    return len(sizes) * min(sizes) if half.parts == "weights" else min(sizes)
