"""What a rank holds all the time: weights, adapters, gradients, optimizer states, and what its strategy adds."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gangline.optimizers import EIGHT_BITS
from gangline.planner.architecture import Architecture, Layer, adapted, layer_adapters, table_adapters
from gangline.planner.training import BYTES, PlannedStrategy, Training
from gangline.runs.formulas import padded, shard_dimension

PACKED_BYTES = 0.5
"""Half a byte per weight, and one fp32 scale per 64 (Dettmers et al., QLoRA, section 3)."""
SCALE_BYTES = 4 / 64
LEVEL_BYTES = 1 / 64
DOUBLE_SCALE_BYTES = LEVEL_BYTES + 4 / (64 * 256)
"""Scales in one byte each, with an fp32 scale per 256 of them."""
ROW_SCALE_BYTES = 4
"""Numbers of 8 bits: an fp32 scale for each row (worker/int8)."""
ADAM8_BYTES = 2 + 2 * 4 / 256
"""bitsandbytes: two states of one byte, with an fp32 scale per 256 numbers each."""
LEAST_PAGED = 100_000
"""bitsandbytes: numbers of a tensor whose states are paged; those of smaller ones stay on the card."""
FP32 = 4
DISK_BUFFERS = 4
"""DeepSpeed: a weight in fp32, its gradient and two moments of a group of trained numbers come from a disk at once."""
DISK_GROUP = 100_000_000
"""Numbers of such a group, unless `sub_group_size` in a configuration file says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A part of memory, in the words of a plan."""

    name: str
    num_bytes: int
    source: str
    """Where it comes from, or by which formula."""


@dataclass(frozen=True, kw_only=True)  # no slots: a plan asks for these numbers thousands of times, and keeps them
class Share:
    """The part of a model that one rank computes."""

    architecture: Architecture
    layers: tuple[Layer, ...]
    has_embedding: bool
    has_head: bool
    in_flight: int
    """Micro-batches whose activations it holds at once."""

    @functools.cached_property
    def weighed_layers(self) -> tuple[Layer, ...]:
        """Its layers, and those of a network for images, which lies where the embedding table is."""
        tower = self.architecture.tower
        return (*self.layers, *([tower] if tower is not None and self.has_embedding else []))

    @functools.cached_property
    def num_linear(self) -> int:
        """Numbers in linears inside layers."""
        return sum(layer.count * layer.linear_weights for layer in self.layers)

    @functools.cached_property
    def num_rows(self) -> int:
        """Rows of these linears' matrices."""
        return sum(layer.count * layer.linear_rows for layer in self.layers)

    @functools.cached_property
    def num_experts(self) -> int:
        """Numbers in fused expert tensors."""
        return sum(layer.count * layer.fused_weights for layer in self.layers)

    @functools.cached_property
    def num_vectors(self) -> int:
        """Numbers in norms and biases, and in a network for images, which stays as it is."""
        inside = sum(layer.count * layer.num_parameters for layer in self.weighed_layers)
        inside -= self.num_linear + self.num_experts
        return inside + (self.architecture.vectors if self.has_head else 0)

    @functools.cached_property
    def num_tables(self) -> int:
        """Numbers in the embedding tables and the head; a tied head on another rank is a copy."""
        tables = self.architecture.embedding_weights if self.has_embedding else 0
        if not self.has_head:
            return tables
        copied = self.architecture.tied and not self.has_embedding
        return tables + self.architecture.head_weights + (self.architecture.embedding_weights if copied else 0)

    @property
    def num_head(self) -> int:
        """Numbers in the matrix of an output head that is no embedding table."""
        model = self.architecture
        return model.hidden * model.vocabulary if self.has_head and not model.tied else 0

    @functools.cached_property
    def num_parameters(self) -> int:
        """All numbers."""
        return self.num_linear + self.num_experts + self.num_vectors + self.num_tables

    def num_adapters(self, training: Training) -> int:
        """Numbers in adapters; 0 for full fine-tuning."""
        if training.method == "full":
            return 0
        rank, targets, dora = training.rank, training.targets, training.dora
        embedding, head = table_adapters(self.architecture, dora=dora)
        tables = self.num_saved + (embedding if self.has_embedding else 0) + (head if self.has_head else 0)
        layers = self.weighed_layers
        return tables + sum(layer.count * layer_adapters(layer, rank, targets, dora=dora) for layer in layers)

    @functools.cached_property
    def num_saved(self) -> int:
        """Numbers in copies of the tables that are trained beside adapters."""
        model = self.architecture
        has_table = self.has_embedding or (self.has_head and model.tied)
        table = model.hidden * model.vocabulary if model.saved_embedding and has_table else 0
        rows = model.trained_rows * model.hidden if has_table else 0
        return table + rows + (model.head_weights if model.saved_head and self.has_head else 0)

    def num_trained(self, training: Training) -> int:
        """Numbers that are trained."""
        return self.num_parameters if training.method == "full" else self.num_adapters(training)

    def num_paged(self, training: Training) -> int:
        """Trained numbers in tensors so large that their states can be paged."""
        if training.method == "full":
            return self.num_parameters  # norms and biases are next to nothing
        return self.num_saved + sum(
            layer.count * copies * size
            for layer in self.layers
            for size, copies in _factors(layer, training)
            if size >= LEAST_PAGED
        )

    def largest_trained(self, training: Training) -> int:
        """Numbers in the largest trained tensor."""
        model = self.architecture
        if training.method != "full":
            table = model.hidden * model.vocabulary if self.num_saved else 0
            return max((table, *(size for layer in self.layers for size, _ in _factors(layer, training))))
        table = model.hidden * model.vocabulary if self.has_embedding or self.has_head else 0
        linears = [each.inputs * each.outputs for layer in self.layers for each in layer.linears]
        experts = [2 * layer.fused_weights // 3 for layer in self.layers]  # gate and up are one tensor
        return max(table, *linears, *experts)


def _factors(layer: Layer, training: Training) -> Iterator[tuple[int, int]]:
    """Both matrices of every adapter, and copies that are trained: numbers in one, and how many there are. Those of an
    expert tensor are one.
    """
    for each in layer.linears:
        if each.saved:
            yield each.inputs * each.outputs, each.number
    for each in adapted(layer, training.targets):
        together = each in layer.expert_linears
        for side in (each.inputs, each.outputs):
            size = (each.rank or training.rank) * side
            yield (size * each.number, 1) if together else (size, each.number)


def whole_share(architecture: Architecture) -> Share:
    """All of the model."""
    return Share(architecture=architecture, layers=architecture.layers, has_embedding=True, has_head=True, in_flight=1)


def share_of(architecture: Architecture, strategy: PlannedStrategy, rank: int) -> Share:
    """All of the model, or the part of it that the strategy gives a rank."""
    return strategy.half.share(architecture, strategy, rank) or whole_share(architecture)


def shards(strategy: PlannedStrategy) -> int:
    """Ranks that hold one copy of the weights and states that lie in parts."""
    return strategy.half.shards(strategy)


def trained_shards(training: Training, strategy: PlannedStrategy) -> int:
    """Ranks among which what is trained is cut, and the optimizer's states of it."""
    whole = training.method != "full" and training.stack.whole_adapters and strategy.half.sharded_by == "fsdp2"
    return 1 if whole else shards(strategy)


def adapters_in_ram(training: Training, strategy: PlannedStrategy) -> bool:
    """Whether adapters, their gradients and states lie in the machine's memory with the weights that are in parts."""
    moved = training.method != "full" and "parameters" in strategy.offload
    return moved and strategy.half.sharded_by == "fsdp2" and not training.stack.whole_adapters


def weight_width(training: Training, strategy: PlannedStrategy) -> int:
    """Bytes per trained weight as the model holds it: ZeRO keeps `compute` weights, and the fp32 ones as a state."""
    if training.method == "full" and strategy.half.sharded_by == "deepspeed":
        return BYTES[training.compute]
    return BYTES[training.parameters]


def weight_bytes(share: Share, training: Training, strategy: PlannedStrategy, *, in_ram: bool = False) -> int:
    """The model without adapters, as this rank holds it. in_ram: see `optimizer_bytes`."""
    if "parameters" in strategy.offload and not in_ram:
        return 0
    parts = shards(strategy) if strategy.half.parts == "weights" else 1
    if training.method == "full":
        return _ceil(share.num_parameters * weight_width(training, strategy), parts)
    compute = BYTES[training.compute]
    if training.method == "lora":
        frozen = compute if training.stack.frozen is None else BYTES[training.stack.frozen]
        return _ceil(share.num_parameters * frozen, parts)
    packed, _, rest = quantised_bytes(share, training)
    cut, whole = scale_bytes(share, training)
    return _ceil(packed, parts) + _ceil(cut, parts) + whole + _ceil(rest, parts)


def scale_bytes(share: Share, training: Training) -> tuple[int, int]:
    """Of the scales of quantised weights: what is in parts where these are, and what every rank has.

    bitsandbytes keeps all of them beside the weight, where no sharding reaches them; gangline's layers only the scales
    of scales (worker/quantised.py).
    """
    packed, scales, _ = quantised_bytes(share, training)
    if not training.stack.divides_scales:
        return 0, scales
    outer = int(packed * (DOUBLE_SCALE_BYTES - LEVEL_BYTES) / PACKED_BYTES) if _is_nested(training) else 0
    return scales - outer, outer


def _is_nested(training: Training) -> bool:
    return training.bits == 4 and training.double_quant


def packs_experts(training: Training) -> bool:
    """Whether experts in tensors of three dimensions have few bits (qlora with `quantise_experts`)."""
    return "method.quantise_experts" in training.extras


def quantised_bytes(share: Share, training: Training) -> tuple[int, int, int]:
    """Weights of 4 or 8 bits, their scales, and what stays as it is: tables, norms, biases, fused experts."""
    stack, compute = training.stack, BYTES[training.compute]
    head = share.num_head if stack.quantises_head else 0
    packs = stack.expert_modules or packs_experts(training)
    packed = share.num_linear + head + (share.num_experts if packs else 0)
    experts = 0 if packs else share.num_experts * compute
    expert_rows = sum(layer.count * each[0] * each[1] for layer in share.layers for each in layer.expert_shapes)
    num_rows = share.num_rows + (expert_rows if packs_experts(training) else 0)
    scale = DOUBLE_SCALE_BYTES if training.double_quant else SCALE_BYTES
    twice = share.architecture.embedding_weights if stack.doubles_embedding and share.has_embedding else 0
    tables = (share.num_tables + twice - head) * (FP32 if stack.upcasts else compute)
    vectors = share.num_vectors * (FP32 if stack.upcasts or stack.upcast_norms else compute)
    if training.bits == 8:
        return packed, num_rows * ROW_SCALE_BYTES, experts + tables + vectors
    return int(packed * PACKED_BYTES), int(packed * scale), experts + tables + vectors


def gradient_bytes(share: Share, training: Training, strategy: PlannedStrategy, *, in_ram: bool = False) -> int:
    """Gradients of all trained weights, as this rank keeps them. in_ram: see `optimizer_bytes`.

    FSDP2 has them where the weights are.
    """
    half = strategy.half
    moved = "optimizer" in strategy.offload or adapters_in_ram(training, strategy)
    if half.sharded_by == "fsdp2" and moved and not in_ram:
        return 0
    numbers, width = share.num_trained(training), weight_width(training, strategy)
    parts = trained_shards(training, strategy) if half.parts in ("gradients", "weights") else 1
    wide = max(width, BYTES[training.stack.reduces]) if half.sharded_by == "deepspeed" else width
    # DeepSpeed's stage 1 sums them up beside the gradients of the last micro-batch
    return _ceil(numbers * (wide + (width if half.parts == "states" and wide > width else 0)), parts)


def optimizer_bytes(share: Share, training: Training, strategy: PlannedStrategy, *, in_ram: bool = False) -> int:
    """States of the optimizer, and under zero the weights that it moves.

    Paged ones lie in memory that a GPU's driver may move away, and count 0 there.

    in_ram: whether there is no GPU. Left out: tensors of fewer than 4,096 numbers, whose states have 32 bits.
    """
    if ("optimizer" in strategy.offload or adapters_in_ram(training, strategy)) and not in_ram:
        return 0
    parts = trained_shards(training, strategy)
    numbers, stored = share.num_trained(training), BYTES[training.parameters]
    if strategy.on_disk:
        return DISK_BUFFERS * FP32 * min(DISK_GROUP, _ceil(numbers, parts))
    master = stored if strategy.half.sharded_by == "deepspeed" else 0
    paged = 0 if in_ram or training.optimizer != "paged-adamw-8bit" else share.num_paged(training)
    return _ceil(int((numbers - paged) * state_width(training, share) + numbers * master), parts)


def disk_bytes(share: Share, training: Training, strategy: PlannedStrategy) -> int:
    """What of a rank lies on its host's disk: weights in fp32, two moments, and gradients on their way to them."""
    return DISK_BUFFERS * FP32 * _ceil(share.num_trained(training), trained_shards(training, strategy))


def offloaded_bytes(share: Share, training: Training, strategy: PlannedStrategy) -> int:
    """What of these a rank has in its machine's memory in place of its card's."""
    kinds = (weight_bytes, gradient_bytes, optimizer_bytes)
    return sum(
        size(share, training, strategy, in_ram=True) - size(share, training, strategy)
        for size in (kinds if strategy.offload else ())
    )


def state_width(training: Training, share: Share) -> float:
    """Bytes of the optimizer's states for each trained number of a share, on average, wherever they lie."""
    kind, width = training.optimizer, BYTES[training.parameters]
    if kind in EIGHT_BITS:
        return ADAM8_BYTES
    if kind == "adafactor":
        return max(FP32, width) * _rows_and_columns(share, training) / max(1, share.num_trained(training))
    if kind == "muon":  # one mean of a matrix, two moments of what AdamW moves
        others = share.num_vectors + share.num_tables if training.method == "full" else 0
        return width * (1 + others / max(1, share.num_trained(training)))
    return width * {"adamw": 2, "lion": 1, "sgd": int(training.momentum)}[kind]


def _rows_and_columns(share: Share, training: Training) -> float:
    """Numbers that Adafactor keeps: one for each row and column of a matrix, and one for each number of a vector."""
    model = share.architecture
    if training.method != "full":  # a row or a column of an adapter has as many numbers as its rank
        return share.num_adapters(training) / training.rank + 2 * training.rank * model.num_layers
    columns = sum(layer.count * each.inputs * each.number for layer in share.layers for each in layer.linears)
    tables = share.num_tables // model.hidden + model.hidden
    return share.num_vectors + share.num_rows + columns + tables + 2 * share.num_experts / model.hidden


def _ceil(number: int, parts: int) -> int:
    return -(-number // parts)


# What FSDP2 adds to experts that its ranks do not divide evenly by their number. Pure.


def padded_experts(architecture: Architecture, training: Training, strategy: PlannedStrategy) -> Architecture:
    """As ranks keep and send it: every part of expert tensors is as large as the largest."""
    if not architecture.expert_weights or not _cuts(training, strategy):
        return architecture
    parts = shards(strategy)
    return replace(architecture, layers=tuple(_layer(layer, parts) for layer in architecture.layers))


def reordered(layer: Layer, training: Training, strategy: PlannedStrategy) -> int:
    """Numbers of a layer's experts that FSDP2 holds a second time, while it puts them together from ranks.

    That is so of what is not cut along the first dimension (foreach_all_gather_copy_out of torch 2.13).
    """
    if not _cuts(training, strategy):
        return 0
    return sum(math.prod(shape) for shape in layer.expert_shapes if shard_dimension(shape, shards(strategy)))


def _cuts(training: Training, strategy: PlannedStrategy) -> bool:
    return strategy.half.sharded_by == "fsdp2" and not training.stack.expert_modules


def _layer(layer: Layer, parts: int) -> Layer:
    more = sum(padded(shape, parts) - math.prod(shape) for shape in layer.expert_shapes)
    return replace(layer, fused_weights=layer.fused_weights + more) if more else layer
