"""One way to run a job: the memory of every rank, the shares of the work, the seconds of a step. Pure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gangline.planner.architecture import Architecture
from gangline.planner.config import unpackable
from gangline.planner.machines import Placement, PlannedCluster
from gangline.planner.memory import Memory
from gangline.planner.memory_fit import EVEN, SURE, MemoryFit, Need
from gangline.planner.shares import Dividing, best_count, ceiling, with_others
from gangline.planner.speed import (
    ComputeModel,
    RankWork,
    StepQuery,
    StepTime,
    step_query,
    step_s,
    step_time,
    works_of,
)
from gangline.planner.states import packs_experts
from gangline.planner.traffic import CollectiveBackend, Traffic, traffic
from gangline.planner.training import PlannedStrategy, Training
from gangline.runs.gang import shares_by_time, split_whole, whole_count
from gangline.runs.job import StrategyJob
from gangline.strategies.base import Violation, asked_of, violations
from gangline.strategies.table import plan_half
from gangline.units import format_bytes

# Ranks that do the same micro-batches: pipelines, and under tp the ranks of a host. Pure.


def replica_groups(world: PlannedCluster, strategy: PlannedStrategy) -> list[range]:
    """Ranks of each; where everybody does others, each rank by itself."""
    size = len(world.placements)
    if strategy.half.layers == "sliced":
        hosts = [placement.host for placement in world.placements]
        firsts = [hosts.index(host) for host in world.hosts]
        return [range(first, end) for first, end in zip(firsts, (*firsts[1:], size), strict=True)]
    row = size // strategy.replicas if strategy.half.layers == "staged" else 1
    return [range(first, first + row) for first in range(0, size, row)]


Compute = Callable[[Placement, Training], ComputeModel | None]
"""How fast a placement computes; None where nobody knows. Of cards of a host that are alike one is asked, whatever
their index and their free memory."""


MOST_OF_HOST = 0.9
"""Of what programs can get of a machine's memory: the rest is for the processes themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuery:
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
class EvaluationContext:
    """What was computed for one job, whatever the machines; it lives as long as a decision."""

    memories: dict[Training, dict[tuple[object, ...], Memory]] = field(default_factory=dict)
    """See `MemoryFit.known`."""
    models: dict[Training, dict[tuple[object, ...], ComputeModel | None]] = field(default_factory=dict)
    """Speeds of placements, by what these depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """How one rank does its part of a step, where ranks have settings of their own."""

    training: Training
    """With the samples of its longest forward pass, and its own recomputation."""
    share: int
    """Micro-batches of the run, in which the shares of all ranks count."""
    passes: int | None
    """Forward passes that it joins them into, about equally long; 0: it has none. None: each is one by itself."""


def _way_of(own: RankSettings) -> tuple[bool, bool]:
    return own.training.checkpointing, own.training.offloading


@dataclass(frozen=True, kw_only=True)  # no slots: figures are computed once, and kept
class Scenario:
    """One training on one cluster: what all candidates with it have in common."""

    query: PlanQuery
    world: PlannedCluster
    training: Training
    """Of all ranks; where they have settings of their own, with the micro-batch in which shares count."""
    cache: EvaluationContext = field(compare=False, repr=False)
    settings: tuple[RankSettings, ...] = ()
    """By rank, where ranks have settings of their own (`planner.rank_settings`)."""

    @property
    def count(self) -> int:
        """Micro-batches of a step where speeds do not decide."""
        if "batch" in self.query.open:
            return whole_count(self.query.batch, self.training.micro_batch)
        return max(1, self.query.batch // self.training.micro_batch)

    @property
    def is_timed(self) -> bool:
        """Whether the speed of every placement is known."""
        return None not in self.models

    @property
    def is_weighted(self) -> bool:
        """Whether the cluster file gives shares."""
        return any(placement.weight is not None for placement in self.world.placements)

    @property
    def weights(self) -> tuple[float, ...]:
        """What the cluster file says of speeds, by rank."""
        return tuple(1.0 if placement.weight is None else placement.weight for placement in self.world.placements)

    @property
    def is_uniform(self) -> bool:
        """Whether it does not matter which layers a stage has: the first and the last alone may have another shape."""
        layers = self.query.architecture.layers
        ends = (0, len(layers) - 1)
        return sum(number not in ends or layer.count > 1 for number, layer in enumerate(layers)) <= 1

    @property
    def tokens(self) -> tuple[float, float]:
        """Tokens of a micro-batch, and of a sample."""
        length = self.query.tokens_per_sample
        return self.training.micro_batch * length, length

    @functools.cached_property
    def models(self) -> tuple[ComputeModel | None, ...]:
        """Speeds by rank; equal ones are the same object."""
        if self.settings:
            each = {_way_of(own): self._of_all(own.training) for own in self.settings}
            return tuple(each[_way_of(own)][rank] for rank, own in enumerate(self.settings))
        known = self.cache.models.setdefault(self.training, {})
        found: list[ComputeModel | None] = []
        last: tuple[object, ...] = ()
        for placement in self.world.placements:
            key = (placement.host, placement.gpu, placement.spec, placement.power_limit_w, placement.bus)
            if key != last and key not in known:
                model = self.query.compute(placement, self.training)
                known[key] = next((each for each in known.values() if each == model), model)
            found.append(found[-1] if key == last else known[key])
            last = key
        return tuple(found)

    def _of_all(self, training: Training) -> tuple[ComputeModel | None, ...]:
        """Speeds of all ranks with the recomputation of one of them."""
        alike = dataclasses.replace(self.training, checkpointing=training.checkpointing, offloading=training.offloading)
        return dataclasses.replace(self, training=alike, settings=()).models

    @functools.cached_property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of a micro-batch, by rank; 1 where the speed is not known.

        With settings of their own they are those of a share, evenly: what ranks do alone in their own best way.
        """
        if self.settings:
            return tuple(busy_s / max(1, own.share) for busy_s, own in zip(self._busy_s(), self.settings, strict=True))
        return tuple(1.0 if model is None else model.micro_batch_s(*self.tokens) for model in self.models)

    def _busy_s(self) -> Iterator[float]:
        tokens, length = self.tokens
        for work in self.works([own.share for own in self.settings]):
            yield work.passes_s(tokens=tokens, length=length)[0]

    def works(self, shares: Sequence[int]) -> list[RankWork]:
        """What ranks of known speeds do, with these shares."""
        passes: list[int | None] = [own.passes for own in self.settings] or [None] * len(shares)
        ranks = zip(self.models, shares, passes, strict=True)
        return [
            RankWork(compute=model, micro_batches=share, passes=count or None)
            for model, share, count in ranks
            if model is not None
        ]

    @functools.cached_property
    def own(self) -> tuple[int, ...]:
        """Micro-batches by rank where each does as many as its speed allows."""
        if self.settings:
            return tuple(own.share for own in self.settings)
        if self.is_weighted:
            return split_whole(self.count, self.weights)
        return shares_by_time(self.seconds, self._best_count(self.seconds)) if self.is_timed else self.even

    @functools.cached_property
    def even(self) -> tuple[int, ...]:
        """Micro-batches by rank where all take part in every exchange."""
        by_speed = self.is_timed and not self.is_weighted
        count = self._best_count(_equal(self.seconds)) if by_speed else self.count
        return split_whole(count, [1.0] * len(self.seconds))

    def _best_count(self, seconds: Sequence[float]) -> int:
        """Micro-batches of a step; where the batch is open, of the one that divides best."""
        if "batch" in self.query.open:
            return best_count(seconds, self.query.batch, self.training.micro_batch)
        return self.count

    def shares(self, strategy: PlannedStrategy) -> tuple[int, ...]:
        """Micro-batches of every rank: those of its pipeline, or under tp of its host."""
        half = strategy.half
        if half.layers == "all":
            return self.even if half.lockstep and not self.settings else self.own
        found = replica_groups(self.world, strategy)
        if half.layers == "staged" and strategy.replicas == 1:
            shares: tuple[int, ...] = (self.count,)
        elif self.is_weighted:
            shares = split_whole(
                self.count, [sum(self.weights[replica_group.start : replica_group.stop]) for replica_group in found]
            )
        else:
            seconds = self._replica_groups_s(strategy)
            shares = shares_by_time(seconds, self._best_count(seconds) if self.is_timed else self.count)
        return tuple(share for replica_group, share in zip(found, shares, strict=True) for _ in replica_group)

    def _replica_groups_s(self, strategy: PlannedStrategy) -> tuple[float, ...]:
        """Seconds of a micro-batch by host, as its slowest rank, or by pipeline, as its slowest stage.

        Pipelines of unknown speeds count as equally fast.
        """
        if strategy.half.layers == "sliced":
            return tuple(
                max(self.seconds[rank] for rank in replica_group)
                for replica_group in replica_groups(self.world, strategy)
            )
        models = [model for model in self.models if model is not None]
        if len(models) < len(self.models):
            return (1.0,) * strategy.replicas
        rows = works_of(strategy, [RankWork(compute=model, micro_batches=1) for model in models])
        return tuple(max(stage.compute.micro_batch_s(*self.tokens) for stage in row) for row in rows)

    def work_split_s(self, strategy: PlannedStrategy) -> tuple[float, ...]:
        """Seconds of the micro-batches that are shared out, by rank, by pipeline, under tp by host; empty where speeds
        do not decide the shares.
        """
        half = strategy.half
        if not self.is_timed or self.is_weighted or (half.layers == "staged" and strategy.replicas == 1):
            return ()
        if half.layers != "all":
            return self._replica_groups_s(strategy)
        return _equal(self.seconds) if half.lockstep and not self.settings else self.seconds

    def plain(self, kind: str) -> PlannedStrategy:
        """A strategy of all ranks without numbers of its own."""
        asked = self.query.strategy.kind == kind
        return PlannedStrategy(kind=kind, world_size=len(self.world.placements), asked=asked)

    def offload(self, kind: str) -> tuple[Literal["optimizer", "parameters"], ...]:
        """What the job that asks for this strategy has in the machines' memory."""
        job = self.query.strategy
        return job.offload if job.kind == kind else ()

    def room(self, kind: str) -> MemoryFit:
        """Memory of its ranks; of pipelines as if each had all micro-batches, for that is known before their layers."""
        if (found := self._rooms.get(kind)) is None:
            found = self._rooms[kind] = self._room(kind)
        return found

    @functools.cached_property
    def _rooms(self) -> dict[str, MemoryFit]:
        return {}

    def _room(self, kind: str) -> MemoryFit:
        staged = plan_half(kind).layers == "staged"
        several = self.count > 1 if staged else max(self.shares(PlannedStrategy(kind=kind, world_size=1))) > 1
        training = dataclasses.replace(self.training, accumulation=2 if several else 1)
        if self.settings:
            each = {own.training: self.fit(own.training) for own in set(self.settings)}
            training = dataclasses.replace(training, checkpointing=any(own.checkpointing for own in each))
            return dataclasses.replace(self.fit(training), each=tuple(each[own.training] for own in self.settings))
        return self.fit(training)

    def fit(self, training: Training) -> MemoryFit:
        """Memory of ranks that all train in one way."""
        known = self.cache.memories.setdefault(training, {})
        return MemoryFit(
            architecture=self.query.architecture, training=training, placements=self.world.placements, known=known
        )

    @property
    def told_seconds(self) -> tuple[float, ...]:
        """Seconds of a micro-batch by rank; where the cluster file gives shares, in proportion to these."""
        if not self.is_weighted:
            return self.seconds
        return tuple(1 / max(1e-6, weight) for weight in self.weights)


@dataclass(frozen=True, kw_only=True)  # no slots: figures are computed once, and kept
class Candidate:
    """One way to run the job. Its figures are computed when somebody asks for them."""

    scenario: Scenario
    strategy: PlannedStrategy

    @property
    def query(self) -> PlanQuery:
        """The question that it is an answer to."""
        return self.scenario.query

    @property
    def architecture(self) -> Architecture:
        """The model."""
        return self.query.architecture

    @property
    def world(self) -> PlannedCluster:
        """The machines."""
        return self.scenario.world

    @functools.cached_property
    def room(self) -> MemoryFit:
        """Memory of its ranks."""
        return self.scenario.room(self.strategy.kind)

    @property
    def training(self) -> Training:
        """What a rank computes."""
        return self.room.training

    @functools.cached_property
    def rank_trainings(self) -> tuple[Training, ...]:
        """What every rank computes, by rank; `micro_batch` is the samples of its longest forward pass."""
        each = self.room.each
        return tuple(fit.training for fit in each) if each else (self.training,) * len(self.world.placements)

    @functools.cached_property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches of a full step, by rank: those of its pipeline, or under tp of its host."""
        return self.scenario.shares(self.strategy)

    @property
    def work_split(self) -> tuple[int, ...]:
        """The shares of hosts under tp, of pipelines, else of ranks."""
        return tuple(self.shares[replica_group[0]] for replica_group in replica_groups(self.world, self.strategy))

    @functools.cached_property
    def samples(self) -> int:
        """Samples of a step."""
        return self.training.micro_batch * sum(self.work_split)

    @functools.cached_property
    def nearness(self) -> tuple[float, int]:
        """The chance that all ranks fit, and the bytes that the tightest of them has to spare."""
        return self.room.nearness(self.strategy)

    @property
    def chance(self) -> float:
        """The chance that all ranks fit; a placement whose memory is not known counts as fitting."""
        return self.nearness[0]

    @property
    def fits(self) -> bool:
        """Whether it fits surely enough."""
        return self.chance >= SURE

    @property
    def may_fit(self) -> bool:
        """Whether it is more likely to fit than not."""
        return self.chance >= EVEN

    @functools.cached_property
    def needs(self) -> tuple[Need, ...]:
        """Memory of every rank."""
        return self.room.needs(self.strategy)

    @property
    def host_memory(self) -> dict[str, tuple[int, int | None]]:
        """Bytes by host that lie in the machine's memory in place of its cards', and what programs can get there."""
        found: dict[str, tuple[int, int | None]] = {}
        for need in self.needs:
            host, room = need.placement.host, need.placement.ram_bytes
            found[host] = (found.get(host, (0, room))[0] + need.memory.offloaded_bytes, room)
        return found

    @property
    def fits_host_memory(self) -> bool:
        """Whether there is room for it; a machine whose memory is not known counts as having some."""
        sizes = self.host_memory.values()
        return all(room is None or wanted <= MOST_OF_HOST * room for wanted, room in sizes)

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
        """Whether gangline's own trainer can do it, and does: some strategies only where the job asks for them."""
        taken = self.strategy.asked or not self.strategy.half.capabilities.asked_only
        return taken and lacking(self.strategy, self.training, self.architecture) is None

    @property
    def is_exact(self) -> bool:
        """Whether it computes what one big machine would."""
        return self.strategy.half.capabilities.exact

    @functools.cached_property
    def traffic(self) -> Traffic:
        """The exchanges of a step."""
        return self._traffic(self.training)

    @functools.cached_property
    def seconds(self) -> float:
        """Seconds of a step; infinite where they are not known."""
        return step_s(self._step(self.traffic)) if self.scenario.is_timed else float("inf")

    @functools.cached_property
    def time(self) -> StepTime | None:
        """How long a step takes; None where the speed of a placement is not known."""
        return step_time(self._step(self.traffic)) if self.scenario.is_timed else None

    @functools.cached_property
    def narrow_s(self) -> float | None:
        """Seconds of a step whose gradients travel in bf16; None where they do, would be no narrower, or speeds are
        not known.
        """
        training = self.training
        if not self.strategy.half.narrows or training.parameters != "fp32" or training.exchange:
            return None
        narrow = self._traffic(dataclasses.replace(training, exchange="bf16"))
        return step_s(self._step(narrow)) if self.scenario.is_timed else None

    def _traffic(self, training: Training) -> Traffic:
        backend: CollectiveBackend = (
            "gloo" if any(placement.gpu is None for placement in self.world.placements) else "nccl"
        )
        number = max(self.shares)
        if self.scenario.settings and self.strategy.half.layers == "all":
            number = max(own.passes or 0 for own in self.scenario.settings)
        return traffic(self.architecture, training, self.strategy, micro_batches=number, backend=backend)

    def _step(self, flow: Traffic) -> StepQuery:
        tokens, length = self.scenario.tokens
        ranks = self.scenario.works(self.shares)
        return step_query(self.strategy, flow, ranks, self.world.fabric, tokens=tokens, length=length)

    @property
    def source(self) -> str:
        """Where the times of computation come from, for people."""
        return ", ".join(dict.fromkeys(model.source for model in self.scenario.models if model is not None))

    @property
    def dividing(self) -> Dividing:
        """How well the batch of the question divides."""
        work_split_s = self.scenario.work_split_s(self.strategy)
        found = Dividing(batch=self.query.batch, about=self.query.about, shares=self.work_split, ceiling=None)
        if not work_split_s:
            return found
        here = ceiling(work_split_s, sum(self.work_split))
        found = dataclasses.replace(found, ceiling=here, equal=self.strategy.half.lockstep)
        return with_others(found, work_split_s, micro_batch=self.training.micro_batch)


def _equal(seconds: Sequence[float]) -> tuple[float, ...]:
    """Seconds of a micro-batch where all wait for the slowest."""
    return (max(seconds),) * len(seconds)


def builds_method(training: Training, architecture: Architecture) -> bool:
    """Whether gangline's own trainer can do it with such a model: it quantises linears, and experts where asked."""
    left = unpackable(architecture)
    return training.method != "qlora" or not left or (left == "experts" and packs_experts(training))


def lacking(strategy: PlannedStrategy, training: Training, architecture: Architecture) -> Violation | None:
    """The first thing in it that gangline's own trainer cannot do; None where it can do all."""
    found = violations(strategy.half, asked_of(training))
    if found:
        return found[0]
    if architecture.unloaded:
        what, fix = architecture.unloaded, "train its language model alone, or plan for another trainer with --stack"
        return Violation(key="model.path", what=what, seen=what, expected="a causal language model", fix=fix)
    if not builds_method(training, architecture):
        what = f"{training.method} of {unpackable(architecture)}"
        return Violation(
            key="method.kind", what=what, seen=what, expected="weights of linears", fix="write method: lora"
        )
    return strategy.half.model_violation(architecture, strategy) or _idle(strategy, training, architecture)


def _idle(strategy: PlannedStrategy, training: Training, architecture: Architecture) -> Violation | None:
    """A stage in which no layer has anything to train: adapters sit in other layers."""
    if strategy.half.layers != "staged" or training.method == "full":
        return None
    for rank in range(strategy.world_size):
        share = strategy.half.share(architecture, strategy, rank)
        if share is not None and not share.num_trained(training):
            return Violation(
                key="strategy.kind",
                what=f"{strategy.kind} with nothing to train on rank {rank}",
                seen="none of its layers has an adapter, by method.targets, layers and exclude",
                expected="something to train in the layers of every rank",
                fix="write strategy: fsdp, name targets and layers that every rank has, or set targets: all-linear",
            )
    return None
