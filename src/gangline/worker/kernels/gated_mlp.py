"""gated-mlp: act(gate) * up of a feed-forward layer in one pass, with SiLU (SwiGLU) or GELU by tanh (GeGLU), by Triton.

    c = round(act(a)) * b        da = dc b act'(a)        db = dc round(act(a))

Shazeer, arXiv 2002.05202. Backward computes act(a) again: two tensors are kept, where torch keeps three. Both
activations are x sigmoid(z): z = x, or z = 2 sqrt(2 / pi) (x + 0.044715 x^3), for tanh(y) = 2 sigmoid(2 y) - 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn
from torch.distributed.tensor import DTensor

from gangline.worker.kernels.choice import KernelPlace, Undo, replace_forward, same_numbers, triton_obstacle

obstacle = triton_obstacle
BLOCK = 2048
PARTS = ("gate_proj", "up_proj", "down_proj")


@triton.jit
def _forward(a_ptr, b_ptr, c_ptr, count, GELU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    a = tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=inside, other=0.0)
    z = a
    if GELU:
        z = 1.5957691216057308 * (a + 0.044715 * a * a * a)
    act = (a * tl.sigmoid(z)).to(b.dtype)
    c = act.to(tl.float32) * b.to(tl.float32)
    tl.store(c_ptr + at, c.to(b.dtype), mask=inside)


@triton.jit
def _backward(dc_ptr, a_ptr, b_ptr, da_ptr, db_ptr, count, GELU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    a = tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=inside, other=0.0)
    dc = tl.load(dc_ptr + at, mask=inside, other=0.0).to(tl.float32)
    z = a
    slope = 1.0
    if GELU:
        z = 1.5957691216057308 * (a + 0.044715 * a * a * a)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * a * a)
    gate = tl.sigmoid(z)
    act = (a * gate).to(b.dtype).to(tl.float32)
    da = dc * b.to(tl.float32) * gate * (1.0 + a * (1.0 - gate) * slope)
    tl.store(da_ptr + at, da.to(b.dtype), mask=inside)
    tl.store(db_ptr + at, (dc * act).to(b.dtype), mask=inside)


class GatedProduct(torch.autograd.Function):
    """act(a) * b, for tensors of one shape and format."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, gelu: bool) -> torch.Tensor:  # type: ignore[override]
        """One pass."""
        a, b = a.contiguous(), b.contiguous()
        c = torch.empty_like(b)
        _forward[(triton.cdiv(a.numel(), BLOCK),)](a, b, c, a.numel(), GELU=gelu, BLOCK=BLOCK, num_warps=8)
        ctx.save_for_backward(a, b)
        ctx.gelu = gelu
        return c

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Another one."""
        a, b = ctx.saved_tensors
        dc, da, db = grad_outputs[0].contiguous(), torch.empty_like(a), torch.empty_like(b)
        grid = (triton.cdiv(a.numel(), BLOCK),)
        _backward[grid](dc, a, b, da, db, a.numel(), GELU=ctx.gelu, BLOCK=BLOCK, num_warps=8)
        return da, db, None


class Stretched(nn.Module):
    """Stands for a linear while a layer is tried: x factor + shift."""

    def __init__(self, factor: float, shift: float) -> None:
        super().__init__()
        self.factor, self.shift = factor, shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers that tell which of the three was where."""
        return x * self.factor + self.shift


def put_in(place: KernelPlace) -> list[Undo]:
    """Into every layer of three linears that computes down(act(gate x) * up x)."""
    undo: list[Undo] = []
    found: dict[tuple[Any, ...], bool | None] = {}
    for module in place.model.modules():
        if not all(isinstance(getattr(module, part, None), nn.Module) for part in PARTS):
            continue
        act = getattr(module, "act_fn", None)
        key = (type(module), type(act), getattr(act, "__name__", ""))
        if key not in found:
            found[key] = _activation_of(module, place)
        if (gelu := found[key]) is not None and "forward" not in vars(module):
            undo.append(replace_forward(module, _forward_of(type(module).forward, gelu=gelu)))
    return undo


def _activation_of(module: nn.Module, place: KernelPlace) -> bool | None:
    """Whether it is GELU; None where the layer computes something else.

    In fp32 too: in 16 bits GELU as it is, and `quick_gelu`, are within rounding of GELU by tanh.
    """
    gate, up, down = Stretched(1.5, 0.1), Stretched(-0.7, 0.3), Stretched(2.0, -0.2)
    drawn = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(place.device)
    tried = [drawn.to(dtype) for dtype in dict.fromkeys((torch.float32, place.precision.compute))]

    def own(x: torch.Tensor) -> Any:
        linears = {part: getattr(module, part) for part in PARTS}
        try:
            for part, stand_in in zip(PARTS, (gate, up, down), strict=True):
                setattr(module, part, stand_in)
            return module.forward(x)
        finally:
            for part, linear in linears.items():
                setattr(module, part, linear)

    for gelu in (False, True):
        kernel = partial(_product, gate=gate, up=up, down=down, gelu=gelu)
        if all(same_numbers(place, kernel, own, [x]) for x in tried):
            return gelu
    return None


def _product(x: torch.Tensor, *, gate: nn.Module, up: nn.Module, down: nn.Module, gelu: bool) -> Any:
    return down(GatedProduct.apply(gate(x), up(x), gelu))


def _forward_of(own: Any, *, gelu: bool) -> Any:
    def forward(self: Any, x: torch.Tensor) -> Any:
        if isinstance(x, DTensor):
            return own(self, x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if isinstance(gate, DTensor) or gate.dtype != up.dtype:
            return self.down_proj(self.act_fn(gate) * up)
        return self.down_proj(GatedProduct.apply(gate, up, gelu))

    return forward
