"""What checkpoints cost: bytes, seconds of each, and the part of a run that they hold up. Pure.

A checkpoint holds trained weights and two states for each; frozen weights are never written. Our trainer writes it
whole on every host, so that a lost disk loses nothing, and puts together before what is in parts; with
`checkpoint.each_host: part` every host writes what its ranks hold, which come together in its memory.

Training waits while the state is copied into the host's memory; a thread writes it while training goes on. With
`checkpoint.asynchronous: false` training waits for the disk as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gangline.planner.candidate import Candidate
from gangline.planner.states import state_width, trained_shards, whole_share
from gangline.planner.traffic import Among, Exchange, exchange_s, trained_weights
from gangline.planner.training import BYTES
from gangline.runs.checkpoints import minutes_between
from gangline.runs.gang import layers_on

NOTABLE = 0.01
"""From which part of the run on it is said unasked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast bytes get somewhere, as far as it is known; bytes/s."""

    low: float
    likely: float
    high: float
    source: str

    def seconds(self, num_bytes: float) -> tuple[float, float, float]:
        """Least, likely and most for so many bytes."""
        return num_bytes / self.high, num_bytes / self.likely, num_bytes / self.low


DISK = Rate(low=0.1e9, likely=0.4e9, high=2e9, source="a disk of 0.1 to 2 GB/s assumed")
"""A disk of 7,200 rpm writes 80 to 200 MB/s, a SATA SSD 400 to 550, NVMe 1,700 to 3,000 and more (data sheets and
reviews); every file is flushed, and read once more for its digest."""
COPY = Rate(low=2e9, likely=8e9, high=25e9, source="PCIe")
"""From a card into pinned memory: PCIe 3.0 x8 to 4.0 x16 (8 and 32 GB/s on the line); from memory to memory alike."""
HANDED_OVER = Rate(low=0.4e9, likely=0.9e9, high=3e9, source="gloo inside a host")
"""From rank to rank of one host: 0.7 to 1.0 GiB/s seen between two processes of a machine with two busy cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How a job saves."""

    every_steps: float | None = None
    """Those of a number of epochs may not be whole."""
    every_minutes: float | Literal["auto"] | None = None
    waits: bool = False
    """Whether training waits until it is on the disk."""
    disk: Rate = DISK
    by_host: bool = False
    """Whether every host writes what its ranks hold, where none holds all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """Of one checkpoint; seconds are the least, what is likely, and the most."""

    num_bytes: int
    """Of all that is saved."""
    host_bytes: int
    """Of what one host writes; hosts write at the same time."""
    write_s: tuple[float, float, float]
    """Until it is on the disk."""
    hold_s: tuple[float, float, float]
    """For which training stands still."""
    minutes: float | None
    """After which one is due, however many steps that are; None: only steps count."""
    every_s: float | None
    """Between two of them; None: there is one, at the end, or the speed of a step is not known."""
    source: str
    """Where the seconds come from, for people."""

    @property
    def in_parts(self) -> bool:
        """Whether no host has all of it."""
        return self.host_bytes < self.num_bytes

    @property
    def share(self) -> float | None:
        """Likely part of the run in which training stands still for them; None: there is one, at the end."""
        return None if self.every_s is None else self.hold_s[1] / (self.every_s + self.hold_s[1])

    @property
    def is_late(self) -> bool:
        """Whether one may not be on the disk when the next is due, so that they come less often than the job says."""
        return self.every_s is not None and self.write_s[2] > self.every_s

    @property
    def is_notable(self) -> bool:
        """Whether whoever asks how long a run takes wants to know."""
        return self.is_late or (self.share or 0.0) >= NOTABLE


def save_cost(candidate: Candidate, saving: Saving) -> SaveCost:
    """What saving takes where a job runs that way."""
    training = candidate.training
    width = BYTES[training.parameters] + state_width(training, whole_share(candidate.architecture))
    num_bytes = round(width * trained_weights(candidate.architecture, training))
    by_host = saving.by_host and _is_apart(candidate)
    host_bytes = _most_on_a_host(candidate, num_bytes) if by_host else num_bytes
    written, copied = saving.disk.seconds(host_bytes), COPY.seconds(host_bytes)
    gather_s = 0.0 if by_host else _gather_s(candidate, num_bytes)
    low, likely, high = written if saving.waits else copied
    hold = (low + gather_s, likely + gather_s, high + gather_s)
    if by_host:
        ranks = max(candidate.world.fabric.slots)
        handed_over = HANDED_OVER.seconds(host_bytes * (ranks - 1) / ranks)
        hold = (low + handed_over[0], likely + handed_over[1], high + handed_over[2])
    minutes = minutes_between(hold[1], written[1]) if saving.every_minutes == "auto" else saving.every_minutes
    turns = [60 * minutes] if minutes is not None else []
    turns += [saving.every_steps * candidate.time.total_s] if saving.every_steps and candidate.time is not None else []
    return SaveCost(
        num_bytes=num_bytes,
        host_bytes=host_bytes,
        write_s=written,
        hold_s=hold,
        minutes=minutes,
        every_s=min(turns, default=None),
        source=saving.disk.source,
    )


def _is_apart(candidate: Candidate) -> bool:
    """Whether no host has the whole trained state. What DeepSpeed has in parts is no rows of tensors: it is whole."""
    strategy, hosts = candidate.strategy, candidate.world.hosts
    if len(hosts) == 1 or strategy.half.sharded_by == "deepspeed":
        return False
    if strategy.half.layers == "staged":
        return any(count < candidate.architecture.num_layers for count in _layers_on_hosts(candidate))
    return trained_shards(candidate.training, strategy) > max(candidate.world.fabric.slots)


def _most_on_a_host(candidate: Candidate, num_bytes: int) -> int:
    """Of what all hosts save, what the one with the most saves; layers count alike."""
    if candidate.strategy.half.layers == "staged":
        return math.ceil(num_bytes * max(_layers_on_hosts(candidate)) / candidate.architecture.num_layers)
    counts = candidate.world.fabric.slots
    return math.ceil(num_bytes * max(counts) / sum(counts))


def _layers_on_hosts(candidate: Candidate) -> list[int]:
    """In pipelines, by host."""
    hosts, strategy = [placement.host for placement in candidate.world.placements], candidate.strategy
    return [len(layers) for layers in layers_on(hosts, strategy.stages, replicas=strategy.replicas).values()]


def _gather_s(candidate: Candidate, num_bytes: int) -> float:
    """For what ranks have in parts to come together on every host."""
    strategy, half = candidate.strategy, candidate.strategy.half
    whole = half.layers == "staged"
    ranks = strategy.world_size if whole else trained_shards(candidate.training, strategy)
    ranks = strategy.shard_size if half.layers == "sliced" else ranks
    row = strategy.world_size // strategy.replicas
    inside = whole and strategy.replicas > 1 and not _is_apart(candidate)  # each host has all of it
    ranks = row if inside else ranks
    if ranks == 1:
        return 0.0
    among: Among = "shard" if inside or half.shards_per_host else "world"
    gather = Exchange(
        what="state to be saved",
        operation="broadcast" if whole else "all_gather",  # in a pipeline a tensor is whole, on one rank
        num_bytes=num_bytes,
        times=1,
        ranks=ranks,
        number=candidate.training.parameters,
        among=among,
        backend="gloo" if any(placement.gpu is None for placement in candidate.world.placements) else "nccl",
    )
    return exchange_s(gather, candidate.world.fabric, shard_size=row if whole else strategy.shard_size)
