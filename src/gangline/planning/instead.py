"""What would make a job fit that does not: the smallest changes, each of them tried. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gangline.catalog.gpus import GPUS
from gangline.planning.decision import choose, drafts_of_kinds, trainings
from gangline.planning.links import LinkModel
from gangline.planning.option import Bench, Draft, Option, Question
from gangline.planning.training import Training
from gangline.planning.world import World, imagine

LEAST_LENGTH = 256
MOST_TOGETHER = 3
"""Changes at a time."""
OFFLOADED = "activation_checkpointing: true with activation_offloading: true"
ENOUGH = 4
"""Ways that are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Changes that were tried together, and what fits then."""

    words: tuple[str, ...]
    """What to write in the job, or to buy."""
    option: Option


@dataclass(frozen=True, slots=True)
class _Change:
    words: str
    group: str
    """Of one group only one is made."""
    apply: Callable[[Training], Training]


def ways_out(question: Question, world: World) -> list[Way]:
    """The smallest sets of changes after which gangline's own trainer has room, or, if there are none, any strategy.

    At last the smallest card that would hold the job alone.
    """
    bench = Bench()
    ways = _of_the_job(question, world, bench)
    if _on_gpus(world) and (bought := _one_card(question, bench)) is not None:
        ways.append(bought)
    return ways


def _of_the_job(question: Question, world: World, bench: Bench) -> list[Way]:
    changes = list(_changes(question.training, on_gpus=_on_gpus(world)))
    built: list[Way] = []
    others: list[Way] = []
    tried: dict[tuple[Training, ...], list[Draft]] = {}  # what the job leaves open is varied whatever is changed
    for count in range(1, MOST_TOGETHER + 1):
        for chosen in itertools.combinations(changes, count):
            words = tuple(change.words for change in chosen)
            if len({change.group for change in chosen}) < count or _known(words, built):
                continue
            changed = _changed(question, chosen)
            key = tuple(trainings(changed))
            fitting = tried[key] = tried[key] if key in tried else _fitting(changed, world, bench)
            if (draft := choose([each for each in fitting if each.is_built])) is not None:
                built.append(Way(words=words, option=draft.weighed()))
            elif not _known(words, others) and (draft := choose(fitting)) is not None:
                others.append(Way(words=words, option=draft.weighed()))
        if len(built) >= ENOUGH:
            break
    return (built or others)[:ENOUGH]


def _on_gpus(world: World) -> bool:
    return all(seat.gpu is not None for seat in world.seats)


def _known(words: tuple[str, ...], ways: list[Way]) -> bool:
    """Whether fewer of these changes do already."""
    return any(set(way.words) <= set(words) for way in ways)


def _changed(question: Question, changes: tuple[_Change, ...]) -> Question:
    training = question.training
    for change in changes:
        training = change.apply(training)
    return dataclasses.replace(question, training=training)


def _changes(training: Training, *, on_gpus: bool) -> Iterator[_Change]:
    """The gentlest first: those that change no number come before those that change what is learnt."""
    yield from _of_activations(training, on_gpus=on_gpus)
    if training.method == "full" and training.optimizer == "adamw" and training.parameters == "fp32":
        yield _replaced("optimizer.kind: adamw-8bit", "optimizer", optimizer="adamw-8bit")
    if training.method == "full" and training.optimizer != "adamw":  # for weights in parts
        yield _replaced("optimizer.kind: adamw", "optimizer", optimizer="adamw")
    length = training.sequence_length // 2
    while length >= LEAST_LENGTH:
        yield _replaced(f"data.sequence_length: {length}", "length", sequence_length=length)
        length //= 2
    if training.method == "full" and training.parameters == "fp32" and training.compute == "bf16":
        yield _replaced("precision.parameters: compute", "parameters", parameters="bf16")
    if training.method == "full":
        yield _replaced("method: lora", "method", method="lora", parameters="fp32")
    if training.method != "qlora":
        yield _replaced("method: qlora", "method", method="qlora", parameters="fp32")
    elif training.bits == 8:
        yield _replaced("method.bits: 4", "method", bits=4)


def _of_activations(training: Training, *, on_gpus: bool) -> Iterator[_Change]:
    if not training.checkpointing:
        yield _replaced("activation_checkpointing: true", "checkpointing", checkpointing=True)
    elif on_gpus and not training.offloading:
        yield _replaced("activation_offloading: true", "offloading", offloading=True)
    if training.micro_batch > 1:
        yield _replaced("micro_batch: 1", "micro_batch", micro_batch=1)
    if on_gpus and not training.checkpointing:
        yield _replaced(OFFLOADED, "checkpointing", checkpointing=True, offloading=True)


def _replaced(words: str, group: str, **values: object) -> _Change:
    return _Change(words, group, lambda training: dataclasses.replace(training, **values))  # type: ignore[arg-type]


def _one_card(question: Question, bench: Bench) -> Way | None:
    """The smallest card of the catalogue that holds the job alone."""
    for spec in sorted(GPUS, key=lambda gpu: (gpu.total_bytes, -gpu.tflops)):
        if spec.laptop or (question.training.compute == "bf16" and not spec.bf16):
            continue
        world = dataclasses.replace(_world_of(spec.name), asked=False)
        if (draft := choose(_fitting(question, world, bench))) is not None:
            words = f"one card with {spec.memory_gb:g} GB, such as {spec.name}"
            return Way(words=(words,), option=draft.weighed())
    return None


def _fitting(question: Question, world: World, bench: Bench) -> list[Draft]:
    return [draft for draft in drafts_of_kinds(question, world, bench) if draft.fits]


def _world_of(name: str) -> World:
    none = LinkModel(latency_s=0.0, bytes_per_s=1e12, source="one card: nothing travels")
    return World(seats=imagine(name), wire=none, inside=none)
