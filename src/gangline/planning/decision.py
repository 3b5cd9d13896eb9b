"""Which of all ways to run a job is the best, what speaks against the others, and what n machines would give. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from gangline.planning.option import Option, Question, stages, weigh
from gangline.planning.training import Kind, Strategy, Training
from gangline.planning.world import World

SIMPLEST: tuple[Kind, ...] = ("single", "ddp", "zero-1", "zero-2", "fsdp", "hsdp", "zero-3", "pipeline", "local-sgd")
"""Of two that are as fast, the one further to the left is taken."""
AS_FAST = 1.02
LEAST_CHANCE = 0.1
"""Below that a start is refused; what is foreseen of a process may be a quarter too much."""
INNER_STEPS = 50
"""local-sgd: steps between two exchanges, as published for fine-tuning over slow links (DiLoCo: 50 to 500)."""
UNTIMED = 4
"""Samples at once where nobody knows how long they take, if they fit."""
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
    def today(self) -> Option | None:
        """The fastest that gangline's own trainer can do with any number of these machines."""
        built = [few.runnable for few in self.by_hosts if few.runnable is not None]
        return min(built, key=lambda option: option.seconds, default=self.runnable)


def decide(question: Question, world: World) -> Verdict:
    """Weigh every way on all hosts, and the best one on fewer."""
    options = best_of_kinds(question, world)
    best, runnable = choose(fitting(options)), _runnable(options)
    whole = Few(count=len(world.hosts), best=best, runnable=runnable)
    return Verdict(
        question=question,
        world=world,
        best=best,
        runnable=runnable,
        by_kind=tuple(options),
        by_hosts=tuple(_by_hosts(question, world, whole=whole)),
    )


def _runnable(options: list[Option]) -> Option | None:
    built = [option for option in options if option.is_built]
    return choose(fitting(built) or [option for option in built if option.chance >= LEAST_CHANCE])


def best_of_kinds(question: Question, world: World) -> list[Option]:
    """The best option of every strategy that these seats allow, in the order of `SIMPLEST`."""
    found: list[Option] = []
    for kind in SIMPLEST:
        options = list(_options(question, world, kind))
        if options:
            found.append(choose(fitting(options)) or max(options, key=_nearness))
    return found


def _nearness(option: Option) -> tuple[float, int]:
    return option.chance, -option.tightest.shortage_bytes


def choose(options: list[Option]) -> Option | None:
    """The simplest of the fastest; what computes other numbers than one big machine is never taken by itself."""
    exact = [option for option in options if option.is_exact] or options
    least_s = min((option.seconds for option in exact), default=float("inf"))
    as_fast = [option for option in exact if option.seconds <= least_s * AS_FAST]
    return min(as_fast, key=_simplicity, default=None)


def _simplicity(option: Option) -> tuple[int, bool, int, float]:
    return (
        SIMPLEST.index(option.strategy.kind),
        option.training.checkpointing,
        # without times, a few samples at once: one alone keeps no device busy
        abs(option.training.micro_batch - UNTIMED) if option.time is None else option.training.micro_batch,
        option.seconds,
    )


def fitting(options: list[Option]) -> list[Option]:
    """Those that fit; where none does, those that may."""
    return [option for option in options if option.fits] or [option for option in options if option.may_fit]


def _options(question: Question, world: World, kind: Kind) -> Iterator[Option]:
    for training in trainings(question):
        for strategy in _strategies(question, world, training, kind):
            yield weigh(question, world, strategy, training)


def trainings(question: Question) -> list[Training]:
    """The job's own, or all that it leaves open."""
    base = question.training
    micro = _micro_batches(question.batch) if "micro_batch" in question.open else [base.micro_batch]
    checkpointing = [False, True] if "activation_checkpointing" in question.open else [base.checkpointing]
    return [dataclasses.replace(base, micro_batch=m, checkpointing=c) for m in micro for c in checkpointing]


def _micro_batches(batch: int) -> list[int]:
    """Divisors of the batch that are a power of two, or three times one."""
    sizes = sorted({factor << power for factor in (1, 3) for power in range(7)})
    return [size for size in sizes if size <= min(batch, MOST_AT_ONCE) and batch % size == 0]


def _strategies(question: Question, world: World, training: Training, kind: Kind) -> Iterator[Strategy]:
    size = len(world.seats)
    if kind == "single":
        if size == 1:
            yield Strategy(kind="single", world_size=1)
    elif size > 1:
        yield from _together(question, world, training, kind)


def _together(question: Question, world: World, training: Training, kind: Kind) -> Iterator[Strategy]:
    size = len(world.seats)
    if kind == "pipeline":
        if (layers := stages(question, world, training)) is not None:
            yield Strategy(kind="pipeline", world_size=size, stages=layers)
    elif kind == "local-sgd":
        if training.method == "full":
            yield Strategy(kind="local-sgd", world_size=size, inner_steps=INNER_STEPS)
    elif kind == "hsdp":
        counts = {len(world.seats_of(host)) for host in world.hosts}
        if len(world.hosts) > 1 and len(counts) == 1 and counts != {1}:
            yield Strategy(kind="hsdp", world_size=size, shard_size=counts.pop())
    elif kind == "fsdp":
        for reshard in (True, False):
            yield Strategy(kind="fsdp", world_size=size, shard_size=size, reshard=reshard)
    else:
        yield Strategy(kind=kind, world_size=size, shard_size=1 if kind == "ddp" else size)


def _by_hosts(question: Question, world: World, *, whole: Few) -> Iterator[Few]:
    """The best with n machines: of one, the best of all; of more, the fastest ones. `whole`: with all of them."""
    order = sorted(world.hosts, key=lambda host: -_speed(question, world, host))
    if len(order) > 1:
        unlike = {_kind(world, host): host for host in reversed(order)}
        alone = [_few(question, world.only([host])) for host in list(unlike.values())[:MOST_ALONE]]
        yield from _best_of(alone)
    for count in (n for n in range(2, len(order)) if len(order) <= FEW_HOSTS or n & (n - 1) == 0):
        yield from _best_of([_few(question, world.only(order[:count]))])
    yield from _best_of([whole])


def _few(question: Question, world: World) -> Few:
    options = best_of_kinds(question, world)
    return Few(count=len(world.hosts), best=choose(fitting(options)), runnable=_runnable(options))


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
