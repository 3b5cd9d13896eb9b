"""Adapters folded into the weights that they adapt, in the precision in which those are stored. Is the result worth
exporting?
"""

from __future__ import annotations

from typing import Any

import torch

from gangline.errors import RunFailed, UsageError


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


def check_weights(model: Any) -> None:
    """Raises RunFailed for weights that nobody can want: NaN, an empty tensor, an adapter that does nothing."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    for name, value in trained.items():
        check_weight(name, value)
    outputs = [value for name, value in trained.items() if "lora_B" in name or "lora_embedding_B" in name]
    if adapted_layers(model) and not any(value.any() for value in outputs):
        raise _useless("all B matrices of the adapter are zero, so that it changes nothing")


def check_weight(name: str, value: torch.Tensor) -> None:
    """The same for one of them."""
    if value.numel() == 0:
        raise _useless(f"{name} is empty")
    if not torch.isfinite(value).all():
        raise _useless(f"{name} holds values that are not finite")


def _useless(seen: str) -> RunFailed:
    return RunFailed(
        "the checkpoint is not worth exporting",
        seen=f"expected finite weights, and an adapter that changes something; {seen}",
        fix="export an earlier or a later checkpoint; metrics.jsonl shows the loss and the skipped steps",
    )
