"""Memory of this process."""

from __future__ import annotations

import os

import torch


def memory_bytes(device: torch.device) -> int:
    """Peak of the allocator on a GPU; resident memory of the process now on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
