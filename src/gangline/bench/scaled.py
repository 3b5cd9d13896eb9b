"""What `bench scaling` found, and the arithmetic of it. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gangline.runs.deal import shares_by_time

SCATTER = 0.05
"""Of (most - least) over the median: more than that is told."""
FEW = 3
"""Turns: fewer say little of how steady the figures are."""
OTHERS_SHARE, OTHERS_CPUS = 0.1, 0.25
"""Of a machine's processors, and processors: what other programs may have without being named."""
METHOD = (
    "every host alone with the whole batch, all at the same time without a word between them, then all together; steps "
    "of the trainer itself on random weights and random full-length samples; warmed up, in turns, the slowest rank's "
    "clock, medians"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Some steps of all hosts together."""

    tokens_per_s: float
    steps: int
    step_s: float
    exposed_s: float
    """Seconds of a step in which the last rank to have computed everything still waited for the exchange."""
    shares: tuple[int, ...]
    """Micro-batches of a step, by rank, at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpeed:
    """One host alone."""

    host: str
    device: str
    ranks: tuple[int, ...]
    slowdown: float
    """Simulated: its ranks are told to take so many times as long."""
    alone_tokens_per_s: tuple[float, ...]
    """Of the whole batch, in each turn."""
    alone_micro_batches: int
    """Of the steps that were timed; fewer than those of the batch where the time was short."""

    @property
    def tokens_per_s(self) -> float:
        """Alone: the median."""
        return statistics.median(self.alone_tokens_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Speeds of hosts alone and together."""

    job: str
    method: str
    """What is trained: full or lora."""
    dtype: str
    trained_numbers: int
    """Weights that are trained, whose gradients travel."""
    batch: int
    micro_batch: int
    sequence_length: int
    moving: bool
    """Whether shares followed the measured speeds; else the cluster file says who does how much."""
    one_machine: bool
    """All hosts are this one computer, and share its processors: alone means beside each other."""
    hosts: tuple[HostSpeed, ...]
    together: tuple[Turn, ...]
    even: tuple[Turn, ...]
    measured: str
    versions: dict[str, str]
    warnings: tuple[str, ...] = ()
    """What else kept the machines busy."""

    @property
    def num_micro_batches(self) -> int:
        """Of a step of the whole batch."""
        return self.batch // self.micro_batch

    @property
    def sum_tokens_per_s(self) -> float:
        """Of all hosts alone."""
        return sum(host.tokens_per_s for host in self.hosts)

    @property
    def ratio(self) -> float:
        """Together over the sum: medians."""
        return statistics.median(turn.tokens_per_s for turn in self.together) / self.sum_tokens_per_s

    @property
    def worst(self) -> float:
        """The same of the slowest turn."""
        return min(turn.tokens_per_s for turn in self.together) / self.sum_tokens_per_s

    @property
    def even_ratio(self) -> float:
        """With equal shares."""
        return statistics.median(turn.tokens_per_s for turn in self.even) / self.sum_tokens_per_s

    @property
    def ceiling(self) -> float:
        """What the best split into whole micro-batches allows, if exchanging cost nothing.

        The ranks of a host are taken to be equally fast.
        """
        seconds = [len(host.ranks) / host.tokens_per_s for host in self.hosts for _ in host.ranks]
        shares = shares_by_time(seconds, self.num_micro_batches)
        last = max(share * each for share, each in zip(shares, seconds, strict=True))
        return self.num_micro_batches / last / self.sum_tokens_per_s

    @property
    def middle(self) -> Turn:
        """The turn together that was neither fast nor slow."""
        return sorted(self.together, key=lambda turn: turn.tokens_per_s)[len(self.together) // 2]

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why one may not trust the figures."""
        series = {f"{host.host} alone": host.alone_tokens_per_s for host in self.hosts}
        series["all together"] = tuple(turn.tokens_per_s for turn in self.together)
        wide = [f"{name} {scatter(rates):.0%}" for name, rates in series.items() if scatter(rates) > SCATTER]
        num_turns = len(self.together)
        return (
            *self.warnings,
            *([f"turns differ by more than {SCATTER:.0%}: {', '.join(wide)}"] if wide else []),
            *([f"{num_turns} of 5 turns had time; --seconds gives more"] if num_turns < FEW else []),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data with the ratios."""
        hosts = [{**dataclasses.asdict(host), "tokens_per_s": host.tokens_per_s} for host in self.hosts]
        return {
            **dataclasses.asdict(self),
            "hosts": hosts,
            "warnings": list(self.doubts),
            "sum_tokens_per_s": self.sum_tokens_per_s,
            "together_tokens_per_s": self.ratio * self.sum_tokens_per_s,
            "even_tokens_per_s": self.even_ratio * self.sum_tokens_per_s,
            "ratio": self.ratio,
            "worst_ratio": self.worst,
            "even_ratio": self.even_ratio,
            "ceiling_ratio": self.ceiling,
            "exposed_s": self.middle.exposed_s,
            "step_s": self.middle.step_s,
            "how": METHOD,
        }


def batch_s(step_s: float, update_s: float, *, measured: int, whole: int) -> float:
    """Seconds of a step of `whole` micro-batches, by one of `measured`; either has one update.

    Micro-batches are equal here, so that their time grows with their number.
    """
    update_s = min(update_s, step_s)
    return (step_s - update_s) * whole / measured + update_s


def scatter(rates: Sequence[float]) -> float:
    """(most - least) over the median."""
    return (max(rates) - min(rates)) / statistics.median(rates)


def others_note(hosts: Sequence[str], num_busy: float, *, num_cpus: int) -> str | None:
    """In words what other programs had of a machine's processors; None where that is little."""
    if num_busy <= max(OTHERS_CPUS, OTHERS_SHARE * num_cpus):
        return None
    return f"{', '.join(hosts)}: other programs had {num_busy:.1f} of {num_cpus} processors meanwhile"
