"""Where tensors go into layers that several ranks have between them, and come out of these: forward and backward.

What all ranks have is called whole, what each has its columns of is called parted; columns are of the last dimension.
Of a whole tensor every rank has the same gradient, but where it enters: there each has a part of the sum
(Shoeybi et al., Megatron-LM, 2019, section 3, whose f and g are `entering` and `summed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gangline.worker.mesh import INSIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The ranks that have the layers between them, and which of them this is."""

    group: dist.ProcessGroup
    index: int
    count: int
    wire: torch.dtype
    """In which gradients of hidden states travel, where they are wider."""

    @staticmethod
    def of(mesh: DeviceMesh, *, wire: torch.dtype) -> Side:
        """This rank's, of [hosts, ranks of each]."""
        return Side(group=mesh.get_group(INSIDE), index=mesh.get_local_rank(INSIDE), count=mesh.size(1), wire=wire)

    def entering(self, whole: torch.Tensor) -> torch.Tensor:
        """A whole tensor, of which every rank will use some: its gradient is the sum of theirs."""
        return _Entering.apply(whole, self)  # type: ignore[no-any-return, no-untyped-call]

    def summed(self, terms: torch.Tensor) -> torch.Tensor:
        """The sum of what all ranks have: whole."""
        return _Summed.apply(terms, self)  # type: ignore[no-any-return, no-untyped-call]

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The columns of all ranks: whole."""
        return _Gathered.apply(part, self)  # type: ignore[no-any-return, no-untyped-call]

    def parted(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's columns of a whole tensor."""
        return _Parted.apply(whole, self)  # type: ignore[no-any-return, no-untyped-call]

    def told_once(self, whole: torch.Tensor) -> torch.Tensor:
        """A whole tensor whose gradient only the first rank passes on; that of the others is zero."""
        return _ToldOnce.apply(whole, self)  # type: ignore[no-any-return, no-untyped-call]

    def part_of(self, whole: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """A view of this rank's part along a dimension that divides evenly."""
        size = whole.shape[dim] // self.count
        return whole.narrow(dim, self.index * size, size)

    def sum_up(self, terms: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in the format that is narrower: its own or that of the wire."""
        sent = terms.to(self.wire) if self.wire.itemsize < terms.dtype.itemsize else terms.clone()
        sent = sent.contiguous()
        dist.all_reduce(sent, group=self.group)
        return sent.to(terms.dtype)

    def put_together(self, part: torch.Tensor) -> torch.Tensor:
        """The columns of all ranks, in their order."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.count)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, side: Side) -> torch.Tensor:  # type: ignore[override]
        ctx.side = side
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.side.sum_up(gradients[0]), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: torch.Tensor, side: Side) -> torch.Tensor:  # type: ignore[override]
        del ctx
        return side.sum_up(terms)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        del ctx
        return gradients[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, side: Side) -> torch.Tensor:  # type: ignore[override]
        ctx.side = side
        return side.put_together(part)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.side.part_of(gradients[0]).contiguous(), None


class _Parted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, side: Side) -> torch.Tensor:  # type: ignore[override]
        ctx.side = side
        return side.part_of(whole).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.side.put_together(gradients[0]), None


class _ToldOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, side: Side) -> torch.Tensor:  # type: ignore[override]
        ctx.is_first = side.index == 0
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] if ctx.is_first else torch.zeros_like(gradients[0]), None


class PartedDropout(nn.Module):
    """Dropout of parted activations with the mask that one process would draw for the whole of them.

    All ranks draw as many numbers as one process does, so their generators stay alike, as those of whole activations
    have to.
    """

    def __init__(self, p: float, side: Side) -> None:
        super().__init__()
        self.p = p
        self._side = side

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        """part: [..., columns of this rank]."""
        if not self.training or self.p == 0:
            return part
        ones = part.new_ones(*part.shape[:-1], part.shape[-1] * self._side.count)
        # a copy: a view would keep the whole mask until backward
        return part * self._side.part_of(F.dropout(ones, self.p)).clone()
