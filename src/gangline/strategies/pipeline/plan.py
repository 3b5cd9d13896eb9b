"""The plan half of pipelines: every rank holds some consecutive layers; activations travel from one to the next.

Sent at each boundary: k * 2 * tokens * hidden * b for k micro-batches; between M pipelines of G ranks
2(M-1)/M * P_t / G * b, as if each rank had as many weights as the others. A step takes the longest of the bounds in
`runs/formulas.py`; where sending takes no time, that is sum(t_i) + (k - 1) * max(t_i) for stages of t_i seconds, and
(k + stages - 1) t for equal ones (the bubble). Of several pipelines the slowest counts, and then their exchange.

Stages get layers by speed as far as memory allows it. Ranks that do the same on a device of the same kind need the same
memory; of stages with as many layers of the same shapes the one nearer to the front needs more, for it holds more
micro-batches at once.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from gangline.planner.architecture import Architecture
from gangline.planner.config import FAMILIES, STAGED
from gangline.planner.memory_fit import EVEN, SURE, MemoryFit, layer_ranges
from gangline.planner.shares import rows_named
from gangline.planner.states import Share
from gangline.planner.traffic import Exchange, TrafficQuery, trained_weights
from gangline.planner.training import BYTES, PlannedStrategy
from gangline.runs import formulas
from gangline.runs.gang import split_layers
from gangline.strategies.base import (
    ADAPTERS,
    NO_ACTIVATION_OFFLOADING,
    NO_COMPILE,
    NO_FP16,
    NO_QUANTISED_EXPERTS,
    Asked,
    Capabilities,
    Limit,
    Machines,
    PlanHalf,
    Violation,
)

if TYPE_CHECKING:
    from gangline.planner.candidate import Scenario
    from gangline.planner.speed import RankWork, StepQuery
    from gangline.runs.job import StrategyJob

LEAST_STAGES = 2
"""Ranks of a pipeline: of one it would be ddp."""


class PipelinePlan(PlanHalf):
    """Every rank holds some layers."""

    kind = "pipeline"
    train = "gangline.strategies.pipeline.train:Pipeline"
    meaning = "every rank holds some layers; activations travel from one to the next"
    guide = (
        "every device holds some of the layers, more where it is faster, and activations travel from one to the next, "
        "which suits slow links"
    )
    capabilities = Capabilities(
        limits=(
            NO_FP16,
            NO_ACTIVATION_OFFLOADING,
            NO_COMPILE,
            NO_QUANTISED_EXPERTS,
            Limit(
                key="method.train_tokens",
                refused=(True,),
                why="the table is in the first stage and the head in the last one, and their rows would drift apart",
                fix="write `strategy: fsdp`, or delete train_tokens",
            ),
            Limit(
                key="exchange",
                refused=("bf16",),
                when=(("strategy.replicas", (1,)), ("method.kind", ADAPTERS)),
                why="every adapter has one device, and its gradient stays there",
                fix="delete it",
            ),
        ),
        keys=("replicas",),
        asked_only="",
    )
    usual = True
    layers: Literal["staged"] = "staged"
    moves_shares = False
    passes_state = False
    several = True
    rank_settings: Literal["recomputation"] = "recomputation"

    def machine_violations(self, asked: Asked, machines: Machines) -> Iterator[Violation]:
        """Pipelines have as many ranks each; of one rank they would be copies of the model."""
        yield from super().machine_violations(asked, machines)
        num_ranks, replicas = machines.num_ranks, asked.replicas or 1
        if replicas > 1 and (num_ranks % replicas or num_ranks // replicas < LEAST_STAGES):
            counts = map(str, _numbers_of_pipelines(num_ranks))
            yield Violation(
                key="strategy.replicas",
                what=f"strategy.replicas: {num_ranks} ranks do not make {replicas} pipelines",
                seen=f"expected as many ranks in each, {LEAST_STAGES} or more",
                expected=f"as many ranks in each, {LEAST_STAGES} or more",
                fix=f"write replicas: {' or '.join(counts) or '1'} (or auto), or change the hosts or their slots",
            )

    def layer_violation(self, num_layers: int | None, *, replicas: int | None, num_ranks: int) -> Violation | None:
        """A layer for every rank at least; a model of unknown layers cannot be cut."""
        if num_layers is None:
            return _unknown_layers() if num_ranks > 1 else None
        sizes = [num_ranks // count for count in _numbers_of_pipelines(num_ranks)] or [num_ranks]
        if (num_ranks // replicas if replicas else min(sizes)) <= num_layers:
            return None
        several = f" in {replicas} pipelines" if (replicas or 1) > 1 else ""
        return Violation(
            key="strategy.kind",
            what="strategy: pipeline needs a layer for every rank",
            seen=f"{num_ranks} ranks{several}, and a model of {num_layers} layers",
            expected=f"{num_layers} ranks of a pipeline at the most",
            fix=f"use fewer hosts or slots, {num_layers} ranks of a pipeline at the most, or another strategy",
        )

    def model_violation(self, architecture: Architecture, strategy: PlannedStrategy) -> Violation | None:
        """Models that no rank can begin in the middle of."""
        if not (why := unstageable(architecture)):
            return None
        return Violation(
            key="strategy.kind",
            what=f"{self.kind} with {why}",
            seen="every stage would begin with the hidden states of the one before it, in place of embeddings",
            expected="a model whose decoder can be entered between layers",
            fix="write strategy: fsdp, or ddp where every device holds the model",
        )

    def candidates(self, scenario: Scenario) -> Iterator[PlannedStrategy]:
        """One pipeline over all ranks."""
        if scenario.query.strategy.replicas in (None, 1) and (layers := stages_of(scenario)) is not None:
            yield from _paces(scenario, pipeline(layers))

    def more_candidates(self, scenario: Scenario) -> Iterator[PlannedStrategy]:
        """Several pipelines of as many ranks each, as long as they are likely to fit."""
        asked = scenario.query.strategy.replicas
        for replicas in _numbers_of_pipelines(len(scenario.world.placements)):
            if replicas == 1 or asked not in (None, replicas):
                continue
            layers = stages_of(scenario, replicas=replicas)
            if layers is None:  # more ranks than layers
                continue
            strategy = pipeline(layers, replicas=replicas)
            yield from _paces(scenario, strategy)
            if scenario.room(self.kind).nearness(strategy)[0] < EVEN:  # shorter ones need more of each rank
                return

    def own_recomputation(
        self, plain: Scenario, again: Scenario, strategy: PlannedStrategy
    ) -> Iterator[tuple[PlannedStrategy, tuple[bool, ...]]]:
        """A stage recomputes where its device has room for more layers than it could keep the activations of."""
        for cut in dict.fromkeys(_cut_by_way(plain, again, strategy.replicas, chance) for chance in (SURE, EVEN)):
            if cut is not None:
                layers, recomputes = cut
                for way in _paces(plain, pipeline(layers, replicas=strategy.replicas)):
                    yield way, recomputes

    def share(self, architecture: Architecture, strategy: PlannedStrategy, rank: int) -> Share:
        """Some layers; the first rank has the embedding, the last one the head."""
        stages, number = strategy.place(rank)
        start, last = sum(stages[:number]), len(stages) - 1
        ranges = layer_ranges(architecture, start, start + stages[number])
        return Share(
            architecture=architecture,
            layers=tuple(dataclasses.replace(architecture.layers[shape], count=count) for shape, count in ranges),
            has_embedding=number == 0,
            has_head=number == last,
            in_flight=formulas.ahead(number, last + 1, eager=strategy.eager) + 1,
        )

    def keeps_buckets(self, strategy: PlannedStrategy) -> bool:
        """Always."""
        return True

    def traffic(self, ask: TrafficQuery) -> Iterator[Exchange]:
        """The residual stream forward, its gradient back; a tied table is on the first and the last rank of each."""
        both = ask.architecture.tied and ask.training.method == "full"
        number = ask.training.compute
        forward = Exchange(
            what="activations",
            operation="send",
            num_bytes=ask.training.tokens * ask.architecture.hidden * BYTES[number],
            times=ask.micro_batches,
            ranks=2,
            number=number,
            among="next",
            hides="stages",
        )
        yield forward
        yield dataclasses.replace(forward, what="their gradients", among="previous")
        summed = Exchange(
            what="gradients between pipelines",
            operation="all_reduce",
            num_bytes=0,
            times=1,
            ranks=ask.strategy.replicas,
            number=ask.kept,
            among="replicas",
        )
        if ask.strategy.replicas > 1:
            table = ask.architecture.embedding_weights if both else 0
            weights = trained_weights(ask.architecture, ask.training) - table
            part = weights / (ask.size // ask.strategy.replicas)
            yield dataclasses.replace(summed, num_bytes=round(part * BYTES[ask.kept]))
        if both:
            yield dataclasses.replace(
                summed,
                what="gradients of the tied table",
                num_bytes=ask.architecture.hidden * ask.architecture.vocabulary * BYTES[ask.kept],
                ranks=2 * ask.strategy.replicas,
                among="ends",
            )

    def total_s(self, ask: StepQuery) -> float:
        """Of the slowest pipeline; they exchange when all have gone through, and that hides behind nothing."""
        return max(_row_s(ask, row) for row in ask.rows()) + ask.spent("nothing")

    def title(self, strategy: PlannedStrategy) -> str:
        """With the layers of its stages."""
        return f"{self.kind} {rows_named(strategy.rows)}{', eager' if strategy.eager else ''}"

    def reason(self, job: StrategyJob, *, num_ranks: int, num_hosts: int, rows: Sequence[Sequence[int]]) -> str:
        """With the layers of its stages."""
        named = f" ({rows_named(rows)})" if rows else ""
        several = f"; gradients travel between the {len(rows)} pipelines" if len(rows) > 1 else ""
        return f"every rank holds some of the layers{named}; activations travel from one to the next{several}"


def _numbers_of_pipelines(num_ranks: int) -> list[int]:
    """Into how many pipelines of as many stages each so many ranks can be put."""
    return [count for count in range(1, num_ranks // LEAST_STAGES + 1) if num_ranks % count == 0]


def _unknown_layers() -> Violation:
    return Violation(
        key="strategy.kind",
        what="strategy: pipeline needs to know the layers of the model, of which every rank gets some",
        seen="the shape of the model is not known",
        expected="a model whose config.json is known",
        fix="put the model's config.json into a folder, and name it: model: FOLDER; or write another strategy",
    )


def unstageable(architecture: Architecture) -> str:
    """Why no rank can begin in the middle of the model, in words; empty where one can, or has to try.

    Families that transformers has no class for bring code of their own, whose layers give more than hidden states.
    """
    family = architecture.model_type
    if family in FAMILIES and family not in STAGED:
        return f"a model of the family {family}, whose decoder cannot be entered between layers"
    if architecture.tower is not None:
        return "a model with a network for images"
    if key := architecture.entry_dropout:
        return f"a model that drops a part of its embeddings ({key} in config.json)"
    return ""


def pipeline(stages: Sequence[int], *, replicas: int = 1) -> PlannedStrategy:
    """Pipelines of these stages, one after the other."""
    return PlannedStrategy(kind=PipelinePlan.kind, world_size=len(stages), stages=tuple(stages), replicas=replicas)


def stages_of(scenario: Scenario, *, replicas: int = 1) -> tuple[int, ...] | None:
    """See `cut_layers`; where the cluster file says who does how much, it says so of layers."""
    return cut_layers(scenario.room(PipelinePlan.kind), scenario.told_seconds, replicas=replicas)


def cut_layers(room: MemoryFit, seconds: Sequence[float], *, replicas: int = 1) -> tuple[int, ...] | None:
    """Layers of every pipeline stage, by speed as far as memory allows it: surely, else probably.

    seconds: of a micro-batch, by rank. replicas: each pipeline is cut by itself. Where nothing fits, by memory alone,
    which comes nearest to it. None where there are more ranks than layers.
    """
    found: list[int] = []
    size = len(room.placements) // replicas
    for begin in range(0, len(room.placements), size):
        row = dataclasses.replace(room, placements=room.placements[begin : begin + size])
        cut = _cut_row(row, seconds[begin : begin + size])
        if cut is None:
            return None
        found += cut
    return tuple(found)


def _cut_row(room: MemoryFit, seconds: Sequence[float]) -> tuple[int, ...] | None:
    """Of one pipeline over all placements."""
    depth, size = room.architecture.num_layers, len(room.placements)
    fast = split_layers(seconds, depth, most=[depth] * size)
    if fast is None or room.nearness(pipeline(fast))[0] >= SURE:
        return fast
    for chance in (SURE, EVEN):
        most = list(_most_layers(room, chance))
        if len(most) == size and (found := split_layers(seconds, depth, most=most)) is not None:
            return found
    return split_layers(
        [1 / max(1, placement.free_bytes or 1) for placement in room.placements], depth, most=[depth] * size
    )


def _cut_by_way(
    plain: Scenario, again: Scenario, replicas: int, chance: float
) -> tuple[tuple[int, ...], tuple[bool, ...]] | None:
    """Layers of every stage, of which each recomputes or not, so that the slowest is as fast as possible; and which do.

    None where the layers do not fit. chance: of every stage, to fit.
    """
    stages: list[int] = []
    recomputes: list[bool] = []
    size = len(plain.world.placements) // replicas
    for begin in range(0, len(plain.world.placements), size):
        row = slice(begin, begin + size)
        rooms = (each.room(PipelinePlan.kind) for each in (plain, again))
        keeps, again_room = (dataclasses.replace(room, placements=room.placements[row]) for room in rooms)
        most_again = _most_by_rank(again_room, chance)
        if sum(most_again) < plain.query.architecture.num_layers:  # who recomputes holds most
            return None
        fast = zip(plain.told_seconds[row], _most_by_rank(keeps, chance), strict=True)
        ranks = list(zip(fast, zip(again.told_seconds[row], most_again, strict=True), strict=True))
        layers = split_by_way(ranks, plain.query.architecture.num_layers)
        if layers is None:
            return None
        stages += layers
        recomputes += [number > rank[0][1] for number, rank in zip(layers, ranks, strict=True)]
    return tuple(stages), tuple(recomputes)


def _most_by_rank(room: MemoryFit, chance: float) -> list[int]:
    """Layers that each rank has memory for, with that chance; 0: for none."""
    near: dict[object, int] = {}
    found = []
    for rank, placement in enumerate(room.placements):
        alike = (placement.free_bytes, placement.gpu is None)
        near[alike] = _most_of(room, rank, chance, near=near.get(alike, 0))
        found.append(near[alike])
    return found


def split_by_way(ranks: Sequence[Sequence[tuple[float, int]]], num_layers: int) -> tuple[int, ...] | None:
    """Consecutive layers of every stage, so that the slowest is as fast as possible.

    ranks: of every rank its ways, each the seconds of a layer and the layers that it has memory for then; of those with
    memory the first is taken, so ways are sorted by seconds. Each rank gets one layer at least. None where they do not
    fit.
    """

    def seconds(rank: int, layers: int) -> float:
        return next((layers * each_s for each_s, most in ranks[rank] if layers <= most), math.inf)

    if len(ranks) > num_layers:
        return None
    stages = [1] * len(ranks)
    queue = [(seconds(rank, 2), rank) for rank in range(len(ranks))]
    heapq.heapify(queue)
    for _ in range(num_layers - len(ranks)):
        _, rank = queue[0]
        stages[rank] += 1
        heapq.heapreplace(queue, (seconds(rank, stages[rank] + 1), rank))
    fits = all(seconds(rank, layers) < math.inf for rank, layers in enumerate(stages))
    return tuple(stages) if fits else None


def _most_layers(room: MemoryFit, chance: float) -> Iterator[int]:
    """Layers that each rank has memory for, with that chance; ends with the first that has none."""
    most: dict[object, int] = {}
    for rank, placement in enumerate(room.placements):
        alike = (placement.free_bytes, placement.gpu is None)
        found = most[alike] = _most_of(room, rank, chance, near=most.get(alike, 0))
        if not found:
            return
        yield found


def _most_of(room: MemoryFit, rank: int, chance: float, *, near: int) -> int:
    depth, size, placement = room.architecture.num_layers, len(room.placements), room.placements[rank]

    def holds(layers: int) -> bool:
        rest = [1] * size
        rest[rank] = layers
        rest[rank - 1 if rank else size - 1] += depth - sum(rest)
        return room.memory(pipeline(rest), rank).fits(placement.free_bytes or 0) >= chance

    return depth - size + 1 if placement.free_bytes is None else most_that(holds, depth - size + 1, near=near)


def most_that(holds: Callable[[int], bool], high: int, *, near: int = 0) -> int:
    """The largest of 1..high that holds, if all below it do, by halving; 0: none does.

    near: where it may lie. It and its neighbour are tried first.
    """
    low = 0
    while low < high:
        middle = near if low < near <= high else (low + high + 1) // 2
        if holds(middle):
            low, near = middle, near + 1
        else:
            high, near = middle - 1, near - 1
    return low


def _paces(scenario: Scenario, strategy: PlannedStrategy) -> Iterator[PlannedStrategy]:
    """A pipeline, and, where it is known how long sending takes, the same with more micro-batches on their way."""
    yield strategy
    if scenario.is_timed:
        yield dataclasses.replace(strategy, eager=True)


def _row_s(ask: StepQuery, row: Sequence[RankWork]) -> float:
    """One pipeline; 0 without work."""
    k = row[0].micro_batches
    if not k:
        return 0.0
    stages = [(ask.micro_s(stage), stage.compute.backward_share) for stage in row]
    forward = [each_s * (1 - share) for each_s, share in stages]
    backward = [each_s * share for each_s, share in stages]
    sends = [ask.once(each) for each in ask.traffic.exchanges if each.hides == "stages"]
    return formulas.step_s(forward, backward, send_s=max(sends, default=0.0), micro_batches=k, eager=ask.strategy.eager)


PIPELINE = PipelinePlan()
