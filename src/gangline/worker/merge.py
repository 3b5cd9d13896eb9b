"""Adapters folded into the weights that they adapt, in the precision in which those are stored."""

from __future__ import annotations

from typing import Any

import torch

from gangline.errors import UsageError


@torch.no_grad()
def merge_adapter(model: Any) -> Any:
    """The base model of a peft model with W + scale * B A in place of W; the peft model is used up.

    Each sum is taken in fp32 and rounded once to the dtype of W. peft's own merge adds in the dtype of W, which
    rounds the small update before it is added. Raises UsageError where an adapted weight is shared by two layers.
    """
    for name, layer in adapted_layers(model):
        weight = layer.get_base_layer().weight
        refuse_shared(model, name, weight)
        for adapter in layer.active_adapters:
            delta = layer.get_delta_weight(adapter)
            weight.data = (weight.data.float() + delta.float()).to(weight.dtype)
    return model.unload()


def adapted_layers(model: Any) -> list[tuple[str, Any]]:
    """The layers that carry an adapter, with their names."""
    from peft.tuners.lora import LoraLayer

    return [(name, part) for name, part in model.named_modules() if isinstance(part, LoraLayer)]


def refuse_shared(model: Any, name: str, weight: torch.Tensor) -> None:
    """Raises UsageError for a weight that two layers share."""
    owners = [other for other, value in model.named_parameters(remove_duplicate=False) if value is weight]
    if len(owners) > 1:
        raise UsageError(
            f"the adapter of {name} cannot be merged",
            seen=f"its weight is shared: {', '.join(owners)}; merging would change the other layer, too",
            fix="export the adapter without --merged",
        )
