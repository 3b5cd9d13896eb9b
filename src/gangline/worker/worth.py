"""Whether trained weights are worth exporting."""

from __future__ import annotations

from typing import Any

import torch

from gangline.errors import RunFailed
from gangline.worker.merge import adapted_layers


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
