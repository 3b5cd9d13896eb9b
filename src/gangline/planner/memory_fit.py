"""Who has room for what: memory of ranks by what they do, and layers of a pipeline by memory. Pure.

Ranks that do the same on a device of the same kind need the same, whatever their number and their host, so it is
reckoned once. Of stages with as many layers of the same shapes the one nearer to the front needs more, for it holds
more micro-batches at once: whether all of them fit is told by the first, and by those behind it with less memory free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gangline.planner.architecture import Architecture
from gangline.planner.machines import Placement
from gangline.planner.memory import CPU, CUDA, HOPPER, LARGE_WORKSPACE_FROM, Memory, Overheads, rank_memory
from gangline.planner.training import PlannedStrategy, Training
from gangline.runs.formulas import ahead

SURE, EVEN = 0.9, 0.5
"""Chances to fit: from here on it fits; below that it does not; in between it is tight."""
LayerRanges = tuple[tuple[int, int], ...]
"""Layers of a pipeline's stage: (index of the shape in the architecture, how many of it)."""
Role = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Memory of one rank."""

    placement: Placement
    memory: Memory
    chance: float | None
    """That it fits; None where the placement's memory is not known."""

    @property
    def shortage_bytes(self) -> int:
        """What is likely to be missing; below 0 where there is room."""
        return self.memory.process.likely - (self.placement.free_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Memory of ranks that train one model in one way on some placements."""

    architecture: Architecture
    training: Training
    placements: tuple[Placement, ...]
    known: dict[Role, Memory] = field(default_factory=dict)
    """What was reckoned for this training, on whatever placements."""
    each: tuple[MemoryFit, ...] = ()
    """By rank, where ranks train in ways of their own; `training` is then what these have in common."""

    def memory(self, strategy: PlannedStrategy, rank: int) -> Memory:
        """Of one rank."""
        if self.each:
            return self.each[rank].memory(strategy, rank)
        placement = self.placements[rank]
        if strategy.half.layers == "staged":
            stages, number = strategy.place(rank)
            first = ahead(number, len(stages), eager=strategy.eager)
            role: Role = (*self._work(strategy, rank), first, device_of(placement))
        else:
            role = (strategy, device_of(placement))
        if (found := self.known.get(role)) is None:
            device = device_of(placement)
            found = rank_memory(self.architecture, self.training, strategy, rank=rank, device=device)
            self.known[role] = found
        return found

    def needs(self, strategy: PlannedStrategy) -> tuple[Need, ...]:
        """Of every rank."""
        return tuple(self._need(strategy, rank) for rank in range(len(self.placements)))

    def nearness(self, strategy: PlannedStrategy) -> tuple[float, int]:
        """The chance that all ranks fit, and the bytes that the tightest of them has to spare.

        A placement whose memory is not known counts as fitting.
        """
        tight = (self._need(strategy, rank) for rank in self._tight(strategy))
        return min((1.0 if need.chance is None else need.chance, -need.shortage_bytes) for need in tight)

    def _need(self, strategy: PlannedStrategy, rank: int) -> Need:
        placement, memory = self.placements[rank], self.memory(strategy, rank)
        return Need(
            placement=placement,
            memory=memory,
            chance=None if placement.free_bytes is None else memory.fits(placement.free_bytes),
        )

    def _work(self, strategy: PlannedStrategy, rank: int) -> Role:
        """What ranks have to share to do the same, but for the micro-batches that they hold at once."""
        if strategy.half.layers != "staged":
            return ()
        stages, number = strategy.place(rank)
        start, last = sum(stages[:number]), len(stages) - 1
        return number == 0, number == last, layer_ranges(self.architecture, start, start + stages[number])

    def _tight(self, strategy: PlannedStrategy) -> Iterator[int]:
        """The ranks that tell whether all fit: each has less memory free than those before it that do the same."""
        least: dict[Role, int] = {}
        size = len(self.placements) // strategy.replicas
        for rank, placement in enumerate(self.placements):
            if rank % size == 0:  # in the next pipeline others are nearer to the front
                least = {}
            alike: Role = (*self._work(strategy, rank), device_of(placement), placement.free_bytes is None)
            alike = (*alike, id(self.each[rank])) if self.each else alike
            free_bytes = placement.free_bytes or 0
            if alike not in least or free_bytes < least[alike]:
                least[alike] = free_bytes
                yield rank


def device_of(placement: Placement) -> Overheads:
    """What a process on it takes beside its tensors."""
    if placement.gpu is None:
        return CPU
    capability = "" if placement.spec is None else placement.spec.compute_capability
    return HOPPER if float(capability or 0) >= LARGE_WORKSPACE_FROM else CUDA


def layer_ranges(architecture: Architecture, start: int, stop: int) -> LayerRanges:
    """The layers from `start` up to `stop`."""
    found, index = [], 0
    for number, layer in enumerate(architecture.layers):
        taken = min(stop, index + layer.count) - max(start, index)
        if taken > 0:
            found.append((number, taken))
        index += layer.count
    return tuple(found)
