"""The gradient buckets of DDP in a trace of a single process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def fill_buckets(parameters: Sequence[nn.Parameter]) -> None:
    """Make every gradient a view of one flat tensor per dtype, as it is in `strategy.ddp` from its first step on."""
    sizes: dict[torch.dtype, int] = {}
    places = []
    for parameter in parameters:
        places.append(sizes.get(parameter.dtype, 0))
        sizes[parameter.dtype] = places[-1] + parameter.numel()
    flat = {dtype: torch.zeros(size, dtype=dtype) for dtype, size in sizes.items()}
    for parameter, place in zip(parameters, places, strict=True):
        parameter.grad = flat[parameter.dtype][place : place + parameter.numel()].view(parameter.shape)
