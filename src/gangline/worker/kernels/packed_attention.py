"""packed-attention: torch's attention for sequences of any length, over all documents of all rows at once.

It is in torch, by flash attention, which computes in 16 bits on NVIDIA's cards of compute capability 8.0 and later.
`documents.attend_at_once` calls it, and does the same document by document where a layer does not fit it.
"""

from __future__ import annotations

import torch

from gangline.worker import documents
from gangline.worker.kernels.choice import KernelPlace

LOWEST = (8, 0)
"""The compute capability that flash attention asks for."""


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
    if capability < LOWEST:
        return f"compute capability {LOWEST[0]}.{LOWEST[1]}; this card has {capability[0]}.{capability[1]}"
    return ""


def put_in(place: KernelPlace) -> int:
    """The number of layers; `documents.keep_apart` is what changes their attention, once it is known to be right."""
    return max(1, sum(hasattr(module, "is_causal") for module in place.model.modules()))
