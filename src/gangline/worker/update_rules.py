"""Lion, Adafactor and Muon: update rules of matrices and vectors, with their states as tensors from the start.

Each is the published algorithm, equal to the implementation that the tests name. What every one of them keeps:

- the states of a weight are there before the first step, as tensors, so that a checkpoint is loaded in place;
- a step reads the gradients and changes weights and states in place, and draws nothing from a generator;
- Lion works number by number, so a rank may have any part of a weight; the other two want whole matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

Groups = Sequence[dict[str, Any]]
"""`params` and `weight_decay` of each, as torch's optimizers take them."""


class Lion(Optimizer):
    """The sign of a mean of gradients (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2).

    c = b1 * m + (1 - b1) * g;  w -= rate * (sign(c) + decay * w);  m = b2 * m + (1 - b2) * g
    """

    def __init__(self, groups: Groups, *, rate: float, betas: tuple[float, float]) -> None:
        super().__init__(list(groups), {"lr": rate, "betas": betas})
        for parameter in _parameters(self):
            self.state[parameter]["lion_mean"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of every weight that has a gradient."""
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in _with_gradient(group):
                weight, gradient = _local(parameter), _local(parameter.grad)
                mean = _local(self.state[parameter]["lion_mean"])
                update = torch.lerp(gradient, mean, beta1).sign_()
                weight.mul_(1 - rate * group["weight_decay"]).add_(update, alpha=-rate)
                mean.lerp_(gradient, 1 - beta2)


class Adafactor(Optimizer):
    """Means of squared gradients by rows and columns (Shazeer and Stern, Adafactor, 2018, algorithm 4).

    With the job's learning rate, not one relative to the step or to the weights: transformers' Adafactor with
    `scale_parameter=False, relative_step=False`, as its Trainer makes it. The mean of step t decays by 1 - t^-0.8, the
    update of a tensor is cut to a root mean square of 1, and there is no mean of gradients. A stack of matrices
    (experts) has rows and columns of each, and is cut as one tensor.
    """

    def __init__(self, groups: Groups, *, rate: float, epsilon: float) -> None:
        super().__init__(list(groups), {"lr": rate, "eps": epsilon})
        for parameter in _parameters(self):
            state, shape = self.state[parameter], parameter.shape
            wide = torch.promote_types(parameter.dtype, torch.float32)
            state["step"] = torch.zeros((), dtype=torch.int64)
            sizes = (
                {"square_mean": shape} if len(shape) < 2 else {"row_mean": shape[:-1], "column_mean": _columns(shape)}
            )
            for name, size in sizes.items():
                state[name] = torch.zeros(size, dtype=wide, device=parameter.device)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of every weight that has a gradient."""
        for group in self.param_groups:
            for parameter in _with_gradient(group):
                self._move(parameter, group)

    def _move(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, rate = self.state[parameter], group["lr"]
        assert parameter.grad is not None
        state["step"] += 1
        kept = 1 - math.pow(max(1, int(state["step"])), -0.8)  # a trace reads 0
        gradient = parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32))
        squares = gradient**2 + group["eps"]
        if "square_mean" in state:
            update = state["square_mean"].mul_(kept).add_(squares, alpha=1 - kept).rsqrt()
        else:
            rows = state["row_mean"].mul_(kept).add_(squares.mean(dim=-1), alpha=1 - kept)
            columns = state["column_mean"].mul_(kept).add_(squares.mean(dim=-2), alpha=1 - kept)
            by_row = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            update = by_row * columns.unsqueeze(-2).rsqrt()
        del squares
        update.mul_(gradient)
        root_mean_square = torch.linalg.vector_norm(update) / math.sqrt(update.numel())
        update.div_(root_mean_square.clamp_(min=1.0))
        weight = parameter.detach().to(update.dtype)
        weight = weight * (1 - group["weight_decay"] * rate) if group["weight_decay"] else weight
        parameter.copy_(weight - update.mul_(rate))


class Muon(Optimizer):
    """The nearest orthogonal matrix of a mean of gradients (Jordan et al., Muon, 2024; torch.optim.Muon).

        m = b * m + (1 - b) * g;  u = orthogonal((1 - b) * g + b * m, or m);  w -= rate * (scale * u + decay * w)

    scale: "match-adamw" is 0.2 * sqrt(the longer side), with which an update is as large as AdamW's (Liu et al., Muon
    is Scalable for LLM Training, 2025); "original" is sqrt(rows / columns), 1 at the least. A stack of matrices
    (experts) is moved matrix by matrix.
    """

    def __init__(self, groups: Groups, *, rate: float, momentum: float, nesterov: bool, scale: str) -> None:
        words = {"lr": rate, "momentum": momentum, "nesterov": nesterov, "scale": scale}
        super().__init__(list(groups), words)
        for parameter in _parameters(self):
            self.state[parameter]["muon_mean"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of every weight that has a gradient."""
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for parameter in _with_gradient(group):
                gradient, mean = parameter.grad, self.state[parameter]["muon_mean"]
                mean.lerp_(gradient, 1 - momentum)
                update = gradient.lerp(mean, momentum) if group["nesterov"] else mean
                rows, columns = parameter.shape[-2:]
                factor = math.sqrt(max(1, rows / columns))
                if group["scale"] == "match-adamw":
                    factor = 0.2 * math.sqrt(max(rows, columns))
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(orthogonal(update), alpha=-rate * factor)


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial of degree 5 that brings singular values near 1, between 0.7 and 1.2."""
ITERATIONS = 5


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """U V^T of a matrix U S V^T, about: its singular values are near 1. A stack of matrices: of each by itself.

    As torch.optim.Muon, products are in bf16, whatever the format of the weights; in fp64 where weights are, which is
    for comparing numbers.
    """
    if matrix.ndim > 2:
        return torch.stack([orthogonal(each) for each in matrix])
    first, second, third = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.to(torch.float64 if matrix.dtype is torch.float64 else torch.bfloat16)
    found = found.T if tall else found
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = found @ found.T
        polynomial = torch.addmm(gram, gram, gram, beta=second, alpha=third)
        found = torch.addmm(found, polynomial, found, beta=first)
    return found.T if tall else found


class Together(Optimizer):
    """Several optimizers as one: each has weights of its own."""

    def __init__(self, *parts: Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        for part in parts:
            self.state.update(part.state)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update by each of them."""
        for part in self._parts:
            part.step()


def is_matrix(parameter: torch.Tensor) -> bool:
    """Whether it is a matrix or a stack of matrices; a filter of a convolution with one channel is none."""
    return parameter.ndim in (2, 3) and min(parameter.shape[-2:]) > 1


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _with_gradient(group: dict[str, Any]) -> list[nn.Parameter]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def _columns(shape: torch.Size) -> torch.Size:
    return torch.Size([*shape[:-2], shape[-1]])


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a weight that lies on several."""
    found: torch.Tensor = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found
