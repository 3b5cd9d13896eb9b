"""Kernels that compute a part of a training step in another way than torch's own operators: names for job.yaml.

    packed-attention    attention inside the documents of packed rows, all of them in one call
    rms-norm            root-mean-square norms in one pass
    rotary              turns of queries and keys by their positions in one pass
    gated-mlp           act(gate) * up of a feed-forward layer in one pass
    cross-entropy       loss and gradient of a chunk of logits in place
    lora                an adapter's output added within its second product

A kernel is one row of `KERNELS`, and one module of `worker/kernels/`, which finds out where it works. The same numbers
come out within rounding; `kernels: torch` computes by torch's own operators, which tests compare with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

KernelWord = Literal["auto", "torch", "packed-attention", "rms-norm", "rotary", "gated-mlp", "cross-entropy", "lora"]
PACKED_ATTENTION, CROSS_ENTROPY = "packed-attention", "cross-entropy"
FLASH_CAPABILITY = (8, 0)
"""The compute capability of NVIDIA's cards that `packed-attention` asks for, as flash attention does."""
_FOLDER = "gangline.worker.kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel."""

    replaces: str
    """What is computed by it."""
    place: str
    """The module with its functions `obstacle` and `put_in`."""
    package: str = ""
    """The package that it needs beside those of every job; "": none. torch for CUDA and ROCm brings Triton."""
    on_gpu: bool = True
    """Whether it needs a GPU."""


KERNELS: Mapping[str, Kernel] = {
    PACKED_ATTENTION: Kernel(
        replaces="attention of packed rows, document by document", place=f"{_FOLDER}.packed_attention"
    ),
    "rms-norm": Kernel(
        replaces="root-mean-square norms, operation by operation", place=f"{_FOLDER}.rms_norm", package="triton"
    ),
    "rotary": Kernel(
        replaces="turns of queries and keys, operation by operation",
        place=f"{_FOLDER}.rotary_embedding",
        package="triton",
    ),
    "gated-mlp": Kernel(
        replaces="act(gate) * up of feed-forward layers", place=f"{_FOLDER}.gated_mlp", package="triton"
    ),
    CROSS_ENTROPY: Kernel(
        replaces="loss and gradient of logits, operation by operation",
        place=f"{_FOLDER}.cross_entropy",
        package="triton",
    ),
    "lora": Kernel(replaces="scaling and addition of adapters' outputs", place=f"{_FOLDER}.lora", on_gpu=False),
}
"""Every kernel by its name in job.yaml, in the order in which they are put in."""
