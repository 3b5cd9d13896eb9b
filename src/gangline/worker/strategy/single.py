"""One rank, no exchange. Also the reference that other strategies are compared with."""

from __future__ import annotations

import torch

from gangline.worker.batch import Batch
from gangline.worker.loss import CausalLoss
from gangline.worker.precision import Precision
from gangline.worker.strategy.base import Whole


class Single(Whole):
    """Plain backward passes."""

    keeps_gradients = False

    def __init__(self, loss: CausalLoss, *, precision: Precision, device: torch.device) -> None:
        self._loss = loss
        self._precision = precision
        self._device = device

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """Add the gradient of `scale * loss` of one micro-batch."""
        del last
        with self._precision.autocast(self._device):
            loss: torch.Tensor = self._loss(*batch.tensors)
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def join(self, *, last: bool) -> None:
        """A rank alone always has work."""
