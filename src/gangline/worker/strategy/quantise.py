"""What changes of weights look like on a slow wire: rounded to few bytes, in rows of bytes that any backend sends."""

from __future__ import annotations

from typing import Literal

import torch

Payload = Literal["int8", "bf16", "fp32"]

BLOCK = 256
"""Values with one scale."""
LEVELS = 127
_LEAST = 1e-30
"""A block whose largest value is below it counts as zero: the inverse of its scale could overflow."""


def row_bytes(num_values: int, payload: Payload, dtype: torch.dtype) -> int:
    """Bytes of one encoded row. num_values: a multiple of BLOCK; dtype: of the values."""
    if payload == "int8":
        return num_values + 4 * (num_values // BLOCK)
    return num_values * (2 if payload == "bf16" else dtype.itemsize)


def encode(values: torch.Tensor, payload: Payload) -> torch.Tensor:
    """Rows of finite values [rows, n] as rows of bytes [rows, row_bytes], n a multiple of BLOCK.

    int8: the values of a row in whole 127ths of the largest of their block, then the fp32 scales of its blocks: no
    value is off by more than half a scale, which is a 254th of the largest. fp32: the values as they are.
    """
    if payload == "fp32":
        return values.contiguous().view(torch.uint8)
    if payload == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    rows = values.shape[0]
    blocks = values.reshape(rows, -1, BLOCK)
    largest = torch.linalg.vector_norm(blocks, ord=torch.inf, dim=-1)
    inverse = torch.where(largest < _LEAST, 0.0, LEVELS / largest.clamp(min=_LEAST))
    levels = (blocks * inverse[..., None]).round_().to(torch.int8)
    scales = (largest / LEVELS).float()
    return torch.cat([levels.view(rows, -1).view(torch.uint8), scales.view(torch.uint8)], dim=1)


def decode(data: torch.Tensor, payload: Payload, *, dtype: torch.dtype) -> torch.Tensor:
    """The values [rows, n] of rows of bytes that `encode` made, in `dtype`, on the same device."""
    if payload == "fp32":
        return data.view(dtype)
    if payload == "bf16":
        return data.view(torch.bfloat16).to(dtype)
    rows, num_blocks = data.shape[0], data.shape[1] // (BLOCK + 4)
    levels = data[:, : num_blocks * BLOCK].view(torch.int8).reshape(rows, num_blocks, BLOCK)
    scales = data[:, num_blocks * BLOCK :].contiguous().view(torch.float32)
    return (levels.to(dtype) * scales.to(dtype)[..., None]).view(rows, -1)
