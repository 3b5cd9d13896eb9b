"""packed-attention: torch's attention for sequences of any length, over all documents of all rows at once.

It is in torch, by flash attention, which computes in 16 bits on NVIDIA's cards of compute capability 8.0 and later.
`documents.attend_at_once` calls it, and does the same document by document where a layer does not fit it.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from gangline.kernel_table import FLASH_CAPABILITY
from gangline.worker import documents
from gangline.worker.kernels.choice import KernelPlace, Undo, same_numbers
from gangline.worker.model import base_of


def obstacle(place: KernelPlace) -> str:
    """What is missing here; whether the model can do without a mask is tried later, on tokens."""
    if not place.job.data.packing:
        return "packed rows (data.packing)"
    if not documents.has_varlen():
        return f"torch 2.10 or later with torch.nn.attention.varlen; this is {torch.__version__}"
    if place.device.type != "cuda" or torch.version.hip:
        return f"an NVIDIA card; ranks compute on {place.device.type}{' by ROCm' if torch.version.hip else ''}"
    if place.precision.compute not in documents.SIXTEEN_BITS:
        return f"bf16 or fp16; this run computes in {place.precision.name}"
    capability = torch.cuda.get_device_capability(place.device)
    if capability < FLASH_CAPABILITY:
        least = ".".join(map(str, FLASH_CAPABILITY))
        return f"compute capability {least}; this card has {capability[0]}.{capability[1]}"
    return ""


def put_in(place: KernelPlace) -> list[Undo]:
    """The layers; `documents.keep_apart` is what changes their attention, once it is known to need no mask."""
    layers = max(1, sum(hasattr(module, "is_causal") for module in place.model.modules()))
    return [nothing] * layers if _works(place) else []


def nothing() -> None:
    """There is nothing to be undone."""


def _works(place: KernelPlace) -> bool:
    """Whether it has the numbers of attention document by document, with heads as the model has them."""
    text: Any = base_of(place.model).config.get_text_config()  # type: ignore[union-attr, operator]
    heads = getattr(text, "num_attention_heads", 1)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    if size % 8 or size > documents.LARGEST_HEAD:
        return False
    positions = torch.cat([torch.arange(each) for each in (1, 9, 5)])[None].to(place.device)
    layer = SimpleNamespace(is_causal=True, num_key_value_groups=heads // kv_heads)
    draw = torch.Generator().manual_seed(0)
    shapes = ((1, count, 15, size) for count in (heads, kv_heads, kv_heads))
    leaves = [torch.randn(shape, generator=draw).to(place.device, place.precision.compute) for shape in shapes]

    def attend(function: Any, *tensors: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = function(layer, *tensors, None, position_ids=positions)[0]
        return found

    kernel, own = (partial(attend, each) for each in (documents.attend_at_once, documents.attend))
    return same_numbers(place, kernel, own, leaves)
