"""rotary: queries and keys are turned by their positions in one pass over all heads, by Triton.

    y1 = x1 c1 - x2 s1,  y2 = x2 c2 + x1 s2        dx1 = dy1 c1 + dy2 s2,  dx2 = dy2 c2 - dy1 s1

x1 and x2 are the halves of a head, c and s those of cosine and sine at the token's position. Su and others, arXiv
2104.09864, in the order of numbers that transformers has. Sums are in fp32 and rounded once; nothing but cosine and
sine is kept for backward, where transformers' own keeps neither queries nor keys, but makes six tensors of their size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
import triton
import triton.language as tl
from torch.distributed.tensor import DTensor

from gangline.worker.kernels.choice import KernelPlace, Undo, replace_forward, same_numbers, triton_obstacle

obstacle = triton_obstacle
NAME = "apply_rotary_pos_emb"
"""The function of transformers that attention calls, in the module of each model."""


@triton.jit
def _turn(
    x_ptr,
    y_ptr,
    cos_ptr,
    sin_ptr,
    length,
    heads,
    half,
    x_row,
    x_head,
    x_token,
    y_row,
    y_head,
    y_token,
    cos_row,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row, step = token // length, token % length
    at, head = tl.arange(0, HALF), tl.arange(0, HEADS)
    in_half = at < half
    angles = row * cos_row + step * half * 2 + at
    c1 = tl.load(cos_ptr + angles, mask=in_half, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos_ptr + angles + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin_ptr + angles, mask=in_half, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin_ptr + angles + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    inside = (head < heads)[:, None] & in_half[None, :]
    x_at = x_ptr + row * x_row + step * x_token + head[:, None] * x_head + at[None, :]
    x1 = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_at + half, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        y1 = x1 * c1 + x2 * s2
        y2 = x2 * c2 - x1 * s1
    else:
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
    y_at = y_ptr + row * y_row + step * y_token + head[:, None] * y_head + at[None, :]
    tl.store(y_at, y1.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(y_at + half, y2.to(y_ptr.dtype.element_ty), mask=inside)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool, dtype: torch.dtype) -> torch.Tensor:
    """X [m, heads, t, d] turned, as a view of [m, t, heads, d], which is how linears give and take it."""
    rows, heads, length, size = x.shape
    if x.stride(3) != 1:
        x = x.contiguous()
    y = torch.empty((rows, length, heads, size), dtype=dtype, device=x.device).transpose(1, 2)
    padded = triton.next_power_of_2(heads), triton.next_power_of_2(size // 2)
    _turn[(rows * length,)](
        x,
        y,
        cos,
        sin,
        length,
        heads,
        size // 2,
        *(each.stride(axis) for each in (x, y) for axis in (0, 1, 2)),
        0 if cos.shape[0] == 1 else cos.stride(0),
        BACK=back,
        HEADS=padded[0],
        HALF=padded[1],
        num_warps=min(8, max(1, padded[0] * padded[1] // 256)),
    )
    return y


class Rotation(torch.autograd.Function):
    """Queries or keys [m, heads, t, d] turned by cos and sin [1 or m, t, d]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:  # type: ignore[override]
        """Forwards."""
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _turned(x, cos, sin, back=False, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """And back."""
        return _turned(grad_outputs[0], *ctx.saved_tensors, back=True, dtype=ctx.dtype), None, None, None


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both turned, in the format that the products of attention will have."""
    kind = query.device.type
    dtype = torch.promote_types(query.dtype, cos.dtype)
    if torch.is_autocast_enabled(kind) and dtype is torch.float32:
        dtype = torch.get_autocast_dtype(kind)
    return Rotation.apply(query, cos, sin, dtype), Rotation.apply(key, cos, sin, dtype)


def _fits(query: Any, key: Any, cos: Any, sin: Any) -> bool:
    """Whether the tensors are what the kernel takes: whole heads with angles for each of their numbers."""
    return (
        not any(isinstance(each, DTensor) for each in (query, key, cos))
        and query.ndim == key.ndim == 4
        and cos.ndim == 3
        and cos.shape == sin.shape
        and cos.shape[0] in (1, query.shape[0])
        and cos.shape[1:] == query.shape[2:]
        and query.shape[2:] == key.shape[2:]
        and query.shape[3] % 2 == 0
        and not cos.requires_grad
    )


def put_in(place: KernelPlace) -> list[Undo]:
    """Into every attention that calls a function of that name with these numbers."""
    undo: list[Undo] = []
    found: dict[Any, FunctionType | None] = {}
    for module in place.model.modules():
        own: Any = type(module).forward
        if not isinstance(own, FunctionType) or NAME not in own.__code__.co_names or NAME not in own.__globals__:
            continue
        if own not in found:
            found[own] = _with_kernel(own) if _has_same_numbers(own.__globals__[NAME], place) else None
        if (function := found[own]) is not None and "forward" not in vars(module):
            undo.append(replace_forward(module, function))
    return undo


def _has_same_numbers(function: Callable[..., Any], place: KernelPlace) -> bool:
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 5, 16), (2, 2, 5, 16), (2, 5, 16), (2, 5, 16))
    query, key, cos, sin = (
        torch.randn(shape, generator=draw).to(place.device, place.precision.compute) for shape in shapes
    )
    return same_numbers(place, partial(rotate, cos=cos, sin=sin), partial(function, cos=cos, sin=sin), [query, key])


def _with_kernel(forward: FunctionType) -> FunctionType:
    """The same forward of an attention, whose name for that function stands for ours; the module stays as it is."""
    own = forward.__globals__[NAME]

    def turn(query: Any, key: Any, cos: Any, sin: Any, *more: Any, **options: Any) -> Any:
        if more or options or not _fits(query, key, cos, sin):
            return own(query, key, cos, sin, *more, **options)
        return rotate(query, key, cos, sin)

    names = {**forward.__globals__, NAME: turn}
    found = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    found.__kwdefaults__ = forward.__kwdefaults__
    return found
