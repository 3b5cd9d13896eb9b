"""Parameters of a model that no closed form knows, counted on the meta device."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from gangline.runs.job import MethodJob
from gangline.worker.model import base_of, layers_of, trainable
from gangline.worker.trace.build import build_model
from gangline.worker.trace.configs import num_layers, read_config
from gangline.worker.trace.order import TraceOrder


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
class Count:
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


def count(order: TraceOrder) -> Count:
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
    return Count(
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
