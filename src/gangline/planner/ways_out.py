"""What would make a job fit that does not: the smallest changes, each of them planned with its figures. Pure.

The gentlest come first (`Tier`), and what has to be bought comes last: a card is named only where no change without a
price is found. `gangline plan` prints them as `instead`.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gangline.catalog.gpu_specs import GPUS
from gangline.planner.candidate import Candidate, EvaluationContext, PlanQuery, Scenario
from gangline.planner.config import unpackable
from gangline.planner.decision import best_of_kinds, choose, trainings
from gangline.planner.machines import DISPLAY_BYTES, PlannedCluster, imagine
from gangline.planner.memory_fit import SURE
from gangline.planner.traffic import LinkModel
from gangline.planner.training import PlannedStrategy, Training
from gangline.runs.job import StrategyJob
from gangline.strategies.base import AUTO
from gangline.strategies.table import ALONE, STRATEGIES, plan_half

LEAST_LENGTH = 256
MOST_TOGETHER = 3
"""Changes at a time."""
OFFLOADED = "activation_checkpointing: true with activation_offloading: true"
EXPERTS = "method.quantise_experts"
ENOUGH = 4
"""Ways that are told, without what may be bought."""


class Tier(enum.IntEnum):
    """What a change costs."""

    SAME = 0
    """The same weights come out, in about the same time: parts at a time, recomputation, another strategy, fewer hosts,
    rows that are not packed."""
    SLOW = 1
    """The same weights, slowly: weights come from the machines' memory for every micro-batch."""
    ROUNDED = 2
    """Frozen weights, states or trained weights of fewer bits."""
    METHOD = 3
    """Adapters in place of all weights, or on weights of 4 bits."""
    SHORTER = 4
    """Less of each row is seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Changes that were tried together, and what fits then."""

    words: tuple[str, ...]
    """What to write in the job, to leave out, or to buy."""
    candidate: Candidate
    bought: bool = False
    """Whether it takes a purchase; prices are not known here."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question, as far as changes change it."""

    query: PlanQuery
    world: PlannedCluster

    def training(self, **values: object) -> _Asked:
        """With other values of these, which are open no longer."""
        changed = dataclasses.replace(self.query.training, **values)  # type: ignore[arg-type]
        left = self.query.open
        if "checkpointing" in values:
            left = tuple(key for key in left if key != "activation_checkpointing")
        return _Asked(dataclasses.replace(self.query, training=changed, open=left), self.world)


@dataclass(frozen=True, slots=True)
class _Change:
    group: str
    """Of one group only one is made."""
    tier: Tier
    apply: Callable[[_Asked], _Asked]
    words: Callable[[Candidate], str]
    """Told by what fits then."""
    level: int = 0
    """Of changes of a group, one with a higher level goes further; 0: they do not compare."""

    def goes_beyond(self, other: _Change) -> bool:
        """Whether it is that one, or does the same and more."""
        return self is other or (self.group == other.group and self.level > other.level > 0)


def ways_out(query: PlanQuery, world: PlannedCluster) -> list[Suggestion]:
    """The smallest sets of changes after which gangline's own trainer has room, or, if there are none, any strategy.

    At last what may be bought, if no change of `Tier.SAME` is enough: one more card like those of the only host, and
    the smallest card that would hold the job alone.
    """
    search = _Search(_Asked(query, world))
    ways = search.ways()
    if search.on_gpus and Tier.SAME not in search.reached:
        moved = Tier.SLOW in search.reached
        found = (_one_more(search.asked, search.bench, plain=moved), _one_card(query, search.bench))
        ways += [way for way in found if way is not None]
    return ways


class _Search:
    """Sets of changes from the gentlest to the last; those of a tier are as small as they can be."""

    def __init__(self, asked: _Asked) -> None:
        self.asked = asked
        self.bench = EvaluationContext()
        self.on_gpus = all(placement.gpu is not None for placement in asked.world.placements)
        self.changes = list(_changes(asked, moves=self.on_gpus and _has_own_memory(asked.world)))
        self.reached: set[Tier] = set()
        """In which there are sets after which gangline's own trainer has room."""
        self._tried: dict[tuple[object, ...], list[Candidate]] = {}
        self._hopeless: dict[tuple[_Change, ...], bool] = {}

    def ways(self) -> list[Suggestion]:
        """Up to `ENOUGH`; of those that cost more, none that takes more changes than a gentler one."""
        built: list[tuple[tuple[_Change, ...], Suggestion]] = []
        others: list[tuple[tuple[_Change, ...], Suggestion]] = []
        most = MOST_TOGETHER
        for tier in Tier:
            if len(built) >= ENOUGH or (tier == Tier.SHORTER and self.reached & {Tier.SAME, Tier.SLOW}):
                break
            for count in range(1, most + 1):
                if tier in self.reached:
                    break
                for chosen in self._sets(tier, count):
                    if _is_known(chosen, built):
                        continue
                    fitting = self._fitting(chosen)
                    if (draft := choose([each for each in fitting if each.is_built])) is not None:
                        built.append((chosen, _suggestion(chosen, draft)))
                    elif not _is_known(chosen, others) and (draft := choose(fitting)) is not None:
                        others.append((chosen, _suggestion(chosen, draft)))
                self.reached |= {_tier(chosen) for chosen, _ in built}
            most = min((len(chosen) for chosen, _ in built), default=MOST_TOGETHER)
        return [way for _, way in (built or others)[:ENOUGH]]

    def _sets(self, tier: Tier, count: int) -> Iterator[tuple[_Change, ...]]:
        """Of so many changes, one of them of the tier and none beyond it, that are not hopeless."""
        allowed = [change for change in self.changes if change.tier <= tier]
        for chosen in itertools.combinations(allowed, count):
            unlike = len({change.group for change in chosen}) == count
            if unlike and _tier(chosen) == tier and not self._is_hopeless(chosen):
                yield chosen

    def _is_hopeless(self, chosen: tuple[_Change, ...]) -> bool:
        """Whether it would not fit even with all that costs little: told of many sets by one question."""
        part = tuple(change for change in chosen if change.tier > Tier.SLOW or change.group in ("hosts", "strategy"))
        if part not in self._hopeless:
            groups = {change.group for change in part}
            further = {each.group: each for each in self.changes if each.tier == Tier.SAME and each.group not in groups}
            further.pop("hosts", None)
            without = {group: change for group, change in further.items() if group != "strategy"}
            self._hopeless[part] = not any(self._fitting((*part, *more.values())) for more in (further, without))
        return self._hopeless[part]

    def _fitting(self, chosen: Sequence[_Change]) -> list[Candidate]:
        asked = self.asked
        for change in sorted(chosen, key=lambda each: each.group == "strategy"):  # what moves depends on the method
            asked = change.apply(asked)
        query, hosts = asked.query, asked.world.hosts
        key = (tuple(trainings(query)), query.strategy.kind, query.strategy.offload, hosts)
        if key not in self._tried:
            self._tried[key] = _fitting(query, asked.world, self.bench)
        return self._tried[key]


def _tier(chosen: Sequence[_Change]) -> Tier:
    return max(change.tier for change in chosen)


def _is_known(chosen: Sequence[_Change], ways: list[tuple[tuple[_Change, ...], Suggestion]]) -> bool:
    """Whether less than that does already."""
    return any(all(any(each.goes_beyond(less) for each in chosen) for less in found) for found, _ in ways)


def _suggestion(chosen: Sequence[_Change], draft: Candidate) -> Suggestion:
    return Suggestion(words=tuple(change.words(draft) for change in chosen), candidate=draft)


def _fitting(query: PlanQuery, world: PlannedCluster, bench: EvaluationContext) -> list[Candidate]:
    return [draft for draft in best_of_kinds(query, world, bench) if draft.fits and draft.fits_host_memory]


def _changes(asked: _Asked, *, moves: bool) -> Iterator[_Change]:
    """The gentlest first: those that change no number come before those that change what is learnt.

    moves: whether there is other memory than the cards'.
    """
    training = asked.query.training
    yield from _at_a_time(asked.query, moves=moves)
    yield from _strategies(asked, moves=moves)
    yield from _fewer_hosts(asked.world)
    if training.packed:
        yield _replaced("data.packing: false", "packing", Tier.SAME, packed=False)
    if training.method == "qlora" and training.bits == 8:
        yield _replaced("method.bits: 4", "bits", Tier.ROUNDED, bits=4)
    if training.method == "qlora" and _has_whole_experts(asked.query):
        yield _with_experts(training, f"{EXPERTS}: true", "bits", Tier.ROUNDED)
    if training.method == "full" and training.optimizer == "adamw" and training.parameters == "fp32":
        yield _replaced("optimizer.kind: adamw-8bit", "optimizer", Tier.ROUNDED, optimizer="adamw-8bit")
    if training.method == "full" and training.optimizer != "adamw":  # for weights in parts
        yield _replaced("optimizer.kind: adamw", "optimizer", Tier.ROUNDED, optimizer="adamw")
    if training.method == "full" and training.parameters == "fp32" and training.compute == "bf16":
        yield _replaced("precision.parameters: compute", "parameters", Tier.ROUNDED, parameters="bf16")
    if training.method == "full":
        yield _replaced("method: lora", "method", Tier.METHOD, method="lora", parameters="fp32")
    if training.method != "qlora":
        yield _to_qlora(asked.query)
    for number, length in enumerate(_halves(training.sequence_length // 2, LEAST_LENGTH), 1):
        yield _replaced(f"data.sequence_length: {length}", "length", Tier.SHORTER, number, sequence_length=length)


def _has_own_memory(world: PlannedCluster) -> bool:
    return all(placement.spec is None or not placement.spec.is_unified for placement in world.placements)


def _halves(first: int, least: int) -> Iterator[int]:
    while first >= least:
        yield first
        first //= 2


def _at_a_time(query: PlanQuery, *, moves: bool) -> Iterator[_Change]:
    """What of activations is there at once, where the job does not leave that open."""
    training = query.training
    if "micro_batch" not in query.open:
        for number, size in enumerate(_halves(training.micro_batch // 2, 1), 1):
            if query.batch % size == 0:
                yield _replaced(f"micro_batch: {size}", "micro_batch", Tier.SAME, number, micro_batch=size)
    if not training.checkpointing and "activation_checkpointing" not in query.open:
        yield _replaced("activation_checkpointing: true", "checkpointing", Tier.SAME, 1, checkpointing=True)
    if moves and not training.offloading:
        words = "activation_offloading: true" if training.checkpointing else OFFLOADED
        yield _replaced(words, "checkpointing", Tier.SAME, 2, checkpointing=True, offloading=True)


def _strategies(asked: _Asked, *, moves: bool) -> Iterator[_Change]:
    """Another one than the job asks for, and ones that have weights in the machines' memory."""
    own = asked.query.strategy
    if own.kind != AUTO:
        yield _Change("strategy", Tier.SAME, lambda asked: _with(asked, StrategyJob()), _kind_of, 1)
    if not moves or own.offload or len(asked.world.placements) < 2:
        return
    slots = asked.world.fabric.slots
    for kind in STRATEGIES.built_in:
        half = plan_half(kind)
        taken = half.kind == own.kind or not half.capabilities.asked_only
        if taken and (not half.shards_per_host or (len(slots) > 1 and min(slots) > 1)):
            yield from _offloads(kind)


def _offloads(kind: str) -> Iterator[_Change]:
    ways = plan_half(kind).capabilities.offload
    for number in range(max((sum(method in methods for methods, _ in ways) for method in ("full", "lora")), default=0)):

        def apply(asked: _Asked, number: int = number) -> _Asked:
            fitting = [parts for methods, parts in ways if asked.query.training.method in methods]
            parts = fitting[min(number, len(fitting) - 1)] if fitting else ()
            return _with(asked, dataclasses.replace(asked.query.strategy, kind=kind, offload=parts))  # type: ignore[arg-type]

        yield _Change("strategy", Tier.SLOW, apply, _offload_of, 2)


def _with(asked: _Asked, strategy: StrategyJob) -> _Asked:
    return _Asked(dataclasses.replace(asked.query, strategy=strategy), asked.world)


def _kind_of(candidate: Candidate) -> str:
    return f"strategy: {candidate.strategy.kind}"


def _offload_of(candidate: Candidate) -> str:
    parts = candidate.strategy.offload
    moved = parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"
    return f"strategy: {{kind: {candidate.strategy.kind}, offload: {moved}}}"


def _fewer_hosts(world: PlannedCluster) -> Iterator[_Change]:
    """Without those with the least memory, as long as some are left."""
    least = {host: min(each.free_bytes or 0 for each in world.placements_of(host)) for host in world.hosts}
    for number, limit in enumerate(sorted(set(least.values()))[1:], 1):
        out = [host for host in world.hosts if least[host] < limit]
        kept = [host for host in world.hosts if least[host] >= limit]
        named = f"without {', '.join(out[:4])}{f' and {len(out) - 4} more' if len(out) > 4 else ''}"
        yield _Change(
            "hosts",
            Tier.SAME,
            lambda asked, kept=kept: _Asked(asked.query, asked.world.only(kept)),  # type: ignore[misc]
            lambda _, named=named: named,  # type: ignore[misc]
            number,
        )


def _has_whole_experts(query: PlanQuery) -> bool:
    return unpackable(query.architecture) == "experts" and EXPERTS not in query.training.extras


def _to_qlora(query: PlanQuery) -> _Change:
    """Experts have few bits, too, where the model has some: else next to nothing would change."""
    training = query.training
    if not _has_whole_experts(query):
        return _replaced("method: qlora", "method", Tier.METHOD, method="qlora", parameters="fp32")
    words = "method: {kind: qlora, quantise_experts: true}"
    return _with_experts(training, words, "method", Tier.METHOD, method="qlora", parameters="fp32")


def _with_experts(training: Training, words: str, group: str, tier: Tier, **values: object) -> _Change:
    """Experts of few bits, for which the trainer wants recomputation."""
    words += "" if training.checkpointing else " with activation_checkpointing: true"
    changed = {**values, "checkpointing": True, "extras": (*training.extras, EXPERTS)}
    return _Change(group, tier, lambda asked: asked.training(**changed), lambda _: words)


def _replaced(words: str, group: str, tier: Tier, level: int = 0, **values: object) -> _Change:
    return _Change(group, tier, lambda asked: asked.training(**values), lambda _: words, level)


# What may be bought.


def _one_more(asked: _Asked, bench: EvaluationContext, *, plain: bool) -> Suggestion | None:
    """One more card like those of the only host. plain: not with weights in the machine's memory, which fewer do."""
    placements = asked.world.placements
    first, alike = placements[0], {(each.gpu, each.free_bytes) for each in placements}
    if len(asked.world.hosts) > 1 or len(alike) > 1 or first.num_sharing > 1:
        return None
    added = dataclasses.replace(first, device=len(placements))
    more = _Asked(asked.query, dataclasses.replace(asked.world, placements=(*placements, added)))
    for change in (None, *(() if plain else _strategies(more, moves=_has_own_memory(more.world)))):
        tried = more if change is None else change.apply(more)
        built = [each for each in _fitting(tried.query, tried.world, bench) if each.is_built]
        if (draft := choose(built)) is not None:
            bought = f"one more {first.label} in {first.host}"
            words = (bought,) if change is None else (bought, change.words(draft))
            return Suggestion(words=words, candidate=draft, bought=True)
    return None


def _one_card(query: PlanQuery, bench: EvaluationContext) -> Suggestion | None:
    """The smallest card of the catalogue that holds the job alone."""
    none = LinkModel(latency_s=0.0, bytes_per_s=1e12, source="one card: nothing travels")
    memories = None
    for spec in sorted(GPUS, key=lambda gpu: (gpu.total_bytes, -gpu.tflops)):
        apart = spec.laptop or spec.untrained or spec.note or spec.is_unified
        if apart or (query.training.compute == "bf16" and not spec.bf16):
            continue
        world = PlannedCluster(placements=imagine(spec.name), wire=none, inside=none, asked=False)
        if memories is None:  # of a rank they are the same on every card
            alone = PlannedStrategy(kind=ALONE, world_size=1)
            scenarios = [_alone(query, world, training, bench) for training in trainings(query)]
            memories = [scenario.room(ALONE).memory(alone, 0) for scenario in scenarios]
        if not any(memory.fits(spec.total_bytes - DISPLAY_BYTES) >= SURE for memory in memories):
            continue
        if (draft := choose(_fitting(query, world, bench))) is not None:
            words = f"one card with {spec.memory_gb:g} GB, such as {spec.name}"
            return Suggestion(words=(words,), candidate=draft, bought=True)
    return None


def _alone(query: PlanQuery, world: PlannedCluster, training: Training, bench: EvaluationContext) -> Scenario:
    return Scenario(query=query, world=world, training=training, cache=bench)
