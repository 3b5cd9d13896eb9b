"""The gradient buckets of DDP in a trace of a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class Buckets:
    """One flat tensor per dtype, made once and kept, which the gradients become views of.

    What torch's reducer does with `gradient_as_bucket_view=True`, as `strategy.ddp` asks for: in a rank's last
    micro-batch a ready gradient is copied into its place and replaced by a view of it; in those before it stays apart,
    so that a rank with several micro-batches holds its gradients twice until then.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        sizes: dict[torch.dtype, int] = {}
        places = []
        for parameter in parameters:
            places.append(sizes.get(parameter.dtype, 0))
            sizes[parameter.dtype] = places[-1] + parameter.numel()
        flat = {dtype: torch.empty(size, dtype=dtype) for dtype, size in sizes.items()}
        self._active = False
        for parameter, place in zip(parameters, places, strict=True):
            view = flat[parameter.dtype][place : place + parameter.numel()].view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(self._mover(view))

    @contextmanager
    def filled(self, last: bool) -> Iterator[None]:
        """A micro-batch; its gradients go into the buckets if it is the rank's last."""
        self._active = last
        yield
        self._active = False

    def _mover(self, view: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def move(parameter: torch.Tensor) -> None:
            if self._active and parameter.grad is not None:
                parameter.grad = view.copy_(parameter.grad)

        return move
