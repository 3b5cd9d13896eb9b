"""The digest of a tensor: equality without holding two of them."""

from __future__ import annotations

import hashlib

import torch


def digest_of_tensor(tensor: torch.Tensor) -> str:
    """Of shape and values. Not of bytes: some models load a few layers in fp32 whatever the dtype of the others."""
    digest = hashlib.blake2b(f"{list(tensor.shape)}".encode(), digest_size=16)
    value = tensor.float() if tensor.dtype in {torch.bfloat16, torch.float16} else tensor
    digest.update(memoryview(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()
