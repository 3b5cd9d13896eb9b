"""Which samples make up which step and micro-batch: arithmetic on (seed, step), whoever computes it.

Nothing here knows how many ranks there are, but for `deal`, which only says who does which micro-batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from gangline.runs.deal import split_whole, steps_per_epoch

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of samples in a run."""

    num_samples: int
    batch: int
    """Samples per optimizer step."""
    micro_batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one pass; the last one may be short."""
        return steps_per_epoch(self.num_samples, self.batch)

    def epoch(self, step: int) -> int:
        """The pass (from 0) that 0-based step `step` belongs to."""
        return step // self.steps_per_epoch

    def samples(self, step: int) -> Indices:
        """Sample indices of 0-based step `step`: never wrapped over the end of an epoch, never dropped."""
        start = (step % self.steps_per_epoch) * self.batch
        permutation = _permutation(self.num_samples, self.seed, self.epoch(step))
        return permutation[start : start + self.batch]

    def micro_batches(self, step: int) -> list[Indices]:
        """The step's samples, cut into micro-batches; only the last of an epoch's last step may be smaller."""
        samples = self.samples(step)
        return [samples[start : start + self.micro_batch] for start in range(0, len(samples), self.micro_batch)]


@lru_cache(maxsize=2)
def _permutation(num_samples: int, seed: int, epoch: int) -> Indices:
    """Sorted by random integers: numpy promises the raw stream of PCG64 for good, but not Generator.permutation."""
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(num_samples), kind="stable")


def deal(num_micro_batches: int, shares: Sequence[int], crews: Sequence[int]) -> list[range]:
    """Which micro-batches each rank does: adjacent ones, in proportion to `shares`. crews: see `Gang.crews`."""
    own = [shares[crews.index(crew)] for crew in dict.fromkeys(crews)]
    counts = tuple(own) if num_micro_batches == sum(own) else split_whole(num_micro_batches, own)
    ends = np.cumsum(counts)
    dealt = [range(int(end) - count, int(end)) for count, end in zip(counts, ends, strict=True)]
    by_crew = dict(zip(dict.fromkeys(crews), dealt, strict=True))
    return [by_crew[crew] for crew in crews]


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """The random seed of one micro-batch: the same on whichever rank, in whichever attempt."""
    digest = hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
