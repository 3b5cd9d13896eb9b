"""Which of all ways to run a job is the best, what speaks against the others, and what n machines would give. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gangline.planner.candidate import Candidate, EvaluationContext, PlanQuery, Scenario
from gangline.planner.machines import PlannedCluster
from gangline.planner.rank_settings import allows_own, joins, with_own_recomputation, with_own_settings
from gangline.planner.shares import Dividing, ceiling
from gangline.planner.training import Number, PlannedStrategy, Training
from gangline.runs.gang import whole_count, whole_counts
from gangline.strategies.base import AUTO
from gangline.strategies.table import ALONE, STRATEGIES, plan_half

SIMPLEST: Mapping[str, int] = {kind: number for number, kind in enumerate(STRATEGIES.built_in)}
"""Of two that are as fast, the one with the smaller number is taken; a plug-in's comes last."""
AS_FAST = 1.02
MOVED_FASTER = 1.1
"""So much faster a step has to be with inputs of layers in the machine's memory: what copies take is an estimate."""
LEAST_CHANCE = 0.1
"""Below that a start is refused; what is planned for a process may be a quarter too much."""
UNTIMED = 4
"""Samples at once where nobody knows how long they take, if they fit."""
FEW_HOSTS = 5
"""Up to here every number of them is tried, beyond it 1, 2, 4, 8, ..."""
MOST_ALONE = 8
"""Unlike machines that are each tried alone."""
MOST_AT_ONCE = 64
"""Samples of a micro-batch, at the most, where the plan chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSubset:
    """What some of the machines would do."""

    count: int
    best: Candidate | None
    runnable: Candidate | None
    """Of those that gangline's own trainer can do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The decision, and what it was chosen from."""

    query: PlanQuery
    world: PlannedCluster
    best: Candidate | None
    """The fastest that fits; None: nothing fits."""
    runnable: Candidate | None
    """The fastest that fits of those that gangline's own trainer can do."""
    by_kind: tuple[Candidate, ...]
    """The best of every strategy, those that do not fit among them."""
    by_hosts: tuple[MachineSubset, ...] = ()
    """The best with 1, 2, ... machines: the fastest ones first."""
    alone_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step by host, each alone in its own best way; none of one host, of more than eight unlike ones,
    where one has no room for the job, or where speeds are not known."""

    @property
    def dividing(self) -> Dividing | None:
        """How well the batch divides, in what would be run; None where nothing fits."""
        candidate = self.runnable or self.best
        return None if candidate is None else candidate.dividing

    @property
    def today(self) -> Candidate | None:
        """The fastest that gangline's own trainer can do with any number of these machines."""
        built = [few.runnable for few in self.by_hosts if few.runnable is not None]
        return min(built, key=lambda candidate: candidate.seconds, default=self.runnable)

    @property
    def part_of_sum(self) -> float | None:
        """Speed of what would be run, over the sum of what each machine does alone in its own best way."""
        candidate = self.runnable or self.best
        if candidate is None or candidate.time is None or not self.alone_s:
            return None
        return 1 / (candidate.seconds * math.fsum(1 / each for each in self.alone_s.values()))


def decide(query: PlanQuery, world: PlannedCluster) -> Choice:
    """Weigh every way on all hosts, and the best one on fewer."""
    bench = EvaluationContext()
    if "batch" in query.open:
        query = _with_batch(query, world, bench)
    alone = _alone(query, world, bench)
    limit_s = min(
        (each.seconds for few in alone.values() for each in (few.best, few.runnable) if each), default=math.inf
    )
    options = best_of_kinds(query, world, bench, limit_s=limit_s)
    whole = MachineSubset(count=len(world.hosts), best=choose(fitting(options)), runnable=_runnable(options))
    return Choice(
        query=query,
        world=world,
        best=whole.best,
        runnable=whole.runnable,
        by_kind=tuple(options),
        by_hosts=tuple(_by_hosts(query, world, bench, alone=alone, whole=whole)),
        alone_s=_alone_s(query, world, bench, alone),
    )


def _with_batch(query: PlanQuery, world: PlannedCluster, bench: EvaluationContext) -> PlanQuery:
    """The question with the batch that computes the most samples per second among those that are near the wish."""
    drafts = best_of_kinds(query, world, bench)
    draft, least = _runnable(drafts) or choose(fitting(drafts)), query.training.micro_batch
    batch = least * whole_count(query.batch, least) if draft is None else draft.samples
    rest = tuple(key for key in query.open if key != "batch")
    return dataclasses.replace(query, batch=batch, about=query.batch, open=rest)


def _runnable(drafts: list[Candidate]) -> Candidate | None:
    built = [draft for draft in drafts if draft.is_built]
    return choose(fitting(built) or [draft for draft in built if draft.chance >= LEAST_CHANCE])


def best_of_kinds(
    query: PlanQuery,
    world: PlannedCluster,
    bench: EvaluationContext,
    *,
    limit_s: float = math.inf,
    as_fast: float = AS_FAST,
) -> list[Candidate]:
    """The best of every strategy that these placements allow, the simplest first. bench: see there.

    limit_s: of a step on one machine alone: nothing slower is taken for being simple. as_fast: how much slower one
    setting for all ranks may be than settings of their own. Several pipelines are weighed
    where one would be taken, or nothing fits: how they compare with what is simpler has not been measured on GPUs.
    """
    possible = [Scenario(query=query, world=world, training=each, cache=bench) for each in trainings(query)]
    units = [Scenario(query=query, world=world, training=each, cache=bench) for each in _units(query)]
    asked = query.strategy.kind
    kinds = tuple(SIMPLEST) if asked == AUTO else (ALONE, asked)
    found = {kind: _nearest(drafts) for kind in kinds if (drafts := _drafts(possible, kind))}
    own = {kind: plan_half(kind).rank_settings if allows_own(query.training) else "" for kind in kinds}
    for kind in [kind for kind in found if own[kind] == "all"]:
        found[kind] = _with_own(found[kind], units, limit_s=limit_s, as_fast=as_fast)
    taken = choose(fitting(list(found.values())))
    for kind in kinds:
        if plan_half(kind).several and (taken is None or taken.strategy.kind == kind):
            several = [*([found[kind]] if kind in found else []), *_drafts(possible, kind, more=True)]
            if several:
                found[kind] = _nearest(several)
    for kind in [kind for kind in found if own[kind] == "recomputation"]:
        found[kind] = _recomputing(found[kind], possible, limit_s=limit_s, as_fast=as_fast)
    return [found[kind] for kind in kinds if kind in found]


def _with_own(alike: Candidate, units: list[Scenario], *, limit_s: float, as_fast: float) -> Candidate:
    """The best with settings of each rank's own; `alike` itself, where that is worth next to nothing."""
    own: list[Candidate] = []
    for _, several in itertools.groupby(units, key=lambda each: (each.training.micro_batch, each.training.exchange)):
        scenarios = list(several)
        for strategy in _ways_of(alike, scenarios[0]):
            own += [Candidate(scenario=each, strategy=strategy) for each in with_own_settings(scenarios, strategy)]
    return _worth(alike, own, limit_s=limit_s, as_fast=as_fast)


def _recomputing(alike: Candidate, possible: list[Scenario], *, limit_s: float, as_fast: float) -> Candidate:
    """The best in which some ranks alone recompute; `alike` itself, where that is worth next to nothing."""
    pairs: dict[tuple[int, Number | None], list[Scenario]] = {}
    for each in possible:
        pairs.setdefault((each.training.micro_batch, each.training.exchange), []).append(each)
    own = [
        Candidate(scenario=scenario, strategy=way)
        for pair in pairs.values()
        if len(pair) > 1
        for way, scenario in with_own_recomputation(pair[0], pair[1], alike.strategy)
    ]
    return _worth(alike, own, limit_s=limit_s, as_fast=as_fast)


def _worth(alike: Candidate, own: list[Candidate], *, limit_s: float, as_fast: float) -> Candidate:
    drafts = fitting([alike, *own])
    if not own or not drafts:
        return alike
    drafts = _worth_moving(drafts)
    least_s = min(draft.seconds / draft.samples for draft in drafts)
    alone_s = limit_s / alike.query.batch
    enough_s = min(least_s * as_fast, alone_s if least_s <= alone_s else math.inf)
    good = [draft for draft in drafts if draft.seconds / draft.samples <= enough_s]
    return min(good, key=lambda draft: (bool(draft.scenario.settings), draft.training.exchange is not None))


def _worth_moving(drafts: list[Candidate]) -> list[Candidate]:
    """Without those that have inputs of layers in a machine's memory and gain too little by that."""
    at_home = [draft.seconds / draft.samples for draft in drafts if not _moves(draft)]
    fast_s = min(at_home, default=math.inf) / MOVED_FASTER
    return [draft for draft in drafts if not _moves(draft) or draft.seconds / draft.samples <= fast_s]


def _moves(draft: Candidate) -> bool:
    """Whether the plan has inputs of layers in a machine's memory; what the job says of all ranks is no such choice."""
    asked = draft.query.training.offloading
    return not asked and any(own.training.offloading for own in draft.scenario.settings)


def _ways_of(alike: Candidate, scenario: Scenario) -> list[PlannedStrategy]:
    """Its own, and where passes are exchanges all of its kind: which is the best depends on how many there are."""
    ways = [alike.strategy]
    if alike.strategy.half.lockstep:
        others = alike.strategy.half.candidates(scenario)
        ways += [way for way in others if way != ways[0] and way.offload == ways[0].offload]
    return ways


def _nearest(drafts: list[Candidate]) -> Candidate:
    """The best that fits, else what is nearest to it."""
    return choose(fitting(drafts)) or max(drafts, key=lambda draft: draft.nearness)


def _drafts(possible: list[Scenario], kind: str, *, more: bool = False) -> list[Candidate]:
    """All of one strategy, but for micro-batches larger than one that is not likely to fit: they need more.

    That is so as long as gradients are summed over several of them, or over none. Stages of unlike layers are tried all
    the same, for what a rank has room for depends on which ones it gets. more: the
    `more_candidates` of the strategy.
    """
    found: list[Candidate] = []
    half = plan_half(kind)
    too_large: set[tuple[bool, int]] = set()
    crowded = any(each.world.crowded for each in possible[:1])
    for each in possible:
        like = (each.training.checkpointing, each.room(kind).training.accumulation)
        if like in too_large:
            continue
        ways = half.more_candidates(each) if more else _strategies(each, kind)
        drafts = [
            Candidate(scenario=each, strategy=way) for way in ways if not crowded or not way.half.capabilities.own_gpu
        ]
        if drafts and not any(draft.may_fit for draft in drafts) and (half.layers != "staged" or each.is_uniform):
            too_large.add(like)
        found += drafts
    return found


def choose(drafts: list[Candidate]) -> Candidate | None:
    """The simplest of the fastest; what computes other numbers than one big machine is never taken by itself.

    Nor is a strategy that has to be asked for, where another one fits: fsdp has in parts what zero has, and takes
    no further package. tp yields to simpler ones, for how fast slices of layers compute is a guess.
    """
    exact = [draft for draft in drafts if draft.is_exact] or drafts
    exact = [each for each in exact if each.strategy.asked or not each.strategy.half.capabilities.asked_only] or exact
    there = {draft.strategy.kind for draft in exact}
    exact = [draft for draft in exact if there.isdisjoint(draft.strategy.half.capabilities.yields_to)]
    exact = _worth_moving(exact)
    timed = [(draft.seconds / draft.samples, draft) for draft in exact]
    least_s = min((seconds for seconds, _ in timed), default=float("inf"))
    as_fast = [(seconds, draft) for seconds, draft in timed if seconds <= least_s * AS_FAST]
    return min(as_fast, key=_simplicity, default=(0.0, None))[1]


def _simplicity(timed: tuple[float, Candidate]) -> tuple[int, bool, bool, bool, int, int, float]:
    seconds, draft = timed
    return (
        SIMPLEST.get(draft.strategy.kind, len(SIMPLEST)),
        draft.training.checkpointing,
        draft.training.exchange is not None,
        draft.strategy.eager,
        *((0, draft.training.micro_batch) if draft.scenario.is_timed else _untimed(draft)),
        seconds,
    )


def _untimed(draft: Candidate) -> tuple[int, int]:
    """Without times: what gives each rank its share, to 5 %; then a few samples, for one alone keeps no device busy."""
    weights = draft.scenario.weights if draft.strategy.half.layers == "all" else (1.0,)
    missed = 1 - ceiling([1 / weight for weight in weights if weight] or [1.0], draft.scenario.count)
    return int(20 * missed + 1e-9), abs(draft.training.micro_batch - UNTIMED)


def fitting(drafts: list[Candidate]) -> list[Candidate]:
    """Those that fit; where none does, those that may."""
    return [draft for draft in drafts if draft.fits] or [draft for draft in drafts if draft.may_fit]


def trainings(query: PlanQuery) -> list[Training]:
    """The job's own, or all that it leaves open."""
    return _varied(query, _micro_batches(query) if "micro_batch" in query.open else [query.training.micro_batch])


def _units(query: PlanQuery) -> list[Training]:
    """The same with the micro-batches in which shares count where ranks have settings of their own: of one sample, if
    these may share a forward pass. Those that differ in recomputation alone are adjacent.
    """
    free = "micro_batch" in query.open and joins(query.training, query.architecture)
    found = _varied(query, [1]) if free else trainings(query)
    order: dict[tuple[int, Number | None], list[Training]] = {}
    for each in found:
        order.setdefault((each.micro_batch, each.exchange), []).append(each)
    return [each for alike in order.values() for each in alike]


def _varied(query: PlanQuery, micro: list[int]) -> list[Training]:
    base = query.training
    leaves = "activation_checkpointing" in query.open and not base.offloading  # what is moved is what is kept then
    checkpointing = [False, True] if leaves else [base.checkpointing]
    varies = "exchange" in query.open and base.parameters == "fp32"
    exchange: list[Number | None] = [None, "bf16"] if varies else [base.exchange]
    varied = itertools.product(micro, checkpointing, exchange)
    return [dataclasses.replace(base, micro_batch=m, checkpointing=c, exchange=e) for m, c, e in varied]


def _micro_batches(query: PlanQuery) -> list[int]:
    """Divisors of the batch, or of one that may be taken, that are a power of two, or three times one."""
    sizes = sorted({factor << power for factor in (1, 3) for power in range(7)})
    if "batch" in query.open:
        return [size for size in sizes if size <= MOST_AT_ONCE and whole_counts(query.batch, size)]
    return [size for size in sizes if size <= min(query.batch, MOST_AT_ONCE) and query.batch % size == 0]


def _strategies(scenario: Scenario, kind: str) -> Iterator[PlannedStrategy]:
    """Of that kind, on one rank or several."""
    if kind == ALONE or len(scenario.world.placements) > 1:
        yield from plan_half(kind).candidates(scenario)


def _alone(query: PlanQuery, world: PlannedCluster, bench: EvaluationContext) -> dict[str, MachineSubset]:
    """Each host by itself; hosts that are alike are weighed once."""
    kinds = {host: _kind(world, host) for host in _by_speed(query, world)}
    if len(kinds) < 2:
        return {}
    unlike = {kind: host for host, kind in reversed(kinds.items())}
    weighed = {kind: _few(query, world.only([host]), bench) for kind, host in list(unlike.items())[:MOST_ALONE]}
    return {host: weighed[kinds[host]] for host in world.hosts if kinds[host] in weighed}


def _alone_s(
    query: PlanQuery, world: PlannedCluster, bench: EvaluationContext, alone: Mapping[str, MachineSubset]
) -> dict[str, float]:
    """Seconds of a step of every host alone, in the fastest of its ways; {} where one has none, or nobody knows."""
    seconds: dict[int, float] = {}
    for host, few in alone.items():
        if id(few) not in seconds:
            options = best_of_kinds(query, world.only([host]), bench, as_fast=1.0)
            ways = [each for each in fitting(options) if each.is_exact and each.is_built == (few.runnable is not None)]
            seconds[id(few)] = min((each.seconds for each in ways), default=math.inf)
    found = {host: seconds[id(few)] for host, few in alone.items()}
    return found if len(found) == len(world.hosts) and math.inf not in found.values() else {}


def _by_hosts(
    query: PlanQuery,
    world: PlannedCluster,
    bench: EvaluationContext,
    *,
    alone: Mapping[str, MachineSubset],
    whole: MachineSubset,
) -> Iterator[MachineSubset]:
    """The best with n machines: of one, the best of all; of more, the fastest ones. `whole`: with all of them."""
    order = _by_speed(query, world)
    if alone:
        yield from _best_of(list(alone.values()))
    for count in (n for n in range(2, len(order)) if len(order) <= FEW_HOSTS or n & (n - 1) == 0):
        yield from _best_of([_few(query, world.only(order[:count]), bench)])
    yield from _best_of([whole])


def _by_speed(query: PlanQuery, world: PlannedCluster) -> list[str]:
    """Hosts, the fastest first."""
    return sorted(world.hosts, key=lambda host: -_speed(query, world, host))


def _few(query: PlanQuery, world: PlannedCluster, bench: EvaluationContext) -> MachineSubset:
    options = best_of_kinds(query, world, bench)
    return MachineSubset(count=len(world.hosts), best=choose(fitting(options)), runnable=_runnable(options))


def _best_of(several: list[MachineSubset]) -> Iterator[MachineSubset]:
    """One entry with the fastest of each; none where nothing fits."""
    best = [few.best for few in several if few.best is not None]
    runnable = [few.runnable for few in several if few.runnable is not None]
    if best or runnable:
        yield MachineSubset(
            count=several[0].count,
            best=min(best, key=lambda candidate: candidate.seconds, default=None),
            runnable=min(runnable, key=lambda candidate: candidate.seconds, default=None),
        )


def _kind(world: PlannedCluster, host: str) -> tuple[object, ...]:
    """What two hosts have to share to do the same."""
    return tuple(
        (placement.gpu, placement.free_bytes, placement.gpu or host) for placement in world.placements_of(host)
    )


def _speed(query: PlanQuery, world: PlannedCluster, host: str) -> float:
    """Tokens per second of a host's placements, for the order."""
    training, length = query.training, query.tokens_per_sample
    models = [query.compute(placement, training) for placement in world.placements_of(host)]
    return sum(model.tokens_per_s(training.micro_batch * length, length) for model in models if model is not None)
