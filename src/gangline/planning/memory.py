"""Memory of one rank: what lies there all the time, and every instant of a step on top of it.

The peak is a maximum over instants, not a sum: the loss, backward of the last and of the first layer, the optimizer.
`planning.block` computes a layer, `planning.logits` the loss, `planning.states` the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gangline.planning.architecture import Architecture, Layer
from gangline.planning.block import layer_tape, residual_width
from gangline.planning.logits import HeadBytes, head_bytes
from gangline.planning.overheads import Overheads, Spread
from gangline.planning.states import (
    SHARDED,
    Share,
    Term,
    gradient_bytes,
    optimizer_bytes,
    outer_bytes,
    quantised_bytes,
    shards,
    share_of,
    weight_bytes,
)
from gangline.planning.training import BYTES, Strategy, Training

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """A moment of a step that may be the peak."""

    name: str
    terms: tuple[Term, ...]
    """On top of what is there all the time."""

    @property
    def num_bytes(self) -> int:
        """Sum of its terms."""
        return sum(term.num_bytes for term in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a rank needs."""

    persistent: tuple[Term, ...]
    instants: tuple[Instant, ...]
    process: Spread
    """Of the whole process: tensors with the allocator's gaps, context, communication buffers."""

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
    architecture: Architecture, training: Training, strategy: Strategy, *, rank: int = 0, device: Overheads
) -> Memory:
    """Memory of `rank`, which computes with `training` under `strategy` on a device with these overheads."""
    share = share_of(architecture, strategy, rank)
    counted = _Counted(share=share, training=_as_computed(training, strategy), strategy=strategy, stored=training)
    persistent = tuple(_filled(counted.persistent()))
    instants = tuple(counted.instants())
    allocated = sum(term.num_bytes for term in persistent) + max(each.num_bytes for each in instants)
    return Memory(
        persistent=persistent,
        instants=instants,
        process=device.process(allocated, num_ranks=strategy.world_size),
    )


def _as_computed(training: Training, strategy: Strategy) -> Training:
    """Sharded weights are gathered in the width of products: nothing runs under autocast."""
    if training.method == "full" and (strategy.kind in SHARDED or strategy.kind.startswith("zero")):
        return replace(training, parameters=training.compute)
    return training


def _filled(terms: Iterable[Term]) -> list[Term]:
    return [term for term in terms if term.num_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    share: Share
    training: Training
    """As it is computed: dtypes of gathered weights."""
    strategy: Strategy
    stored: Training
    """As it was asked for: dtypes of what lies there."""

    @property
    def accumulates(self) -> bool:
        """Whether gradients are there before backward begins: of earlier micro-batches, or as buckets."""
        return self.training.accumulation > 1 or self.strategy.kind in ("ddp", "local-sgd", "pipeline")

    def persistent(self) -> Iterable[Term]:
        share, stored, strategy = self.share, self.stored, self.strategy
        parts = shards(strategy)
        among = f" / {parts} ranks" if parts > 1 else ""
        numbers = f"{share.num_parameters:,} numbers"
        yield Term(name="weights", num_bytes=weight_bytes(share, stored, strategy), source=_weights_source(stored, numbers) + among)
        adapters = share.num_adapters(stored)
        size = adapters * BYTES[stored.parameters] // (parts if strategy.kind in SHARDED else 1)
        yield Term(name="adapters", num_bytes=size, source=f"{adapters:,} numbers in {stored.parameters}{among}")
        yield Term(name="optimizer", num_bytes=optimizer_bytes(share, stored, strategy), source=f"{stored.optimizer}, two states per trained number{among}")
        yield Term(name="outer optimizer", num_bytes=outer_bytes(share, stored, strategy), source="weights of the last exchange and momentum in fp32")
        if self.accumulates:
            yield self._gradients()
        yield Term(name="workspace", num_bytes=8 * MIB, source="cuBLAS, one handle and stream")

    def _gradients(self, part: float = 1.0) -> Term:
        size = gradient_bytes(self.share, self.stored, self.strategy)
        return Term(name="gradients", num_bytes=int(size * part), source=f"{self.share.num_trained(self.stored):,} trained numbers")

    def instants(self) -> Iterable[Instant]:
        yield Instant(name="loss", terms=tuple(_filled([*self._kept(cast=True), *self._loss(), self._gather(0)])))
        last, first = self.share.layers[-1], self.share.layers[0]
        terms = [*self._backward(last, first=False), self._gather(2), self._scatter()]
        yield Instant(name="backward-last", terms=tuple(_filled(terms)))
        terms = [*self._backward(first, first=True), self._gather(1), self._scatter()]
        yield Instant(name="backward-first", terms=tuple(_filled(terms)))
        yield Instant(name="backward-rest", terms=tuple(_filled([*self._tables(), self._gather(0)])))
        yield Instant(name="optimizer", terms=tuple(_filled(self._update())))

    def _kept(self, *, cast: bool) -> Iterable[Term]:
        training = self.training
        flight = self.share.in_flight
        entry = training.tokens * self.share.architecture.hidden * residual_width(training)
        tapes = [(layer.count, layer_tape(layer, self.share.architecture.hidden, training)) for layer in self.share.layers]
        depth = sum(count for count, _ in tapes)
        if training.checkpointing:
            yield Term(name="checkpoints", num_bytes=depth * entry * flight, source=f"{depth} layers · T·h·{residual_width(training)}")
            copies = sum(count * tape.constants for count, tape in tapes)
            yield Term(name="casted weights", num_bytes=copies if cast else 0, source="autocast keeps its copies until forward ends")
        else:
            kept = sum(count * tape.kept_bytes for count, tape in tapes)
            yield Term(name="activations", num_bytes=kept * flight + entry, source=f"{depth} layers, each tensor that backward needs")
        yield Term(name="rotary", num_bytes=self._rotary(), source="cosines and sines of every position")

    def _rotary(self) -> int:
        layer = self.share.layers[0]
        return 2 * self.training.tokens * layer.head_dim * residual_width(self.training)

    def _loss(self) -> Iterable[Term]:
        if not self.share.has_head:
            return
        yield self._last_norm()
        head = self._head()
        yield Term(name="loss", num_bytes=head.peak, source=head.formula)

    def _norm_width(self) -> int:
        """Bytes of a number that comes out of the last norm."""
        training = self.training
        wide = training.stack.upcast_norms and training.method == "qlora"
        return max(residual_width(training), 4 if wide else 0)

    def _last_norm(self) -> Term:
        """What the last norm keeps, and its output."""
        numbers = self.training.tokens * self.share.architecture.hidden
        width, eager = residual_width(self.training), "norm" not in self.training.stack.fused
        kept = numbers * width + (numbers * 4 if eager and width < 4 else 0)
        kept += numbers * width if self.training.method == "full" and eager else 0
        return Term(name="last norm", num_bytes=kept, source="hidden states, and in fp32")

    def _head(self) -> HeadBytes:
        return head_bytes(self.share.architecture, self.training, hidden_width=self._norm_width())

    def _backward(self, layer: Layer, *, first: bool) -> Iterable[Term]:
        training, hidden = self.training, self.share.architecture.hidden
        tape = layer_tape(layer, hidden, training, accumulates=self.accumulates)
        entry = training.tokens * hidden * residual_width(training)
        if not first:
            yield from self._kept(cast=False)
            extra = tape.backward_bytes() - (0 if training.checkpointing else tape.kept_bytes)
            yield Term(name="layer", num_bytes=extra, source="backward of the last layer")
            if self.share.has_head:
                yield self._held_logits()
        else:
            before = self._in_flight_before()
            yield Term(name="checkpoints", num_bytes=entry * self._left() + before, source="what is left of them")
            yield Term(name="layer", num_bytes=tape.backward_bytes(), source="backward of the first layer")
        if not self.accumulates:
            yield self._gradients(self._present(first=first))

    def _left(self) -> int:
        """Layer inputs, and gradients of them, that are there in backward of the first layer."""
        depth = sum(layer.count for layer in self.share.layers)
        held = self.training.stack.holds_inputs and self.training.checkpointing and self.training.method != "full"
        return 2 * depth - 2 if held else 1

    def _in_flight_before(self) -> int:
        """Activations of a pipeline's other micro-batches."""
        return sum(term.num_bytes for term in self._kept(cast=False)) * (self.share.in_flight - 1) // self.share.in_flight

    def _held_logits(self) -> Term:
        numbers = self.training.tokens * self.share.architecture.vocabulary
        kept = self.training.stack.kept_logits_bytes if self.training.stack.loss != "fused" else 0
        return Term(name="logits", num_bytes=numbers * kept, source="the caller still holds them")

    def _present(self, *, first: bool) -> float:
        """The part of all gradients that is there when a layer's backward begins."""
        if self.training.method != "full":
            return 1.0
        model, numbers = self.share.architecture, self.share.num_parameters
        if first:
            table = model.embedding_weights if self.share.has_embedding and not model.tied else 0
            return max(0.0, (numbers - table - self.share.layers[0].num_parameters) / numbers)
        head = model.hidden * model.vocabulary if self.share.has_head else 0
        return head / numbers

    def _tables(self) -> Iterable[Term]:
        """Backward of the embedding: its gradient is dense, and is added to the head's if they are one table."""
        training, model = self.training, self.share.architecture
        entry = training.tokens * model.hidden * residual_width(training)
        yield Term(name="hidden states", num_bytes=entry, source="gradient of the first layer's input")
        if training.method == "full" and self.share.has_embedding:
            table = model.embedding_weights * BYTES[training.parameters]
            copies = (2 if model.tied and self.share.has_head else 0) + (1 if self.accumulates else 0)
            yield Term(name="table's gradient", num_bytes=copies * table, source="beside the one that stays")
        if not self.accumulates:
            yield self._gradients()

    def _update(self) -> Iterable[Term]:
        if not self.accumulates:
            yield self._gradients()
        stored, stack = self.stored, self.stored.stack
        if stack.foreach and stored.optimizer == "adamw":
            numbers = self.share.num_trained(stored) // (shards(self.strategy) if self.strategy.kind != "single" else 1)
            yield Term(name="foreach copy", num_bytes=numbers * BYTES[stored.parameters], source="AdamW's square roots of all trained numbers")
        if self.strategy.kind in ("zero-1", "zero-2"):
            yield Term(name="gather bucket", num_bytes=2 * 500_000_000, source="DeepSpeed's allgather_bucket_size, bf16")

    def _gather(self, units: int) -> Term:
        """Weights of other ranks that are here for a moment: so many layers, and embedding and head."""
        if self.strategy.kind not in SHARDED:
            return Term(name="gathered weights", num_bytes=0, source="")
        unit = max(self._unit_bytes(layer) for layer in self.share.layers) * units
        root = (self.share.num_tables + self.share.architecture.vectors) * BYTES[self.training.compute]
        return Term(name="gathered weights", num_bytes=unit + root, source=f"{units} layers, embedding and head")

    def _unit_bytes(self, layer: Layer) -> int:
        one = replace(self.share, layers=(replace(layer, count=1),), has_embedding=False, has_head=False)
        if self.training.method == "qlora":
            packed, _, rest = quantised_bytes(one, self.training)
            return packed + rest
        return one.num_parameters * BYTES[self.training.compute]

    def _scatter(self) -> Term:
        """Gradients of a layer before they are reduced and cut."""
        if self.strategy.kind not in SHARDED or self.training.method != "full":
            return Term(name="unreduced gradients", num_bytes=0, source="")
        unit = max(layer.num_parameters for layer in self.share.layers)
        wide = BYTES[self.stored.stack.reduces]
        size = unit * (BYTES[self.training.compute] + (wide if wide > BYTES[self.training.compute] else 0))
        return Term(name="unreduced gradients", num_bytes=size, source="of one layer, as computed and as summed")


def _weights_source(training: Training, numbers: str) -> str:
    if training.method == "full":
        return f"{numbers} in {training.parameters}"
    return f"{numbers} in {training.compute}" if training.method == "lora" else f"{numbers}, those of linears in 4 bits"
