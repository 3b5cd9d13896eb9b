"""Memory of one rank: what lies there all the time, and every instant of a step on top of it.

The peak is a maximum over instants, not a sum: the loss, backward of the last layer, of the first layer and of the
embedding, the optimizer. `planning.tape` and `planning.block` compute a layer, `planning.logits` the loss,
`planning.states` what stays, `planning.instants` puts them together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gangline.optimizers import EIGHT_BITS
from gangline.planner.activations import HeadBytes, LayerBytes, head_bytes, layer_bytes, residual_width
from gangline.planner.architecture import Architecture, Layer, lora_parameters
from gangline.planner.software import placed, settled
from gangline.planner.states import (
    FP32,
    Share,
    Term,
    adapters_in_ram,
    disk_bytes,
    gradient_bytes,
    offloaded_bytes,
    optimizer_bytes,
    padded_experts,
    quantised_bytes,
    reordered,
    scale_bytes,
    shards,
    share_of,
    trained_shards,
    weight_bytes,
)
from gangline.planner.training import BYTES, PlannedStrategy, Training

# The instants of a step that may be its peak, term by term, on top of what lies there all the time.


MIB = 1 << 20
_COPIES = {"lion": 1, "adafactor": 3, "muon": 2}
"""Of the largest trained tensor while it is updated: the update, squares, products in 16 bits (worker/update_rules)."""
UNPACKED_BYTES = 20
"""Per number of one tensor, bitsandbytes on a CPU: gradient, both moments, and denominator and its root, in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """A moment of a step that may be the peak."""

    name: str
    terms: tuple[Term, ...]
    """On top of what is there all the time."""
    pooled_bytes: int = 0
    """Besides, of tensors that are gone; see `SoftwareStack.pooled_logit_bytes`."""

    @property
    def num_bytes(self) -> int:
        """Sum of its terms."""
        return sum(term.num_bytes for term in self.terms)


@dataclass(frozen=True, kw_only=True)  # no slots: a plan asks for these numbers thousands of times, and keeps them
class Step:
    """One step of one rank."""

    share: Share
    training: Training
    """As it was asked for: what lies there has these dtypes."""
    strategy: PlannedStrategy
    in_ram: bool = False
    """Whether tensors lie in the machine's memory, for there is no GPU."""
    workspace_bytes: int = 0
    """See `Overheads`."""

    @functools.cached_property
    def computed(self) -> Training:
        """As it is computed: sharded weights are gathered in the width of products, and nothing needs autocast."""
        gathered = self.full or self.training.stack.gathers_adapters
        if gathered and self.strategy.half.parts != "none":
            return replace(self.training, parameters=self.training.compute)
        return self.training

    @functools.cached_property
    def accumulates(self) -> bool:
        """Whether gradients are there before backward begins: of earlier micro-batches, or as buckets."""
        return self.training.accumulation > 1 or self.strategy.half.keeps_buckets(self.strategy)

    @property
    def full(self) -> bool:
        """Whether all weights are trained."""
        return self.training.method == "full"

    @functools.cached_property
    def depth(self) -> int:
        """Layers of this rank."""
        return sum(layer.count for layer in self.share.layers)

    @functools.cached_property
    def entry_bytes(self) -> int:
        """The stream between two layers."""
        training = self.computed
        return training.tokens * self.share.architecture.hidden * residual_width(training)

    @functools.cached_property
    def sizes(self) -> tuple[LayerBytes, ...]:
        """Forward and backward of one layer of each kind, in the order of the share's."""
        hidden = self.share.architecture.hidden
        return tuple(
            layer_bytes(layer, hidden, self.computed, accumulates=self.accumulates) for layer in self.share.layers
        )

    @functools.cached_property
    def unit_sizes(self) -> tuple[int, ...]:
        """Bytes of one layer of each kind, whole, as ranks send it."""
        return tuple(self._unit_bytes(layer) for layer in self.share.layers)

    def persistent(self) -> tuple[Term, ...]:
        """What is there all the time."""
        share, training, strategy = self.share, self.training, self.strategy
        among, trained_among = (
            f" / {parts} ranks" if parts > 1 else "" for parts in (shards(strategy), trained_shards(training, strategy))
        )
        adapters = share.num_adapters(training)
        parts = trained_shards(training, strategy) if strategy.half.parts == "weights" else 1
        copies = 2 if training.splits else training.stack.num_adapters
        held = adapters * copies * BYTES[training.parameters] // parts
        if adapters_in_ram(training, strategy) and not self.in_ram:
            held = 0
        return _filled(
            Term(
                name="weights",
                num_bytes=weight_bytes(share, training, strategy, in_ram=self.in_ram),
                source=self._weights() + among,
            ),
            Term(
                name="adapters", num_bytes=held, source=f"{adapters:,} numbers in {training.parameters}{trained_among}"
            ),
            Term(
                name="optimizer",
                num_bytes=optimizer_bytes(share, training, strategy, in_ram=self.in_ram),
                source=f"{training.optimizer}: two states per trained number{trained_among}",
            ),
            *(strategy.half.lasting_terms(self) if self.in_ram else ()),
            *([self._gradients()] if self.accumulates else []),
            Term(name="workspace", num_bytes=self.workspace_bytes, source="cuBLAS, forward's thread and backward's"),
        )

    def _weights(self) -> str:
        numbers = f"{self.share.num_parameters:,} numbers"
        kinds = {
            "full": f"{numbers} in {self.training.parameters}",
            "lora": f"{numbers} in {self.training.compute}",
            "qlora": f"{numbers}, those of linears in {self.training.bits} bits",
        }
        return kinds[self.training.method]

    def _gradients(self, part: float = 1.0) -> Term:
        size = gradient_bytes(self.share, self.training, self.strategy, in_ram=self.in_ram)
        numbers = self.share.num_trained(self.training)
        return Term(name="gradients", num_bytes=int(size * part), source=f"of {numbers:,} trained numbers")

    def instants(self) -> tuple[Instant, ...]:
        """In order of time."""
        return (
            Instant(
                name="loss",
                terms=_filled(*self._kept(forward=True), *self._loss(), self._gathered(0, forward=True)),
                pooled_bytes=self._pooled_bytes(),
            ),
            Instant(name="backward-last", terms=_filled(*self._backward_last())),
            Instant(name="backward-first", terms=_filled(*self._backward_first())),
            Instant(name="backward-rest", terms=_filled(*self._backward_rest(), self._gathered(0))),
            Instant(name="optimizer", terms=_filled(*self._update())),
            *self.strategy.half.further_instants(self),
        )

    def _kept(self, *, forward: bool) -> Iterable[Term]:
        """What all layers keep for backward, of every micro-batch in flight."""
        flight = self.share.in_flight
        layers = [(each.count, size) for each, size in zip(self.share.layers, self.sizes, strict=True)]
        if self.training.checkpointing:
            depth = self._inputs_here()
            size = depth * self.entry_bytes * flight
            yield Term(name="checkpoints", num_bytes=size, source=f"{depth} layers' inputs, T·h each")
            held = forward and self.training.stack.caches_casts
            copies = sum(count * layer.cached for count, layer in layers) if held else 0
            yield Term(name="casted weights", num_bytes=copies, source="autocast keeps its copies until forward ends")
        else:
            kept = sum(count * layer.kept for count, layer in layers)
            yield Term(
                name="activations", num_bytes=kept * flight, source=f"what backward of {self.depth} layers needs"
            )
        width = 2 * self.share.layers[0].head_dim * residual_width(self.computed)
        yield Term(name="rotary", num_bytes=self.training.tokens * width, source="cosines and sines of positions")

    def _inputs_here(self) -> int:
        """Layers' inputs on the card: of those in the machine's memory the one that is copied, and the next one."""
        return min(2, self.depth) if self.training.offloading and not self.in_ram else self.depth

    @property
    def offloaded_bytes(self) -> int:
        """What lies in the machine's memory though the rank computes on a card."""
        if self.in_ram:
            return 0
        # torch takes pinned memory in powers of two
        inputs = self.depth << (self.entry_bytes - 1).bit_length() if self.training.offloading else 0
        return offloaded_bytes(self.share, self.training, self.strategy) + inputs

    def _loss(self) -> Iterable[Term]:
        if not self.share.has_head:
            return
        numbers = self.training.tokens * self.share.architecture.hidden
        width, eager = residual_width(self.computed), "norm" not in self.training.stack.fused
        kept = numbers * (FP32 if eager else width) + (numbers * width if self.full and eager else 0)
        yield Term(name="last norm", num_bytes=kept, source="hidden states in fp32")
        head = self._head()
        yield Term(name="loss", num_bytes=head.peak, source=head.formula)

    def _pooled_bytes(self) -> int:
        stack, whole = self.training.stack, self.share.has_head and self.training.stack.loss == "plain"
        return self.training.tokens * self.share.architecture.vocabulary * stack.pooled_logit_bytes if whole else 0

    def _head(self) -> HeadBytes:
        parts = self.strategy.shard_size if self.strategy.half.layers == "sliced" else 1
        width = residual_width(self.computed)
        return head_bytes(self.share.architecture, self.computed, hidden_width=width, parts=parts)

    def _backward_last(self) -> Iterable[Term]:
        last = self.sizes[-1]
        yield from self._kept(forward=False)
        size = self._recomputed(last) if self.training.checkpointing else last.backward - last.kept
        yield Term(name="layer", num_bytes=size, source="recomputation and backward of the last layer")
        if self.share.has_head:
            stack = self.training.stack
            held = stack.kept_logits_bytes if stack.loss != "fused" else 0
            numbers = self.training.tokens * self.share.architecture.vocabulary
            yield Term(name="logits", num_bytes=numbers * held, source="the caller still holds them")
        yield from self._of_shards(units=2, forward=True)
        if not self.accumulates:
            model = self.share.architecture
            head = model.hidden * model.vocabulary if self.share.has_head else 0
            # of adapters those of this layer at the most; a trained table beside them has its own from the loss on
            part = 1.0 if self.share.num_saved else 1.0 / self.depth
            yield self._gradients(head / self.share.num_parameters if self.full else part)

    def _recomputed(self, layer: LayerBytes) -> int:
        """The highest point of a layer: computed again beside the gradient that waits for it, or in its backward."""
        return max(layer.backward, layer.again + self.entry_bytes)

    def _backward_first(self) -> Iterable[Term]:
        first = self.share.layers[0]
        before = sum(term.num_bytes for term in self._kept(forward=False)) // self.share.in_flight
        left = self.entry_bytes * self._inputs_left() + before * (self.share.in_flight - 1)
        yield Term(name="checkpoints", num_bytes=left, source="what is left of layers' inputs")
        size = self._recomputed(self.sizes[0]) if self.training.checkpointing else self.sizes[0].backward
        yield Term(name="layer", num_bytes=size, source="recomputation and backward of the first layer")
        yield from self._of_shards(units=1)
        if not self.accumulates:
            missing = first.num_parameters + self._own_table()
            yield self._gradients(1.0 - missing / self.share.num_parameters if self.full else 1.0)

    def _own_table(self) -> int:
        """Numbers of an embedding table that is no head: its gradient comes last."""
        model = self.share.architecture
        return model.embedding_weights if self.share.has_embedding and not model.tied else 0

    def _inputs_left(self) -> int:
        """Layer inputs, and gradients of them, that are there in backward of the first layer."""
        held = self.training.stack.holds_inputs and self.training.checkpointing and not self.full
        return 2 * self.depth - 2 if held else 1

    def _backward_rest(self) -> Iterable[Term]:
        """The embedding's gradient is dense, and is added to the head's if they are one table."""
        yield Term(name="hidden states", num_bytes=self.entry_bytes, source="gradient of the first layer's input")
        model = self.share.architecture
        if self.full and self.share.has_embedding:
            copies = (2 if model.tied and self.share.has_head else 0) + (1 if self.accumulates else 0)
            size = copies * model.embedding_weights * BYTES[self.computed.parameters]
            yield Term(name="table's gradient", num_bytes=size, source="beside the one that stays")
        if not self.accumulates:
            yield self._gradients()

    def _update(self) -> Iterable[Term]:
        if not self.accumulates:
            yield self._gradients()
        training = self.training
        if training.stack.foreach and training.optimizer == "adamw":
            size = self.share.num_trained(training) // trained_shards(training, self.strategy)
            size *= BYTES[training.parameters]
            yield Term(name="foreach copy", num_bytes=size, source="AdamW's square roots of all trained numbers")
        if training.optimizer in _COPIES:
            size = _COPIES[training.optimizer] * max(FP32, BYTES[training.parameters])
            told = "of the largest trained tensor"
            yield Term(name="its update", num_bytes=size * self.share.largest_trained(training), source=told)
        if self.in_ram and training.optimizer in EIGHT_BITS:
            size = UNPACKED_BYTES * self.share.largest_trained(training)
            yield Term(name="moments of 8 bits", num_bytes=size, source="unpacked for the largest trained tensor")
        yield from self.strategy.half.update_terms(self)

    def _of_shards(self, *, units: int, forward: bool = False) -> Iterable[Term]:
        """What exists because weights and gradients are cut among ranks."""
        yield self._gathered(units, forward=forward)
        mixed = max(reordered(layer, self.training, self.strategy) for layer in self.share.layers)
        told = "of one layer, cut along another dimension than their number"
        yield Term(name="experts put in order", num_bytes=mixed * BYTES[self.training.compute], source=told)
        if self.full and self.strategy.half.parts == "weights":
            numbers = max(layer.num_parameters for layer in self.share.layers)
            compute, wide = BYTES[self.training.compute], BYTES[self.training.stack.reduces]
            size = numbers * (compute + (wide if wide > compute else 0))
            yield Term(name="unreduced gradients", num_bytes=size, source="of one layer, as computed and as summed")
        yield from self.strategy.half.backward_terms(self)

    def _gathered(self, units: int, *, forward: bool = False) -> Term:
        """Weights of other ranks that are here for a moment: so many layers, embedding and head.

        `forward`: whether no layer has been through backward; without resharding all of them are here then.
        """
        size, whole = 0, forward and not self.strategy.reshard
        if self.strategy.half.parts == "weights":
            root = self.share.num_tables + self.share.architecture.vectors
            layers = [(each.count, size) for each, size in zip(self.share.layers, self.unit_sizes, strict=True)]
            size = sum(count * each for count, each in layers) if whole else units * max(self.unit_sizes)
            size += root * BYTES[self.training.compute]
            if "parameters" in self.strategy.offload and not self.in_ram:  # the rank's own part, on its way
                size += units * max(self.unit_sizes) // shards(self.strategy)
        told = "all layers, kept since forward" if whole else f"{units} layers, embedding and head"
        size, told = self.strategy.half.gathered(self, size, told)
        return Term(name="gathered weights", num_bytes=size, source=told)

    def _unit_bytes(self, layer: Layer) -> int:
        """One layer, whole, as ranks send it."""
        one = replace(self.share, layers=(layer.one,), has_embedding=False, has_head=False)
        if self.training.method == "qlora":
            packed, _, rest = quantised_bytes(one, self.training)
            return packed + scale_bytes(one, self.training)[0] + rest
        stack, training = self.training.stack, self.training
        beside = stack.num_adapters * one.num_adapters(training) if stack.gathers_adapters else 0
        return (one.num_parameters + beside) * BYTES[training.compute]


def _filled(*terms: Term) -> tuple[Term, ...]:
    return tuple(term for term in terms if term.num_bytes)


# What a process takes beside its tensors, and how sure that is.


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A number that is known roughly: 5 of 100 cases are below `low`, 5 above `high`."""

    low: int
    likely: int
    high: int

    def probability_below(self, limit: int) -> float:
        """How sure it is that the number stays at or below `limit`.

        Two halves of normal distributions that meet at `likely`, each so wide that `low` and `high` are its 5 and 95
        per cent points (a split normal distribution, whose density has no step).
        """
        below, above = max(1.0, self.likely - self.low) / 1.645, max(1.0, self.high - self.likely) / 1.645
        if limit <= self.likely:
            return 2 * below / (below + above) * _normal((limit - self.likely) / below)
        return 1 - 2 * above / (below + above) * _normal((self.likely - limit) / above)


def _normal(value: float) -> float:
    """The standard normal distribution's share below `value`."""
    return 0.5 * math.erfc(-value / math.sqrt(2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Of one device. Factors are the process's memory for tensors over what tensors take at the peak."""

    factor: tuple[float, float, float]
    """Low, likely, high."""
    context: tuple[int, int, int]
    """Bytes of the CUDA context with its kernels."""
    buffers: tuple[int, int, int] = (0, 0, 0)
    """Bytes of the communicator, with more than one rank."""
    workspace_bytes: int = 0
    """That the allocator gives to cuBLAS for good."""

    def process(self, allocated_bytes: int, *, num_ranks: int) -> Spread:
        """The whole process."""
        buffers = self.buffers if num_ranks > 1 else (0, 0, 0)
        low, likely, high = (
            int(allocated_bytes * factor) + context + buffer
            for factor, context, buffer in zip(self.factor, self.context, buffers, strict=True)
        )
        return Spread(low=low, likely=likely, high=high)


WORKSPACE, LARGE_WORKSPACE, LARGE_WORKSPACE_FROM = 8 * MIB + (1 << 17), 32 * MIB, 9.0
"""Of one thread that multiplies; the larger one from this capability on (torch, ATen/cuda/CublasHandlePool.cpp).

Backward has a thread of its own. On an H200 the worker's peak was that of its trace and 64 MiB (RESULTS.md).
"""
CUDA = Overheads(
    factor=(1.02, 1.10, 1.25),
    context=(141 * MIB, 350 * MIB, 600 * MIB),
    buffers=(16 * MIB, 64 * MIB, 256 * MIB),
    workspace_bytes=2 * WORKSPACE,
)
"""Factors: pool over tensors of ten QLoRA runs on an RTX 4080 (1.02 to 1.25, mean 1.10; can-i-finetune-this). Context:

141 MiB on a T4 in every run of fitcheck-llm, 300 to 400 MB on larger cards. Buffers: a ring of two channels over
Ethernet, 4 MiB for each channel and connection (NCCL); machines with NVSwitch take 1 GiB and more.
"""
HOPPER = replace(CUDA, workspace_bytes=2 * LARGE_WORKSPACE)
CPU = Overheads(factor=(1.00, 1.05, 1.25), context=(300 * MIB, 390 * MIB, 600 * MIB))
"""A rank on the processor: what python holds once torch and transformers are imported, instead of a context. In the
demo's runs 330 MiB of a rank are its own, and 430 with what it shares with others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a rank needs."""

    persistent: tuple[Term, ...]
    instants: tuple[Instant, ...]
    offloaded_bytes: int
    """In the machine's memory, in place of the card's."""
    process: Spread
    """Of the whole process: tensors with the allocator's gaps, context, communication buffers."""
    factor: float = 1.0
    """What the allocator holds over what tensors take at the peak, as a rule."""
    disk_bytes: int = 0
    """What of it lies on the host's disk."""

    def reserved_bytes(self, free_bytes: int | None = None) -> int:
        """What the allocator is likely to hold for tensors (torch's max_memory_reserved).

        It keeps blocks that no tensor needs any more, until memory gets short.
        """
        most = self.persistent_bytes + max(each.num_bytes + each.pooled_bytes for each in self.instants)
        held = int(most * self.factor)
        return held if free_bytes is None else max(self.allocated_bytes, min(held, free_bytes))

    def process_bytes(self, free_bytes: int | None = None) -> int:
        """What the whole process is likely to hold: the same, context and communication buffers."""
        return self.reserved_bytes(free_bytes) + self.process.likely - int(self.allocated_bytes * self.factor)

    @property
    def persistent_bytes(self) -> int:
        """Between two steps."""
        return sum(term.num_bytes for term in self.persistent)

    @property
    def peak(self) -> Instant:
        """The instant that needs most."""
        return max(self.instants, key=lambda instant: instant.num_bytes)

    @property
    def allocated_bytes(self) -> int:
        """The most that tensors take at any moment (torch's max_memory_allocated)."""
        return self.persistent_bytes + self.peak.num_bytes

    def fits(self, free_bytes: int) -> float:
        """Probability that the process fits into this much free memory. See `Spread.probability_below`."""
        return self.process.probability_below(free_bytes)


def rank_memory(
    architecture: Architecture, training: Training, strategy: PlannedStrategy, *, rank: int = 0, device: Overheads
) -> Memory:
    """Memory of `rank`, which computes with `training` under `strategy` on a device with these overheads.

    The peak lies at one of the instants: between the last and the first layer, activations fall and gradients rise in
    straight lines. Raises ModelError for adapters that match nothing (`lora_parameters`).
    """
    training, strategy = settled(architecture, training, strategy), placed(training, strategy)
    if architecture.tied and training.stack.unties:
        architecture = replace(architecture, tied=False)
    if training.method != "full":
        lora_parameters(architecture, training.rank, training.targets, dora=training.dora)
    share = share_of(padded_experts(architecture, training, strategy), strategy, rank)
    step = Step(
        share=share,
        training=training,
        strategy=strategy,
        in_ram=device == CPU,
        workspace_bytes=device.workspace_bytes,
    )
    persistent, instants = step.persistent(), step.instants()
    allocated = sum(term.num_bytes for term in persistent) + max(each.num_bytes for each in instants)
    return Memory(
        persistent=persistent,
        instants=instants,
        offloaded_bytes=step.offloaded_bytes,
        process=device.process(allocated, num_ranks=strategy.world_size),
        factor=device.factor[1],
        disk_bytes=disk_bytes(share, training, strategy) if strategy.on_disk else 0,
    )
