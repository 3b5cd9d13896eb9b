"""Where documents begin in packed rows: found on the processor, before a batch goes to its device.

A GPU that is asked for positions has to be waited for, so a batch remembers what its positions said while they were
here, under the tensor that layers are called with. Attention asks for it by that tensor, in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True, slots=True)
class Borders:
    """The documents of a micro-batch."""

    lengths: tuple[tuple[int, ...], ...]
    """Tokens of the documents of every row."""
    starts: torch.Tensor
    """Where documents begin in the rows one behind the other, and the end of the last: int32 [n + 1], on the device."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(map(max, self.lengths))

    @property
    def packed(self) -> bool:
        """Whether a row holds several documents."""
        return any(len(row) > 1 for row in self.lengths)


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of the position tensors that layers are called with, which they all share."""


def remember_borders(positions: torch.Tensor, here: torch.Tensor) -> None:
    """Find the borders of positions [m, t] that will be asked for by a copy of them on a device. here: on the CPU."""
    _known[positions] = _found(here.numpy(), positions.device)


def borders_of(positions: torch.Tensor, *, rows: int) -> Borders:
    """The borders of positions [1 or m, t] for `rows` rows; a GPU is waited for where nobody remembered them."""
    found: Borders | None = _known.get(positions)
    if found is None or len(found.lengths) != rows:
        found = _found(np.asarray(positions.expand(rows, -1).tolist()), positions.device)
        _known[positions] = found
    return found


def _found(rows: npt.NDArray[np.int64], device: torch.device) -> Borders:
    """A document begins with a row, and where positions do not go on by 1, as in transformers."""
    begins = np.ones(rows.shape, dtype=bool)
    begins[:, 1:] = rows[:, 1:] != rows[:, :-1] + 1
    starts = np.append(np.flatnonzero(begins), rows.size).astype(np.int32)
    counts, sizes = begins.sum(axis=1), np.diff(starts)
    lengths = tuple(tuple(row.tolist()) for row in np.split(sizes, np.cumsum(counts)[:-1]))
    edges = torch.from_numpy(starts)
    if device.type == "cuda":
        edges = edges.pin_memory().to(device, non_blocking=True)
    return Borders(lengths, edges)
