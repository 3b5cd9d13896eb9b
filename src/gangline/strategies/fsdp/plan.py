"""The plan half of FSDP2: weights, gradients and states in parts over all ranks (fsdp), or over those of a host (hsdp).

Sent by every rank, for k micro-batches, P weights and P_t trained ones of b bytes, c = (N-1)/N:

    fsdp    k*c * (2 * P * b + P_t * b)     without resharding: k*c * (P * b + P_t * b)
    hsdp    inside a host as fsdp, and across 2(M-1)/M * P_t / G * b (M copies of G ranks each)

torch keeps the weights outside layers (embedding, head) between forward and backward whatever `reshard` says; they are
counted twice all the same, which is 1.3 % too much for Llama-2-7B. Adapters stay whole on every rank: their gradients
travel once a step. `sharded_traffic` and `sharded_s` are those of zero-3, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from gangline.planner.architecture import Layer, layer_adapters
from gangline.planner.states import padded_experts
from gangline.planner.traffic import Exchange, Hides, TrafficQuery, linear_bytes, trained_weights
from gangline.planner.training import BYTES, PlannedStrategy, Training
from gangline.strategies.base import (
    ADAPTERS,
    FULL,
    NO_EIGHT_BITS,
    NO_FP16,
    NO_QUANTISED_EXPERTS,
    NO_WHOLE_MATRICES,
    Capabilities,
    PlanHalf,
)

if TYPE_CHECKING:
    from gangline.planner.candidate import Scenario
    from gangline.planner.speed import StepQuery
    from gangline.runs.job import StrategyJob

LIMITS = (
    NO_QUANTISED_EXPERTS,
    replace(NO_FP16, when=FULL),
    replace(NO_EIGHT_BITS, when=FULL, fix="write `kind: adamw`, or `strategy: ddp`, or `method: lora`"),
    replace(NO_WHOLE_MATRICES, when=FULL),
)
OFFLOAD = ((("full",), ("optimizer", "parameters")), (ADAPTERS, ("parameters",)))


class FsdpPlan(PlanHalf):
    """Weights, gradients and states in parts over all ranks."""

    kind = "fsdp"
    train = "gangline.strategies.fsdp.train:Fsdp"
    meaning = "weights, gradients and states in parts: weights travel for every micro-batch"
    guide = (
        "the model lies in parts on all devices, for one that no device holds; its layers travel for every "
        "micro-batch, which needs fast links"
    )
    capabilities = Capabilities(limits=LIMITS, keys=("offload",), offload=OFFLOAD, min_ranks=1, asked_only="")
    usual = True
    parts = "weights"
    sharded_by = "fsdp2"
    lockstep = True
    moves_shares = False
    rank_settings: Literal["all"] = "all"
    passes_state = False

    def candidates(self, scenario: Scenario) -> Iterator[PlannedStrategy]:
        """With and without giving up weights after forward; a job that offloads them gives them up, and so does other
        software than ours.
        """
        size, offload = len(scenario.world.placements), scenario.offload(self.kind)
        keeps = scenario.training.stack.chooses_reshard and not offload
        for reshard in (True, False) if keeps else (True,):
            yield PlannedStrategy(kind=self.kind, world_size=size, shard_size=size, reshard=reshard, offload=offload)

    def traffic(self, ask: TrafficQuery) -> Iterator[Exchange]:
        """Layer by layer; whole adapters once a step."""
        whole = ask.training.method != "full" and ask.training.stack.whole_adapters
        yield from sharded_traffic(ask, with_adapters=not whole)
        yield from self._adapters(ask) if whole else self._between_copies(ask)

    def copy_s(self, exchange: Exchange, strategy: PlannedStrategy, *, bytes_per_s: float) -> float:
        """Of a rank's part to the card before it is gathered, or back after gradients are summed."""
        moved = exchange.what.startswith("weights") or "optimizer" in strategy.offload
        cut = exchange.operation in ("all_gather", "reduce_scatter")
        if "parameters" not in strategy.offload or not (moved and cut):
            return 0.0
        return exchange.num_bytes / max(1, exchange.ranks) / bytes_per_s

    def total_s(self, ask: StepQuery) -> float:
        """Layer by layer."""
        return sharded_s(ask)

    def title(self, strategy: PlannedStrategy) -> str:
        """Without resharding weights are kept."""
        return super().title(strategy) if strategy.reshard else f"{self.kind}, kept"

    def reason(self, job: StrategyJob, *, num_ranks: int, num_hosts: int, rows: Sequence[Sequence[int]]) -> str:
        """Who has a copy."""
        among = "the ranks of every host have" if self.shards_per_host else f"the {num_ranks} ranks have"
        off = ", from the machines' memory" if job.offload else ""
        return f"{among} one copy of the model between them; its layers travel for every micro-batch{off}"

    def _between_copies(self, ask: TrafficQuery) -> Iterator[Exchange]:
        """There is one copy."""
        return iter(())

    def _adapters(self, ask: TrafficQuery) -> Iterator[Exchange]:
        """Gradients of whole adapters, once a step, when nothing is left to hide them."""
        yield _summed(ask)


class Hsdp(FsdpPlan):
    """In parts inside every host, with one copy per host."""

    kind = "hsdp"
    meaning = "in parts inside a host, a copy per host; gradients travel between hosts"
    guide = "as fsdp inside every host, with one copy of the model per host"
    usual = False
    shards_per_host = True

    def candidates(self, scenario: Scenario) -> Iterator[PlannedStrategy]:
        """One copy inside every host; where that is one copy in all, or none, a job that asks for it gets fsdp."""
        size, slots = len(scenario.world.placements), scenario.world.fabric.slots
        offload = scenario.offload(self.kind)
        if len(slots) > 1 and len(set(slots)) == 1 and slots[0] > 1:
            yield PlannedStrategy(kind=self.kind, world_size=size, shard_size=slots[0], offload=offload)
        elif scenario.query.strategy.kind == self.kind:
            yield PlannedStrategy(kind=FSDP.kind, world_size=size, shard_size=size, offload=offload)

    def _between_copies(self, ask: TrafficQuery) -> Iterator[Exchange]:
        yield replace(_summed_between(ask), hides="last-backward")

    def _adapters(self, ask: TrafficQuery) -> Iterator[Exchange]:
        """First among the ranks of every host."""
        part = replace(_summed(ask), ranks=ask.strategy.shard_size, among="shard")
        yield replace(part, operation="reduce_scatter")
        yield _summed_between(ask)
        yield replace(part, what="their sums", operation="all_gather")


def sharded_traffic(ask: TrafficQuery, *, with_adapters: bool) -> Iterator[Exchange]:
    """Weights are put together layer by layer, gradients summed into parts, in every micro-batch."""
    training = ask.training
    for layer in padded_experts(ask.architecture, training, ask.strategy).layers:
        adapters = layer_adapters(layer, training.rank, training.targets, dora=training.dora) if with_adapters else 0
        trained = layer.num_parameters if training.method == "full" else adapters
        yield from _unit(ask, _gathered_bytes(layer, training, adapters=adapters), trained, count=layer.count)
    outside = ask.architecture.embedding_weights + ask.architecture.head_weights + ask.architecture.vectors
    trained = outside if training.method == "full" else 0
    yield from _unit(ask, outside * _plain_bytes(training), trained, count=0)


def _unit(ask: TrafficQuery, gathered: float, trained: int, *, count: int) -> Iterator[Exchange]:
    """The exchanges of `count` layers of one shape; 0: of what is outside layers, which hides behind nothing."""
    gather = Exchange(
        what="weights for forward",
        operation="all_gather",
        num_bytes=round(gathered),
        times=ask.micro_batches * max(1, count),
        ranks=ask.strategy.half.shards(ask.strategy),
        number=_frozen_format(ask.training) if count else ask.training.compute,
        among="shard",
        hides="forward-layer" if count else "nothing",
    )
    yield gather
    late: Hides = "backward-layer" if count else "nothing"
    if ask.strategy.reshard:
        yield replace(gather, what="weights for backward", hides=late)
    num_bytes = trained * BYTES[ask.kept]
    yield replace(
        gather, what="gradients", operation="reduce_scatter", num_bytes=num_bytes, number=ask.kept, hides=late
    )


def _summed(ask: TrafficQuery) -> Exchange:
    num_bytes = trained_weights(ask.architecture, ask.training) * BYTES[ask.kept]
    return Exchange(
        what="gradients", operation="all_reduce", num_bytes=num_bytes, times=1, ranks=ask.size, number=ask.kept
    )


def _summed_between(ask: TrafficQuery) -> Exchange:
    """The part of each rank of a copy, among all copies."""
    summed, inside = _summed(ask), ask.strategy.shard_size
    part, copies = round(summed.num_bytes / inside), ask.size // inside
    return replace(summed, what="gradients between copies", num_bytes=part, ranks=copies, among="replicas")


def _gathered_bytes(layer: Layer, training: Training, *, adapters: int) -> float:
    """Of one layer's weights as they travel: in the format of computation, or in 4 or 8 bits where they are kept so.

    adapters: numbers in those that travel with it.
    """
    plain, each = _plain_bytes(training), BYTES[training.compute]
    if training.method == "full":
        return layer.num_parameters * each
    adapters *= each
    if training.method == "lora":
        return layer.num_parameters * each + adapters
    return linear_bytes(layer, training) + (layer.num_parameters - layer.linear_weights) * plain + adapters


def _frozen_format(training: Training) -> str:
    if training.method != "qlora":
        return training.compute
    return "nf4" if training.bits == 4 else "int8"


def _plain_bytes(training: Training) -> int:
    """Of a frozen number that is not quantised."""
    upcast = training.method == "qlora" and training.stack.upcasts
    return 4 if upcast else BYTES[training.compute]


def sharded_s(ask: StepQuery) -> float:
    """Layer by layer, all ranks together: the slowest one's computation against the exchange for the next layer."""
    k = max(1.0, ask.traffic.micro_batches)
    layers = [each for each in ask.traffic.exchanges if each.hides in {"forward-layer", "backward-layer"}]
    depth = sum(each.times for each in layers if each.hides == "forward-layer") / k
    micro_s = max(ask.pass_s(rank) for rank in ask.ranks)
    if not depth:  # parts of one: each rank holds all
        return ask.last_backward_s()
    slowest = max(ask.ranks, key=ask.pass_s)
    back_s = micro_s * slowest.compute.backward_share / depth
    forward_s = micro_s / depth - back_s
    gather_s = ask.spent("forward-layer") / k / depth
    late_s = ask.spent("backward-layer") / k / depth
    load = slowest.compute.contention
    slower_s = load * min(forward_s, ask.travelling("forward-layer") / k / depth)
    later_s = load * min(back_s, ask.travelling("backward-layer") / k / depth)
    both_s = depth * (max(forward_s + slower_s, gather_s) + max(back_s + later_s, late_s))
    # the first gathering of each pass and the last exchange of gradients run alone
    alone_s = min(forward_s, gather_s) + min(back_s, late_s)
    between_s = max(0.0, ask.spent("last-backward") - depth * back_s)
    return k * (both_s + alone_s) + ask.spent("nothing") + between_s


FSDP = FsdpPlan()
HSDP = Hsdp()
