"""Peak rates of GPUs, by the names that NVML reports.

Dense fp16/bf16 with fp32 accumulation, no sparsity, in TFLOP/s, as the vendor's specifications give them. GeForce cards
of the 30, 40 and 50 series run this at twice their fp32 rate (half of what the data sheets call "tensor" with fp16
accumulation). Laptop variants have figures of their own and are absent here: theirs depend on the power limit.
"""

from __future__ import annotations

import re

_TFLOPS: dict[str, float] = {
    "GeForce RTX 3060": 25.5,
    "GeForce RTX 3060 Ti": 32,
    "GeForce RTX 3070": 40.6,
    "GeForce RTX 3070 Ti": 43.5,
    "GeForce RTX 3080": 59.5,
    "GeForce RTX 3080 Ti": 68,
    "GeForce RTX 3090": 71,
    "GeForce RTX 3090 Ti": 80,
    "GeForce RTX 4060": 30,
    "GeForce RTX 4060 Ti": 44,
    "GeForce RTX 4070": 58.3,
    "GeForce RTX 4070 SUPER": 71,
    "GeForce RTX 4070 Ti": 80,
    "GeForce RTX 4070 Ti SUPER": 88,
    "GeForce RTX 4080": 97.5,
    "GeForce RTX 4080 SUPER": 104,
    "GeForce RTX 4090": 165,
    "GeForce RTX 5060": 38,
    "GeForce RTX 5060 Ti": 47,
    "GeForce RTX 5070": 61.7,
    "GeForce RTX 5070 Ti": 87.9,
    "GeForce RTX 5080": 112.6,
    "GeForce RTX 5090": 209.5,
    "RTX A5000": 111,
    "RTX A6000": 155,
    "RTX 6000 Ada Generation": 364,
    "A10": 125,
    "A30": 165,
    "A40": 150,
    "A100-SXM4-40GB": 312,
    "A100-SXM4-80GB": 312,
    "A100-PCIE-40GB": 312,
    "A100 80GB PCIe": 312,
    "L4": 121,
    "L40": 181,
    "L40S": 362,
    "H100 PCIe": 756,
    "H100 80GB HBM3": 989,
    "H200": 989,
    "B200": 2250,
    "Tesla T4": 65,
    "Tesla V100-SXM2-16GB": 125,
    "Tesla V100-SXM2-32GB": 125,
}


def peak_flops(name: str) -> float | None:
    """Dense fp16/bf16 peak of the GPU that NVML calls `name`, in FLOP/s; None where it is not known."""
    figure = _TFLOPS.get(re.sub(r"^NVIDIA ", "", name.strip()))
    return figure * 1e12 if figure is not None else None
