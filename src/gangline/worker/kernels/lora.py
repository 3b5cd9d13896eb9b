"""lora: a linear with its adapter as one operation, whose additions happen within products.

    y = W x + s B (A x)                 dx = dy W + s (dy B) A
    dA = s (dy B)^T x                   dB = s dy^T (A x)

x and y have rows of tokens. peft computes B (A x), multiplies it by s and adds it, five times the traffic of y, and
autograd adds both parts of dx; with adapters in fp32 over a model in 16 bits it also widens x for A, which autocast
narrows again, and keeps that copy for backward, one for each linear. Here torch.addmm adds while it writes y and dx,
and linears that share their input keep it once. It is pure torch, for devices of every kind. Where the frozen weight
has 4 or 8 bits, the adapter has dropout, or there are two, the linear stays what it is, and y is added to in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gangline.worker.kernels.choice import KernelPlace, Undo, replace_forward, same_numbers


def obstacle(place: KernelPlace) -> str:
    """Whether there is anything to do, and weights to do it with."""
    if place.job.method.kind == "full":
        return "adapters (method: lora or qlora)"
    if place.job.method.dora:
        return "adapters that are added; with dora the sum is scaled by rows"
    if place.by_module:
        return "weights that stay while a layer runs; under this strategy each is there while its own module runs"
    return ""


def put_in(place: KernelPlace) -> list[Undo]:
    """Into every linear with adapters."""
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
    """Whether every adapter is two products, and nothing more."""
    factors = [part[name] for name in module.lora_A for part in (module.lora_A, module.lora_B)]
    return not module.lora_variant and all(type(each) is nn.Linear and each.bias is None for each in factors)


def _forward(own: Any) -> Any:
    def forward(self: Any, x: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
        names = [name for name in self.active_adapters if name in self.lora_A]
        factors = [(self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]) for name in names]
        if more or options or self.disable_adapters or self.merged or not factors or isinstance(factors[0][0], DTensor):
            return own(self, x, *more, **options)  # type: ignore[no-any-return]
        base, dropouts = self.base_layer, [self.lora_dropout[name] for name in names]
        result: torch.Tensor
        if len(names) == 1 and isinstance(dropouts[0], nn.Identity) and _is_own(base):
            result = AdaptedLinear.apply(x, base.weight, base.bias, *factors[0])
            return result
        result = base(x)
        for dropout, adapter in zip(dropouts, factors, strict=True):
            result = AddedAdapter.apply(result, dropout(x), *adapter)
        return result

    return forward


def _is_own(base: nn.Module) -> bool:
    """Whether a linear computes with its own weight, which is all there."""
    return type(base) is nn.Linear and "forward" not in vars(base) and not isinstance(base.weight, DTensor)


def _format(x: torch.Tensor) -> torch.dtype:
    """What products are computed in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


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
            # no view: others may change in place what a function of our own returns (Falcon does)
            y = nn.functional.linear(x.to(dtype), weight.to(dtype))
            if bias is not None:
                y.add_(bias)
            y.view(-1, y.shape[-1]).addmm_(narrow, up.t(), alpha=scale)
        ctx.save_for_backward(rows, first, second, narrow, weight)
        ctx.scale, ctx.format = scale, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Five, of which those for frozen weights are left out."""
        *adapter, weight = ctx.saved_tensors  # once: recomputation gives them a single time
        rows, first = adapter[:2]
        need_x, need_weight, need_bias, need_first, need_second, _ = ctx.needs_input_grad
        shape, dtype = grad_outputs[0].shape, rows.dtype
        dy = grad_outputs[0].flatten(0, -2).to(dtype)
        with torch.autocast(dy.device.type, enabled=False):
            d_narrow, d_first, d_second = _of_adapter(dy, adapter, ctx.scale, (need_first, need_second))
            dx = None
            if need_x:
                dx = (dy @ weight.to(dtype)).addmm_(d_narrow, first.to(dtype)).to(ctx.format)
                dx = dx.view(*shape[:-1], dx.shape[-1])
            d_weight = (dy.t() @ rows).to(weight.dtype) if need_weight else None
            d_bias = dy.sum(0) if need_bias else None
        return dx, d_weight, d_bias, d_first, d_second, None


class AddedAdapter(torch.autograd.Function):
    """y [..., out], x [..., in], A [r, in], B [out, r], s -> y, to which s * x A^T B^T is added in place."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, y: torch.Tensor, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Two products, in the format of y."""
        rows = x.flatten(0, -2).to(y.dtype)
        with torch.autocast(x.device.type, enabled=False):
            narrow = rows @ first.to(y.dtype).t()
            y.view(-1, y.shape[-1]).addmm_(narrow, second.to(y.dtype).t(), alpha=scale)
        ctx.mark_dirty(y)
        ctx.save_for_backward(rows, first, second, narrow)
        ctx.scale, ctx.format = scale, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Four; the gradient of y is that of the sum."""
        adapter = ctx.saved_tensors
        rows, first = adapter[:2]
        _, need_x, need_first, need_second, _ = ctx.needs_input_grad
        dy = grad_outputs[0].flatten(0, -2).to(rows.dtype)
        with torch.autocast(dy.device.type, enabled=False):
            d_narrow, d_first, d_second = _of_adapter(dy, adapter, ctx.scale, (need_first, need_second))
            dx = (d_narrow @ first.to(dy.dtype)).to(ctx.format) if need_x else None
        return (
            grad_outputs[0],
            None if dx is None else dx.view(*grad_outputs[0].shape[:-1], -1),
            d_first,
            d_second,
            None,
        )


def _of_adapter(
    dy: torch.Tensor, kept: Sequence[torch.Tensor], scale: float, needs: tuple[bool, bool]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of A x [n, r], of A and of B, from that of y [n, out]. kept: x, A, B and A x."""
    rows, first, second, narrow = kept
    d_narrow = (dy @ second.to(dy.dtype)).mul_(scale)
    d_first = (d_narrow.t() @ rows).to(first.dtype) if needs[0] else None
    d_second = (dy.t() @ narrow).mul_(scale).to(second.dtype) if needs[1] else None
    return d_narrow, d_first, d_second
