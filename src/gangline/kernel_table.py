"""Kernels that compute a part of a training step in another way than torch's own operators: names for job.yaml.

    packed-attention    attention inside the documents of packed rows, all of them in one call

A kernel is one row of `KERNELS`, and one module of `worker/kernels/`, which finds out where it works. The same numbers
come out within rounding; `kernels: torch` computes by torch's own operators and is the reference of all tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

KernelWord = Literal["auto", "torch", "packed-attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel."""

    replaces: str
    """What is computed by it."""
    place: str
    """The module with its functions `obstacle` and `put_in`."""
    package: str = ""
    """The package that it needs beside those of every job; "": none."""


KERNELS: Mapping[str, Kernel] = {
    "packed-attention": Kernel(
        replaces="attention of packed rows, document by document",
        place="gangline.worker.kernels.packed_attention",
    ),
}
"""Every kernel by its name in job.yaml, in the order in which they are put in."""
