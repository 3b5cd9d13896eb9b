"""One way to run a job, weighed: what every rank needs, who does how much, how long a step takes. Pure.

A `Draft` says only what decides between ways, and an `Option` all of one. Drafts of a decision share a `Bench`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gangline.planner.architecture import Architecture
from gangline.planner.config import unpackable
from gangline.planner.machines import PlannedCluster, Seat
from gangline.planner.memory import Memory
from gangline.planner.room import EVEN, SURE, Need, Room
from gangline.planner.shares import Dividing, best_count, ceiling, with_others
from gangline.planner.speed import ComputeModel, RankWork, StepTime, step_s, step_time, works_of
from gangline.planner.traffic import CollectiveBackend, Fabric, Traffic, traffic
from gangline.planner.training import Number, PlannedStrategy, Training
from gangline.runs.gang import shares_by_time, split_whole, whole_count
from gangline.runs.job import StrategyJob
from gangline.strategies.base import Violation, asked_of, violations
from gangline.strategies.table import plan_half
from gangline.units import format_bytes

# Ranks that do the same micro-batches: pipelines, and under tp the ranks of a host. Pure.


def crews(world: PlannedCluster, strategy: PlannedStrategy) -> list[range]:
    """Ranks of each; where everybody does others, each rank by itself."""
    size = len(world.seats)
    if strategy.half.layers == "sliced":
        hosts = [seat.host for seat in world.seats]
        firsts = [hosts.index(host) for host in world.hosts]
        return [range(first, end) for first, end in zip(firsts, (*firsts[1:], size), strict=True)]
    row = size // strategy.replicas if strategy.half.layers == "staged" else 1
    return [range(first, first + row) for first in range(0, size, row)]


def weights_of(world: PlannedCluster, found: Sequence[range]) -> list[float]:
    """What the cluster file says of their speeds, by crew."""
    weights = [1.0 if seat.weight is None else seat.weight for seat in world.seats]
    return [sum(weights[rank] for rank in crew) for crew in found]


def hosts_s(seconds: Sequence[float], found: Sequence[range]) -> tuple[float, ...]:
    """Of a micro-batch, by crew: as its slowest rank."""
    return tuple(max(seconds[rank] for rank in crew) for crew in found)


def rows_s(
    strategy: PlannedStrategy, models: Sequence[ComputeModel], *, tokens: float, length: float
) -> tuple[float, ...]:
    """Of a micro-batch, by pipeline: as its slowest stage, for that decides how many go through."""
    rows = works_of(strategy, [RankWork(compute=model, micro_batches=1) for model in models])
    return tuple(max(stage.compute.micro_batch_s(tokens, length) for stage in row) for row in rows)


Compute = Callable[[Seat, Training], ComputeModel | None]
"""How fast a seat computes; None where nobody knows. Of cards of a host that are alike one is asked, whatever their
index and their free memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be decided."""

    architecture: Architecture
    training: Training
    """As the job says; where it leaves something open, that is varied."""
    batch: int
    """Samples of an optimizer step; where that is open, about how many."""
    compute: Compute
    open: tuple[str, ...] = ()
    """See `Job.open`."""
    about: int | None = None
    """What the job wishes for, where `batch` was chosen near it."""
    strategy: StrategyJob = field(default_factory=StrategyJob)
    """As the job says. Where it does not ask for local-sgd, that is weighed with these numbers all the same."""

    @property
    def tokens_per_sample(self) -> float:
        """What a step's time is reckoned with: samples are taken to be full, as packing makes them."""
        return float(self.training.sequence_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run the job."""

    architecture: Architecture
    world: PlannedCluster
    strategy: PlannedStrategy
    training: Training
    shares: tuple[int, ...]
    """Micro-batches of a full step, by rank: those of its pipeline, or under tp of its host."""
    needs: tuple[Need, ...]
    traffic: Traffic
    time: StepTime | None
    """None where the speed of a seat is not known."""
    narrow_s: float | None = None
    """Of a step whose gradients travel in bf16; None where they do, would be no narrower, or nobody knows."""
    tokens_per_sample: float = 0.0
    """With which the times were reckoned."""
    source: str = ""
    """Where the times of computation come from, for people."""
    profiles: tuple[str | None, ...] = ()
    """By rank: see `ComputeModel.profile`."""
    dealt_s: tuple[float, ...] = ()
    """See `Shift.dealt_s`."""

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
    def on_disk(self) -> str:
        """What every rank writes to its host's disk and reads from it, in words; "" if nothing."""
        most = max(need.memory.disk_bytes for need in self.needs)
        return f"{format_bytes(most)} of each rank are written and read in every step" if most else ""

    @property
    def is_built(self) -> bool:
        """Whether gangline's own trainer can do it."""
        return is_built(self.strategy, self.training, self.architecture)

    @property
    def is_exact(self) -> bool:
        """Whether it computes what one big machine would."""
        return is_exact(self.strategy)

    @property
    def seconds(self) -> float:
        """Of a step; infinite where it is not known."""
        return float("inf") if self.time is None else self.time.total_s

    @property
    def dealt(self) -> tuple[int, ...]:
        """Shares of those that are dealt to, each once: hosts under tp, pipelines, else ranks."""
        return tuple(self.shares[crew[0]] for crew in crews(self.world, self.strategy))

    def dividing(self, question: Question) -> Dividing:
        """How well the batch of the question, which this is an answer to, divides."""
        found = Dividing(batch=question.batch, about=question.about, shares=self.dealt, ceiling=None)
        if not self.dealt_s:
            return found
        here = ceiling(self.dealt_s, sum(self.dealt))
        found = dataclasses.replace(found, ceiling=here, equal=self.strategy.half.lockstep)
        return with_others(found, self.dealt_s, micro_batch=self.training.micro_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationContext:
    """What was reckoned for one job, whatever the machines; it lives as long as a decision."""

    memories: dict[Training, dict[tuple[object, ...], Memory]] = field(default_factory=dict)
    """See `Room.known`."""
    models: dict[Training, dict[tuple[object, ...], ComputeModel | None]] = field(default_factory=dict)
    """Speeds of seats, by what these depend on."""

    def room(self, question: Question, world: PlannedCluster, training: Training, *, accumulation: int) -> Room:
        """Memory of ranks that do so many micro-batches, or more than one."""
        training = dataclasses.replace(training, accumulation=accumulation)
        known = self.memories.setdefault(training, {})
        return Room(architecture=question.architecture, training=training, seats=world.seats, known=known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """One training on one world: what all ways to share the work have in common."""

    question: Question
    world: PlannedCluster
    training: Training
    fabric: Fabric
    models: tuple[ComputeModel | None, ...]
    """By rank."""
    seconds: tuple[float, ...]
    """Of a micro-batch, by rank; 1 where the speed is not known."""
    own: tuple[int, ...]
    """Micro-batches by rank where each does what it can."""
    even: tuple[int, ...]
    """Micro-batches by rank where all take part in every exchange."""
    alone: Room
    """Memory of ranks that do one micro-batch of a step."""
    several: Room
    """Memory of ranks that sum gradients over several."""

    @property
    def count(self) -> int:
        """Micro-batches of a step that nobody deals."""
        return _count(self.question, self.training)

    @property
    def is_timed(self) -> bool:
        """Whether the speed of every seat is known."""
        return None not in self.models

    @property
    def is_uniform(self) -> bool:
        """Whether it does not matter which layers a stage has: the first and the last alone may have another shape."""
        layers = self.question.architecture.layers
        ends = (0, len(layers) - 1)
        return sum(number not in ends or layer.count > 1 for number, layer in enumerate(layers)) <= 1

    def shares(self, strategy: PlannedStrategy) -> tuple[int, ...]:
        """Micro-batches of every rank: those of its pipeline, or under tp of its host."""
        half = strategy.half
        if half.layers != "all":
            return self._of_crews(strategy)
        return self.even if half.lockstep else self.own

    def samples(self, strategy: PlannedStrategy) -> int:
        """Of a step."""
        shares = self.shares(strategy)
        return self.training.micro_batch * sum(shares[crew[0]] for crew in crews(self.world, strategy))

    def _of_crews(self, strategy: PlannedStrategy) -> tuple[int, ...]:
        """Pipelines, or hosts, that do what they can; ranks of one do the same."""
        found = crews(self.world, strategy)
        if strategy.half.layers == "staged" and strategy.replicas == 1:
            shares: tuple[int, ...] = (self.count,)
        elif _is_weighted(self.world):
            shares = split_whole(self.count, weights_of(self.world, found))
        else:
            seconds = self._crews_s(strategy)
            count = _dealt(self.question, self.training, seconds) if self.is_timed else self.count
            shares = shares_by_time(seconds, count)
        return tuple(share for crew, share in zip(found, shares, strict=True) for _ in crew)

    def _crews_s(self, strategy: PlannedStrategy) -> tuple[float, ...]:
        """Of a micro-batch, by pipeline or by host. Pipelines of which nobody knows the speed are as fast."""
        if strategy.half.layers == "sliced":
            return hosts_s(self.seconds, crews(self.world, strategy))
        models = [model for model in self.models if model is not None]
        if len(models) < len(self.models):
            return (1.0,) * strategy.replicas
        length = self.question.tokens_per_sample
        return rows_s(strategy, models, tokens=self.training.micro_batch * length, length=length)

    def dealt_s(self, strategy: PlannedStrategy) -> tuple[float, ...]:
        """Seconds of the micro-batches that are dealt, by rank, by pipeline, under tp by host; none where speeds have
        no say in who gets how many.
        """
        half = strategy.half
        if not self.is_timed or _is_weighted(self.world) or (half.layers == "staged" and strategy.replicas == 1):
            return ()
        if half.layers != "all":
            return self._crews_s(strategy)
        return _equal(self.seconds) if half.lockstep else self.seconds

    def plain(self, kind: str) -> PlannedStrategy:
        """A strategy of all ranks without numbers of its own."""
        asked = self.question.strategy.kind == kind
        return PlannedStrategy(kind=kind, world_size=len(self.world.seats), asked=asked)

    def offload(self, kind: str) -> tuple[Literal["optimizer", "parameters"], ...]:
        """What the job that asks for this strategy has in the machines' memory."""
        job = self.question.strategy
        return job.offload if job.kind == kind else ()

    def room(self, kind: str) -> Room:
        """Memory of its ranks; of pipelines as if each had all micro-batches, for that is known before their layers."""
        staged = plan_half(kind).layers == "staged"
        several = self.count > 1 if staged else max(self.shares(PlannedStrategy(kind=kind, world_size=1))) > 1
        return self.several if several else self.alone

    @property
    def told_seconds(self) -> tuple[float, ...]:
        """Seconds of a micro-batch by rank; where the cluster file says who does how much, in proportion to that."""
        if not _is_weighted(self.world):
            return self.seconds
        return tuple(1 / max(1e-6, 1.0 if seat.weight is None else seat.weight) for seat in self.world.seats)

    def draft(self, strategy: PlannedStrategy) -> Draft:
        """One way to share the work."""
        room = self.room(strategy.kind)
        chance, spare_bytes = room.nearness(strategy)
        return Draft(shift=self, strategy=strategy, room=room, chance=chance, spare_bytes=spare_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One way to run the job, with what decides between ways; the words are those of `Option`."""

    shift: Shift
    strategy: PlannedStrategy
    room: Room
    chance: float
    spare_bytes: int
    """Of the tightest rank."""

    @property
    def training(self) -> Training:
        """What a rank computes."""
        return self.room.training

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches by rank."""
        return self.shift.shares(self.strategy)

    @property
    def fits(self) -> bool:
        """Surely enough."""
        return self.chance >= SURE

    @property
    def may_fit(self) -> bool:
        """More likely than not."""
        return self.chance >= EVEN

    @property
    def is_built(self) -> bool:
        """Whether gangline's own trainer can do it."""
        return is_built(self.strategy, self.training, self.shift.question.architecture)

    @property
    def is_exact(self) -> bool:
        """Whether it computes what one big machine would."""
        return is_exact(self.strategy)

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.shift.samples(self.strategy)

    def seconds(self) -> float:
        """Of a step; infinite where it is not known. Reckoned anew for each call."""
        if not self.shift.is_timed:
            return float("inf")
        tokens, length = self._tokens()
        return step_s(self.strategy, self._traffic(), self._work(), self.shift.fabric, tokens=tokens, length=length)

    def weighed(self) -> Option:
        """Everything that can be said of it."""
        shift, flow, time = self.shift, self._traffic(), None
        tokens, length = self._tokens()
        if shift.is_timed:
            time = step_time(self.strategy, flow, self._work(), shift.fabric, tokens=tokens, length=length)
        return Option(
            architecture=shift.question.architecture,
            world=shift.world,
            strategy=self.strategy,
            training=self.training,
            shares=self.shares,
            needs=self.room.needs(self.strategy),
            traffic=flow,
            time=time,
            narrow_s=self._narrow_s(),
            tokens_per_sample=length,
            source=", ".join(dict.fromkeys(model.source for model in shift.models if model is not None)),
            profiles=tuple(None if model is None else model.profile for model in shift.models),
            dealt_s=shift.dealt_s(self.strategy),
        )

    def _narrow_s(self) -> float | None:
        training = self.training
        if (
            not self.strategy.half.narrows
            or training.parameters != "fp32"
            or training.exchange
            or not self.shift.is_timed
        ):
            return None
        (tokens, length), flow = self._tokens(), self._traffic(exchange="bf16")
        return step_s(self.strategy, flow, self._work(), self.shift.fabric, tokens=tokens, length=length)

    def _tokens(self) -> tuple[float, float]:
        """Of a micro-batch, and of a sample."""
        length = self.shift.question.tokens_per_sample
        return self.training.micro_batch * length, length

    def _work(self) -> list[RankWork]:
        works = zip(self.shift.models, self.shares, strict=True)
        return [RankWork(compute=model, micro_batches=share) for model, share in works if model is not None]

    def _traffic(self, *, exchange: Number | None = None) -> Traffic:
        backend: CollectiveBackend = "gloo" if any(seat.gpu is None for seat in self.shift.world.seats) else "nccl"
        architecture, shares = self.shift.question.architecture, self.shares
        training = dataclasses.replace(self.training, exchange=exchange) if exchange else self.training
        return traffic(architecture, training, self.strategy, micro_batches=max(shares), backend=backend)


def weigh(question: Question, world: PlannedCluster, strategy: PlannedStrategy, training: Training) -> Option:
    """Everything that can be said of one way to run the job."""
    return shifts(question, world, [training], EvaluationContext())[0].draft(strategy).weighed()


def shifts(
    question: Question, world: PlannedCluster, trainings: Sequence[Training], bench: EvaluationContext
) -> list[Shift]:
    """Each of the trainings on one world."""
    links = fabric(world)
    return [_shift(question, world, links, training, bench) for training in trainings]


def _shift(
    question: Question, world: PlannedCluster, links: Fabric, training: Training, bench: EvaluationContext
) -> Shift:
    length = question.tokens_per_sample
    tokens, count = training.micro_batch * length, _count(question, training)
    models = _models(question, world, training, bench)
    seconds = tuple(1.0 if model is None else model.micro_batch_s(tokens, length) for model in models)
    even = own = split_whole(count, [1.0] * len(models))
    if _is_weighted(world):
        own = split_whole(count, [1.0 if seat.weight is None else seat.weight for seat in world.seats])
    elif None not in models:
        own = shares_by_time(seconds, _dealt(question, training, seconds))
        even = split_whole(_dealt(question, training, _equal(seconds)), [1.0] * len(models))
    return Shift(
        question=question,
        world=world,
        training=training,
        fabric=links,
        models=models,
        seconds=seconds,
        own=own,
        even=even,
        alone=bench.room(question, world, training, accumulation=1),
        several=bench.room(question, world, training, accumulation=2),
    )


def _count(question: Question, training: Training) -> int:
    if "batch" in question.open:
        return whole_count(question.batch, training.micro_batch)
    return max(1, question.batch // training.micro_batch)


def _dealt(question: Question, training: Training, seconds: Sequence[float]) -> int:
    """Micro-batches of a step, of the batch that divides best where that is open."""
    if "batch" in question.open:
        return best_count(seconds, question.batch, training.micro_batch)
    return _count(question, training)


def _equal(seconds: Sequence[float]) -> tuple[float, ...]:
    """What a micro-batch takes where all wait for the slowest."""
    return (max(seconds),) * len(seconds)


def _is_weighted(world: PlannedCluster) -> bool:
    return any(seat.weight is not None for seat in world.seats)


def _models(
    question: Question, world: PlannedCluster, training: Training, bench: EvaluationContext
) -> tuple[ComputeModel | None, ...]:
    """Speeds by rank; equal ones are the same object."""
    known = bench.models.setdefault(training, {})
    found: list[ComputeModel | None] = []
    last: tuple[object, ...] = ()
    for seat in world.seats:
        key = (seat.host, seat.gpu, seat.spec, seat.power_limit_w)
        if key != last and key not in known:
            model = question.compute(seat, training)
            known[key] = next((each for each in known.values() if each == model), model)
        found.append(found[-1] if key == last else known[key])
        last = key
    return tuple(found)


def fabric(world: PlannedCluster) -> Fabric:
    """The links of a world's ranks."""
    slots = tuple(Counter(seat.host for seat in world.seats).values())
    return Fabric(slots=slots, wire=world.wire, inside=world.inside)


def builds_method(training: Training, architecture: Architecture) -> bool:
    """Whether gangline's own trainer can do it with such a model: it quantises linears, and no other weights."""
    return training.method != "qlora" or not unpackable(architecture)


def is_built(strategy: PlannedStrategy, training: Training, architecture: Architecture) -> bool:
    """Whether gangline's own trainer can do it, and does: some strategies only where the job asks for them."""
    taken = strategy.asked or not strategy.half.capabilities.asked_only
    return taken and lacking(strategy, training, architecture) is None


def lacking(strategy: PlannedStrategy, training: Training, architecture: Architecture) -> Violation | None:
    """The first thing in it that gangline's own trainer cannot do; None where it can do all."""
    found = violations(strategy.half, asked_of(training))
    if found:
        return found[0]
    if not builds_method(training, architecture):
        what = f"{training.method} of {unpackable(architecture)}"
        return Violation(
            key="method.kind", what=what, seen=what, expected="weights of linears", fix="write method: lora"
        )
    return strategy.half.model_violation(architecture, strategy)


def is_exact(strategy: PlannedStrategy) -> bool:
    """Whether it computes what one big machine would."""
    return strategy.half.capabilities.exact
