"""lora: a linear with its adapter as one operation, whose additions happen within products.

    y = W x + s B (A x)                 dx = dy W + s (dy B) A
    dA = s (dy B)^T x                   dB = s dy^T (A x)

x and y have rows of tokens. peft computes B (A x), multiplies it by s and adds it, five times the traffic of y, and
autograd adds both parts of dx. Here torch.addmm does it while it writes y and dx. It is pure torch, for devices of
every kind. Where the frozen weight has 4 or 8 bits, its linear stays what it is, and y is added to in the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gangline.worker.kernels.choice import KernelPlace, Undo, replace_forward, same_numbers


def obstacle(place: KernelPlace) -> str:
    """Whether there is anything to do."""
    if place.job.method.kind == "full":
        return "adapters (method: lora or qlora)"
    if place.job.method.dora:
        return "adapters that are added; with dora the sum is scaled by rows"
    if place.job.method.dropout:
        return "adapters without dropout"
    return ""


def put_in(place: KernelPlace) -> list[Undo]:
    """Into every linear with one adapter."""
    from peft.tuners.lora import Linear

    draw, dtype = torch.Generator().manual_seed(0), place.precision.compute
    shapes = ((5, 16), (24, 16), (4, 16), (24, 4))
    leaves = [torch.randn(shape, generator=draw).to(place.device, dtype) for shape in shapes]
    if not same_numbers(place, _at_once, _one_by_one, leaves):
        return []
    return [
        replace_forward(module, _forward(type(module).forward))
        for module in place.model.modules()
        if type(module) is Linear and _is_plain(module) and "forward" not in vars(module)
    ]


def _at_once(x: torch.Tensor, weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = AdaptedLinear.apply(x, weight, None, first, second, 2.0)
    return found


def _one_by_one(x: torch.Tensor, weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, weight) + nn.functional.linear(nn.functional.linear(x, first), second) * 2.0


def _is_plain(module: Any) -> bool:
    names = list(module.active_adapters)
    return (
        len(names) == 1
        and names[0] in module.lora_A
        and type(module.lora_A[names[0]]) is type(module.lora_B[names[0]]) is nn.Linear
        and module.lora_A[names[0]].bias is None
        and module.lora_B[names[0]].bias is None
        and isinstance(module.lora_dropout[names[0]], nn.Identity)
    )


def _forward(own: Any) -> Any:
    def forward(self: Any, x: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
        name = self.active_adapters[0]
        first, second = self.lora_A[name].weight, self.lora_B[name].weight
        if more or options or self.disable_adapters or self.merged or _is_divided(first):
            return own(self, x, *more, **options)  # type: ignore[no-any-return]
        base, scale = self.base_layer, self.scaling[name]
        if type(base) is nn.Linear and "forward" not in vars(base) and not _is_divided(base.weight):
            found: torch.Tensor = AdaptedLinear.apply(x, base.weight, base.bias, first, second, scale)
            return found
        result: torch.Tensor = base(x)
        # autocast narrows x itself; peft would widen it first, to the format of the adapter
        narrow = nn.functional.linear(x if torch.is_autocast_enabled(x.device.type) else x.to(first.dtype), first)
        return with_adapter(result.flatten(0, -2), narrow.flatten(0, -2), second, scale).view(result.shape)

    return forward


def _is_divided(weight: torch.Tensor) -> bool:
    """Whether it has to be put together by a call of its module: zero-3 does that, and marks weights so."""
    return isinstance(weight, DTensor) or hasattr(weight, "ds_id")


def _format(x: torch.Tensor) -> torch.dtype:
    """What products are computed in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def with_adapter(result: torch.Tensor, narrow: torch.Tensor, second: torch.Tensor, scale: float) -> torch.Tensor:
    """Result [n, out] + scale * narrow [n, r] @ second [out, r].T, in the format of result."""
    dtype = _format(result)
    return torch.addmm(result.to(dtype), narrow.to(dtype), second.to(dtype).t(), alpha=scale).to(result.dtype)


class AdaptedLinear(torch.autograd.Function):
    """x [..., in], weight [out, in], bias [out] or None, A [r, in], B [out, r], s -> y [..., out]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        first: torch.Tensor,
        second: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Three products."""
        dtype = _format(x)
        rows = x.flatten(0, -2).to(dtype)
        down, up = first.to(dtype), second.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            narrow = rows @ down.t()
            y = nn.functional.linear(rows, weight.to(dtype), None if bias is None else bias.to(dtype))
            y.addmm_(narrow, up.t(), alpha=scale)
        ctx.save_for_backward(rows, weight, first, second, narrow)
        ctx.scale, ctx.format = scale, x.dtype
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Five, of which those for frozen weights are left out."""
        rows, weight, first, second, narrow = ctx.saved_tensors
        need_x, need_weight, need_bias, need_first, need_second, _ = ctx.needs_input_grad
        shape, dtype = grad_outputs[0].shape, rows.dtype
        dy = grad_outputs[0].flatten(0, -2).to(dtype)
        with torch.autocast(dy.device.type, enabled=False):
            d_narrow = (dy @ second.to(dtype)).mul_(ctx.scale)
            d_first = (d_narrow.t() @ rows).to(first.dtype) if need_first else None
            d_second = (dy.t() @ narrow).mul_(ctx.scale).to(second.dtype) if need_second else None
            dx = None
            if need_x:
                dx = (dy @ weight.to(dtype)).addmm_(d_narrow, first.to(dtype)).to(ctx.format)
                dx = dx.view(*shape[:-1], dx.shape[-1])
            d_weight = (dy.t() @ rows).to(weight.dtype) if need_weight else None
            d_bias = dy.sum(0) if need_bias else None
        return dx, d_weight, d_bias, d_first, d_second, None
