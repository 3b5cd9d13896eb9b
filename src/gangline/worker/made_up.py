"""What a measurement trains on: samples of random tokens, all of full length, in steps the first of which are short."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gangline.worker.batch import Indices, Order

POOL = 64
"""Unlike samples; more would only take memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sample: a document that fills it, trained on every token."""

    input_ids: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]


class MadeUpSet:
    """A set of `num_samples` rows of `length` tokens each."""

    def __init__(self, num_samples: int, *, length: int, vocabulary: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        positions = np.arange(length)
        texts = [draw.integers(0, vocabulary, length + 1) for _ in range(min(num_samples, POOL))]
        self._rows = [Row(input_ids=text[:-1], targets=text[1:], position_ids=positions) for text in texts]
        self.label_counts: npt.NDArray[np.int64] = np.full(num_samples, length)
        self.lengths: npt.NDArray[np.int64] = np.full(num_samples, length)

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, index: int) -> Row:
        """One row."""
        return self._rows[index % len(self._rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Warming(Order):
    """An order whose first steps have fewer samples: kernels, memory and connections need no whole step to be ready."""

    warm_steps: int
    warm_batch: int

    def samples(self, step: int) -> Indices:
        """Sample indices of 0-based step `step`."""
        samples = Order.samples(self, step)  # super() does not know the class that slots make anew
        return samples[: self.warm_batch] if step < self.warm_steps else samples
