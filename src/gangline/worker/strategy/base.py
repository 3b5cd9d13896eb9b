"""The seam between the loop and a way to train over several ranks."""

from __future__ import annotations

from typing import Protocol

import torch

from gangline.worker.batch import Batch


class Strategy(Protocol):
    """Turns micro-batches into the gradient of the whole batch, left in `.grad` of every trainable parameter.

    The contract test in tests/train/test_strategies.py says what every strategy promises: the gradient is the sum
    of `scale * loss` over all micro-batches of all ranks, the same on every rank.
    """

    keeps_gradients: bool
    """Whether the tensors of gradients stay from step to step: they are set to zero then, not let go."""

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """Add one micro-batch; returns its summed loss, detached. `last` of a rank completes the exchange."""
        ...

    def join(self) -> None:
        """Take part in a step without any work of one's own."""
        ...

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of it besides weights and optimizer: the live tensors, by name."""
        ...

    def waited_s(self) -> float:
        """Seconds of the last step in which this rank had computed everything and waited for the exchange."""
        ...
