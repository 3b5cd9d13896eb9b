"""From a minute of measurement on a machine to the time of any micro-batch of the whole model. Pure.

Every rank times a copy of the model with two layers of random weights, with one of them and with both, at three sizes
of micro-batch; the output head with its loss, and the update, are timed apart. What a further layer costs is that of
every layer; what is left is done once per micro-batch. Layers of unlike shape count by their FLOPs.

A line alone does not do: small micro-batches sit on a floor, where the processor asks for kernels no faster. So a fit
is max(floor, a + b T (1 + r s)). r, the weight of attention, comes from FLOPs: one length alone cannot tell it from b.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangline.planner.architecture import Architecture
from gangline.planner.speed import ComputeModel, flops_per_token, squared_flops
from gangline.planner.traffic import fit_two
from gangline.planner.training import Training
from gangline.runs.record_versions import Record

PROFILE_SCHEMA_VERSION = 1
NEAR = 0.03
"""A fit that is this near to every point needs no floor."""
NEWEST_WEIGHT = 0.3
"""Of a run's own outcome in the correction that the next plan uses: five runs forget 83 % of what was before."""
LEAST_SPREAD = 0.03
DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Of config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedBatch:
    """One size of micro-batch, timed on one rank while all ranks were at work."""

    layers: int
    """Of the copy: 1 or 2."""
    tokens: int
    length: int
    """Tokens of each document in it."""
    seconds: float
    """Forward and backward, head and loss among it: the median."""
    head_s: float
    """The head and the loss alone."""
    backward_share: float
    """Part of it that backward takes."""
    spread: float = 0.0
    """Of the repetitions: half of (longest - shortest) over the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """max(floor, a + b * size)."""

    floor: float
    a: float
    b: float
    worst: float
    """The largest relative error at the points it was fitted to."""

    def at(self, size: float) -> float:
        """The value there."""
        return max(self.floor, self.a + self.b * size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a measured speed holds for. Another driver or torch may be faster or slower."""

    gpu: str
    """As NVML names it, or the processor."""
    driver: str
    torch: str
    kernels: str
    """See `kernel_words`."""
    method: str
    """See `method_words`."""
    dtype: str
    """Of products."""
    architecture: str
    """See `architecture_digest`."""

    @property
    def name(self) -> str:
        """For a file."""
        return _digest(dataclasses.asdict(self))

    def meets(self, wanted: ProfileKey) -> bool:
        """Whether it holds for what is asked; an empty word asks for nothing."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(wanted), strict=True)
        return all(other in {"", own} for own, other in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Record):
    """The speed of one kind of device at one kind of work, as measured, and corrected by runs since."""

    key: ProfileKey
    measured: str
    """When, in ISO format."""
    host: str
    compute: ComputeModel
    """As fitted; `corrected` is what a plan uses."""
    points: tuple[TimedBatch, ...] = ()
    optimizer_numbers: int = 0
    """Trained numbers of the copy whose update was timed."""
    optimizer_s: float = 0.0
    factor: float = 1.0
    """What runs took over what was predicted, exponentially weighted."""
    num_runs: int = 0
    schema_version: int = PROFILE_SCHEMA_VERSION

    @property
    def name(self) -> str:
        """What tells it from others: the work, and the host that was measured."""
        return f"{self.key.name}-{self.host}"

    @property
    def corrected(self) -> ComputeModel:
        """With what real runs taught."""
        return dataclasses.replace(self.compute.scaled(self.factor), profile=self.name)


def architecture_digest(architecture: Architecture) -> str:
    """The same for models of one shape, whatever their weights and wherever it was read."""
    layers = [
        [
            *(layer.count, layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim, layer.width, layer.window),
            *(layer.experts, layer.top_k, layer.fused_weights, layer.fused_active),
            [[each.name, each.inputs, each.outputs, each.number, each.active] for each in layer.linears],
        ]
        for layer in architecture.layers
    ]
    whole = [architecture.model_type, architecture.hidden, architecture.vocabulary, architecture.tied]
    return _digest([whole, layers])


def shallow_config(config: Mapping[str, Any], num_layers: int = 2) -> dict[str, Any]:
    """The config.json of a copy with so many layers, all of the kind that most layers are.

    Experts of a mixture begin with the first layer; a list with a word for each layer has the most frequent one.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        return {**config, "text_config": shallow_config(inner, num_layers)}
    depth = next((config[key] for key in DEPTH_KEYS if isinstance(config.get(key), int)), 0)
    cut: dict[str, Any] = {key: num_layers for key in DEPTH_KEYS if key in config}
    for key, value in config.items():
        if isinstance(value, list) and len(value) == depth > 0:
            cut[key] = [max(value, key=value.count)] * num_layers
    cut["quantization_config"] = None  # random weights are not packed
    if "first_k_dense_replace" in config:
        cut["first_k_dense_replace"] = 0
    if "mlp_only_layers" in config:
        cut["mlp_only_layers"] = []
    return {key: value for key, value in {**config, **cut}.items() if value is not None or key not in cut}


def method_words(training: Training) -> str:
    """What of a job's method decides how long a token takes."""
    words: list[str] = [training.method]
    words += ["8 bits"] if training.method == "qlora" and training.bits == 8 else []
    if training.method != "full":
        words += [f"r{training.rank}", *training.targets, *(["dropout"] if training.dropout else [])]
        words += ["dora"] if training.dora else []
    words += [training.parameters, training.optimizer, *(["checkpointing"] if training.checkpointing else [])]
    words += ["offloading"] if training.offloading else []
    return " ".join(words)


def kernel_words(training: Training, *, attention: str) -> str:
    """Attention, as transformers names it, and what of gangline's own kernels decides how long a token takes.

    Attention of packed rows does not: whole samples are timed.
    """
    stack = training.stack
    added = stack.adds_adapters and training.method != "full" and not training.dora
    loss = stack.chunk_bytes is not None
    return "+".join([attention, *stack.fused, *(["cross-entropy"] if loss else []), *(["lora"] if added else [])])


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Through (size, seconds), the smallest error that counts being relative. Raises ValueError for no points.

    As few of the smallest points as possible are taken to lie on the floor: none, if a line is within 3 % of all.
    """
    rows = sorted(points)
    if not rows or any(size <= 0 or seconds <= 0 for size, seconds in rows):
        raise ValueError(f"sizes and seconds have to be positive: {rows}")
    best = _with_floor(rows, 0)
    for count in range(1, len(rows) + 1):
        if best.worst <= NEAR:
            break
        other = _with_floor(rows, count)
        best = other if other.worst < best.worst else best
    return best


def fit_compute(
    points: Sequence[TimedBatch], copy: Architecture, whole: Architecture, training: Training, *, source: str
) -> ComputeModel:
    """The whole model's micro-batches from points of a copy with one or two of its layers.

    copy: the architecture of the copy with both layers. The update is not in it: see `with_optimizer`. Raises
    ValueError for no points.
    """
    length = max((point.length for point in points), default=1)
    ratio = _attention_ratio(whole, training, length=length)
    layer_points, once = _split(points)
    layer = fit_line([(_size(tokens, each, ratio), seconds) for tokens, each, seconds in layer_points])
    head = fit_line([(point.tokens, point.head_s) for point in points if point.head_s > 0] or [(1.0, 1e-12)])
    # `layer` is one layer of the copy: a floor counts kernels, so layers; the slope counts FLOPs
    depth = float(whole.num_layers)
    slope = layer.b * copy.num_layers * _layer_flops(whole, training, length) / _layer_flops(copy, training, length)
    spread = max(LEAST_SPREAD, layer.worst, sum(point.spread for point in points) / len(points))
    return ComputeModel(
        floor_s=layer.floor * depth,
        overhead_s=layer.a * depth + once[0] + head.at(0),
        per_token_s=slope + once[1],
        per_token2_s=slope * ratio,
        head_per_token_s=head.b,
        backward_share=_backward_share(points, whole.num_layers),
        source=source,
        spread=spread,
    )


def with_optimizer(model: ComputeModel, *, seconds: float, numbers: int, trained: int) -> ComputeModel:
    """With the update of `trained` numbers, timed on `numbers` of them: it grows with their number."""
    return dataclasses.replace(model, optimizer_s=seconds * trained / numbers if numbers else 0.0)


def refit(profile: Profile, *, predicted_s: float, measured_s: float) -> Profile:
    """The profile after a real run whose micro-batches took `measured_s` where `corrected` said `predicted_s`.

    Exponentially weighted, in logarithms, so that twice and half as long cancel: the first run counts all, every later
    one 30 %. The spread follows the errors that were made, and never falls below 3 %.
    """
    error = math.log(measured_s / predicted_s)
    weight = NEWEST_WEIGHT if profile.num_runs else 1.0
    spread = (1 - NEWEST_WEIGHT) * profile.compute.spread + NEWEST_WEIGHT * math.expm1(abs(error))
    return dataclasses.replace(
        profile,
        factor=profile.factor * math.exp(weight * error),
        num_runs=profile.num_runs + 1,
        compute=dataclasses.replace(profile.compute, spread=max(LEAST_SPREAD, spread)),
    )


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _with_floor(rows: Sequence[tuple[float, float]], count: int) -> Line:
    """The best line if the `count` smallest points lie on the floor."""
    low, high = rows[:count], rows[count:]
    floor = sum(seconds for _, seconds in low) / len(low) if low else 0.0
    if len(high) > 1:
        a, b = fit_two([(1.0, size, seconds) for size, seconds in high])
    else:
        # one point says no more than that it is proportional; none, that it is no more than that
        size, seconds = high[0] if high else rows[-1]
        a, b = 0.0, seconds / size
    line = Line(floor=floor, a=a, b=b, worst=0.0)
    return dataclasses.replace(line, worst=max(abs(line.at(size) - seconds) / seconds for size, seconds in rows))


def _split(points: Sequence[TimedBatch]) -> tuple[list[tuple[int, int, float]], tuple[float, float]]:
    """(tokens, length, seconds) of one layer, and (a, b) of what is done once, a + b T, without the head.

    t(2) = once + 2 layers, t(1) = once + layer. The difference of the two is noisy, so what is done once is a line over
    all sizes, whose errors count in relation to t(1).
    """
    body = {(point.tokens, point.length, point.layers): max(point.seconds - point.head_s, 1e-9) for point in points}
    deep = max((layers for *_, layers in body), default=1)
    pairs = [
        (tokens, seconds, body[tokens, length, 2])
        for (tokens, length, layers), seconds in body.items()
        if layers == 1 and deep == 2 and (tokens, length, 2) in body
    ]
    once = (0.0, 0.0)
    if pairs:
        rows = [(1.0, float(tokens), 2 * one - two) for tokens, one, two in pairs]
        once = fit_two(rows, [one for _, one, _ in pairs])
    layer = [
        (tokens, length, max(0.1 * seconds, seconds - once[0] - once[1] * tokens) / deep)
        for (tokens, length, layers), seconds in body.items()
        if layers == deep
    ]
    return layer, once


def _size(tokens: float, length: float, ratio: float) -> float:
    return tokens * (1 + ratio * length)


def _attention_ratio(whole: Architecture, training: Training, *, length: int) -> float:
    """Attention's FLOPs per token and token of length, over those of a token's products with weights."""
    squared = squared_flops(whole, training, length=length)
    return squared / (_layer_flops(whole, training, length) - squared * length)


def _layer_flops(architecture: Architecture, training: Training, length: int) -> float:
    flops = flops_per_token(architecture, training, length=length)
    return flops.total - flops.head


def _backward_share(points: Sequence[TimedBatch], depth: int) -> float:
    """Of the whole model: the head computes its gradients in forward, and is a small part of many layers."""
    point = max(points, key=lambda each: (each.layers, each.tokens))
    backward_s = point.backward_share * point.seconds / point.layers * depth
    forward_s = (1 - point.backward_share) * point.seconds - point.head_s
    return backward_s / (backward_s + max(0.0, forward_s) / point.layers * depth + point.head_s)
