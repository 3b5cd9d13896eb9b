"""One layer as a tape: which tensors a transformers decoder layer keeps, by method, dtypes and kernels.

The operations are those of transformers' llama-like layers (5.x), of peft's LoRA layer, of bitsandbytes' 4-bit linear
and of torch's attention kernels. tests/train compares the result with the trace of our own trainer, and
tests/unit/planning/test_memory_rows.py with measured peaks of other software.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from gangline.planning.architecture import Layer, Linear
from gangline.planning.lora import adapted
from gangline.planning.tape import Tape, Value
from gangline.planning.training import BYTES, Training

FP32 = 4
_GELU_STEPS = ("gelu_new", "gelu_fast", "quick_gelu")
"""Activations that transformers writes as a chain of operations, each of which keeps something."""


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
        entry = Value(tokens * self.hidden, self.residual_width, external=self.training.checkpointing)
        if self.layer.parallel:
            normed = self.norm(entry)
            other = self.norm(entry) if self.layer.num_norms > 1 else normed
            both = self.tape.add(self.attention(normed), self.mlp(other))
            self.tape.result = self.tape.add(entry, both)
            return self.tape
        middle = self.tape.add(entry, self.post(self.attention(self.norm(entry))))
        self.tape.result = self.tape.add(middle, self.post(self.mlp(self.norm(middle))))
        return self.tape

    def post(self, value: Value) -> Value:
        """The second norm of a half, and dropout, where there are any."""
        value = self.norm(value) if self.layer.num_norms == 4 else value
        return self.tape.apply(value, keeps=(Value(value.numbers, 1),)) if self.layer.dropout else value

    def norm(self, value: Value) -> Value:
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

    def linear(self, value: Value, linear: Linear) -> Value:
        """A product with its adapter, if it carries one."""
        base = self._quantised(value, linear) if self.training.method == "qlora" else self._product(value, linear)
        if self.training.method == "full" or linear not in adapted(self.layer, self.training.targets):
            return base
        return self._adapter(value, base, linear)

    def _product(self, value: Value, linear: Linear) -> Value:
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

    def _quantised(self, value: Value, linear: Linear) -> Value:
        """Input and output change to the format of products and back; the matrix is unpacked to it for a moment."""
        weight = linear.inputs * linear.outputs * self.compute * self.training.stack.unpacked_copies
        narrow = self.tape.cast(value, self.compute)
        numbers = value.numbers // linear.inputs * linear.outputs
        keeps = (narrow,) if self.training.stack.keeps_quantised_inputs else ()
        product = self.tape.apply(narrow, numbers=numbers, keeps=keeps, scratch_bytes=weight)
        return self.tape.cast(product, value.width)

    def _adapter(self, value: Value, base: Value, linear: Linear) -> Value:
        """peft: the input in the adapter's width, two narrow products, and the sum."""
        rank = value.numbers // linear.inputs * self.training.rank
        if self.autocast:
            self.tape.copy_weights(self.training.rank * (linear.inputs + linear.outputs) * self.compute)
        value = self.tape.cast(value, self.stored)
        if self.training.dropout:
            value = self.tape.apply(value, keeps=(Value(value.numbers, 1),))
        value = self.tape.cast(value, self.compute) if self.autocast else value
        narrow = self.tape.apply(value, numbers=rank, keeps=(value,))
        wide = self._widened(narrow, base.numbers)
        return self.tape.cast(self.tape.add(base, self.tape.apply(wide)), base.width)

    def _widened(self, narrow: Value, numbers: int) -> Value:
        """An adapter's second product; where it reaches a part of the outputs, index_copy puts that part among zeros,
        and keeps it for backward (torch's derivatives.yaml: the gradient is expanded like the source).
        """
        share = self.training.stack.adapter_share
        wide = self.tape.apply(narrow, numbers=int(numbers * share), keeps=(narrow,))
        return wide if share == 1 else self.tape.apply(wide, numbers=numbers, keeps=(wide,))

    def attention(self, value: Value) -> Value:
        """From normed hidden states to what is added to the residual."""
        linears = [each for each in self.layer.linears if each.part == "attention"]
        query, key, content = self._latent(value, linears) if self.layer.latent else self._heads(value, linears)
        mixed = self._mix(query, key, content)
        return self.linear(mixed, linears[-1])

    def _heads(self, value: Value, linears: list[Linear]) -> tuple[Value, Value, Value]:
        tokens, layer = self.training.tokens, self.layer
        sizes = [tokens * layer.heads * layer.head_dim, *[tokens * layer.kv_heads * layer.head_dim] * 2]
        if len(linears) == 4:
            query, key, content = (self.linear(value, linear) for linear in linears[:3])
        else:
            whole = self.linear(value, linears[0])
            # views: as long as one of them is kept, all of the product is
            query, key, content = (self.tape.apply(whole, numbers=size, view=True) for size in sizes)
        if layer.qk_norm != "none":
            query, key = self.norm(query), self.norm(key)
        return (self._rotate(query), self._rotate(key), content) if layer.rotary else (query, key, content)

    def _rotate(self, value: Value) -> Value:
        width = max(value.width, self.residual_width)
        if "rope" in self.training.stack.fused:
            return self.tape.apply(value)
        turned = self.tape.apply(self.tape.apply(value), width=width)
        return self.tape.add(self.tape.apply(value, width=width), turned)

    def _latent(self, value: Value, linears: list[Linear]) -> tuple[Value, Value, Value]:
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

    def _mix(self, query: Value, key: Value, content: Value) -> Value:
        """softmax(q k) v."""
        layer = self.layer
        if self.training.stack.attention != "eager" and self.autocast:
            query, key, content = (self.tape.cast(each, self.compute) for each in (query, key, content))
        kind = self._kernel(query.width)
        numbers = query.numbers // layer.head_dim * layer.value_dim
        repeated = layer.kv_heads < layer.heads and not layer.latent
        if repeated and (kind != "flash" or layer.repeats_heads or self.training.stack.repeats_heads):
            key = self.tape.apply(key, numbers=query.numbers)
            content = self.tape.apply(content, numbers=numbers)
        if kind in ("math", "eager"):
            return self._matrix(query, key, content, numbers)
        lse = Value(self.training.tokens * layer.heads, FP32)
        # gradients of all queries are added up in fp32, those of keys and values for every query head
        scratch = query.numbers * FP32 + (2 * query.num_bytes if key.numbers < query.numbers else 0)
        result = self.tape.apply(query, key, content, numbers=numbers, scratch_bytes=scratch)
        mask = Value(self.training.tokens * self.training.sequence_length, query.width)
        self.tape.keep(query, key, content, result, lse, *((mask,) if self.training.packed else ()))
        return result

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
        if self.training.packed:
            return "efficient"
        if width == 2 and layer.head_dim <= 256 and layer.head_dim == layer.value_dim:
            return "flash"
        grouped = layer.kv_heads < layer.heads and layer.head_dim == layer.value_dim <= 256
        return "math" if grouped else "efficient"

    def _matrix(self, query: Value, key: Value, content: Value, numbers: int) -> Value:
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
        mixed = self.tape.apply(weights, content, numbers=numbers, width=content.width, keeps=(weights, content))
        return self.tape.apply(mixed)

    def _softmax(self, value: Value, width: int) -> Value:
        """It keeps its output; torch multiplies output and gradient into a tensor of their own in backward."""
        result = self.tape.apply(value, width=width, scratch_bytes=value.numbers * width)
        self.tape.keep(result)
        return result

    def mlp(self, value: Value) -> Value:
        """The dense MLP, or the experts and what every token passes through."""
        linears = [each for each in self.layer.linears if each.part == "mlp" and each.outputs > 1]
        if not self.layer.experts:
            return self._dense(value, linears)
        mixed = self._experts(value)
        if self.layer.shared_width:
            mixed = self.tape.add(mixed, self._dense(value, [each for each in linears if each.name != "router"]))
        return mixed

    def _dense(self, value: Value, linears: list[Linear]) -> Value:
        *first, down = linears
        if not self.layer.gated:
            return self.linear(self._activate(self.linear(value, first[0])), down)
        if len(first) == 2:
            gate, up = (self.linear(value, linear) for linear in first)
        else:
            gate, up = self._halves(self.linear(value, first[0]))
        return self.linear(self._gate(gate, up), down)

    def _halves(self, whole: Value) -> tuple[Value, Value]:
        """Two views of one tensor."""
        gate = self.tape.apply(whole, numbers=whole.numbers // 2, view=True)
        return gate, self.tape.apply(whole, numbers=whole.numbers // 2, view=True)

    def _gate(self, gate: Value, up: Value) -> Value:
        if "mlp" in self.training.stack.fused:
            return self.tape.apply(gate, up, keeps=(gate, up))
        active = self.tape.apply(gate, keeps=(gate,))
        return self.tape.apply(active, up, keeps=(active, up))

    def _activate(self, value: Value) -> Value:
        if self.layer.activation in _GELU_STEPS and "activation" not in self.training.stack.fused:
            cubed = self.tape.apply(value, keeps=(value,))
            bent = self.tape.apply(self.tape.add(value, cubed))
            self.tape.keep(bent)
            raised, half = self.tape.apply(bent), self.tape.apply(value)
            return self.tape.apply(half, raised, keeps=(half, raised))
        return self.tape.apply(value, keeps=(value,))

    def _experts(self, value: Value) -> Value:
        """Tokens are copied for each of their experts, pass the products, and are weighted and summed."""
        layer = self.layer
        if not self.training.stack.expert_modules:
            return self._routed(value, layer.top_k, 1.0)
        total = value
        for _ in range(layer.experts):
            total = self.tape.add(total, self._routed(value, layer.top_k / layer.experts, 1.0 / layer.experts))
        return total

    def _routed(self, value: Value, share: float, part: float) -> Value:
        """`share`: routed copies of each token; `part` of all experts' weights."""
        layer, tokens = self.layer, self.training.tokens
        width = int((layer.width - layer.shared_width) / layer.top_k * tokens * share)
        routed = self.tape.apply(value, numbers=int(tokens * share * self.hidden))
        quantised = self.training.method == "qlora" and self.training.stack.expert_modules
        routed = self.tape.cast(routed, self.compute) if self.autocast and not quantised else routed
        numbers = int(layer.fused_weights * part)
        merged = numbers * self.compute if self._merges() else 0
        cast = numbers * self.compute if self.full and self.autocast else 0
        self.tape.copy_weights(merged + cast, cached=False)
        scratch = numbers * self._gradient_scratch() if self.full else merged
        keeps = (routed,) if self.full else ()
        both = self.tape.apply(routed, numbers=2 * width, keeps=keeps, scratch_bytes=scratch)
        gated = self._gate(*self._halves(both))
        down = self.tape.apply(gated, numbers=routed.numbers, keeps=(gated,) if self.full else ())
        weighted = self.tape.apply(down, keeps=(down,))
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


@functools.lru_cache(maxsize=4096)  # one layer is asked for at every instant of every way to run a job
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """What one layer needs."""

    kept: int
    """From its forward to its backward."""
    cached: int
    """Copies of weights that autocast holds until forward ends."""
    backward: int
    """The highest point of its backward, with what is kept."""


def layer_bytes(layer: Layer, hidden: int, training: Training, *, accumulates: bool = False) -> LayerBytes:
    """Bytes of one layer; `accumulates`: gradients are there already, and new ones are added to them."""
    return _layer_bytes(replace(layer, count=1), hidden, training, accumulates)


@functools.lru_cache(maxsize=1024)
def _layer_bytes(layer: Layer, hidden: int, training: Training, accumulates: bool) -> LayerBytes:
    block = Block(layer=layer, hidden=hidden, training=training, accumulates=accumulates, tape=Tape())
    tape = block.build()
    return LayerBytes(kept=tape.kept_bytes, cached=tape.cached, backward=tape.backward_bytes())
