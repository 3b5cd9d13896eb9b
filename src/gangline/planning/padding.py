"""What FSDP2 adds to experts that its ranks do not divide evenly by their number. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from gangline.planning.architecture import Architecture, Layer
from gangline.planning.states import shards
from gangline.planning.training import Strategy, Training
from gangline.runs.sharding import padded, shard_dimension


def padded_experts(architecture: Architecture, training: Training, strategy: Strategy) -> Architecture:
    """As ranks keep and send it: every part of expert tensors is as large as the largest."""
    if not architecture.expert_weights or not _cuts(training, strategy):
        return architecture
    parts = shards(strategy)
    return replace(architecture, layers=tuple(_layer(layer, parts) for layer in architecture.layers))


def reordered(layer: Layer, training: Training, strategy: Strategy) -> int:
    """Numbers of a layer's experts that FSDP2 holds a second time, while it puts them together from ranks.

    That is so of what is not cut along the first dimension (foreach_all_gather_copy_out of torch 2.13).
    """
    if not _cuts(training, strategy):
        return 0
    return sum(math.prod(shape) for shape in layer.expert_shapes if shard_dimension(shape, shards(strategy)))


def _cuts(training: Training, strategy: Strategy) -> bool:
    return strategy.half.sharded_by == "fsdp2" and not training.stack.expert_modules


def _layer(layer: Layer, parts: int) -> Layer:
    more = sum(padded(shape, parts) - math.prod(shape) for shape in layer.expert_shapes)
    return replace(layer, fused_weights=layer.fused_weights + more) if more else layer
