"""The plan half of tensor parallelism: the ranks of a host compute every layer together, each some columns and rows.

transformers' plan for the family says which linears are cut: queries, keys and values, and the matrices
that make a feed-forward layer wide, by columns; the ones after them by rows. So a rank has some of the heads and some
of the width. Where one matrix makes several of these at once, or norms see all heads at once, the outputs are put
together and are whole on every rank; of such a part only the weights are cut.

Sent by every rank, for k micro-batches, L layers and n ranks of each of M hosts: inside a host k * 2(n-1)/n * 4 * L *
tokens * hidden * b (one sum more behind the layers, and with recomputation one more in each), and for weights that are
whole on every rank as hsdp; across hosts 2(M-1)/M * P_t / n * b. A step takes max(k_i (t_i / n + x)) + exposed +
update: the n ranks wait for the sums x inside layers; across hosts as ddp. The floor stays: as many kernels run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from gangline.planner.architecture import Architecture, Layer, Linear
from gangline.planner.config import FAMILIES, SLICED
from gangline.planner.memory_fit import SURE
from gangline.planner.states import Share, whole_share
from gangline.planner.traffic import Exchange, TrafficQuery, trained_weights
from gangline.planner.training import BYTES, PlannedStrategy
from gangline.strategies.base import (
    NO_ACTIVATION_OFFLOADING,
    NO_COMPILE,
    NO_EIGHT_BITS,
    NO_FP16,
    NO_WHOLE_MATRICES,
    Capabilities,
    Limit,
    PlanHalf,
    Violation,
    asked_of,
    violations,
)

if TYPE_CHECKING:
    from gangline.planner.candidate import Scenario
    from gangline.planner.speed import ComputeModel, StepQuery
    from gangline.runs.job import StrategyJob

_BY_HEADS = "query_key_value"
"""One matrix for three whose outputs lie head by head, so that a cut leaves heads whole."""


class TensorParallelPlan(PlanHalf):
    """The ranks of a host compute each layer together."""

    kind = "tp"
    train = "gangline.strategies.tensor_parallel.train:TensorParallel"
    meaning = (
        "the ranks of a host compute each layer together and sum hidden states in it; gradients travel between hosts"
    )
    guide = (
        "the devices of a host compute every layer together, each some of its columns and rows, which needs the links "
        "between the GPUs of one machine; across hosts as ddp"
    )
    capabilities = Capabilities(
        limits=(
            Limit(
                key="method.kind",
                refused=("qlora",),
                why="weights are cut by columns and rows as they are, and quantised numbers share their scales",
                fix="write `strategy: hsdp`, or `method: lora`",
            ),
            Limit(
                key="method.dora",
                refused=(True,),
                why="no rank has whole rows of the weights that are cut along them, whose lengths are trained",
                fix="write `strategy: hsdp`, or delete dora",
            ),
            Limit(
                key="method.modules_to_save",
                refused=(True,),
                why="the head and the table are shared by the ranks of a host as they are",
                fix="write `strategy: hsdp`, or delete modules_to_save",
            ),
            Limit(
                key="method.train_tokens",
                refused=(True,),
                why="the head and the table are shared by the ranks of a host as they are",
                fix="write `strategy: hsdp`, or delete train_tokens",
            ),
            Limit(
                key="method.target_parameters",
                refused=(True,),
                why="linears are cut by columns and rows, and no other weights",
                fix="write `strategy: hsdp`, or delete target_parameters",
            ),
            NO_FP16,
            NO_EIGHT_BITS,
            replace(NO_WHOLE_MATRICES, fix="write `kind: adamw`, `kind: lion` or `kind: sgd`, or `strategy: ddp`"),
            NO_ACTIVATION_OFFLOADING,
            NO_COMPILE,
        ),
        min_ranks_on_host=2,
        equal_hosts=True,
        asked_only="",
        yields_to=("single", "ddp", "fsdp", "hsdp"),
    )
    layers: Literal["sliced"] = "sliced"
    rank_settings: Literal["recomputation"] = "recomputation"
    shards_per_host = True
    passes_state = False

    def model_violation(self, architecture: Architecture, strategy: PlannedStrategy) -> Violation | None:
        """Heads and widths that these ranks do not divide, and layers of which nobody knows the columns."""
        if not (why := unsliceable(architecture, strategy.shard_size)):
            return None
        return Violation(
            key="strategy.kind",
            what=f"{self.kind} with {why}",
            seen="the ranks of a host would compute every layer together, each some of its heads, columns and rows",
            expected="layers that these ranks divide evenly",
            fix="write strategy: hsdp (or fsdp), or set slots of every host to another number",
        )

    def candidates(self, scenario: Scenario) -> Iterator[PlannedStrategy]:
        """Over the ranks of every host, by itself where that is possible; one rank on each has all: ddp."""
        size, slots = len(scenario.world.placements), scenario.world.fabric.slots
        asked = scenario.query.strategy.kind == self.kind
        if max(slots) == 1:
            if asked:
                yield PlannedStrategy(kind="ddp", world_size=size)
        elif len(set(slots)) == 1:
            strategy = PlannedStrategy(kind=self.kind, world_size=size, shard_size=slots[0])
            job = replace(asked_of(scenario.training), optimizer="adamw")
            possible = not violations(self, job) and not unsliceable(scenario.query.architecture, slots[0])
            if asked or possible:
                yield strategy

    def own_recomputation(
        self, plain: Scenario, again: Scenario, strategy: PlannedStrategy
    ) -> Iterator[tuple[PlannedStrategy, tuple[bool, ...]]]:
        """The ranks of a host do the same, for they compute every layer together: it recomputes where one has to."""
        needs = plain.room(self.kind).needs(strategy)
        short = {need.placement.host for need in needs if need.chance is not None and need.chance < SURE}
        yield strategy, tuple(need.placement.host in short for need in needs)

    def share(self, architecture: Architecture, strategy: PlannedStrategy, rank: int) -> Share:
        """Some of the heads and of the width of every layer."""
        return whole_share(sliced(architecture, strategy.shard_size))

    def keeps_buckets(self, strategy: PlannedStrategy) -> bool:
        """Across hosts."""
        return strategy.world_size > strategy.shard_size

    def traffic(self, ask: TrafficQuery) -> Iterator[Exchange]:
        """Hidden states and their gradients inside a host, for every micro-batch; gradients of weights once a step.

        Of two sums forward and two back in a layer, recomputation does the first one again: torch stops before the
        second. One more is behind the layers. In front of the first adapter nothing goes back, unless activations are
        recomputed: transformers then asks for gradients of the embeddings, frozen or not.
        """
        training, parts, depth = ask.training, ask.strategy.shard_size, ask.architecture.num_layers
        states = Exchange(
            what="hidden states",
            operation="all_reduce",
            num_bytes=training.tokens * ask.architecture.hidden * BYTES[training.compute],
            times=ask.micro_batches * depth * (3 if training.checkpointing else 2),
            ranks=parts,
            number=training.compute,
            among="shard",
            hides="in-layer",
        )
        yield states
        back = 2 * depth + (1 if training.method == "full" or training.checkpointing else 0)
        yield replace(states, what="their gradients", times=ask.micro_batches * back)
        yield from self._gradients(ask)

    def _gradients(self, ask: TrafficQuery) -> Iterator[Exchange]:
        training, parts = ask.training, ask.strategy.shard_size
        own = trained_weights(sliced(ask.architecture, parts), training)
        total = trained_weights(ask.architecture, training)
        cut = (total - own) // (parts - 1)  # on each rank; the rest of its own is whole
        gradients = Exchange(
            what="gradients",
            operation="all_reduce",
            num_bytes=cut * BYTES[ask.kept],
            times=1,
            ranks=ask.size // parts,
            number=ask.kept,
            among="replicas",
            hides="last-backward",
        )
        yield gradients
        kept = ask.kept if ask.size > parts else training.parameters
        whole = (own - cut) * BYTES[kept]
        part = replace(gradients, what="gradients of what is whole", hides="nothing", number=kept)
        inside = replace(part, operation="reduce_scatter", num_bytes=whole, ranks=parts, among="shard")
        yield inside
        yield replace(part, num_bytes=whole // parts)
        yield replace(inside, what="their sums", operation="all_gather")

    def compute_of(self, model: ComputeModel, strategy: PlannedStrategy) -> ComputeModel:
        """One of the ranks that compute every micro-batch together."""
        return model.sliced(strategy.shard_size)

    def total_s(self, ask: StepQuery) -> float:
        """As ddp across hosts; sums inside layers come on top of every micro-batch, and hide nothing of it."""
        inside_s = ask.spent("in-layer") / max(1.0, ask.traffic.micro_batches)
        tail_s, early_s = ask.spent("nothing"), ask.spent("last-backward")
        ends = []
        for rank in ask.ranks:
            busy_s = ask.busy_s(rank) + max(1, rank.micro_batches) * inside_s
            ends.append(max(busy_s, busy_s - ask.window(rank).backward_s + early_s) + tail_s)
        return max(ends)

    def reason(self, job: StrategyJob, *, num_ranks: int, num_hosts: int, rows: Sequence[Sequence[int]]) -> str:
        """Inside a host, and across hosts."""
        across = "; gradients travel between hosts" if num_hosts > 1 else ""
        return f"the ranks of every host compute each layer together, some columns and rows of it each{across}"


def sliced(architecture: Architecture, parts: int) -> Architecture:
    """What each of so many ranks has. Tables, norms and the head are whole."""
    return replace(architecture, layers=tuple(_layer(layer, parts) for layer in architecture.layers))


def unsliceable(architecture: Architecture, parts: int) -> str:
    """Why so many ranks cannot have the layers between them, in words; empty where they can."""
    if architecture.model_type in FAMILIES and architecture.model_type not in SLICED:
        return (
            f"a model of the family {architecture.model_type}, for which transformers has no plan of columns and rows"
        )
    if architecture.tower is not None:
        return "a model with a network for images"
    if any(layer.delta for layer in architecture.layers):
        return "layers of linear attention, for which transformers' plan has no columns and rows"
    if architecture.expert_weights:
        return "experts, which lie in one tensor"
    figures: dict[str, int] = {}
    for layer in architecture.layers:
        if not _gathers_heads(layer):
            figures |= {"attention heads": layer.heads, "key-value heads": layer.kv_heads}
        if not _gathers_width(layer):
            figures["of the feed-forward width"] = layer.width
    uneven = [f"{number:,} {what}" for what, number in figures.items() if number % parts]
    return f"{', '.join(uneven)}, which {parts} ranks do not divide evenly" if uneven else ""


def _layer(layer: Layer, parts: int) -> Layer:
    heads, width = 1 if _gathers_heads(layer) else parts, 1 if _gathers_width(layer) else parts
    linears: list[Linear] = []
    for part, cut in (("attention", heads), ("mlp", width)):
        group = [each for each in layer.linears if each.part == part]
        linears += [_linear(each, parts, by_rows=each is group[-1], whole=cut == 1) for each in group]
    return replace(
        layer,
        linears=tuple(linears),
        heads=max(1, layer.heads // heads),
        kv_heads=max(1, layer.kv_heads // heads),
        width=max(1, layer.width // width),
    )


def _linear(linear: Linear, parts: int, *, by_rows: bool, whole: bool) -> Linear:
    if whole:
        return replace(linear, parts=parts, active=linear.active / parts)
    if by_rows:
        return replace(linear, inputs=max(1, linear.inputs // parts))
    return replace(linear, outputs=max(1, linear.outputs // parts))


def _gathers_heads(layer: Layer) -> bool:
    attention = [each.name for each in layer.linears if each.part == "attention"]
    return layer.qk_norm == "projection" or (len(attention) == 2 and attention[0] != _BY_HEADS)


def _gathers_width(layer: Layer) -> bool:
    return layer.gated and sum(each.part == "mlp" for each in layer.linears) == 2


TENSOR_PARALLEL = TensorParallelPlan()
