"""One way to run a job, weighed: what every rank needs, who does how much, how long a step takes. Pure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

from gangline.planning.architecture import Architecture
from gangline.planning.links import Fabric
from gangline.planning.memory import Memory, rank_memory
from gangline.planning.overheads import CPU, CUDA, Overheads
from gangline.planning.shares import shares_by_time, split_layers
from gangline.planning.speed import ComputeModel, RankWork, StepTime, step_time
from gangline.planning.traffic import Backend, Traffic, traffic
from gangline.planning.training import Strategy, Training
from gangline.planning.world import Seat, World
from gangline.runs.deal import split_whole

Compute = Callable[[Seat, Training], ComputeModel | None]
"""How fast a seat computes; None where nobody knows."""
SURE, EVEN = 0.9, 0.5
"""Chances to fit: from here on it fits; below that it does not; in between it is tight."""
IN_STEP = ("fsdp", "hsdp", "zero-2", "zero-3")
"""Every rank takes part in every micro-batch's exchanges: whoever has fewer of them waits for the others."""
BUILT_STRATEGIES = ("single", "ddp")
BUILT_METHODS = ("full", "lora")
"""What gangline's own trainer does so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be decided."""

    architecture: Architecture
    training: Training
    """As the job says; where it leaves something open, that is varied."""
    batch: int
    """Samples of an optimizer step."""
    compute: Compute
    open: tuple[str, ...] = ()
    """See `Job.open`."""

    @property
    def tokens_per_sample(self) -> float:
        """What a step's time is reckoned with: samples are taken to be full, as packing makes them."""
        return float(self.training.sequence_length)


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
class Option:
    """One way to run the job."""

    architecture: Architecture
    world: World
    strategy: Strategy
    training: Training
    shares: tuple[int, ...]
    """Micro-batches of a full step, by rank; in a pipeline every rank has all of them."""
    needs: tuple[Need, ...]
    traffic: Traffic
    time: StepTime | None
    """None where the speed of a seat is not known."""
    tokens_per_sample: float = 0.0
    """With which the times were reckoned."""
    source: str = ""
    """Where the times of computation come from, for people."""
    profiles: tuple[str | None, ...] = ()
    """By rank: see `ComputeModel.profile`."""

    @property
    def chance(self) -> float:
        """That all ranks fit; a seat whose memory is not known counts as fitting."""
        return min((need.chance for need in self.needs if need.chance is not None), default=1.0)

    @property
    def fits(self) -> bool:
        """Surely enough."""
        return self.chance >= SURE

    @property
    def may_fit(self) -> bool:
        """More likely than not."""
        return self.chance >= EVEN

    @property
    def tightest(self) -> Need:
        """The rank that is the first not to fit."""
        return min(self.needs, key=lambda need: (1.0 if need.chance is None else need.chance, -need.shortage_bytes))

    @property
    def is_built(self) -> bool:
        """Whether gangline's own trainer can do it."""
        return (
            self.strategy.kind in BUILT_STRATEGIES
            and self.training.method in BUILT_METHODS
            and self.training.optimizer == "adamw"
        )

    @property
    def is_exact(self) -> bool:
        """Whether it computes what one big machine would."""
        return self.strategy.kind != "local-sgd"

    @property
    def seconds(self) -> float:
        """Of a step; infinite where it is not known."""
        return float("inf") if self.time is None else self.time.total_s


def weigh(question: Question, world: World, strategy: Strategy, training: Training) -> Option:
    """Everything that can be said of one way to run the job."""
    count = max(1, question.batch // training.micro_batch)
    tokens = training.micro_batch * question.tokens_per_sample
    models = [_scaled(question.compute(seat, training), seat) for seat in world.seats]
    shares = _shares(world, strategy, models, count=count, tokens=tokens, length=question.tokens_per_sample)
    training = dataclasses.replace(training, accumulation=2 if max(shares) > 1 else 1)
    backend: Backend = "gloo" if any(seat.gpu is None for seat in world.seats) else "nccl"
    flow = traffic(question.architecture, training, strategy, micro_batches=max(shares), backend=backend)
    known = [model for model in models if model is not None]
    time = None
    if len(known) == len(models):
        work = [RankWork(compute=model, micro_batches=share) for model, share in zip(known, shares, strict=True)]
        time = step_time(strategy, flow, work, fabric(world), tokens=tokens, length=question.tokens_per_sample)
    return Option(
        architecture=question.architecture,
        world=world,
        strategy=strategy,
        training=training,
        shares=shares,
        needs=_needs(question.architecture, world, strategy, training),
        traffic=flow,
        time=time,
        tokens_per_sample=question.tokens_per_sample,
        source=", ".join(dict.fromkeys(model.source for model in known)),
        profiles=tuple(None if model is None else model.profile for model in models),
    )


def stages(question: Question, world: World, training: Training) -> tuple[int, ...] | None:
    """Layers of every pipeline stage, by speed as far as memory allows it: surely, else probably.

    Where nothing does, by memory alone, which comes nearest to fitting. None where there are more ranks than layers.
    """
    depth, size = question.architecture.num_layers, len(world.seats)
    if size > depth:
        return None
    models = [_scaled(question.compute(seat, training), seat) for seat in world.seats]
    tokens, length = training.micro_batch * question.tokens_per_sample, question.tokens_per_sample
    seconds = [1.0 if model is None else model.micro_batch_s(tokens, length) for model in models]
    fast = split_layers(seconds, depth, most=[depth] * size)
    architecture = question.architecture
    if fast is None or all(_holds(architecture, world, training, fast, rank, SURE) for rank in range(size)):
        return fast
    for chance in (SURE, EVEN):
        most = [_most_layers(architecture, world, training, rank, chance) for rank in range(size)]
        if (found := split_layers(seconds, depth, most=most)) is not None:
            return found
    return split_layers([1 / max(1, seat.free_bytes or 1) for seat in world.seats], depth, most=[depth] * size)


def fabric(world: World) -> Fabric:
    """The links of a world's ranks."""
    slots = tuple(len(world.seats_of(host)) for host in world.hosts)
    return Fabric(slots=slots, wire=world.wire, inside=world.inside)


def overheads(seat: Seat) -> Overheads:
    """What a process takes beside tensors on that seat."""
    return CPU if seat.gpu is None else CUDA


def _scaled(model: ComputeModel | None, seat: Seat) -> ComputeModel | None:
    return model if model is None or seat.slowdown == 1.0 else model.scaled(seat.slowdown)


def _shares(
    world: World,
    strategy: Strategy,
    models: list[ComputeModel | None],
    *,
    count: int,
    tokens: float,
    length: float,
) -> tuple[int, ...]:
    size = len(world.seats)
    if strategy.kind == "pipeline":
        return (count,) * size
    if any(seat.weight is not None for seat in world.seats) and strategy.kind not in IN_STEP:
        return split_whole(count, [1.0 if seat.weight is None else seat.weight for seat in world.seats])
    known = [model for model in models if model is not None]
    if len(known) < size or strategy.kind in IN_STEP:
        return split_whole(count, [1.0] * size)
    return shares_by_time([model.micro_batch_s(tokens, length) for model in known], count)


def _needs(architecture: Architecture, world: World, strategy: Strategy, training: Training) -> tuple[Need, ...]:
    needs = []
    for rank, seat in enumerate(world.seats):
        role = rank if strategy.kind == "pipeline" else 0
        memory = _memory(architecture, training, strategy, role, overheads(seat))
        chance = None if seat.free_bytes is None else memory.fits(seat.free_bytes)
        needs.append(Need(seat=seat, memory=memory, chance=chance))
    return tuple(needs)


@functools.lru_cache(maxsize=4096)
def _memory(architecture: Architecture, training: Training, strategy: Strategy, rank: int, device: Overheads) -> Memory:
    return rank_memory(architecture, training, strategy, rank=rank, device=device)


def _most_layers(architecture: Architecture, world: World, training: Training, rank: int, chance: float) -> int:
    """Layers that a rank has memory for, by halving."""
    depth, size, seat = architecture.num_layers, len(world.seats), world.seats[rank]
    low, high = 0, depth - size + 1
    if seat.free_bytes is None:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        rest = [1] * size
        rest[rank] = middle
        rest[rank - 1 if rank else size - 1] += depth - sum(rest)
        holds = _holds(architecture, world, training, tuple(rest), rank, chance)
        low, high = (middle, high) if holds else (low, middle - 1)
    return low


def _holds(
    architecture: Architecture, world: World, training: Training, layers: tuple[int, ...], rank: int, chance: float
) -> bool:
    """Whether a rank has memory for its stage, with that chance at least."""
    seat = world.seats[rank]
    strategy = Strategy(kind="pipeline", world_size=len(layers), stages=layers)
    memory = _memory(architecture, training, strategy, rank, overheads(seat))
    return seat.free_bytes is None or memory.fits(seat.free_bytes) >= chance
