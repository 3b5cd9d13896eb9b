"""What a process takes beside its tensors, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A number that is known roughly: 5 of 100 cases are below `low`, 5 above `high`."""

    low: int
    likely: int
    high: int

    def probability_below(self, limit: int) -> float:
        """How sure it is that the number stays at or below `limit`.

        Two halves of normal distributions that meet at `likely`, each so wide that `low` and `high` are its 5 and 95
        per cent points (a split normal distribution, whose density has no step).
        """
        below, above = max(1.0, self.likely - self.low) / 1.645, max(1.0, self.high - self.likely) / 1.645
        if limit <= self.likely:
            return 2 * below / (below + above) * _normal((limit - self.likely) / below)
        return 1 - 2 * above / (below + above) * _normal((self.likely - limit) / above)


def _normal(value: float) -> float:
    """The standard normal distribution's share below `value`."""
    return 0.5 * math.erfc(-value / math.sqrt(2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Of one device. Factors are the process's memory for tensors over what tensors take at the peak."""

    factor: tuple[float, float, float]
    """Low, likely, high."""
    context: tuple[int, int, int]
    """Bytes of the CUDA context with its kernels."""
    buffers: tuple[int, int, int] = (0, 0, 0)
    """Bytes of the communicator, with more than one rank."""

    def process(self, allocated_bytes: int, *, num_ranks: int) -> Spread:
        """The whole process."""
        buffers = self.buffers if num_ranks > 1 else (0, 0, 0)
        low, likely, high = (
            int(allocated_bytes * factor) + context + buffer
            for factor, context, buffer in zip(self.factor, self.context, buffers, strict=True)
        )
        return Spread(low=low, likely=likely, high=high)


CUDA = Overheads(
    factor=(1.02, 1.10, 1.25),
    context=(141 * MIB, 350 * MIB, 600 * MIB),
    buffers=(16 * MIB, 64 * MIB, 256 * MIB),
)
"""Factors: pool over tensors of ten QLoRA runs on an RTX 4080 (1.02 to 1.25, mean 1.10; can-i-finetune-this). Context:

141 MiB on a T4 in every run of fitcheck-llm, 300 to 400 MB on larger cards. Buffers: a ring of two channels over
Ethernet, 4 MiB for each channel and connection (NCCL); machines with NVSwitch take 1 GiB and more.
"""
CPU = Overheads(factor=(1.00, 1.05, 1.25), context=(300 * MIB, 390 * MIB, 600 * MIB))
"""A rank on the processor: what python holds once torch and transformers are imported, instead of a context. In the
demo's runs 330 MiB of a rank are its own, and 430 with what it shares with others."""
