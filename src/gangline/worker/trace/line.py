"""From two shallow depths to the true one: the trace's result.

Parameters of a model that no closed form knows, counted on the meta device.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

from torch import nn

from gangline.runs.job import MethodJob
from gangline.worker.model import base_of, layers_of, trainable
from gangline.worker.trace.configs import is_even, num_layers, read_config, shallow_depths
from gangline.worker.trace.order import TraceOrder
from gangline.worker.trace.steps import INSTANTS, Depth, build_model, trace_depth

_OFF_THE_LINE = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResult:
    """What a step of the whole model takes, in bytes of tensors on one rank."""

    peak_bytes: int
    peak_instant: str
    instants: dict[str, int]
    """The peak of every instant (see `steps.INSTANTS`) at the true depth."""
    per_layer_bytes: dict[str, float]
    """What one more layer adds to each."""
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    num_parameters: int
    num_trainable: int
    layers: int
    fused_loss: bool
    depths: tuple[Depth, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"kind": "trace", **asdict(self)}


def trace(order: TraceOrder) -> TraceResult:
    """Run the shallow depths and extrapolate every instant for itself: the peak is then the largest of them.

    Within an instant bytes are linear in the number of layers. Raises UsageError or ModelError.
    """
    started = time.perf_counter()
    config = read_config(order.config, order.model, revision=order.revision)
    layers = num_layers(config)
    depths = tuple(sorted(set(order.layers or shallow_depths(config))))
    seen = tuple(trace_depth(config, depth, order) for depth in depths)
    instants = {name: _at(seen, lambda depth, name=name: depth.instants[name], layers) for name in INSTANTS}
    top = max(INSTANTS, key=lambda name: instants[name])
    return TraceResult(
        peak_bytes=instants[top],
        peak_instant=top,
        instants=instants,
        per_layer_bytes={name: _slope(seen, lambda depth, name=name: depth.instants[name]) for name in INSTANTS},
        weights_bytes=_at(seen, lambda depth: depth.weights_bytes, layers),
        gradients_bytes=_at(seen, lambda depth: depth.gradients_bytes, layers),
        optimizer_bytes=_at(seen, lambda depth: depth.optimizer_bytes, layers),
        num_parameters=_at(seen, lambda depth: depth.num_parameters, layers),
        num_trainable=_at(seen, lambda depth: depth.num_trainable, layers),
        layers=layers,
        fused_loss=seen[-1].fused_loss,
        depths=seen,
        notes=tuple(_notes(order, config, seen)),
        versions={name: version(name) for name in ("torch", "transformers", "peft")},
        seconds=round(time.perf_counter() - started, 3),
    )


def _slope(seen: Sequence[Depth], value: Any) -> float:
    shallow, deep = seen[-2:]
    return (value(deep) - value(shallow)) / (deep.layers - shallow.layers)


def _at(seen: Sequence[Depth], value: Any, layers: int) -> int:
    return round(value(seen[-1]) + _slope(seen, value) * (layers - seen[-1].layers))


def _notes(order: TraceOrder, config: Any, seen: Sequence[Depth]) -> list[str]:
    """What the reader of the figures has to know."""
    notes = []
    if not seen[-1].fused_loss:
        notes.append("the model changes its logits after the head: the loss holds all of them, not a chunk")
    if order.attention == "flash_attention_2":
        notes.append(
            "flash_attention_2 is traced as a kernel that keeps no scores; its indices of documents are left out"
        )
    if order.attention_kernel != "cpu" and order.attention == "eager":
        notes.append("attention_kernel has no meaning for eager attention, which keeps the scores")
    if order.ranks > 1:
        notes.append("gradients are counted through the whole step: they are DDP's buckets")
    if not is_even(config, tuple(depth.layers for depth in seen)):
        notes.append("the deeper layers are of other kinds than the traced ones: the straight line is approximate")
    off = [_distance(seen, name) for name in INSTANTS]
    if max(off) > _OFF_THE_LINE:
        notes.append(f"depths do not lie on one line: {INSTANTS[off.index(max(off))]} is off by {max(off):.1%}")
    return notes


def _distance(seen: Sequence[Depth], name: str) -> float:
    """How far the shallower depths lie off the line through the last two, as a part of what they are."""
    value = [_at(seen, lambda depth: depth.instants[name], depth.layers) for depth in seen]
    return max(
        abs(line - depth.instants[name]) / max(1, depth.instants[name]) for line, depth in zip(value, seen, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """Linear layers of one name and shape inside the blocks."""

    name: str
    rows: int
    """Numbers that come out."""
    columns: int
    """Numbers that go in."""
    bias: bool
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Numbers of parameters; the groups sum to `total`."""

    total: int
    embeddings: int
    head: int
    """0 where the head is the embedding table."""
    tied: bool
    linears: int
    """Weights of nn.Linear inside the blocks: what 4-bit loading quantises."""
    experts: int
    """Parameters of three dimensions inside the blocks (fused experts), which are no nn.Linear."""
    others: int
    """Norms, biases, gates, convolutions and the like."""
    lora: int
    """What peft adds and trains for this method; 0 for full training."""
    trainable: int
    layers: int
    shapes: tuple[LinearShape, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"kind": "count", **asdict(self)}


def count(order: TraceOrder) -> ParameterCount:
    """Build the whole model without memory and count. Raises UsageError or ModelError."""
    started = time.perf_counter()
    config = read_config(order.config, order.model, revision=order.revision)
    model, _, _ = build_model(config, replace(order, method=MethodJob(), activation_checkpointing=False))
    groups = _groups(model)
    shapes = _shapes(model)
    total = sum(groups.values())
    lora = 0
    if order.method.kind != "full":
        model, _, _ = build_model(config, replace(order, activation_checkpointing=False))
        lora = sum(parameter.numel() for parameter in trainable(model).values())
    return ParameterCount(
        total=total,
        embeddings=groups["embeddings"],
        head=groups["head"],
        tied=_is_tied(model),
        linears=groups["linears"],
        experts=groups["experts"],
        others=groups["others"],
        lora=lora,
        trainable=lora or total,
        layers=num_layers(config),
        shapes=shapes,
        seconds=round(time.perf_counter() - started, 3),
    )


def _groups(model: nn.Module) -> Counter[str]:
    core: Any = base_of(model)
    head = core.get_output_embeddings()
    embeddings = {id(part.weight) for part in core.modules() if isinstance(part, nn.Embedding)}
    blocks = {id(parameter) for parameter in layers_of(core).parameters()}
    linears = {id(part.weight) for part in layers_of(core).modules() if isinstance(part, nn.Linear)}
    groups: Counter[str] = Counter()
    for parameter in core.parameters():
        key = id(parameter)
        if key in embeddings:
            groups["embeddings"] += parameter.numel()
        elif head is not None and parameter is head.weight:
            groups["head"] += parameter.numel()
        elif key in linears:
            groups["linears"] += parameter.numel()
        elif key in blocks and parameter.ndim == 3:
            groups["experts"] += parameter.numel()
        else:
            groups["others"] += parameter.numel()
    return groups


def _shapes(model: nn.Module) -> tuple[LinearShape, ...]:
    found = Counter(
        (name.rsplit(".", 1)[-1], *part.weight.shape, part.bias is not None)
        for name, part in layers_of(base_of(model)).named_modules()
        if isinstance(part, nn.Linear)
    )
    return tuple(
        LinearShape(name=name, rows=rows, columns=columns, bias=bias, count=number)
        for (name, rows, columns, bias), number in found.items()
    )


def _is_tied(model: nn.Module) -> bool:
    core: Any = base_of(model)
    head, table = core.get_output_embeddings(), core.get_input_embeddings()
    return head is not None and head.weight is table.weight
