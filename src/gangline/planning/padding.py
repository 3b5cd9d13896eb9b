"""What FSDP2 adds to experts that its ranks do not divide evenly. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from gangline.planning.architecture import Architecture, Layer
from gangline.planning.states import shards
from gangline.planning.training import Strategy, Training
from gangline.runs.sharding import padded


def padded_experts(architecture: Architecture, training: Training, strategy: Strategy) -> Architecture:
    """As ranks keep and send it: every part of expert tensors is as large as the largest."""
    if strategy.kind not in ("fsdp", "hsdp") or training.stack.expert_modules or not architecture.expert_weights:
        return architecture
    parts = shards(strategy)
    return replace(architecture, layers=tuple(_layer(layer, parts) for layer in architecture.layers))


def _layer(layer: Layer, parts: int) -> Layer:
    more = sum(padded(shape, parts) - math.prod(shape) for shape in layer.expert_shapes)
    return replace(layer, fused_weights=layer.fused_weights + more) if more else layer
