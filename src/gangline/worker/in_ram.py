"""Activations in the machine's memory: of a layer that is computed again, its input leaves the card until backward.

With recomputation that input is all that a layer keeps (torch.utils.checkpoint saves it like any other tensor), so a
card holds those of one layer in place of all. Copies are asked for in the order of computation: nothing that is
computed later can overtake them, and nobody waits but the card.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from gangline.errors import ModelError

RAM = torch.device("cpu")
_CHECKPOINT = "_gradient_checkpointing_func"
"""Where transformers keeps what computes a layer of a model without keeping its activations."""


def keep_inputs_in_ram(model: nn.Module) -> None:
    """Of every layer that recomputes. Raises ModelError for a model that has none in transformers' way."""
    found = [module for module in model.modules() if _CHECKPOINT in vars(module)]
    if not found:
        raise ModelError(
            "activation_offloading: this model's layers are not computed again in the way of transformers",
            seen=f"no module of {type(model).__name__} has {_CHECKPOINT} after recomputation was switched on",
            fix="set activation_offloading: false",
        )
    for module in found:
        setattr(module, _CHECKPOINT, partial(_checkpointed, getattr(module, _CHECKPOINT)))


def _checkpointed(checkpoint: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    # hooks inside of the recomputation are its own: these get what it saves, and no other tensor
    with torch.autograd.graph.saved_tensors_hooks(to_ram, from_ram):
        return checkpoint(*arguments, **options)


def to_ram(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    """A copy in pinned memory, and where the tensor was; itself where that is the machine's memory already."""
    if tensor.device == RAM:
        return RAM, tensor
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, device=RAM, pin_memory=True)
    return tensor.device, kept.copy_(tensor, non_blocking=True)


def from_ram(moved: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    """What `to_ram` was given."""
    device, kept = moved
    return kept.to(device, non_blocking=True)
