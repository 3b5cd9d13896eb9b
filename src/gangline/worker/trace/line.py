"""The two documents of this program: a trace of two shallow depths, extrapolated to the true one; and a count of the
parameters of a model that no closed form knows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from operator import attrgetter
from typing import Any

from torch import nn

from gangline.runs.job import MethodJob
from gangline.worker.model import base_of, layers_of, trainable
from gangline.worker.trace.configs import is_even, num_layers, read_config, shallow_depths
from gangline.worker.trace.order import TraceOrder
from gangline.worker.trace.steps import INSTANTS, Depth, build_model, trace_depth
from gangline.worker.weights import is_tied

_OFF_THE_LINE = 0.002
TOTALS = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "num_parameters", "num_trainable")
"""Fields of a depth that grow with the number of layers."""


def trace(order: TraceOrder) -> dict[str, Any]:
    """The document of a trace: bytes of tensors that a step of the whole model takes on one rank.

    Two shallow depths are run, and every instant (see `steps.INSTANTS`) is extrapolated by itself, because its bytes
    are linear in the number of layers: the peak is the largest of them. Raises UsageError or ModelError.
    """
    started = time.perf_counter()
    config = read_config(order.config, order.model, revision=order.revision)
    layers = num_layers(config)
    depths = sorted(set(order.layers or shallow_depths(config)))
    seen = [trace_depth(config, depth, order) for depth in depths]
    instants = {name: _at(seen, _instant(name), layers) for name in INSTANTS}
    top = max(INSTANTS, key=lambda name: instants[name])
    return {
        "kind": "trace",
        "peak_bytes": instants[top],
        "peak_instant": top,
        "instants": instants,
        # the bytes that one more layer adds to each instant
        "per_layer_bytes": {name: _slope(seen, _instant(name)) for name in INSTANTS},
        **{name: _at(seen, attrgetter(name), layers) for name in TOTALS},
        "layers": layers,
        "fused_loss": seen[-1].fused_loss,
        "depths": [asdict(depth) for depth in seen],
        "notes": list(_notes(order, config, seen)),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "seconds": round(time.perf_counter() - started, 3),
    }


def _instant(name: str) -> Callable[[Depth], int]:
    return lambda depth: depth.instants[name]


def _slope(seen: Sequence[Depth], value: Callable[[Depth], int]) -> float:
    shallow, deep = seen[-2:]
    return (value(deep) - value(shallow)) / (deep.layers - shallow.layers)


def _at(seen: Sequence[Depth], value: Callable[[Depth], int], layers: int) -> int:
    return round(value(seen[-1]) + _slope(seen, value) * (layers - seen[-1].layers))


def _notes(order: TraceOrder, config: Any, seen: Sequence[Depth]) -> Iterator[str]:
    """Facts that the reader of the figures has to know."""
    if not seen[-1].fused_loss:
        yield "the model changes its logits after the head: the loss holds all of them, not a chunk"
    if order.attention == "flash_attention_2":
        yield "flash_attention_2 is traced as a kernel that keeps no scores; its indices of documents are left out"
    if order.attention_kernel != "cpu" and order.attention == "eager":
        yield "attention_kernel has no meaning for eager attention, which keeps the scores"
    if order.ranks > 1:
        yield "gradients are counted through the whole step: they are DDP's buckets"
    if not is_even(config, tuple(depth.layers for depth in seen)):
        yield "the deeper layers are of other kinds than the traced ones: the straight line is approximate"
    off, name = max((_distance(seen, name), name) for name in INSTANTS)
    if off > _OFF_THE_LINE:
        yield f"depths do not lie on one line: {name} is off by {off:.1%}"


def _distance(seen: Sequence[Depth], name: str) -> float:
    """How far the shallower depths lie off the line through the last two, relative to their own bytes."""
    own = [depth.instants[name] for depth in seen]
    line = [_at(seen, _instant(name), depth.layers) for depth in seen]
    return max(abs(there - here) / max(1, here) for there, here in zip(line, own, strict=True))


def count(order: TraceOrder) -> dict[str, Any]:
    """The document of a count: parameters of the whole model, built without memory. Raises UsageError or ModelError.

    `total` is the sum of `embeddings`, `head` (0 where it is the embedding table), `linears` (weights of nn.Linear in
    the blocks: 4-bit loading quantises these), `experts` (parameters of three dimensions in the blocks, which are no
    nn.Linear) and `others` (norms, biases, gates, convolutions). `lora`: the parameters that peft adds and trains for
    this method, 0 for full training. `shapes`: the linears of each name and shape (rows out, columns in).
    """
    started = time.perf_counter()
    config = read_config(order.config, order.model, revision=order.revision)
    model, _, _ = build_model(config, replace(order, method=MethodJob(), activation_checkpointing=False))
    groups = _groups(model)
    total, lora = sum(groups.values()), 0
    shapes = _shapes(model)
    tied = is_tied(model)
    if order.method.kind != "full":
        model, _, _ = build_model(config, replace(order, activation_checkpointing=False))
        lora = sum(parameter.numel() for parameter in trainable(model).values())
    return {
        "kind": "count",
        "total": total,
        **groups,
        "tied": tied,
        "lora": lora,
        "trainable": lora or total,
        "layers": num_layers(config),
        "shapes": shapes,
        "seconds": round(time.perf_counter() - started, 3),
    }


def _groups(model: nn.Module) -> dict[str, int]:
    core: Any = base_of(model)
    head = core.get_output_embeddings()
    embeddings = {id(part.weight) for part in core.modules() if isinstance(part, nn.Embedding)}
    blocks = {id(parameter) for parameter in layers_of(core).parameters()}
    linears = {id(part.weight) for part in layers_of(core).modules() if isinstance(part, nn.Linear)}

    def group(parameter: nn.Parameter) -> str:
        if id(parameter) in embeddings:
            return "embeddings"
        if head is not None and parameter is head.weight:
            return "head"
        if id(parameter) in linears:
            return "linears"
        return "experts" if id(parameter) in blocks and parameter.ndim == 3 else "others"

    sizes = dict.fromkeys(("embeddings", "head", "linears", "experts", "others"), 0)
    for parameter in core.parameters():
        sizes[group(parameter)] += parameter.numel()
    return sizes


def _shapes(model: nn.Module) -> list[dict[str, Any]]:
    found = Counter(
        (name.rsplit(".", 1)[-1], *part.weight.shape, part.bias is not None)
        for name, part in layers_of(base_of(model)).named_modules()
        if isinstance(part, nn.Linear)
    )
    return [
        {"name": name, "rows": rows, "columns": columns, "bias": bias, "count": number}
        for (name, rows, columns, bias), number in found.items()
    ]
