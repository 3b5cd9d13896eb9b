"""How fast a rank computes that nobody has measured: the causes of its time, one by one. Pure.

A micro-batch of T tokens waits for the longer of two: for the processor to ask for all kernels, or for the card. The
card takes, one after the other: products, at a rate that depends on the chip and on the size of the matrices; kernels
without reuse (norms, positions, activations, adapters, logits), at the rate of its memory; attention; and, once for
each pass over the layers, the weights themselves, which are read, and unpacked where they are quantised.

The rates of cards are those of `catalog/efficiency.py`; the constants of `Causes` are fitted to public runs by
`python -m benchmarks.plan_gpu_fit` (docs/decisions/0030-time-from-causes.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gangline.catalog.efficiency import SustainedRates, sustained_rates
from gangline.catalog.gpu_specs import GpuSpec
from gangline.optimizers import OPTIMIZERS
from gangline.planner.activations import residual_width
from gangline.planner.architecture import Architecture, Layer, adapted
from gangline.planner.speed import (
    FLASH_BACKWARD,
    MATH_BACKWARD,
    WHOLE_SQUARE,
    ComputeModel,
    attention_flops,
    copies_s,
    flops_per_token,
    recomputed_last,
)
from gangline.planner.states import packs_experts
from gangline.planner.traffic import NF4_BYTES, linear_bytes, trained_weights
from gangline.planner.training import BYTES, Training

WIDE_NUMBERS, WIDE_SPREAD = 4.0, 1.0
"""Products in fp32 take so many times as long as in 16 bits: 2 on GeForce, 16 on an A100, and so the interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Causes:
    """The constants of all cards, models and methods."""

    products: float = 0.81
    """Part of the rate of a long product that products between other kernels reach."""
    tile: float = 120.0
    """Every product takes as long as one whose inner width is so much larger: filling and emptying its pipeline."""
    rows: float = 87.0
    """Every product takes as long as one of so many more tokens: its rows come in whole tiles, and its tiles in whole
    rounds over the chip."""
    traffic: float = 0.99
    """Bytes of kernels without reuse, over those that `_traffic_bytes` counts."""
    attention: float = 0.58
    """Part of that rate in FlashAttention 2."""
    experts: float = 0.92
    """Part of the rate of products that grouped products of experts reach."""
    expert_call_s: float = 0.5e-3
    """Of one pass through one expert where experts are modules of their own, called one after the other."""
    launch_s: float = 20e-6
    """Of asking for one kernel from Python."""
    unpacking: float = 1.5
    """Time to unpack quantised weights, over that of their bytes."""
    update: float = 1.5
    """Time of an update kernel by kernel (foreach), over that of one that is fused."""
    contention: float = 0.6
    """Part of an exchange by which the layers beside it become longer. Beside it computing takes 18.9 % longer on
    average, and one after the other 10.2 % more than that (arXiv 2507.03114): exchanges of 0.31 cost 0.19.
    """


CAUSES = Causes()
SPREAD = {"full": 0.28, "lora": 0.28, "qlora": 0.33}
"""Times may be so much shorter or longer: nine of ten public runs whose source had no part in the fit are within."""


def uncalibrated(
    spec: GpuSpec,
    architecture: Architecture,
    training: Training,
    *,
    power_limit_w: float | None = None,
    causes: Causes = CAUSES,
) -> ComputeModel:
    """An estimate from data sheets and public runs, with an interval to match.

    power_limit_w: what a laptop's card is given, as the driver says it.
    """
    rates = sustained_rates(spec, power_limit_w=power_limit_w)
    wide = BYTES[training.compute] > 2
    product_flops = causes.products * rates.product_flops * _rate_of_format(spec, training)
    passes = 3 if training.checkpointing else 2
    flops = traffic = fixed_s = launches = 0.0
    for layer in architecture.layers:
        flops += layer.count * _product_flops(layer, training, causes)
        traffic += layer.count * _traffic_bytes(architecture, layer, training) * (passes + 1)
        calls, alone = _kernels(layer, training)
        launches += layer.count * (calls * (passes + 0.7) + alone * passes)
        if layer.experts and training.stack.expert_modules:
            fixed_s += layer.count * layer.experts * passes * causes.expert_call_s
    head_flops = flops_per_token(architecture, training, length=1).head * (1 + causes.tile / architecture.hidden)
    head_bytes = LOGIT_TRAFFIC[training.stack.loss] * architecture.vocabulary
    square_s = _square_s(architecture, training, rates, causes, format_rate=_rate_of_format(spec, training))
    quantised, packed = _quantised(architecture, training)
    plain = (architecture.num_parameters - quantised) * BYTES[training.compute]
    # quantised weights are read and written out in 16 bits for every pass, and read again
    fixed_s += passes * (plain + (packed + 4 * quantised) * causes.unpacking) / rates.bytes_per_s
    updated = (
        trained_weights(architecture, training) * BYTES[training.parameters] * OPTIMIZERS[training.optimizer].moved
    )
    spread = (1 + SPREAD[training.method]) * max(1 / rates.low, rates.high) - 1
    return ComputeModel(
        per_token_s=flops / product_flops
        + causes.traffic * traffic / rates.bytes_per_s
        + copies_s(architecture, training),
        per_token2_s=square_s,
        head_per_token_s=head_flops / product_flops + causes.traffic * head_bytes / rates.bytes_per_s,
        overhead_s=fixed_s + causes.rows * flops / product_flops,
        floor_s=launches * causes.launch_s + fixed_s / passes,
        optimizer_s=(causes.update if training.stack.foreach else 1.0) * updated / rates.bytes_per_s,
        backward_share=flops_per_token(architecture, training, length=training.sequence_length).backward_share,
        contention=causes.contention,
        source="estimated from data sheets",
        spread=spread + (WIDE_SPREAD if wide else 0),
    )


LOGIT_TRAFFIC = {"fused": 16.0, "chunked": 30.0, "plain": 40.0, "inplace": 22.0}
"""Bytes read and written per logit by the loss: in fp32 with log-softmax and two gradients (plain), in one kernel
(fused, inplace)."""


def _product_flops(layer: Layer, training: Training, causes: Causes) -> float:
    """Of a token through one layer, forward, backward and recomputed; inner widths are longer by a tile."""
    full = training.method == "full"
    forward = backward = 0.0
    for inputs, outputs, active in _matrices(layer, causes):
        forward += 2 * (inputs + causes.tile) * outputs * active
        backward += 2 * inputs * (outputs + causes.tile) * active + (2 * inputs * outputs * active if full else 0)
    if not full:
        for each in adapted(layer, training.targets):
            # one of its two products has the rank as its inner width, the other as its outer one
            narrow = 2 * ((each.rank or training.rank) + causes.tile) * (each.inputs + each.outputs) * each.active
            forward += narrow
            backward += 2 * narrow
    again = forward - recomputed_last(layer, training) if training.checkpointing else 0.0
    return forward + backward + again


def _matrices(layer: Layer, causes: Causes) -> list[tuple[float, float, float]]:
    """Inputs, outputs, and how many of them a token passes through."""
    found = [(each.inputs, each.outputs, each.active) for each in layer.linears]
    active = layer.top_k / causes.experts
    return [*found, *((inputs, outputs, active) for _, outputs, inputs in layer.expert_shapes)]


def _traffic_bytes(architecture: Architecture, layer: Layer, training: Training) -> float:
    """Read and written per token by kernels without reuse, in one forward pass; backward moves twice as much.

    One kernel reads and writes once; in transformers' own code an RMS norm is seven kernels, half of them in fp32, and
    a rotation five.
    """
    stack, width = training.stack, BYTES[training.compute]
    stream = residual_width(training)
    heads = layer.heads * layer.head_dim
    keys = layer.kv_heads * layer.head_dim
    norm = 2 * width if "norm" in stack.fused or layer.norm == "layer" else 15 * width
    normed = layer.num_norms * architecture.hidden + (0 if layer.qk_norm == "none" else heads + keys)
    rotary = (2 if "rope" in stack.fused else 9) * width if layer.rotary else 0
    act = (3 if {"mlp", "gated-mlp", "activation"} & set(stack.fused) else 5) if layer.gated else 2
    found: float = (
        normed * norm + 6 * stream * architecture.hidden + (heads + keys) * rotary + layer.width * act * width
    )
    found += 4 * layer.top_k * architecture.hidden * width
    if training.method == "full":
        return found
    adapters = sum((each.inputs + each.outputs) * each.active for each in adapted(layer, training.targets))
    return found + adapters * (1 if "mlp" in stack.fused else 3) * width


def _kernels(layer: Layer, training: Training) -> tuple[float, float]:
    """Kernels that Python asks for in a forward pass: those with a longer backward, and those of unpacking."""
    stack = training.stack
    norms = layer.num_norms + (0 if layer.qk_norm == "none" else 2)
    found = norms * (1 if "norm" in stack.fused or layer.norm == "layer" else 6) + 10
    found += (2 if "rope" in stack.fused else 10) if layer.rotary else 0
    found += sum(each.number for each in layer.linears) + (12 if layer.experts else 0)
    if training.method != "full":
        found += (3 if "mlp" in stack.fused else 6) * sum(each.number for each in adapted(layer, training.targets))
    unpacked = UNPACKING_CALLS * sum(each.number for each in layer.linears) if training.method == "qlora" else 0
    return found, unpacked


UNPACKING_CALLS = 20
"""Kernels' worth of Python in one product with a quantised weight (bitsandbytes)."""


def _rate_of_format(spec: GpuSpec, training: Training) -> float:
    """Rate of products in the format of a training, in parts of the card's rate in 16 bits."""
    if BYTES[training.compute] > 2:
        return 1 / WIDE_NUMBERS if spec.tensor_cores else 1.0
    return spec.fp16_share if training.compute == "fp16" else 1.0


def _square_s(
    architecture: Architecture, training: Training, rates: SustainedRates, causes: Causes, *, format_rate: float
) -> float:
    """Seconds of attention per token and token of its document, all passes together."""
    length, wide = training.sequence_length, _has_wide_queries(training)
    width = 4 if wide else BYTES[training.compute]
    total = 0.0
    for layer in architecture.layers:
        square = training.stack.attention in WHOLE_SQUARE or (
            wide and layer.kv_heads < layer.heads and not layer.latent
        )
        asked = replace(training, stack=replace(training.stack, attention="math")) if square else training
        passes = 1 + (MATH_BACKWARD if square else FLASH_BACKWARD) + (1 if training.checkpointing else 0)
        per_pair = layer.count * passes * attention_flops(layer, asked, length=length) / length
        if square:
            total += per_pair / (causes.products * rates.product_flops * format_rate / (WIDE_NUMBERS if wide else 1))
            total += layer.count * layer.heads * width * SCORE_PASSES * passes / rates.bytes_per_s
        else:
            rate = rates.product_flops if training.stack.native_attention else rates.attention_flops
            total += per_pair / (causes.attention * rate * format_rate)
    return total


def _has_wide_queries(training: Training) -> bool:
    """Whether attention gets fp32 where products have 16 bits, which leaves grouped heads the plain form."""
    return training.method == "qlora" and training.stack.upcasts and not training.stack.autocast


SCORE_PASSES = 6
"""Times that attention without a kernel of its own reads or writes its matrix of scores, forward."""


def _quantised(architecture: Architecture, training: Training) -> tuple[float, float]:
    """Numbers that are quantised, and their bytes."""
    if training.method != "qlora":
        return 0.0, 0.0
    numbers = float(architecture.linear_weights)
    packed = sum(layer.count * linear_bytes(layer, training) for layer in architecture.layers)
    if packs_experts(training):
        numbers += architecture.expert_weights
        packed += architecture.expert_weights * (1 if training.bits == 8 else NF4_BYTES)
    return numbers, packed
