"""lora: the output of an adapter is added within its second product.

    y = W x + s B (A x)

peft computes B (A x), multiplies it by s and adds it: five times the traffic of y. torch.addmm does all of it while it
writes y once. The same two products, in pure torch, for devices of every kind.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gangline.worker.kernels.choice import KernelPlace


def obstacle(place: KernelPlace) -> str:
    """Whether there is anything to do."""
    if place.job.method.kind == "full":
        return "adapters (method: lora or qlora)"
    if place.job.method.dora:
        return "adapters that are added; with dora the sum is scaled by rows"
    if place.job.method.dropout:
        return "adapters without dropout"
    return ""


def put_in(place: KernelPlace) -> int:
    """Into every linear with one adapter."""
    from peft.tuners.lora import Linear

    number = 0
    for module in place.model.modules():
        if type(module) is Linear and _is_plain(module):
            module.forward = MethodType(_forward(type(module).forward), module)  # type: ignore[method-assign]
            number += 1
    return number


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
        if more or options or self.disable_adapters or self.merged or isinstance(first, DTensor):
            return own(self, x, *more, **options)  # type: ignore[no-any-return]
        result: torch.Tensor = self.base_layer(x)
        # autocast narrows it itself; peft would widen it first, to the format of the adapter
        narrow = nn.functional.linear(x if torch.is_autocast_enabled(x.device.type) else x.to(first.dtype), first)
        found = with_adapter(result.flatten(0, -2), narrow.flatten(0, -2), second, self.scaling[name])
        return found.view(result.shape)

    return forward


def with_adapter(result: torch.Tensor, narrow: torch.Tensor, second: torch.Tensor, scale: float) -> torch.Tensor:
    """Result [n, out] + scale * narrow [n, r] @ second [out, r].T, in the format of result."""
    kind = result.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else result.dtype
    return torch.addmm(result.to(dtype), narrow.to(dtype), second.to(dtype).t(), alpha=scale).to(result.dtype)
