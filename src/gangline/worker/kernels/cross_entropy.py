"""cross-entropy: loss and gradient of a chunk of logits in two passes over them, in place, by Triton.

    loss = log(sum(exp(x))) - x[goal]        dx = exp(x) / sum(exp(x)) - [column is goal]

The products with the output head stay torch's (`loss.LinearCrossEntropy`). Torch's operators go over the logits a
dozen times in fp32; here they stay in the format of the products and are read twice and written once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from gangline.worker.kernels.choice import KernelPlace, Undo, same_numbers, triton_obstacle
from gangline.worker.loss import LinearCrossEntropy, RowsLoss

obstacle = triton_obstacle
BLOCK = 8192


@triton.jit
def _rows(x_ptr, goal_ptr, loss_ptr, n, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * n
    goal = tl.load(goal_ptr + row)
    chosen = tl.load(x_ptr + goal).to(tl.float32)
    top = -float("inf")
    mass = 0.0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=0))
        mass = mass * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), axis=0)
        top = higher
    tl.store(loss_ptr + row, tl.log(mass) + top - chosen)
    if GRADIENT:
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < n, other=-float("inf")).to(tl.float32)
            delta = tl.exp(x - top) / mass - tl.where(at == goal, 1.0, 0.0)
            tl.store(x_ptr + at, delta.to(x_ptr.dtype.element_ty), mask=at < n)


def cross_entropy_in_place(logits: torch.Tensor, goal: torch.Tensor, *, gradient: bool) -> torch.Tensor:
    """The losses [n] of logits [n, V], contiguous; these become the gradient of their sum, if it is asked for."""
    rows, n = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(n))
    warps = min(16, max(1, block // 512))
    _rows[(rows,)](logits, goal, losses, n, GRADIENT=gradient, BLOCK=block, num_warps=warps)
    return losses


def put_in(place: KernelPlace) -> list[Undo]:
    """Into the loss, where that is computed in chunks."""
    loss, draw = place.loss, torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(shape, generator=draw).to(place.device) for shape in ((9, 8), (700, 8)))
    goal = torch.randint(700, (9,), generator=draw).to(place.device)

    def total(rows: torch.Tensor, *, rows_loss: RowsLoss | None) -> Any:
        return LinearCrossEntropy.apply(rows, head, None, goal, place.precision.compute, True, rows_loss)

    kernel, own = (partial(total, rows_loss=each) for each in (cross_entropy_in_place, None))
    if not same_numbers(place, kernel, own, [hidden.to(place.precision.compute)]):
        return []
    loss.rows_loss = cross_entropy_in_place
    return [partial(setattr, loss, "rows_loss", None)]
