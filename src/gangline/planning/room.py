"""Who has room for what: memory of ranks by what they do, and layers of a pipeline by memory. Pure.

Ranks that do the same on a device of the same kind need the same, whatever their number and their host, so it is
reckoned once. Of stages with as many layers of the same shapes the one nearer to the front needs more, for it holds
more micro-batches at once: whether all of them fit is told by the first, and by those behind it with less memory free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from gangline.planning.architecture import Architecture
from gangline.planning.memory import Memory, rank_memory
from gangline.planning.overheads import CPU, CUDA, Overheads
from gangline.planning.shares import split_layers
from gangline.planning.training import Strategy, Training
from gangline.planning.world import Seat
from gangline.runs.schedule import ahead

SURE, EVEN = 0.9, 0.5
"""Chances to fit: from here on it fits; below that it does not; in between it is tight."""
Part = tuple[tuple[int, int], ...]
"""Layers of a pipeline's stage: (index of the shape in the architecture, how many of it)."""
Role = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Memory of one rank."""

    seat: Seat
    memory: Memory
    chance: float | None
    """That it fits; None where the seat's memory is not known."""

    @property
    def shortage_bytes(self) -> int:
        """What is likely to be missing; below 0 where there is room."""
        return self.memory.process.likely - (self.seat.free_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory of ranks that train one model in one way on some seats."""

    architecture: Architecture
    training: Training
    seats: tuple[Seat, ...]
    known: dict[Role, Memory] = field(default_factory=dict)
    """What was reckoned for this training, on whatever seats."""

    def memory(self, strategy: Strategy, rank: int) -> Memory:
        """Of one rank."""
        seat = self.seats[rank]
        if strategy.kind == "pipeline":
            stages, number = strategy.place(rank)
            first = ahead(number, len(stages), eager=strategy.eager)
            role: Role = (*self._work(strategy, rank), first, seat.gpu is None)
        else:
            role = (strategy, seat.gpu is None)
        if (found := self.known.get(role)) is None:
            found = rank_memory(self.architecture, self.training, strategy, rank=rank, device=overheads(seat))
            self.known[role] = found
        return found

    def needs(self, strategy: Strategy) -> tuple[Need, ...]:
        """Of every rank."""
        return tuple(self._need(strategy, rank) for rank in range(len(self.seats)))

    def nearness(self, strategy: Strategy) -> tuple[float, int]:
        """The chance that all ranks fit, and the bytes that the tightest of them has to spare.

        A seat whose memory is not known counts as fitting.
        """
        tight = (self._need(strategy, rank) for rank in self._tight(strategy))
        return min((1.0 if need.chance is None else need.chance, -need.shortage_bytes) for need in tight)

    def stages(self, seconds: Sequence[float], *, replicas: int = 1) -> tuple[int, ...] | None:
        """Layers of every pipeline stage, by speed as far as memory allows it: surely, else probably.

        seconds: of a micro-batch, by rank. replicas: each pipeline is cut by itself. Where nothing fits, by memory
        alone, which comes nearest to it. None where there are more ranks than layers.
        """
        found: list[int] = []
        size = len(self.seats) // replicas
        for begin in range(0, len(self.seats), size):
            row = replace(self, seats=self.seats[begin : begin + size])
            cut = row._stages(seconds[begin : begin + size])
            if cut is None:
                return None
            found += cut
        return tuple(found)

    def _stages(self, seconds: Sequence[float]) -> tuple[int, ...] | None:
        """Of one pipeline over all seats."""
        depth, size = self.architecture.num_layers, len(self.seats)
        fast = split_layers(seconds, depth, most=[depth] * size)
        if fast is None or self.nearness(pipeline(fast))[0] >= SURE:
            return fast
        for chance in (SURE, EVEN):
            most = list(self._most_layers(chance))
            if len(most) == size and (found := split_layers(seconds, depth, most=most)) is not None:
                return found
        return split_layers([1 / max(1, seat.free_bytes or 1) for seat in self.seats], depth, most=[depth] * size)

    def _need(self, strategy: Strategy, rank: int) -> Need:
        seat, memory = self.seats[rank], self.memory(strategy, rank)
        return Need(seat=seat, memory=memory, chance=None if seat.free_bytes is None else memory.fits(seat.free_bytes))

    def _work(self, strategy: Strategy, rank: int) -> Role:
        """What ranks have to share to do the same, but for the micro-batches that they hold at once."""
        if strategy.kind != "pipeline":
            return ()
        stages, number = strategy.place(rank)
        start, last = sum(stages[:number]), len(stages) - 1
        return number == 0, number == last, self._part(start, start + stages[number])

    def _part(self, start: int, stop: int) -> Part:
        found, index = [], 0
        for number, layer in enumerate(self.architecture.layers):
            taken = min(stop, index + layer.count) - max(start, index)
            if taken > 0:
                found.append((number, taken))
            index += layer.count
        return tuple(found)

    def _tight(self, strategy: Strategy) -> Iterator[int]:
        """The ranks that tell whether all fit: each has less memory free than those before it that do the same."""
        least: dict[Role, int] = {}
        size = len(self.seats) // strategy.replicas
        for rank, seat in enumerate(self.seats):
            if rank % size == 0:  # in the next pipeline others are nearer to the front
                least = {}
            alike = (*self._work(strategy, rank), seat.gpu is None, seat.free_bytes is None)
            free_bytes = seat.free_bytes or 0
            if alike not in least or free_bytes < least[alike]:
                least[alike] = free_bytes
                yield rank

    def _most_layers(self, chance: float) -> Iterator[int]:
        """Layers that each rank has memory for, with that chance; ends with the first that has none."""
        most: dict[object, int] = {}
        for rank, seat in enumerate(self.seats):
            alike = (seat.free_bytes, seat.gpu is None)
            found = most[alike] = self._most_of(rank, chance, near=most.get(alike, 0))
            if not found:
                return
            yield found

    def _most_of(self, rank: int, chance: float, *, near: int) -> int:
        depth, size, seat = self.architecture.num_layers, len(self.seats), self.seats[rank]

        def holds(layers: int) -> bool:
            rest = [1] * size
            rest[rank] = layers
            rest[rank - 1 if rank else size - 1] += depth - sum(rest)
            return self.memory(pipeline(rest), rank).fits(seat.free_bytes or 0) >= chance

        return depth - size + 1 if seat.free_bytes is None else most_that(holds, depth - size + 1, near=near)


def most_that(holds: Callable[[int], bool], high: int, *, near: int = 0) -> int:
    """The largest of 1..high that holds, if all below it do, by halving; 0: none does.

    near: where it may lie. It and what is next to it are tried first.
    """
    low = 0
    while low < high:
        middle = near if low < near <= high else (low + high + 1) // 2
        if holds(middle):
            low, near = middle, near + 1
        else:
            high, near = middle - 1, near - 1
    return low


def pipeline(stages: Sequence[int], *, replicas: int = 1) -> Strategy:
    """Pipelines of these stages, one after the other."""
    return Strategy(kind="pipeline", world_size=len(stages), stages=tuple(stages), replicas=replicas)


def overheads(seat: Seat) -> Overheads:
    """What a process takes beside tensors on that seat."""
    return CPU if seat.gpu is None else CUDA
