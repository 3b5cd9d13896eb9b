"""The seam between the loop and a way to train over several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from gangline.worker.batch import Batch
from gangline.worker.optimizer import gradients_of


class Strategy(Protocol):
    """Turns micro-batches into the gradient of the whole batch, left in `.grad` of every trainable parameter.

    The contract test in tests/train/test_strategies.py says what every strategy promises: the gradient is the sum
    of `scale * loss` over all micro-batches of all ranks: the same on every rank, or each rank's part of it.
    """

    keeps_gradients: bool
    """Whether the tensors of gradients stay from step to step: they are set to zero then, not let go."""
    in_step: bool
    """Whether every pass through the model is a collective: then all ranks make equally many of them."""
    replicated: bool
    """Whether every rank has the whole trained state between two steps, the same as all others have."""
    parts: dist.ProcessGroup | None
    """The ranks among which the trained weights are divided; None where every rank has all of them."""
    apart: bool
    """Whether no host has the whole trained state."""
    has_loss: bool
    """Whether micro-batches are this rank's to count: of those that do the same ones, one rank counts them. What all
    of them return as the loss adds up to it."""
    clips: bool
    """Whether the update clips gradients itself."""

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """Add one micro-batch; returns its summed loss, detached. `last` of a rank completes the exchange."""
        ...

    def join(self, *, last: bool) -> None:
        """Take part in a step without work of one's own: once (`last`), or, `in_step`, as often as others have more."""
        ...

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Those of the step, after its last micro-batch, or this rank's parts of them; of what several ranks have whole
        beside their parts, one rank gives the gradient.
        """
        ...

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of it besides weights and optimizer: the live tensors, by name.

        On the meta device where it only knows what they are like: then it has a `fill`, too.
        """
        ...

    def placed(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same live tensors of a checkpoint, parts of them as DTensors with the shape of the whole."""
        ...

    def whole(self, tensors: Mapping[str, torch.Tensor], *, wanted: bool) -> dict[str, torch.Tensor]:
        """Such tensors as one rank alone would have them, for a checkpoint. wanted: by this rank; else it gives {}.

        Collective where anything is in parts.
        """
        ...

    def elsewhere(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Names of state that a checkpoint holds and other ranks have whole; tensors: what this one has. Collective."""
        ...

    def put_away(self) -> None:
        """Let go of what passes without a gradient have put together."""
        ...

    def waited_s(self) -> float:
        """Seconds of the last step in which this rank had computed everything and waited for the exchange."""
        ...


def put_together(tensors: Mapping[str, torch.Tensor], *, wanted: bool) -> dict[str, torch.Tensor]:
    """See `Strategy.whole`; of parts that are DTensors, one after the other."""
    found = {}
    for name, tensor in tensors.items():
        value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if wanted:
            found[name] = value.cpu() if value is not tensor else value
    return found


class Whole:
    """What holds of every strategy whose ranks have all weights, and nothing to save but these and the optimizer."""

    in_step = False
    replicated = True
    parts: dist.ProcessGroup | None = None
    apart = False
    has_loss = True
    clips = False

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """All of them."""
        return gradients_of(parameters)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer are all there is."""
        return {}

    def placed(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """None is a part."""
        return dict(tensors)

    def whole(self, tensors: Mapping[str, torch.Tensor], *, wanted: bool) -> dict[str, torch.Tensor]:
        """The tensors themselves."""
        return dict(tensors) if wanted else {}

    def elsewhere(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Nothing."""
        del tensors
        return frozenset()

    def put_away(self) -> None:
        """Nothing is in parts."""

    def waited_s(self) -> float:
        """Nobody to wait for."""
        return 0.0
