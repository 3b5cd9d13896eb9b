"""Samples: which make up which step and micro-batch, their random seeds, and their tensors.

The order of samples is arithmetic on (seed, step). It does not depend on the number of ranks: `split_work` only says
which rank does which micro-batch, and each micro-batch draws its dropout masks from a seed of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from gangline.runs.gang import split_whole, steps_per_epoch
from gangline.worker.borders import remember_borders
from gangline.worker.data.tokens import NO_TARGET, Sample


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
        """The batch on a device, which need not be asked later where documents begin."""
        if device.type == "cpu":
            return self
        moved = Batch(*(sent(tensor, device) for tensor in self.tensors))
        remember_borders(moved.position_ids, self.position_ids)
        return moved

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The arguments of `CausalLoss.forward`, in order."""
        return self.input_ids, self.targets, self.position_ids, self.trained


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device of a tensor on the processor, which waits for nothing: not for what the GPU still computes,
    as a copy from memory that is not pinned may. torch keeps the pinned memory until the copy is made.
    """
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def collate(samples: Sequence[Sample]) -> Batch:
    """Pad to the longest on the right; padding has no target and continues the positions of the last document.

    No attention mask: causal attention keeps real tokens from seeing the padding behind them, and a mask would
    make transformers ignore the document borders in position_ids. Positions that went back to 0 in the padding
    would count as a border, and cost unpacked rows the fast causal kernel.
    """
    longest = max(len(sample.input_ids) for sample in samples)
    input_ids = np.zeros((len(samples), longest), dtype=np.int64)
    targets = np.full((len(samples), longest), NO_TARGET, dtype=np.int64)
    position_ids = np.zeros((len(samples), longest), dtype=np.int64)
    for row, sample in enumerate(samples):
        length = len(sample.input_ids)
        input_ids[row, :length] = sample.input_ids
        targets[row, :length] = sample.targets
        position_ids[row, :length] = sample.position_ids
        position_ids[row, length:] = sample.position_ids[-1] + 1 + np.arange(longest - length)
    trained = np.flatnonzero(targets != NO_TARGET)
    return Batch(*(torch.from_numpy(array) for array in (input_ids, targets, position_ids, trained)))


def empty_batch() -> Batch:
    """One token without a target: what a rank without work sends through the model to join the collectives."""
    token, target, position = (torch.full((1, 1), value) for value in (0, NO_TARGET, 0))
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

    def sample(self, index: int) -> Sample:
        """One sample."""


Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
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


def split_work(num_micro_batches: int, shares: Sequence[int], replica_groups: Sequence[int]) -> list[range]:
    """Which micro-batches each rank does: adjacent ones, in proportion to `shares`; see `Gang.replica_groups`."""
    own = [shares[replica_groups.index(replica_group)] for replica_group in dict.fromkeys(replica_groups)]
    counts = tuple(own) if num_micro_batches == sum(own) else split_whole(num_micro_batches, own)
    ends = np.cumsum(counts)
    work_split = [range(int(end) - count, int(end)) for count, end in zip(counts, ends, strict=True)]
    by_replica_group = dict(zip(dict.fromkeys(replica_groups), work_split, strict=True))
    return [by_replica_group[replica_group] for replica_group in replica_groups]


def joined(indices: range, longest: int) -> list[range]:
    """Adjacent micro-batches as passes of at most `longest` of them: as few as possible, and about equally long."""
    count = -(-len(indices) // longest)
    starts = [len(indices) * number // count for number in range(count + 1)] if count else []
    return [indices[start:end] for start, end in pairwise(starts)]


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """The random seed of one micro-batch: the same on whichever rank, in whichever attempt."""
    digest = hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def begin_draws(seed: int, device: torch.device) -> None:
    """As torch.manual_seed, on the processor and, where ranks compute there, on GPUs.

    That function looks for devices of all kinds; without a GPU it writes down its caller's stack each time, which takes
    up to 0.6 ms: as long as other parts of a pass through a small stage.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
