"""Which of all ways to run a job is the best, what speaks against the others, and what n machines would give. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gangline.planning.dividing import Dividing
from gangline.planning.option import Bench, Draft, Option, Question, Shift, lacking, shifts
from gangline.planning.room import EVEN, pipeline
from gangline.planning.training import Kind, Number, Strategy, Training
from gangline.planning.world import World
from gangline.runs.deal import whole_count, whole_counts
from gangline.runs.job import ZERO, StrategyJob

SIMPLEST: tuple[Kind, ...] = (
    "single",
    "ddp",
    "zero-1",
    "zero-2",
    "fsdp",
    "hsdp",
    "zero-3",
    "tp",
    "pipeline",
    "local-sgd",
)
"""Of two that are as fast, the one further to the left is taken."""
AS_FAST = 1.02
LEAST_CHANCE = 0.1
"""Below that a start is refused; what is foreseen of a process may be a quarter too much."""
INNER_STEPS = StrategyJob().inner_steps
"""local-sgd: steps between two exchanges where the job says nothing; published: 50 to 500 (DiLoCo)."""
ASKED: dict[str, tuple[Kind, ...]] = {
    "auto": SIMPLEST,
    "ddp": ("single", "ddp"),
    "fsdp": ("single", "fsdp"),
    "hsdp": ("single", "hsdp"),
    "zero-1": ("single", "zero-1"),
    "zero-2": ("single", "zero-2"),
    "zero-3": ("single", "zero-3"),
    "tp": ("single", "tp"),
    "pipeline": ("single", "pipeline"),
    "local-sgd": ("single", "local-sgd"),
}
"""All that is weighed, by what the job asks for."""
SHARING: tuple[Kind, ...] = ("single", "ddp", "local-sgd")
"""What ranks that share a GPU can do: of what ranks exchange under the others gloo does not do all."""
BEFORE_TP: tuple[Kind, ...] = ("single", "ddp", "fsdp", "hsdp")
"""Where one of these fits, tp is taken only if the job asks for it."""
UNTIMED = 4
"""Samples at once where nobody knows how long they take, if they fit."""
LEAST_STAGES = 2
"""Ranks of a pipeline: of one it would be ddp."""
FEW_HOSTS = 5
"""Up to here every number of them is tried, beyond it 1, 2, 4, 8, ..."""
MOST_ALONE = 8
"""Unlike machines that are each tried alone."""
MOST_AT_ONCE = 64
"""Samples of a micro-batch, at the most, where the plan chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Few:
    """What some of the machines would do."""

    count: int
    best: Option | None
    runnable: Option | None
    """Of those that gangline's own trainer can do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision, and what it was chosen from."""

    question: Question
    world: World
    best: Option | None
    """The fastest that fits; None: nothing fits."""
    runnable: Option | None
    """The fastest that fits of those that gangline's own trainer can do."""
    by_kind: tuple[Option, ...]
    """The best of every strategy, those that do not fit among them."""
    by_hosts: tuple[Few, ...] = ()
    """The best with 1, 2, ... machines: the fastest ones first."""

    @property
    def dividing(self) -> Dividing | None:
        """How well the batch divides, in what would be run; None where nothing fits."""
        option = self.runnable or self.best
        return None if option is None else option.dividing(self.question)

    @property
    def today(self) -> Option | None:
        """The fastest that gangline's own trainer can do with any number of these machines."""
        built = [few.runnable for few in self.by_hosts if few.runnable is not None]
        return min(built, key=lambda option: option.seconds, default=self.runnable)


def decide(question: Question, world: World) -> Verdict:
    """Weigh every way on all hosts, and the best one on fewer."""
    bench = Bench()
    if "batch" in question.open:
        question = _with_batch(question, world, bench)
    drafts = drafts_of_kinds(question, world, bench)
    options = [draft.weighed() for draft in drafts]
    best, runnable = (
        None if draft is None else options[drafts.index(draft)]
        for draft in (choose(fitting(drafts)), _runnable(drafts))
    )
    whole = Few(count=len(world.hosts), best=best, runnable=runnable)
    return Verdict(
        question=question,
        world=world,
        best=best,
        runnable=runnable,
        by_kind=tuple(options),
        by_hosts=tuple(_by_hosts(question, world, bench, whole=whole)),
    )


def _with_batch(question: Question, world: World, bench: Bench) -> Question:
    """The question with the batch that computes the most samples per second among those that are near the wish."""
    drafts = drafts_of_kinds(question, world, bench)
    draft, least = _runnable(drafts) or choose(fitting(drafts)), question.training.micro_batch
    batch = least * whole_count(question.batch, least) if draft is None else draft.samples
    rest = tuple(key for key in question.open if key != "batch")
    return dataclasses.replace(question, batch=batch, about=question.batch, open=rest)


def _runnable(drafts: list[Draft]) -> Draft | None:
    built = [draft for draft in drafts if draft.is_built]
    return choose(fitting(built) or [draft for draft in built if draft.chance >= LEAST_CHANCE])


def drafts_of_kinds(question: Question, world: World, bench: Bench) -> list[Draft]:
    """The best of every strategy that these seats allow, in the order of `SIMPLEST`. bench: see there.

    Several pipelines are weighed where one would be taken, or nothing fits: how they compare with what is simpler has
    not been measured on GPUs.
    """
    possible = shifts(question, world, trainings(question), bench)
    kinds = ASKED[question.strategy.kind]
    found = {kind: _nearest(drafts) for kind in kinds if (drafts := _drafts(possible, kind))}
    taken = choose(fitting(list(found.values())))
    if taken is None or taken.strategy.kind == "pipeline":
        alone = [found["pipeline"]] if "pipeline" in found else []
        if several := [*alone, *(_drafts(possible, "pipeline", several=True) if "pipeline" in kinds else [])]:
            found["pipeline"] = _nearest(several)
    return [found[kind] for kind in kinds if kind in found]


def _nearest(drafts: list[Draft]) -> Draft:
    """The best that fits, else what is nearest to it."""
    return choose(fitting(drafts)) or max(drafts, key=lambda draft: (draft.chance, draft.spare_bytes))


def _drafts(possible: list[Shift], kind: Kind, *, several: bool = False) -> list[Draft]:
    """All of one strategy, but for micro-batches larger than one that is not likely to fit: they need more.

    That is so as long as gradients are summed over several of them, or over none. Stages of unlike layers are tried all
    the same, for what a rank has room for depends on which ones it gets. several: more than one pipeline.
    """
    found: list[Draft] = []
    too_large: set[tuple[bool, int]] = set()
    crowded = any(each.world.crowded for each in possible[:1])
    for each in possible:
        like = (each.training.checkpointing, each.room(kind).training.accumulation)
        if like in too_large:
            continue
        ways = _rows(each) if several else _strategies(each, kind)
        drafts = [each.draft(strategy) for strategy in ways if not crowded or strategy.kind in SHARING]
        if drafts and not any(draft.may_fit for draft in drafts) and (kind != "pipeline" or each.is_uniform):
            too_large.add(like)
        found += drafts
    return found


def choose(drafts: list[Draft]) -> Draft | None:
    """The simplest of the fastest; what computes other numbers than one big machine is never taken by itself.

    Nor is zero where something else fits: what it has in parts fsdp has, without a package more. tp is taken where
    nothing simpler fits, for how fast slices of layers compute is a guess.
    """
    exact = [draft for draft in drafts if draft.is_exact] or drafts
    exact = [draft for draft in exact if draft.strategy.asked or draft.strategy.kind not in ZERO] or exact
    if any(draft.strategy.kind in BEFORE_TP for draft in exact):
        exact = [draft for draft in exact if draft.strategy.kind != "tp"]
    timed = [(draft.seconds() / draft.samples, draft) for draft in exact]
    least_s = min((seconds for seconds, _ in timed), default=float("inf"))
    as_fast = [(seconds, draft) for seconds, draft in timed if seconds <= least_s * AS_FAST]
    return min(as_fast, key=_simplicity, default=(0.0, None))[1]


def _simplicity(timed: tuple[float, Draft]) -> tuple[int, bool, bool, bool, int, float]:
    seconds, draft = timed
    return (
        SIMPLEST.index(draft.strategy.kind),
        draft.training.checkpointing,
        draft.training.exchange is not None,
        draft.strategy.eager,
        # without times, a few samples at once: one alone keeps no device busy
        draft.training.micro_batch if draft.shift.is_timed else abs(draft.training.micro_batch - UNTIMED),
        seconds,
    )


def fitting(drafts: list[Draft]) -> list[Draft]:
    """Those that fit; where none does, those that may."""
    return [draft for draft in drafts if draft.fits] or [draft for draft in drafts if draft.may_fit]


def trainings(question: Question) -> list[Training]:
    """The job's own, or all that it leaves open."""
    base = question.training
    micro = _micro_batches(question) if "micro_batch" in question.open else [base.micro_batch]
    leaves = "activation_checkpointing" in question.open and not base.offloading  # what is moved is what is kept then
    checkpointing = [False, True] if leaves else [base.checkpointing]
    varies = "exchange" in question.open and base.parameters == "fp32"
    exchange: list[Number | None] = [None, "bf16"] if varies else [base.exchange]
    varied = itertools.product(micro, checkpointing, exchange)
    return [dataclasses.replace(base, micro_batch=m, checkpointing=c, exchange=e) for m, c, e in varied]


def _micro_batches(question: Question) -> list[int]:
    """Divisors of the batch, or of one that may be taken, that are a power of two, or three times one."""
    sizes = sorted({factor << power for factor in (1, 3) for power in range(7)})
    if "batch" in question.open:
        return [size for size in sizes if size <= MOST_AT_ONCE and whole_counts(question.batch, size)]
    return [size for size in sizes if size <= min(question.batch, MOST_AT_ONCE) and question.batch % size == 0]


def _strategies(shift: Shift, kind: Kind) -> Iterator[Strategy]:
    size = len(shift.world.seats)
    if kind == "single":
        if size == 1:
            yield Strategy(kind="single", world_size=1)
    elif size > 1:
        yield from _together(shift, kind)


def _together(shift: Shift, kind: Kind) -> Iterator[Strategy]:
    size, slots = len(shift.world.seats), shift.fabric.slots
    if kind == "pipeline":
        if shift.question.strategy.replicas in (None, 1) and (layers := shift.stages()) is not None:
            yield from _paces(shift, pipeline(layers))
    elif kind == "local-sgd":
        if shift.training.method == "full":
            yield _rounds(shift.question, slots)
    elif kind == "hsdp":
        yield from _copies(shift, size, slots)
    elif kind == "tp":
        yield from _slices(shift, size, slots)
    elif kind == "fsdp":
        offload = _offload(shift.question.strategy, kind)
        for reshard in (True,) if offload else (True, False):
            yield Strategy(kind="fsdp", world_size=size, shard_size=size, reshard=reshard, offload=offload)
    else:
        yield _plain(shift.question.strategy, kind, size)


def _plain(job: StrategyJob, kind: Kind, size: int) -> Strategy:
    """Ddp or zero, with what the job says of it if it asks for just that."""
    asked, shard_size = kind in ZERO and job.kind == kind, 1 if kind == "ddp" else size
    on_disk = asked and job.offload_to is not None
    offload = _offload(job, kind)
    return Strategy(kind=kind, world_size=size, shard_size=shard_size, asked=asked, offload=offload, on_disk=on_disk)


def _offload(job: StrategyJob, kind: Kind) -> tuple[Literal["optimizer", "parameters"], ...]:
    """What the job has in the machines' memory under that strategy; hsdp is fsdp where hosts are unlike."""
    same = job.kind == kind or (job.kind == "hsdp" and kind == "fsdp")
    return job.offload if same else ()


def _rows(shift: Shift) -> Iterator[Strategy]:
    """Several pipelines of as many ranks each, as long as they are likely to fit."""
    asked, size = shift.question.strategy.replicas, len(shift.world.seats)
    for replicas in range(2, size // LEAST_STAGES + 1):
        if size % replicas or asked not in (None, replicas):
            continue
        layers = shift.stages(replicas=replicas)
        if layers is None:  # more ranks than layers
            continue
        strategy = pipeline(layers, replicas=replicas)
        yield from _paces(shift, strategy)
        if shift.room("pipeline").nearness(strategy)[0] < EVEN:  # shorter ones need more of each rank
            return


def _paces(shift: Shift, strategy: Strategy) -> Iterator[Strategy]:
    """A pipeline, and, where it is known how long sending takes, the same with more micro-batches on their way."""
    yield strategy
    if shift.is_timed:
        yield dataclasses.replace(strategy, eager=True)


def _copies(shift: Shift, size: int, slots: Sequence[int]) -> Iterator[Strategy]:
    """One copy inside every host; where that is one copy in all, or none, a job that asks for it gets that."""
    if len(slots) > 1 and len(set(slots)) == 1 and slots[0] > 1:
        offload = _offload(shift.question.strategy, "hsdp")
        yield Strategy(kind="hsdp", world_size=size, shard_size=slots[0], offload=offload)
    elif shift.question.strategy.kind == "hsdp":
        offload = _offload(shift.question.strategy, "fsdp")
        yield Strategy(kind="fsdp", world_size=size, shard_size=size, offload=offload)


def _slices(shift: Shift, size: int, slots: Sequence[int]) -> Iterator[Strategy]:
    """Layers cut over the ranks of every host, by itself where that is possible; one rank on each has all: ddp."""
    asked = shift.question.strategy.kind == "tp"
    if max(slots) == 1:
        if asked:
            yield Strategy(kind="ddp", world_size=size)
    elif len(set(slots)) == 1:
        strategy = Strategy(kind="tp", world_size=size, shard_size=slots[0])
        if asked or not lacking(strategy, shift.training, shift.question.architecture):
            yield strategy


def _rounds(question: Question, slots: Sequence[int]) -> Strategy:
    """local-sgd over hosts with these numbers of ranks."""
    job = question.strategy
    return Strategy(
        kind="local-sgd",
        world_size=sum(slots),
        shard_size=slots[0] if len(slots) > 1 and len(set(slots)) == 1 else 1,
        inner_steps=job.inner_steps,
        payload=job.payload,
        asked=question.asks_for_rounds,
    )


def _by_hosts(question: Question, world: World, bench: Bench, *, whole: Few) -> Iterator[Few]:
    """The best with n machines: of one, the best of all; of more, the fastest ones. `whole`: with all of them."""
    order = sorted(world.hosts, key=lambda host: -_speed(question, world, host))
    if len(order) > 1:
        unlike = {_kind(world, host): host for host in reversed(order)}
        alone = [_few(question, world.only([host]), bench) for host in list(unlike.values())[:MOST_ALONE]]
        yield from _best_of(alone)
    for count in (n for n in range(2, len(order)) if len(order) <= FEW_HOSTS or n & (n - 1) == 0):
        yield from _best_of([_few(question, world.only(order[:count]), bench)])
    yield from _best_of([whole])


def _few(question: Question, world: World, bench: Bench) -> Few:
    drafts = drafts_of_kinds(question, world, bench)
    best, runnable = choose(fitting(drafts)), _runnable(drafts)
    return Few(
        count=len(world.hosts),
        best=None if best is None else best.weighed(),
        runnable=None if runnable is None else runnable.weighed(),
    )


def _best_of(several: list[Few]) -> Iterator[Few]:
    """One entry with the fastest of each; none where nothing fits."""
    best = [few.best for few in several if few.best is not None]
    runnable = [few.runnable for few in several if few.runnable is not None]
    if best or runnable:
        yield Few(
            count=several[0].count,
            best=min(best, key=lambda option: option.seconds, default=None),
            runnable=min(runnable, key=lambda option: option.seconds, default=None),
        )


def _kind(world: World, host: str) -> tuple[object, ...]:
    """What two hosts have to share to do the same."""
    return tuple((seat.gpu, seat.free_bytes, seat.slowdown, seat.gpu or host) for seat in world.seats_of(host))


def _speed(question: Question, world: World, host: str) -> float:
    """Tokens per second of a host's seats, for the order."""
    training, length = question.training, question.tokens_per_sample
    models = [(question.compute(seat, training), seat.slowdown) for seat in world.seats_of(host)]
    return sum(
        model.tokens_per_s(training.micro_batch * length, length) / slowdown
        for model, slowdown in models
        if model is not None
    )
