"""Settings of every rank's own: for each the way with the fewest seconds for its share that fits its memory. Pure.

Of a share of n micro-batches a rank makes k forward passes, as few as its memory allows, about equally long: passes
cost more the more there are of them, and recomputation costs more than it saves unless it makes them fewer. So a rank
has three ways, without recomputation, with it, and with it from inputs in the machine's memory, each with the longest
pass that fits, and for every n one is the fastest; f_r(n) are its seconds, which grow with n. The smallest possible
max_r f_r(n_r) over all shares that sum to the batch is found by bisection: it is the smallest time T in which ranks
together can do that many, each as many as it can.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gangline.planner.architecture import Architecture
from gangline.planner.candidate import MOST_OF_HOST, RankSettings, Scenario
from gangline.planner.memory_fit import EVEN, SURE
from gangline.planner.speed import ComputeModel, RankWork
from gangline.planner.training import GANGLINE, PlannedStrategy, Training
from gangline.runs.gang import split_whole

LONGEST = 64
"""Samples of a forward pass, at the most, where the plan chooses."""
SLACK = 1.01
"""Passes are as short as this part of the time allows: short ones leave memory free."""
_BISECTIONS = 64
_ROUNDING = 1 + 1e-12


def allows_own(training: Training) -> bool:
    """Whether ranks may have settings of their own: other trainers give all ranks one."""
    return training.stack.name.startswith(GANGLINE.name)


def joins(training: Training, architecture: Architecture) -> bool:
    """Whether micro-batches may share a forward pass, whatever dropout there is.

    Not where its masks belong to micro-batches. Nor with dropout in attention: there it is computed by its formula,
    whose memory grows with the pass and is not counted.
    """
    drops = training.dropout > 0 or any(layer.dropout for layer in architecture.layers)
    in_attention = any(layer.attention_dropout for layer in architecture.layers)
    return not in_attention and (training.draws_by_sample or not drops)


@dataclass(frozen=True, slots=True)
class _Way:
    """One of the ways of a rank: with or without recomputation, or that from inputs in the machine's memory."""

    checkpointing: bool
    offloading: bool
    compute: ComputeModel
    alone: int
    """Micro-batches of a pass that is the only one, at the most."""
    several: int
    """Of one of several passes, for which gradients are there from the start."""

    @property
    def effort(self) -> tuple[bool, bool]:
        """Of ways that are as fast the one with the least is taken."""
        return self.checkpointing, self.offloading

    def work(self, share: int, passes: int | None = None) -> RankWork | None:
        """So many micro-batches, in as few passes as possible, or in so many; None where none fits."""
        if passes is None:
            if share > self.alone and not self.several:
                return None
            passes = 1 if share <= self.alone else -(-share // self.several)
        return RankWork(compute=self.compute, micro_batches=share, passes=passes if share else None)


@dataclass(frozen=True, slots=True)
class _Rank:
    """The ways of one kind of rank."""

    ways: tuple[_Way, ...]
    tokens: float
    length: float
    known: dict[int, tuple[float, _Way, RankWork]] = field(default_factory=dict)
    """The best by micro-batches: a search asks for the same ones again and again."""

    def seconds(self, work: RankWork) -> float:
        return work.passes_s(tokens=self.tokens, length=self.length)[0]

    def best(self, share: int) -> tuple[float, _Way, RankWork]:
        """The fastest way to do so many micro-batches; of two that are as fast, the plainest."""
        if share not in self.known:
            works = [(way, way.work(share)) for way in self.ways]
            timed = [(self.seconds(work), way, work) for way, work in works if work is not None]
            self.known[share] = min(timed, key=lambda each: (each[0], each[1].effort))
        return self.known[share]

    def most(self, limit_s: float, total: int) -> int:
        """Micro-batches that it can do in that time, of so many."""
        low, high = 0, total
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.best(middle)[0] <= limit_s else (low, middle - 1)
        return low

    def shortest(self, share: int, limit_s: float) -> tuple[_Way, RankWork]:
        """The way with the shortest passes that is done in that time, and the least effort."""
        found = []
        for way in self.ways:
            work = way.work(share)
            if work is None or self.seconds(work) > limit_s:
                continue
            low, high = work.passes or 0, share
            while low < high:
                middle = (low + high + 1) // 2
                longer = way.work(share, middle)
                assert longer is not None
                low, high = (middle, high) if self.seconds(longer) <= limit_s else (low, middle - 1)
            found.append((way.effort, -low, way, way.work(share, low)))
        _, _, way, work = min(found, key=lambda each: each[:2])
        assert work is not None
        return way, work


def with_own_settings(possible: Sequence[Scenario], strategy: PlannedStrategy) -> Iterator[Scenario]:
    """The same question with settings of each rank's own, the fastest ones and ones with shorter passes; then those in
    which ranks have inputs of layers in their machines' memory.

    possible: trainings that differ in recomputation alone, all with the micro-batch in which shares count. Nothing
    where speeds are not known, or where a rank has no way that fits.
    """
    if not all(each.is_timed for each in possible):
        return
    moved = _offloaded(possible, strategy)
    for moving in [[], *([moved] if moved else [])]:
        ranks = _ranks(possible, strategy, moving)
        if all(rank.ways for rank in ranks):
            found = _of_ways(possible[0], strategy, ranks)
            yield from (each for each in found if not moving or any(own.training.offloading for own in each.settings))


def _of_ways(first: Scenario, strategy: PlannedStrategy, ranks: Sequence[_Rank]) -> Iterator[Scenario]:
    total = first.count
    if strategy.half.lockstep:
        yield from _in_step(first, ranks, split_whole(total, first.weights) if first.is_weighted else None)
        return
    shares = split_whole(total, first.weights) if first.is_weighted else _shares(ranks, total)
    limit_s = max(rank.best(share)[0] for rank, share in zip(ranks, shares, strict=True))
    for slack in (1.0, SLACK):
        chosen = [
            rank.best(share)[1:] if slack == 1.0 else rank.shortest(share, limit_s * slack)
            for rank, share in zip(ranks, shares, strict=True)
        ]
        yield dataclasses.replace(first, settings=tuple(_settings(first.training, *each) for each in chosen))


# Where every pass is an exchange, all ranks make equally many, of unlike sizes.


@dataclass(frozen=True, slots=True)
class _Passes:
    """The passes of one kind of rank: of so many micro-batches, beginning with none."""

    seconds: tuple[float, ...]
    """Of the fastest way; they grow."""
    ways: tuple[_Way, ...]

    @classmethod
    def of(cls, rank: _Rank, *, alone: bool) -> _Passes:
        """alone: as the only pass of a step."""
        longest = [way.alone if alone else way.several for way in rank.ways]
        seconds, ways = [0.0], list(rank.ways[:1])
        for count in range(1, max(longest) + 1):
            timed = [
                (way.compute.micro_batch_s(count * rank.tokens, rank.length), way.effort, way)
                for way, most in zip(rank.ways, longest, strict=True)
                if most >= count
            ]
            seconds_each, _, way = min(timed, key=lambda each: each[:2])
            seconds.append(max(seconds[-1], seconds_each))
            ways.append(way)
        return cls(tuple(seconds), tuple(ways))

    def most(self, limit_s: float) -> int:
        """Micro-batches of a pass that takes no longer."""
        return bisect.bisect_right(self.seconds, limit_s) - 1


def _in_step(first: Scenario, ranks: Sequence[_Rank], shares: tuple[int, ...] | None) -> Iterator[Scenario]:
    """For every number of passes that could be the best the settings with the shortest passes; shares: if they are set.

    With more passes of the same seconds in sum, weights only travel more often: these are left out.
    """
    total, least_s = first.count, math.inf
    kinds = {id(rank): rank for rank in ranks}
    known = {alone: {kind: _Passes.of(rank, alone=alone) for kind, rank in kinds.items()} for alone in (True, False)}
    for number in range(1, total + 1):
        if number > 1 and -(-total // number) == -(-total // (number - 1)) and shares is None:
            continue  # as many micro-batches in all that are done at once
        passes = [known[number == 1][id(rank)] for rank in ranks]
        lengths = _even_lengths(passes, shares, number) if shares else _lengths(passes, total, number)
        if lengths is None:
            continue
        pass_s = max(each.seconds[length] for each, length in zip(passes, lengths, strict=True))
        if number * pass_s < least_s / _ROUNDING:
            least_s = number * pass_s
            own = shares or _trimmed(passes, lengths, total, number)
            settings = (_own_pass(first.training, *each, number) for each in zip(passes, own, strict=True))
            yield dataclasses.replace(first, settings=tuple(settings))


def _even_lengths(passes: Sequence[_Passes], shares: Sequence[int], number: int) -> list[int] | None:
    lengths = [-(-share // number) for share in shares]
    fits = all(length < len(each.seconds) for length, each in zip(lengths, passes, strict=True))
    return lengths if fits else None


def _lengths(passes: Sequence[_Passes], total: int, number: int) -> list[int] | None:
    """Of the longest pass of each rank, in the shortest time in which all together do enough; None: never."""
    kinds = {id(each): each for each in passes}
    counts = Counter(map(id, passes))

    def is_enough(limit_s: float) -> bool:
        return number * sum(count * kinds[kind].most(limit_s) for kind, count in counts.items()) >= total

    times = sorted({seconds for each in kinds.values() for seconds in each.seconds})
    place = bisect.bisect_left(times, True, key=is_enough)
    return None if place == len(times) else [each.most(times[place]) for each in passes]


def _trimmed(passes: Sequence[_Passes], lengths: Sequence[int], total: int, number: int) -> tuple[int, ...]:
    """Shares of so many passes of these lengths; what is more than all is taken from the slowest."""
    shares = [number * length for length in lengths]
    for _ in range(sum(shares) - total):
        rank = max(range(len(shares)), key=lambda each: (passes[each].seconds[-(-shares[each] // number)], each))
        shares[rank] -= 1
    return tuple(shares)


def _own_pass(training: Training, passes: _Passes, share: int, number: int) -> RankSettings:
    """One rank's share in so many passes, or as few as that length takes."""
    length = -(-share // number)
    own = dataclasses.replace(
        training,
        micro_batch=max(1, length) * training.micro_batch,
        checkpointing=passes.ways[length].checkpointing,
        offloading=passes.ways[length].offloading,
        accumulation=2 if number > 1 else 1,
    )
    return RankSettings(training=own, share=share, passes=-(-share // length) if length else 0)


def with_own_recomputation(
    plain: Scenario, again: Scenario, strategy: PlannedStrategy
) -> Iterator[tuple[PlannedStrategy, Scenario]]:
    """The same question where some ranks alone recompute, and all have one micro-batch: `PlanHalf.own_recomputation`.

    Nothing where speeds are not known.
    """
    if not plain.is_timed or not again.is_timed:
        return
    several = plain.room(strategy.kind).training.accumulation
    trainings = [dataclasses.replace(each.training, accumulation=several) for each in (plain, again)]
    for way, recomputes in strategy.half.own_recomputation(plain, again, strategy):
        if len(set(recomputes)) > 1:
            own = [RankSettings(training=trainings[each], share=plain.count, passes=None) for each in recomputes]
            yield way, dataclasses.replace(plain, settings=tuple(own))


def _settings(training: Training, way: _Way, work: RankWork) -> RankSettings:
    passes = work.passes or 0
    joined = -(-work.micro_batches // passes) if passes else 1
    own = dataclasses.replace(
        training,
        micro_batch=joined * training.micro_batch,
        checkpointing=way.checkpointing,
        offloading=way.offloading,
        accumulation=2 if passes > 1 else 1,
    )
    return RankSettings(training=own, share=work.micro_batches, passes=passes)


def _ranks(possible: Sequence[Scenario], strategy: PlannedStrategy, moving: Sequence[Scenario]) -> list[_Rank]:
    """The ways of every rank; ranks that are alike share one. moving: see `_offloaded`."""
    first = possible[0]
    query, (tokens, length) = first.query, first.tokens
    free = "micro_batch" in query.open and joins(first.training, query.architecture)
    longest = min(first.count, LONGEST // first.training.micro_batch) if free else 1
    models = [each.models for each in (*possible, *moving)]  # of cards that are alike, slots tell copies
    known: dict[tuple[object, ...], _Rank] = {}
    found = []
    for rank, placement in enumerate(first.world.placements):
        own = [each[rank] for each in models]
        key = (*map(id, own), placement.free_bytes, placement.gpu is None, _room_in_ram(first, rank))
        if key not in known:
            own_memory = placement.gpu is not None and not (placement.spec is not None and placement.spec.is_unified)
            scenarios = [*possible, *(moving if own_memory else ())]
            ways = _ways(scenarios, strategy, rank, longest=max(1, longest))
            known[key] = _Rank(tuple(ways), tokens, length)
        found.append(known[key])
    return found


def _ways(scenarios: Sequence[Scenario], strategy: PlannedStrategy, rank: int, *, longest: int) -> list[_Way]:
    """Those that fit surely enough; where none does, those that may.

    Nothing is moved where recomputation alone has room for the longest pass.
    """
    for sure in (SURE, EVEN):
        found: list[_Way] = []
        for each in scenarios:
            if each.training.offloading and any(way.checkpointing and way.several == longest for way in found):
                continue
            way = _way(each, each.models[rank], strategy, rank, longest=longest, sure=sure)
            found += [] if way is None else [way]
        if found:
            return found
    return []


def _offloaded(possible: Sequence[Scenario], strategy: PlannedStrategy) -> list[Scenario]:
    """The way that recomputes, with its inputs in the machine's memory, where that is open and can be done.

    Its copies take time: it is of use where it makes passes longer than recomputation alone, or is the only way.
    """
    if len(possible) == 1 or "activation_offloading" not in possible[0].query.open:
        return []
    if not strategy.half.capabilities.supports("activation_offloading", value=True, given={}):
        return []
    return [
        dataclasses.replace(each, training=dataclasses.replace(each.training, offloading=True))
        for each in possible
        if each.training.checkpointing
    ]


def _way(
    scenario: Scenario,
    model: ComputeModel | None,
    strategy: PlannedStrategy,
    rank: int,
    *,
    longest: int,
    sure: float,
) -> _Way | None:
    several = _longest(scenario, strategy, rank, most=longest, accumulation=2, sure=sure)
    alone = several
    if not strategy.half.keeps_buckets(strategy) and several < longest:
        alone = _longest(scenario, strategy, rank, most=longest, accumulation=1, sure=sure)
    if model is None or not (several or alone >= scenario.count):
        return None
    return _Way(scenario.training.checkpointing, scenario.training.offloading, model, alone, several)


def _longest(
    scenario: Scenario, strategy: PlannedStrategy, rank: int, *, most: int, accumulation: int, sure: float
) -> int:
    """Micro-batches of a pass that are likely enough to fit on a rank, at the most; 0: not one does."""
    free_bytes = scenario.world.placements[rank].free_bytes
    if free_bytes is None:
        return most
    ram_bytes = _room_in_ram(scenario, rank)

    def fits(count: int) -> bool:
        size = count * scenario.training.micro_batch
        training = dataclasses.replace(scenario.training, micro_batch=size, accumulation=accumulation)
        memory = scenario.fit(training).memory(strategy, rank)
        return memory.fits(free_bytes) >= sure and memory.offloaded_bytes <= ram_bytes

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _room_in_ram(scenario: Scenario, rank: int) -> float:
    """Bytes of the machine's memory for what a rank moves there; its ranks share them."""
    placement = scenario.world.placements[rank]
    if placement.ram_bytes is None:
        return math.inf
    return MOST_OF_HOST * placement.ram_bytes / len(scenario.world.placements_of(placement.host))


def _shares(ranks: Sequence[_Rank], total: int) -> tuple[int, ...]:
    """Shares of which the slowest is done as early as possible."""
    kinds = list({id(rank): rank for rank in ranks}.values())
    numbers = [sum(rank is kind for rank in ranks) for kind in kinds]

    def done(limit_s: float) -> int:
        return sum(number * kind.most(limit_s, total) for kind, number in zip(kinds, numbers, strict=True))

    low_s, high_s = 0.0, min(kind.best(total)[0] for kind in kinds)
    for _ in range(_BISECTIONS):
        middle_s = (low_s + high_s) / 2
        if not low_s < middle_s < high_s:
            break
        low_s, high_s = (low_s, middle_s) if done(middle_s) >= total else (middle_s, high_s)
    by_kind = {id(kind): kind.most(high_s * _ROUNDING, total) for kind in kinds}
    shares = [by_kind[id(rank)] for rank in ranks]
    for _ in range(sum(shares) - total):  # what more could be done in that time is taken from the slowest
        rank = max(
            range(len(ranks)), key=lambda each: (ranks[each].best(shares[each])[0] if shares[each] else 0.0, each)
        )
        shares[rank] -= 1
    return tuple(shares)
