"""One layer as a tape: which tensors a transformers decoder layer keeps, by method, dtypes and kernels.

The operations are those of transformers' llama-like layers (5.x), of peft's LoRA layer, of bitsandbytes' 4-bit linear
and of torch's attention kernels. tests/train compares the result with the trace of our own trainer, and
tests/unit/planner/test_memory_rows.py with measured peaks of other software.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gangline.planner.architecture import Architecture, Layer, Linear, adapted
from gangline.planner.states import packs_experts
from gangline.planner.training import BYTES, Training

# What autograd keeps, operation by operation: a tape of sizes.


@dataclass(slots=True, eq=False)
class TensorSize:
    """A tensor: so many numbers of so many bytes."""

    numbers: int
    width: int
    """Bytes of a number."""
    needs_gradient: bool = True
    external: bool = False
    """Held by someone else (weights, the input of a layer): not counted among what is kept."""
    base: TensorSize | None = None
    """The tensor that this one is a view of: keeping the view keeps all of it."""

    @property
    def num_bytes(self) -> int:
        """Size."""
        return self.numbers * self.width


@dataclass(slots=True, eq=False)
class _Operation:
    inputs: tuple[TensorSize, ...]
    output: TensorSize
    keeps: tuple[TensorSize, ...]
    scratch_bytes: int
    """Allocated inside backward, and free when it is over."""
    passes: bool
    """Whether the gradient of the output is handed on as it is (a sum of equal shapes)."""
    held: tuple[TensorSize, ...] = ()
    """Of forward: tensors that functions which are still running have names for."""


@dataclass(slots=True, eq=False)
class Tape:
    """One forward pass, written down; what is asked of it is reckoned once, when it is complete."""

    operations: list[_Operation] = field(default_factory=list)
    constants: int = 0
    """Bytes kept that do not belong to a tensor of this tape (cast or merged copies of weights)."""
    cached: int = 0
    """How many of them autocast holds until forward ends, checkpointing or not."""
    result: TensorSize | None = None
    held: tuple[TensorSize, ...] = ()
    """See `_Operation.held`: of what is applied from now on."""

    @contextmanager
    def holding(self, *values: TensorSize) -> Iterator[None]:
        """Inside, a function is running that has names for these tensors."""
        before = self.held
        self.held = (*before, *values)
        yield
        self.held = before

    def apply(
        self,
        *inputs: TensorSize,
        numbers: int | None = None,
        width: int | None = None,
        keeps: tuple[TensorSize, ...] = (),
        scratch_bytes: int = 0,
        passes: bool = False,
        view: bool = False,
    ) -> TensorSize:
        """One operation; its output has the size of the first input unless told otherwise."""
        first = inputs[0]
        output = TensorSize(
            first.numbers if numbers is None else numbers,
            first.width if width is None else width,
            any(each.needs_gradient for each in inputs),
            base=(first.base or first) if view else None,
        )
        if output.needs_gradient:
            self.operations.append(_Operation(inputs, output, keeps, scratch_bytes, passes, self.held))
        return output

    def keep(self, *values: TensorSize) -> None:
        """Let the last operation keep these, its own output perhaps among them."""
        if self.operations:
            self.operations[-1].keeps = values

    def copy_weights(self, num_bytes: int, *, cached: bool = True) -> None:
        """Keep a copy of weights, which autocast makes once per forward (`cached`) or an operation each time."""
        self.constants += num_bytes
        self.cached += num_bytes if cached else 0

    def cast(self, value: TensorSize, width: int) -> TensorSize:
        """The same numbers in another width; nothing happens if it is the same."""
        return value if value.width == width else self.apply(value, width=width)

    def add(self, one: TensorSize, other: TensorSize) -> TensorSize:
        """Sum of equal shapes, in the wider of both."""
        width = max(one.width, other.width)
        return self.apply(one, other, width=width, passes=one.width == other.width == width)

    @property
    def kept_bytes(self) -> int:
        """What backward needs, without external tensors; each tensor once."""
        kept = {id(each.base or each): each.base or each for operation in self.operations for each in operation.keeps}
        return self.constants + sum(each.num_bytes for each in kept.values() if not each.external)


def _again_peak(tape: Tape) -> int:
    """The highest point of a layer that is computed again: what is kept so far, and what is still to be read or has a
    name. It ends before the last operation that keeps something, as torch's checkpoint does (early_stop).
    """
    last: dict[int, int] = {}
    end = max((index for index, operation in enumerate(tape.operations) if operation.keeps), default=0)
    for index, operation in enumerate(tape.operations):
        last |= {id(each.base or each): index for each in (*operation.inputs, *operation.held)}
    sizes: dict[int, int] = {}
    kept: set[int] = set()
    live = peak = tape.constants
    for index, operation in enumerate(tape.operations[:end]):
        touched = {
            id(each.base or each): 0 if (each.base or each).external else (each.base or each).num_bytes
            for each in (*operation.inputs, *operation.held, *operation.keeps, operation.output)
        }
        live += sum(size for key, size in touched.items() if key not in sizes)
        sizes |= touched
        peak = max(peak, live)
        kept |= {id(each.base or each) for each in operation.keeps}
        for key in touched:
            if key not in kept and last.get(key, index) <= index:
                live -= sizes[key]
                sizes[key] = 0
    return peak


class _Backward:
    """One backward pass, whose highest point is asked for, the gradient of the result included."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.holders: dict[int, int] = {}
        self.gradients: dict[int, _Gradient] = {}
        for operation in tape.operations:
            for value in (each.base or each for each in operation.keeps):
                self.holders[id(value)] = self.holders.get(id(value), 0) + 1
        self.live = tape.kept_bytes
        self.peak = self.live

    def run(self) -> int:
        result = self.tape.result
        if result is None or not result.needs_gradient:
            return self.live
        self.gradients[id(result)] = _Gradient(result.num_bytes)
        self._grow(result.num_bytes)
        for operation in reversed(self.tape.operations):
            gradient = self.gradients.pop(id(operation.output), None)
            if gradient is not None:
                self._step(operation, gradient)
        return self.peak

    def _step(self, operation: _Operation, gradient: _Gradient) -> None:
        self._grow(operation.scratch_bytes)
        for value in operation.inputs:
            if value.needs_gradient:
                self._hand_on(value, gradient if operation.passes else None)
        self._grow(-operation.scratch_bytes)
        self._release(gradient)
        for value in (each.base or each for each in operation.keeps):
            self.holders[id(value)] -= 1
            if self.holders[id(value)] == 0 and not value.external:
                self._grow(-value.num_bytes)

    def _hand_on(self, value: TensorSize, shared: _Gradient | None) -> None:
        known = self.gradients.get(id(value))
        if known is None:
            if shared is not None:
                shared.holders += 1
                self.gradients[id(value)] = shared
                return
            self.gradients[id(value)] = _Gradient(value.num_bytes)
            self._grow(value.num_bytes)
            return
        if shared is None:
            # a second gradient is there for a moment, then added to the first
            self._grow(value.num_bytes)
            self._grow(-value.num_bytes)
        if known.holders > 1:
            known.holders -= 1
            self.gradients[id(value)] = _Gradient(value.num_bytes)
            self._grow(value.num_bytes)

    def _release(self, gradient: _Gradient) -> None:
        gradient.holders -= 1
        if gradient.holders == 0:
            self._grow(-gradient.num_bytes)

    def _grow(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.peak = max(self.peak, self.live)


@dataclass(slots=True)
class _Gradient:
    num_bytes: int
    holders: int = 1


FP32 = 4
CHUNK = 64
"""Tokens of a chunk of a gated delta net."""
_GELU_STEPS = ("gelu_new", "gelu_fast", "quick_gelu")
"""Activations that transformers writes as a chain of operations, each of which keeps something."""
_GATED_KERNEL = ("silu", "swish", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate")
"""Those that the kernel `gated-mlp` computes: SiLU, and GELU by tanh, under transformers' names of them."""


@dataclass(slots=True)
class Block:
    """Builds the tape of one layer."""

    layer: Layer
    hidden: int
    training: Training
    accumulates: bool
    """Whether gradients are there already, and new ones are added to them."""
    tape: Tape

    @property
    def compute(self) -> int:
        """Bytes of a number in products."""
        return BYTES[self.training.compute]

    @property
    def stored(self) -> int:
        """Bytes of a trained number."""
        return BYTES[self.training.parameters]

    @property
    def full(self) -> bool:
        """Whether the layer's own weights are trained."""
        return self.training.method == "full"

    @property
    def autocast(self) -> bool:
        """Whether products turn their inputs into `compute` first."""
        return self.training.stack.autocast and self.stored != self.compute

    @property
    def residual_width(self) -> int:
        """Bytes of a number between layers."""
        return residual_width(self.training)

    def build(self) -> Tape:
        """The whole layer."""
        tokens = self.training.tokens
        entry = TensorSize(tokens * self.hidden, self.residual_width, external=self.training.checkpointing)
        if self.layer.parallel:
            normed = self.norm(entry)
            other = self.norm(entry) if self.layer.num_norms > 1 else normed
            both = self.tape.add(self._inside(self.attention, normed), self._inside(self.mlp, other))
            self.tape.result = self.tape.add(entry, both)
            return self.tape
        middle = self.tape.add(entry, self.post(self._inside(self.attention, self.norm(entry))))
        self.tape.result = self.tape.add(middle, self.post(self._inside(self.mlp, self.norm(middle))))
        return self.tape

    def _inside(self, module: Callable[[TensorSize], TensorSize], value: TensorSize) -> TensorSize:
        """What a module makes of a value, for which its caller has a name meanwhile."""
        with self.tape.holding(value):
            return module(value)

    def post(self, value: TensorSize) -> TensorSize:
        """The second norm of a half, and dropout, where there are any."""
        value = self.norm(value) if self.layer.num_norms == 4 else value
        return self._drop(value) if self.layer.dropout else value

    def _drop(self, value: TensorSize) -> TensorSize:
        """Dropout: it keeps a byte for each number, on a processor the factor itself."""
        return self.tape.apply(value, keeps=(TensorSize(value.numbers, value.width if self.on_cpu else 1),))

    @property
    def on_cpu(self) -> bool:
        """Whether kernels are those for processors."""
        return self.training.stack.on_cpu

    def norm(self, value: TensorSize) -> TensorSize:
        """A norm over the last axis."""
        stack, kind = self.training.stack, self.layer.norm
        weight = FP32 if stack.upcasts or stack.upcast_norms else 0
        if "norm" in stack.fused or (kind == "layer" and not (self.autocast and stack.widens_norms)):
            return self.tape.apply(value, keeps=(value,), width=max(value.width, weight))
        wide = self.tape.cast(value, FP32)
        if kind == "layer":
            return self.tape.apply(wide, keeps=(wide,))
        scaled = self.tape.apply(wide, keeps=(wide,), scratch_bytes=wide.num_bytes)
        narrow = self.tape.cast(scaled, value.width)
        if kind == "none":
            return narrow
        keeps = (narrow,) if self.full else ()
        return self.tape.apply(narrow, keeps=keeps, width=max(value.width, weight))

    def linear(self, value: TensorSize, linear: Linear) -> TensorSize:
        """A product with its adapter, if it carries one."""
        carries = not self.full and linear in adapted(self.layer, self.training.targets)
        if carries and self._is_one_product:
            return self._one_product(value, linear)
        base = self._quantised(value, linear) if self.training.method == "qlora" else self._product(value, linear)
        if not carries:
            return base
        if self.training.splits:
            base = self._began(value, base, linear)
        return self._adapter(value, base, linear)

    @property
    def _is_one_product(self) -> bool:
        """Whether our kernel computes a matrix and its adapter at once, not one after the other."""
        training = self.training
        more = training.dora or training.dropout or training.splits
        return training.stack.adds_adapters and training.method == "lora" and not more

    def _one_product(self, value: TensorSize, linear: Linear) -> TensorSize:
        """The kernel `lora` over a whole matrix keeps its input, and what the first factor makes of it."""
        rows = value.numbers // linear.inputs
        with self.tape.holding(value):
            given = self.tape.cast(value, self.compute if self.autocast else self.stored)
            narrow = TensorSize(rows * (linear.rank or self.training.rank), given.width)
            return self.tape.apply(given, numbers=rows * linear.outputs, keeps=(given, narrow))

    def _began(self, value: TensorSize, base: TensorSize, linear: Linear) -> TensorSize:
        """What the adapter began with, subtracted: frozen factors, whose products keep nothing."""
        rank = linear.rank or self.training.rank
        if self.autocast:
            self.tape.copy_weights(rank * (linear.inputs + linear.outputs) * self.compute)
        value = self.tape.cast(self.tape.cast(value, self.stored), self.compute if self.autocast else self.stored)
        narrow = self.tape.apply(value, numbers=value.numbers // linear.inputs * rank)
        wide = self.tape.apply(narrow, numbers=base.numbers)
        return self.tape.add(base, self.tape.apply(wide))

    def _product(self, value: TensorSize, linear: Linear) -> TensorSize:
        numbers = value.numbers // linear.inputs * linear.outputs
        value = self.tape.cast(value, self.compute) if self.autocast else value
        scratch = 0
        if self.full:
            scratch = linear.inputs * linear.outputs * self._gradient_scratch()
            if self.autocast:
                self.tape.copy_weights(linear.inputs * linear.outputs * self.compute)
        return self.tape.apply(value, numbers=numbers, keeps=(value,) if self.full else (), scratch_bytes=scratch)

    def _gradient_scratch(self) -> int:
        """Bytes per number of a weight's gradient that exist beside the lasting one."""
        return (self.compute if self.autocast else 0) + (self.stored if self.accumulates else 0)

    def _quantised(self, value: TensorSize, linear: Linear) -> TensorSize:
        """Input and output change to the format of products and back; the matrix is unpacked to it for a moment."""
        weight = linear.inputs * linear.outputs * self.compute * self.training.stack.unpacked_copies
        narrow = self.tape.cast(value, self.compute)
        numbers = value.numbers // linear.inputs * linear.outputs
        keeps = (narrow,) if self.training.stack.keeps_quantised_inputs else ()
        product = self.tape.apply(narrow, numbers=numbers, keeps=keeps, scratch_bytes=weight)
        return self.tape.cast(product, value.width)

    def _adapter(self, value: TensorSize, base: TensorSize, linear: Linear) -> TensorSize:
        """peft: the input in the adapter's width, two narrow products, and the sum."""
        if self.training.stack.adds_adapters and not self.training.dora:
            return self._added(value, base, linear)
        with self.tape.holding(value):
            stored = self.tape.cast(value, self.stored)
            with self.tape.holding(stored):
                narrow = self._narrowed(stored, linear, linear.rank or self.training.rank)
                wide = self._widened(narrow, base.numbers)
                if self.training.dora:
                    return self._dora(base, wide, linear)
                return self.tape.cast(self.tape.add(base, self.tape.apply(wide)), base.width)

    def _added(self, value: TensorSize, base: TensorSize, linear: Linear) -> TensorSize:
        """The kernel `lora`: the second product goes into what the matrix gave; the first keeps the matrix's input."""
        rank = linear.rank or self.training.rank
        with self.tape.holding(value):
            given = self._drop(value) if self.training.dropout else value
            given = self.tape.cast(given, base.width)
            narrow = self.tape.apply(given, numbers=given.numbers // linear.inputs * rank, keeps=(given,))
            return self.tape.apply(base, narrow, keeps=(narrow,), passes=True, view=True)

    def _narrowed(self, value: TensorSize, linear: Linear, rank: int) -> TensorSize:
        """The product with an adapter's first matrix."""
        narrow_numbers = value.numbers // linear.inputs * rank
        if self.autocast:
            self.tape.copy_weights(rank * (linear.inputs + linear.outputs) * self.compute)
        value = self.tape.cast(value, self.stored)
        if self.training.dropout:
            value = self._drop(value)
        value = self.tape.cast(value, self.compute) if self.autocast else value
        return self.tape.apply(value, numbers=narrow_numbers, keeps=(value,))

    def _dora(self, base: TensorSize, wide: TensorSize, linear: Linear) -> TensorSize:
        """peft: both products times the trained length of their row over the row's length.

        That is computed anew in every forward, by way of a unit matrix and four copies of the weight.
        """
        again = linear.inputs * (linear.inputs + 4 * linear.outputs) * self.stored if self.training.checkpointing else 0
        scaled = self.tape.apply(base, keeps=(base,), width=self.stored, scratch_bytes=again)
        turned = self.tape.apply(self.tape.apply(wide, keeps=(wide,), width=self.stored))
        both = self.tape.add(scaled, turned)
        return self.tape.cast(self.tape.add(base, both), base.width)

    def _widened(self, narrow: TensorSize, numbers: int) -> TensorSize:
        """An adapter's second product; where it reaches a part of the outputs, index_copy puts that part among zeros,
        and keeps it for backward (torch's derivatives.yaml: the gradient is expanded like the source).
        """
        share = self.training.stack.adapter_share
        wide = self.tape.apply(narrow, numbers=int(numbers * share), keeps=(narrow,))
        return wide if share == 1 else self.tape.apply(wide, numbers=numbers, keeps=(wide,))

    def attention(self, value: TensorSize) -> TensorSize:
        """From normed hidden states to what is added to the residual."""
        linears = [each for each in self.layer.linears if each.part == "attention"]
        if self.layer.delta:
            return self.linear(self._delta(value, linears), linears[-1])
        query, key, content = self._latent(value, linears) if self.layer.latent else self._heads(value, linears)
        mixed = self._mix(query, key, content)
        if self.layer.gated_attention:
            gate = self.tape.apply(mixed)
            self.tape.keep(gate)
            mixed = self.tape.apply(mixed, gate, keeps=(mixed, gate))
        return self.linear(mixed, linears[-1])

    def _delta(self, value: TensorSize, linears: list[Linear]) -> TensorSize:
        """A gated delta net as transformers (5.23) writes it in torch: in fp32, in chunks of 64 tokens, with a state of
        every chunk. Kernels of other packages keep less.
        """
        layer, tokens, values = self.layer, self.training.tokens, linears[-1].inputs
        products = [self.linear(value, each) for each in linears[:-1]]
        mixed = sum(each.outputs for each in linears[:-1]) - 2 * layer.heads - values
        joined = self.tape.apply(products[0], numbers=tokens * mixed)
        folded = self.tape.apply(joined, keeps=(joined,))  # the short convolution, then its activation
        active = self.tape.apply(folded, keeps=(folded,))
        per_head = 8 * layer.head_dim + 5 * layer.value_dim + 5 * CHUNK
        states = TensorSize(tokens * layer.heads * per_head, FP32)
        result = self.tape.apply(active, numbers=tokens * values, width=FP32, keeps=(states,))
        narrow = self.tape.cast(result, value.width)
        wide = self.tape.cast(narrow, FP32)
        normed = self.tape.apply(wide, keeps=(wide,))
        gate = self.tape.apply(products[-1], numbers=tokens * values, width=FP32)
        self.tape.keep(gate)
        return self.tape.cast(self.tape.apply(normed, gate, width=FP32, keeps=(normed, gate)), value.width)

    def _heads(self, value: TensorSize, linears: list[Linear]) -> tuple[TensorSize, TensorSize, TensorSize]:
        tokens, layer = self.training.tokens, self.layer
        sizes = [tokens * layer.heads * layer.head_dim, *[tokens * layer.kv_heads * layer.head_dim] * 2]
        if len(linears) == 4 and self.training.stack.joins_qkv:
            query, key, content = self._joined(value, linears[:3], sizes)
        elif len(linears) > 2:
            products = [self.linear(value, linear) for linear in linears[:-1]]
            query, key, content = products[0], products[1], products[-1]
            if layer.gated_attention:  # half of the product; the gate lies in the other one
                query = self.tape.apply(query, numbers=sizes[0], view=True)
        else:
            whole = self.linear(value, linears[0])
            # views: as long as one of them is kept, all of the product is
            query, key, content = (self.tape.apply(whole, numbers=size, view=True) for size in sizes)
        if layer.qk_norm != "none":
            query, key = self.norm(query), self.norm(key)
        return (self._rotate(query), self._rotate(key), content) if layer.rotary else (query, key, content)

    def _joined(self, value: TensorSize, linears: list[Linear], sizes: list[int]) -> Iterator[TensorSize]:
        """Queries, keys and values from one matrix, with one adapter over those of them that are named: the input is
        dropped once; index_copy spreads a part of the outputs among zeros, and keeps it for backward (torch's
        derivatives.yaml: the gradient is expanded like the source).
        """
        whole = replace(linears[0], outputs=sum(each.outputs for each in linears), name="query_key_value")
        base = self._quantised(value, whole) if self.training.method == "qlora" else self._product(value, whole)
        chosen = () if self.full else [each for each in linears if each in adapted(self.layer, self.training.targets)]
        if chosen:
            rank = (chosen[0].rank or self.training.rank) * len(chosen)
            narrow = self._narrowed(value, whole, rank)
            reached = sum(each.outputs for each in chosen)
            wide = self.tape.apply(narrow, numbers=base.numbers // whole.outputs * reached, keeps=(narrow,))
            spread = wide if len(chosen) == 3 else self.tape.apply(wide, numbers=base.numbers, keeps=(wide,))
            base = self.tape.cast(self.tape.add(base, self.tape.apply(spread)), base.width)
        return (self.tape.apply(base, numbers=size, view=True) for size in sizes)

    def _rotate(self, value: TensorSize) -> TensorSize:
        width = max(value.width, self.residual_width)
        if "rope" in self.training.stack.fused:
            return self.tape.apply(value)
        turned = self.tape.apply(self.tape.apply(value), width=width)
        return self.tape.add(self.tape.apply(value, width=width), turned)

    def _latent(self, value: TensorSize, linears: list[Linear]) -> tuple[TensorSize, TensorSize, TensorSize]:
        """Multi-head latent attention: narrow projections, norms, wide ones, and the rotary part joined on."""
        tokens, layer = self.training.tokens, self.layer
        named = {each.name: each for each in linears}
        if "q_proj" in named:
            query = self.linear(value, named["q_proj"])
        else:
            query = self.linear(self.norm(self.linear(value, named["q_a_proj"])), named["q_b_proj"])
        narrow = self.linear(value, named["kv_a_proj_with_mqa"])
        wide = named["kv_b_proj"]
        inner = self.norm(self.tape.apply(narrow, numbers=tokens * wide.inputs))
        both = self.linear(inner, wide)
        key = self.tape.apply(both, numbers=tokens * layer.heads * layer.head_dim)
        content = self.tape.apply(both, numbers=tokens * layer.heads * layer.value_dim)
        return self.tape.apply(query), key, content

    def _mix(self, query: TensorSize, key: TensorSize, content: TensorSize) -> TensorSize:
        """softmax(q k) v."""
        layer = self.layer
        if self.training.stack.attention != "eager" and self.autocast:
            query, key, content = (self.tape.cast(each, self.compute) for each in (query, key, content))
        kind = self._kernel(query.width)
        numbers = query.numbers // layer.head_dim * layer.value_dim
        repeated = layer.kv_heads < layer.heads and not layer.latent
        if repeated and (
            kind != "flash" or self._is_masked or layer.repeats_heads or self.training.stack.repeats_heads
        ):
            key = self.tape.apply(key, numbers=query.numbers)
            content = self.tape.apply(content, numbers=numbers)
        if kind in ("math", "eager"):
            return self._matrix(query, key, content, numbers)
        lse = TensorSize(self.training.tokens * layer.heads, FP32)
        # gradients of all queries are added up in fp32, those of keys and values for every query head
        scratch = query.numbers * FP32 + (2 * query.num_bytes if key.numbers < query.numbers else 0)
        result = self.tape.apply(query, key, content, numbers=numbers, scratch_bytes=scratch)
        mask = TensorSize(self.training.tokens * self.training.sequence_length, query.width)
        self.tape.keep(query, key, content, result, lse, *((mask,) if self._is_masked else ()))
        alone = self.training.packed and self.training.stack.joins_documents and not self._is_masked
        return self.tape.apply(result) if alone else result

    @property
    def _is_masked(self) -> bool:
        """Whether attention gets a mask that keeps documents apart."""
        return self.training.packed and self.training.stack.masks == "always"

    def _kernel(self, width: int) -> str:
        """What sdpa takes (torch's sdp_utils.cpp).

        Flash for half precision without a mask, heads of equal width up to 256; the memory-efficient one otherwise, but
        for grouped heads without a mask, which transformers leaves grouped.
        """
        asked, layer = self.training.stack.attention, self.layer
        if asked != "flash":
            return asked
        if layer.plain_attention:
            return "math"
        if self.on_cpu:
            return "math" if layer.attention_dropout or layer.head_dim != layer.value_dim else "flash"
        if self._is_masked:
            return "efficient"
        if width == 2 and layer.head_dim <= 256 and layer.head_dim == layer.value_dim:
            return "flash"
        grouped = layer.kv_heads < layer.heads and layer.head_dim == layer.value_dim <= 256
        return "math" if grouped else "efficient"

    def _matrix(self, query: TensorSize, key: TensorSize, content: TensorSize, numbers: int) -> TensorSize:
        """The attention weights of every head as a matrix."""
        length = self.training.sequence_length
        scores = self.training.tokens * length * self.layer.heads
        if self.training.stack.attention != "eager":
            query, key = self.tape.apply(query), self.tape.apply(key)
            first = self.tape.apply(query, key, numbers=scores, keeps=(query, key))
            weights = self._softmax(self.tape.apply(first), first.width)
            if self.layer.plain_attention:
                # with a mask, rows that see nothing are set to zero in a tensor of their own
                weights = self.tape.apply(weights)
        else:
            first = self.tape.apply(query, key, numbers=scores, keeps=(query, key))
            masked = self.tape.apply(self.tape.apply(first), passes=True)
            weights = self.tape.cast(self._softmax(masked, FP32), query.width)
        weights = self._drop(weights) if self.layer.attention_dropout else weights
        mixed = self.tape.apply(weights, content, numbers=numbers, width=content.width, keeps=(weights, content))
        return self.tape.apply(mixed)

    def _softmax(self, value: TensorSize, width: int) -> TensorSize:
        """It keeps its output; torch multiplies output and gradient into a tensor of their own in backward."""
        result = self.tape.apply(value, width=width, scratch_bytes=value.numbers * width)
        self.tape.keep(result)
        return result

    def mlp(self, value: TensorSize) -> TensorSize:
        """The dense MLP, or the experts and what every token passes through."""
        linears = [each for each in self.layer.linears if each.part == "mlp" and each.outputs > 1]
        if not self.layer.experts:
            return self._dense(value, linears)
        mixed = self._experts(self._scored(value))
        if self.layer.shared_width:
            mixed = self.tape.add(mixed, self._dense(value, [each for each in linears if each.name != "router"]))
        return mixed

    def _dense(self, value: TensorSize, linears: list[Linear]) -> TensorSize:
        *first, down = linears
        if not self.layer.gated:
            return self.linear(self._activate(self.linear(value, first[0])), down)
        if len(first) == 2:
            gate, up = (self.linear(value, linear) for linear in first)
            if "gated-mlp" in self.training.stack.fused and self.layer.activation in _GATED_KERNEL:
                return self.linear(self.tape.apply(gate, up, keeps=(gate, up)), down)
        else:
            gate, up = self._halves(self.linear(value, first[0]))
        return self.linear(self._gate(gate, up), down)

    def _halves(self, whole: TensorSize) -> tuple[TensorSize, TensorSize]:
        """Two views of one tensor."""
        gate = self.tape.apply(whole, numbers=whole.numbers // 2, view=True)
        return gate, self.tape.apply(whole, numbers=whole.numbers // 2, view=True)

    def _gate(self, gate: TensorSize, up: TensorSize) -> TensorSize:
        if "mlp" in self.training.stack.fused:
            return self.tape.apply(gate, up, keeps=(gate, up))
        active = self.tape.apply(gate, keeps=(gate,))
        return self.tape.apply(active, up, keeps=(active, up))

    def _activate(self, value: TensorSize) -> TensorSize:
        if self.layer.activation in _GELU_STEPS and "activation" not in self.training.stack.fused:
            cubed = self.tape.apply(value, keeps=(value,))
            bent = self.tape.apply(self.tape.add(value, cubed))
            self.tape.keep(bent)
            raised, half = self.tape.apply(bent), self.tape.apply(value)
            return self.tape.apply(half, raised, keeps=(half, raised))
        if self.layer.activation == "xielu":  # both branches, and what its two trained numbers are multiplied with
            more = TensorSize((4 if self.full else 2) * value.numbers, value.width)
            return self.tape.apply(value, keeps=(value, more, TensorSize(value.numbers, 1)))
        return self.tape.apply(value, keeps=(value,))

    def _scored(self, value: TensorSize) -> TensorSize:
        """The same value: a router keeps its scores, and its input where it is trained or carries an adapter."""
        layer, tokens = self.layer, self.training.tokens
        adapters = adapted(layer, self.training.targets) if not self.full else ()
        if self.full or any(each in layer.expert_linears[3:4] for each in adapters):
            value = self.tape.cast(value, self.compute) if self.autocast else value
            self.tape.apply(value, numbers=tokens * layer.experts, width=FP32, keeps=(value,))
        scores = TensorSize(tokens * (layer.experts + 8 * layer.top_k), FP32)  # softmax; four orders of 8 bytes
        self.tape.apply(value, numbers=tokens * layer.experts, width=FP32, keeps=(scores,))
        return value

    def _experts(self, value: TensorSize) -> TensorSize:
        """Tokens are copied for each of their experts, pass the products, and are weighted and summed."""
        layer = self.layer
        if not self.training.stack.expert_modules:
            return self._routed(value, layer.top_k, 1.0)
        total = value
        for _ in range(layer.experts):
            total = self.tape.add(total, self._routed(value, layer.top_k / layer.experts, 1.0 / layer.experts))
        return total

    def _routed(self, value: TensorSize, share: float, part: float) -> TensorSize:
        """`share`: routed copies of each token; `part` of all experts' weights."""
        layer, tokens = self.layer, self.training.tokens
        width = int((layer.width - layer.shared_width) / layer.top_k * tokens * share)
        routed = self.tape.apply(value, numbers=int(tokens * share * self.hidden))
        quantised = self.training.method == "qlora" and self.training.stack.expert_modules
        routed = self.tape.cast(routed, self.compute) if self.autocast and not quantised else routed
        numbers = int(layer.fused_weights * part)
        grouped = self.training.stack.grouped_adapters and self._merges()
        merged = numbers * self.compute if self._merges() and not grouped else 0
        cast = numbers * self.compute if self.full and self.autocast else 0
        unpacked = numbers * self.compute if packs_experts(self.training) else 0
        self.tape.copy_weights(merged + cast + unpacked, cached=False)
        scratch = numbers * self._gradient_scratch() if self.full else merged
        trains = self.full or self._merges()  # a gradient of all weights needs what they were multiplied with
        keeps = (routed,) if trains else ()
        both = self.tape.apply(routed, numbers=2 * width, keeps=keeps, scratch_bytes=scratch)
        both = self.tape.add(both, self.tape.apply(routed, numbers=2 * width)) if grouped else both
        gated = self._gate(*self._halves(both))
        down = self.tape.apply(gated, numbers=routed.numbers, keeps=(gated,) if trains else ())
        down = self.tape.add(down, self.tape.apply(gated, numbers=routed.numbers)) if grouped else down
        down = self.tape.cast(down, FP32) if self.training.stack.weighs_in_fp32 else down
        weighted = self.tape.cast(self.tape.apply(down, keeps=(down,)), routed.width)
        return self.tape.apply(weighted, numbers=tokens * self.hidden, passes=False)

    def _merges(self) -> bool:
        """Whether peft adds an adapter to all experts' tensor, which makes a whole copy of it."""
        if self.full:
            return False
        return any(each in self.layer.expert_linears[:3] for each in adapted(self.layer, self.training.targets))


def residual_width(training: Training) -> int:
    """Bytes of a number in the stream between layers: the embedding table's, which peft's preparation makes fp32."""
    if training.method == "qlora" and (training.stack.upcasts or training.stack.upcast_norms):
        return FP32
    return BYTES[training.parameters if training.method == "full" else training.compute]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """What one layer needs."""

    kept: int
    """From its forward to its backward."""
    cached: int
    """Copies of weights that autocast holds until forward ends."""
    backward: int
    """The highest point of its backward, with what is kept."""
    again: int
    """The highest point while it is computed again, with what is kept."""


def layer_bytes(layer: Layer, hidden: int, training: Training, *, accumulates: bool = False) -> LayerBytes:
    """Bytes of one layer; `accumulates`: gradients are there already, and new ones are added to them."""
    return _layer_bytes(layer.one, hidden, training, accumulates)


@functools.lru_cache(maxsize=1024)  # one layer is asked for at every instant of every way to run a job
def _layer_bytes(layer: Layer, hidden: int, training: Training, accumulates: bool) -> LayerBytes:
    block = Block(layer=layer, hidden=hidden, training=training, accumulates=accumulates, tape=Tape())
    tape = block.build()
    again, backward = _again_peak(tape), _Backward(tape).run()
    return LayerBytes(kept=tape.kept_bytes, cached=tape.cached, backward=backward, again=again)


# The output head and the loss: usually the largest tensors of a step, and the first instant of backward.


MIN_CHUNK_ROWS = 64
"""As in `worker.loss`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBytes:
    """What the head and the loss need beside the layers' activations."""

    peak: int
    """The highest point, forward or backward."""
    formula: str


def head_bytes(architecture: Architecture, training: Training, *, hidden_width: int, parts: int = 1) -> HeadBytes:
    """Peak of head and loss over the tokens of a micro-batch; `hidden_width`: bytes of a number that comes out of the
    last norm. parts: ranks that have the tokens between them, where the loss is fused (tp).
    """
    kind = training.stack.loss
    if kind == "fused" and not architecture.linear_head:
        kind = "plain"
    hidden = training.tokens * architecture.hidden * hidden_width
    if kind == "fused":
        return _fused(architecture, training, hidden=hidden, width=hidden_width, parts=parts)
    if kind == "chunked":
        return _chunked(architecture, training, hidden=hidden)
    return _whole(architecture, training, hidden=hidden, inplace=kind == "inplace")


def trains_head(architecture: Architecture, training: Training) -> bool:
    """Whether the head, or a copy of it, is trained."""
    return training.method == "full" or architecture.trains_head


def _head_copy(architecture: Architecture, training: Training) -> int:
    """The head in the width of products, if it is stored wider."""
    cast = trains_head(architecture, training) and training.parameters != training.compute
    return architecture.hidden * architecture.vocabulary * BYTES[training.compute] if cast else 0


def _fused(architecture: Architecture, training: Training, *, hidden: int, width: int, parts: int) -> HeadBytes:
    """`worker.loss.LinearCrossEntropy`: hidden states, this rank's rows of them, their gradient, a chunk of logits.

    For a trained head its gradient as well, beside one product of it.
    """
    compute, vocabulary = BYTES[training.compute], architecture.vocabulary
    rows = min(-(-training.tokens // parts), max(MIN_CHUNK_ROWS, training.stack.chunk_numbers // vocabulary))
    bytes_each = training.stack.chunk_bytes or max(FP32, compute) + (compute if compute < FP32 else 0)
    each = vocabulary * bytes_each
    chunk = rows * each
    head, stored = architecture.hidden * vocabulary, BYTES[training.parameters]
    kept = head * stored if trains_head(architecture, training) else 0
    # the head's gradient is a product beside a wider sum
    logits = kept + chunk + (head * compute if kept and stored > compute else 0)
    each_has = "3" if parts == 1 else f"(1 + 2/{parts})"
    part = hidden // (training.tokens * width) * rows * compute if width > compute else 0
    return HeadBytes(
        peak=hidden + 2 * hidden // parts + part + logits + _head_copy(architecture, training),
        formula=f"{each_has} T·h·{width} + a chunk of {rows} rows of logits"
        + (" + the head's gradient" if kept else ""),
    )


def _chunked(architecture: Architecture, training: Training, *, hidden: int) -> HeadBytes:
    """Logits of a chunk of tokens, their log-softmax and two gradients; the hidden states and their gradient.

    What is kept of all chunks is there when backward begins; the first chunk then adds its two gradients, and next to
    the narrow one of its logits a quantised head is unpacked.
    """
    stack, compute, vocabulary = training.stack, BYTES[training.compute], architecture.vocabulary
    positions = stack.chunk_positions and stack.chunk_positions * training.micro_batch
    rows = min(training.tokens, positions or max(1, stack.chunk_numbers // vocabulary))
    each = 2 * FP32 if stack.kept_softmax_bytes else compute + 3 * FP32
    logits = rows * vocabulary * each
    if training.method == "qlora" and stack.quantises_head:
        unpacked = stack.unpacked_copies * architecture.hidden * vocabulary * compute
        logits = max(logits, unpacked + rows * vocabulary * (compute - stack.kept_softmax_bytes))
    weight = architecture.hidden * vocabulary * BYTES[training.parameters]
    kept = weight if trains_head(architecture, training) else 0
    held = training.tokens * vocabulary * stack.kept_logits_bytes
    softmax = training.tokens * vocabulary * stack.kept_softmax_bytes
    return HeadBytes(
        peak=2 * hidden + logits + 2 * kept + held + softmax + _head_copy(architecture, training),
        formula=f"2 T·h + chunk of {rows} tokens · V · {each}",
    )


def _whole(architecture: Architecture, training: Training, *, hidden: int, inplace: bool) -> HeadBytes:
    """log_softmax, the gradient of the loss and of log_softmax, 4 bytes each, beside the logits that are held."""
    stack, numbers = training.stack, training.tokens * architecture.vocabulary
    each = stack.logit_bytes + (0 if inplace else stack.kept_logits_bytes)
    each += BYTES[training.compute] if architecture.capped_logits else 0
    return HeadBytes(
        peak=hidden + numbers * each + _head_copy(architecture, training),
        formula=f"T·V·{each}: logits as held, log-softmax, gradients",
    )
