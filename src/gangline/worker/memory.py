"""Memory of this process."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import torch


def memory_bytes(device: torch.device) -> int:
    """Peak of the allocator on a GPU; resident memory of the process now on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def return_freed() -> None:
    """Let the system have what was freed: glibc keeps pieces of less than 32 MiB for the next ones of their kind."""
    with suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)
