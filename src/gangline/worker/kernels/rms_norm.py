"""rms-norm: root-mean-square norms in one pass over a row, forward and backward, by Triton.

    y = round(x / sqrt(mean(x^2) + eps)) * (offset + w)        Zhang and Sennrich, arXiv 1910.07467

Models differ in whether numbers are rounded to their format before the weight or behind it, and in the offset (1 in
Gemma). Which of these forms a module has is tried on numbers. The gradients, with h = x / rms and g = dy (offset + w):

    dx = (g - h mean(g h)) / rms        dw = sum over rows of dy h
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import nn
from torch.distributed.tensor import DTensor

from gangline.worker.kernels.choice import (
    KernelPlace,
    Undo,
    distance,
    replace_forward,
    same_numbers,
    triton_obstacle,
)

obstacle = triton_obstacle
LARGEST = 1 << 15
"""Numbers in a row that a program holds at once."""
TILE = 2048
"""Numbers that a program works on, where rows are shorter."""


class Form(NamedTuple):
    """What a module computes."""

    offset: float
    rounds_early: bool
    """Whether numbers are rounded before they meet the weight."""
    epsilon: str
    """The attribute of the module that has it."""


FORMS = tuple(
    Form(offset, early, epsilon)
    for epsilon, offset, early in itertools.product(("variance_epsilon", "eps"), (0.0, 1.0), (True, False))
)


@triton.jit
def _forward(
    x_ptr,
    w_ptr,
    y_ptr,
    rms_ptr,
    rows,
    n,
    eps,
    OFFSET: tl.constexpr,
    EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < n)[None, :]
    place = row[:, None] * n + at[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / n + eps)
    y = wide * inverse[:, None]
    if EARLY:
        y = y.to(x.dtype).to(tl.float32)
    w = tl.load(w_ptr + at, mask=at < n, other=0.0).to(tl.float32) + OFFSET
    tl.store(y_ptr + place, (y * w[None, :]).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(rms_ptr + row, inverse, mask=row < rows)


@triton.jit
def _backward(
    dy_ptr,
    x_ptr,
    w_ptr,
    rms_ptr,
    dx_ptr,
    dw_ptr,
    rows,
    n,
    tiles,
    OFFSET: tl.constexpr,
    EARLY: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + at, mask=at < n, other=0.0).to(tl.float32) + OFFSET
    of_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for tile in range(tiles):
        row = (program * tiles + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (at < n)[None, :]
        place = row[:, None] * n + at[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0)
        dy = tl.load(dy_ptr + place, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(rms_ptr + row, mask=row < rows, other=0.0)[:, None]
        h = x.to(tl.float32) * inverse
        if WEIGHT:
            rounded = h
            if EARLY:
                rounded = h.to(x.dtype).to(tl.float32)
            of_weight += tl.sum(dy * rounded, axis=0)
        g = dy * w[None, :]
        mean = tl.sum(g * h, axis=1) / n
        dx = (g - h * mean[:, None]) * inverse
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if WEIGHT:
        tl.store(dw_ptr + program * n + at, of_weight, mask=at < n)


class RmsNorm(torch.autograd.Function):
    """x [..., n], weight [n] -> the normalised rows in the format of x; rounded early, in the wider one of both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, form: Form) -> torch.Tensor:  # type: ignore[override]
        """One pass over the rows."""
        x = x.contiguous()
        n = x.shape[-1]
        rows = x.numel() // n
        wider = torch.promote_types(x.dtype, weight.dtype)
        y = torch.empty_like(x, dtype=wider if form.rounds_early else x.dtype)
        inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
        block, height, warps = _tile(n)
        _forward[(triton.cdiv(rows, height),)](
            x,
            weight,
            y,
            inverse,
            rows,
            n,
            eps,
            OFFSET=form.offset,
            EARLY=form.rounds_early,
            ROWS=height,
            BLOCK=block,
            num_warps=warps,
        )
        ctx.save_for_backward(x, weight, inverse)
        ctx.form = form
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Another one."""
        x, weight, inverse = ctx.saved_tensors
        dy, n = grad_outputs[0].contiguous(), x.shape[-1]
        rows, needs_weight = x.numel() // n, ctx.needs_input_grad[1]
        block, height, warps = _tile(n)
        tiles = 1
        if needs_weight:  # each program adds up the rows that it sees, so there are not more of them than fit at once
            tiles = triton.cdiv(triton.cdiv(rows, height), 4 * _processors(x.device))
        programs = triton.cdiv(rows, height * tiles)
        dx = torch.empty_like(x)
        parts = torch.empty((programs if needs_weight else 0, n), dtype=torch.float32, device=x.device)
        _backward[(programs,)](
            dy,
            x,
            weight,
            inverse,
            dx,
            parts,
            rows,
            n,
            tiles,
            OFFSET=ctx.form.offset,
            EARLY=ctx.form.rounds_early,
            WEIGHT=needs_weight,
            ROWS=height,
            BLOCK=block,
            num_warps=warps,
        )
        return dx, parts.sum(0).to(weight.dtype) if needs_weight else None, None, None


def _tile(n: int) -> tuple[int, int, int]:
    """Numbers and rows that a program works on, and its warps."""
    block = triton.next_power_of_2(n)
    height = max(1, TILE // block)
    return block, height, min(16, max(4, block * height // 512))


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def put_in(place: KernelPlace) -> list[Undo]:
    """Into every norm whose numbers are those of one of the forms."""
    undo: list[Undo] = []
    forms: dict[tuple[Any, ...], Form | None] = {}
    for module in place.model.modules():
        weight = getattr(module, "weight", None)
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, torch.Tensor) or weight.ndim != 1:
            continue
        key = (type(module), weight.shape, weight.dtype, getattr(module, "eps", None))
        if key not in forms:
            forms[key] = _form_of(module, place)
        if (form := forms[key]) is not None and "forward" not in vars(module):
            undo.append(replace_forward(module, _forward_of(type(module).forward, form, _formats(module, place))))
    return undo


def _form_of(module: nn.Module, place: KernelPlace) -> Form | None:
    """The form that has the numbers of this module, for rows in each of `_formats`."""
    n, dtype = module.weight.shape[0], module.weight.dtype  # type: ignore[union-attr, operator]
    if n > LARGEST or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    draw = torch.Generator().manual_seed(n)
    x, weight = (torch.randn(shape, generator=draw).to(place.device) for shape in ((7, n), (n,)))
    trials = [[x.to(each), weight.to(dtype)] for each in _formats(module, place)]

    def own(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    same = []
    for form in FORMS:
        eps = getattr(module, form.epsilon, None)
        if not isinstance(eps, float):
            continue
        kernel = partial(_norm, eps=eps, form=form)
        if all(same_numbers(place, kernel, own, each) for each in trials):  # some are, rounding early or late
            same.append((sum(distance(kernel(*each), own(*each)) for each in trials), form))
    return min(same, default=(0.0, None), key=lambda each: each[0])[1]


def _formats(module: nn.Module, place: KernelPlace) -> tuple[torch.dtype, ...]:
    """Those of its weight and of the products before it, which differ where weights are trained in fp32."""
    dtype: torch.dtype = module.weight.dtype  # type: ignore[union-attr, assignment]
    return tuple(dict.fromkeys((dtype, place.precision.compute)))


def _norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, form: Form) -> torch.Tensor:
    found: torch.Tensor = RmsNorm.apply(x, weight, eps, form)
    return found


def _forward_of(own: Any, form: Form, formats: tuple[torch.dtype, ...]) -> Any:
    def forward(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        if isinstance(weight, DTensor) or isinstance(hidden, DTensor) or hidden.dtype not in formats:
            return own(self, hidden)  # type: ignore[no-any-return]
        return _norm(hidden, weight, eps=getattr(self, form.epsilon), form=form)

    return forward
