"""Weights of 8 bits: whole numbers from -127 to 127, in rows with one scale each, the numbers of bitsandbytes' int8.

Only weights are rounded. LLM.int8() rounds what they are multiplied with, too, and takes the columns of a micro-batch
with an outlier out of that: a sample's gradient would then depend on which others are computed beside it (decision
0021). Packed by torch itself: bitsandbytes goes by way of fp16, which bf16 and fp32 weights may not fit.

Source: Dettmers et al., LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale (2022), section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gangline.worker.quantised import QuantisedLinear

LARGEST = 127
LOT = 1 << 20
"""Numbers that are packed at once, and that a processor unpacks at once: formats are widened in copies. A GPU unpacks
all in one go, and without a copy.
"""


class Int8:
    """See `worker.quantised.Format`."""

    bits = 8

    def require(self) -> None:
        """Torch is enough."""

    def empty(
        self, rows: int, columns: int, device: torch.device
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """A byte for each number, and the largest absolute value of each row."""
        return {
            "weight": torch.empty(rows, columns, dtype=torch.int8, device=device),
            "scales": torch.empty(rows, dtype=torch.float32, device=device),
        }, {}

    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """A weight [out, in] as these tensors. No number is off by more than a 254th of the largest of its row."""
        numbers, scales = [], []
        for rows in weight.split(max(1, LOT // weight.shape[1])):
            wide = rows.float()
            largest = wide.abs().amax(dim=1)
            inverse = torch.where(largest == 0, 0.0, LARGEST / largest)
            numbers.append((wide * inverse[:, None]).round_().to(torch.int8))
            scales.append(largest)
        return {"weight": torch.cat(numbers), "scales": torch.cat(scales)}

    def unpack(self, layer: QuantisedLinear, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The weight [out, in], in the format of products, each number rounded to it once."""
        weight = torch.empty(numbers.shape, dtype=layer.compute, device=numbers.device)
        units = (scales.to(torch.promote_types(layer.compute, torch.float32)) / LARGEST)[:, None]
        rows = max(1, LOT // layer.in_features) if weight.device.type == "cpu" else layer.out_features
        for start in range(0, layer.out_features, rows):
            part = slice(start, start + rows)
            torch.mul(numbers[part], units[part], out=weight[part])
        return weight
