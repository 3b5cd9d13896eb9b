"""The strategy `averaging`, torch half: ranks import it."""

from __future__ import annotations

import torch.distributed as dist

from gangline.worker.model import trainable
from gangline.worker.strategy import Strategy


class Averaging(Strategy):
    """The base trains the whole model and exchanges nothing; this one averages weights after each step."""

    def after_update(self) -> None:
        """Sum the weights of all ranks, and divide."""
        for parameter in trainable(self.loss).values():
            dist.all_reduce(parameter.data)
            parameter.data /= self.world.size
