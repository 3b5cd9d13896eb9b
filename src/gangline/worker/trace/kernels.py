"""What a GPU would do otherwise than the CPU that traces: attention kernels, and the size of the loss's chunks.

Flash and memory-efficient attention keep query, key, value, output and one fp32 number per row of scores; the plain
("math") kernel keeps the scores. Which one torch takes follows its own conditions (`sdp_utils.cpp`): flash needs 16-bit
numbers, no mask and heads of 256 at the most; the memory-efficient one takes fp32 and masks, but no grouped heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gangline.worker import loss
from gangline.worker.trace.order import AttentionKernel

_FLASH_MOST_HEAD = 256
_FLASH_ROWS = 128


class KeptRows(torch.autograd.Function):
    """Attention that keeps no scores: shapes and bytes of the fused kernels, no numbers.

    query [b, h, s, d], key [b, g, t, d] and value [b, g, t, e] with g dividing h; returns [b, h, s, e].
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The output lies as [b, s, h, e], as the kernels write it."""
        batch, heads, rows, _ = query.shape
        output = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
        row_sums = query.new_empty(batch, heads, rows, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, row_sums, mask)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Gradients, beside what the kernels take meanwhile."""
        query, key, value, output, row_sums, _ = ctx.saved_tensors
        taken = [torch.empty_like(row_sums)]
        if query.element_size() == 2:
            taken.append(_flash_sums(query))
        if key.shape[1] != query.shape[1]:
            # flash adds the gradients of a group's heads at the end
            taken += [tensor.new_empty(*query.shape[:2], *tensor.shape[2:]) for tensor in (key, value)]
        del grad_outputs, output
        gradients = [_like_rows_first(tensor) for tensor in (query, key, value)]
        return (*gradients, None)


def _flash_sums(query: torch.Tensor) -> torch.Tensor:
    """The query's gradient in fp32, rows and heads rounded up as FlashAttention 2 does."""
    batch, heads, rows, width = query.shape
    step = 32 if width <= 128 else 64
    return query.new_empty(
        batch, heads, -(-rows // _FLASH_ROWS) * _FLASH_ROWS, -(-width // step) * step, dtype=torch.float32
    )


def _like_rows_first(tensor: torch.Tensor) -> torch.Tensor:
    batch, heads, rows, width = tensor.shape
    return tensor.new_empty(batch, rows, heads, width).transpose(1, 2)


@contextmanager
def kernels_of(kind: AttentionKernel) -> Iterator[None]:
    """Take the kernels of `kind` inside. For "flash" and "math" the loss takes its chunks as on a GPU, too."""
    if kind == "cpu":
        yield
        return
    own, chunk = F.scaled_dot_product_attention, loss.CHUNK_NUMBERS["cpu"]
    F.scaled_dot_product_attention = _fused(own) if kind == "flash" else _plain(own)
    loss.CHUNK_NUMBERS["cpu"] = loss.CHUNK_NUMBERS["cuda"]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own
        loss.CHUNK_NUMBERS["cpu"] = chunk


def _plain(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return own(*args, **kwargs)

    return attention


def _fused(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    plain = _plain(own)

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        query, key, value = (_cast(tensor) for tensor in (query, key, value))
        flash = query.element_size() == 2 and attn_mask is None and query.shape[-1] <= _FLASH_MOST_HEAD
        grouped = key.shape[1] != query.shape[1]
        if query.ndim != 4 or (grouped and not flash) or options.get("dropout_p"):
            return plain(query, key, value, attn_mask=attn_mask, **options)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            # torch makes numbers of it for the kernel, which keeps these
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        result: torch.Tensor = KeptRows.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
        return result

    return attention


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """Autocast knows the real function only."""
    if tensor.dtype is torch.float32 and torch.is_autocast_enabled("cpu"):
        return tensor.to(torch.get_autocast_dtype("cpu"))
    return tensor
