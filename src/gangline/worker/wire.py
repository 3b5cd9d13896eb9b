"""What an all-reduce costs on this very group, on the links that it has today."""

from __future__ import annotations

import torch

from gangline.runs.buckets import AllReduce
from gangline.worker.bench import measure

SIZES = (16 << 10, 128 << 10, 1 << 20, 8 << 20)
ENOUGH_S = 0.02
"""An all-reduce that takes so long says how fast the links are, and the next size would take eight times as long."""
EACH_S = 0.1


def measure_wire(device: torch.device) -> AllReduce:
    """A line through all-reduces of two sizes; collective, about a second.

    Of several the fastest counts (each as its slowest rank saw it): what else machines do can only make one longer.
    The smaller size is mostly latency, the larger one is the first that takes `ENOUGH_S`.
    """
    small, small_s = SIZES[0], measure(SIZES[0], device, EACH_S)[0]
    large, large_s = small, small_s
    for size in SIZES[1:]:
        large, large_s = size, measure(size, device, EACH_S)[0]
        if large_s > ENOUGH_S:  # the same on all ranks
            break
    per_byte_s = max(0.0, large_s - small_s) / (large - small)
    return AllReduce(latency_s=max(0.0, small_s - small * per_byte_s), per_byte_s=per_byte_s)
