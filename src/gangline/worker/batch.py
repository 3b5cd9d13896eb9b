"""Samples as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

IGNORE = -100
"""Target of a position that is not trained on."""


class SampleLike(Protocol):
    """One tokenised row or packed row: three arrays of one length (`data.tokens.Sample`)."""

    @property
    def input_ids(self) -> npt.NDArray[np.int64]:
        """Tokens."""

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        """The token that each position predicts, or IGNORE."""

    @property
    def position_ids(self) -> npt.NDArray[np.int64]:
        """Positions, from 0 in every document."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: int64 tensors [samples, longest], and the trained positions [n] in the flattened batch.

    The positions are found here, on the CPU: a boolean mask would make every micro-batch wait for the GPU.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    trained: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        if device.type == "cpu":
            return self
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self.tensors))

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The arguments of `CausalLoss.forward`, in order."""
        return self.input_ids, self.targets, self.position_ids, self.trained


def collate(samples: Sequence[SampleLike]) -> Batch:
    """Pad to the longest on the right; padding has no target and continues the positions of the last document.

    No attention mask: causal attention keeps real tokens from seeing the padding behind them, and a mask would
    make transformers ignore the document borders in position_ids. Positions that went back to 0 in the padding
    would count as a border, and cost unpacked rows the fast causal kernel.
    """
    longest = max(len(sample.input_ids) for sample in samples)
    input_ids = np.zeros((len(samples), longest), dtype=np.int64)
    targets = np.full((len(samples), longest), IGNORE, dtype=np.int64)
    position_ids = np.zeros((len(samples), longest), dtype=np.int64)
    for row, sample in enumerate(samples):
        length = len(sample.input_ids)
        input_ids[row, :length] = sample.input_ids
        targets[row, :length] = sample.targets
        position_ids[row, :length] = sample.position_ids
        position_ids[row, length:] = sample.position_ids[-1] + 1 + np.arange(longest - length)
    trained = np.flatnonzero(targets != IGNORE)
    return Batch(*(torch.from_numpy(array) for array in (input_ids, targets, position_ids, trained)))


def empty_batch() -> Batch:
    """One token without a target: what a rank without work sends through the model to join the collectives."""
    token, target, position = (torch.full((1, 1), value) for value in (0, IGNORE, 0))
    return Batch(token, target, position, torch.empty(0, dtype=torch.int64))


def pick(samples: Iterable[int], source: TokenSource) -> Batch:
    """Read and collate samples of a token set."""
    return collate([source.sample(int(index)) for index in samples])


class TokenSource(Protocol):
    """What the loop needs of a token set (`data.tokens.TokenSet`)."""

    @property
    def label_counts(self) -> npt.NDArray[np.int64]:
        """Trained positions of every sample."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of every sample."""

    def __len__(self) -> int:
        """Number of samples."""

    def sample(self, index: int) -> SampleLike:
        """One sample."""
