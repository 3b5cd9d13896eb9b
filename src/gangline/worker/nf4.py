"""Weights of 4 bits (QLoRA): NF4 by bitsandbytes, its scales quantised in their turn.

Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs (2023), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gangline.errors import ModelError

if TYPE_CHECKING:
    from gangline.worker.quantised import QuantisedLinear

BLOCK = 64
"""Weights with one scale between them."""
SCALES_BLOCK = 256
"""Scales with one scale between them: what bitsandbytes has."""
PIECE = 1 << 20
"""Weights that are packed at a time: a multiple of BLOCK."""


class Nf4:
    """See `worker.quantised.Format`."""

    bits = 4

    def require(self) -> None:
        """Bitsandbytes is what packs and unpacks."""
        require_library("method: qlora")

    def empty(
        self, rows: int, columns: int, device: torch.device
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Two numbers a byte, a byte for each scale; and the scales' own scales, their mean, and what 8 bits mean."""
        count = rows * columns
        num_scales = -(-count // BLOCK)
        parameters = {
            "weight": torch.empty((count + 1) // 2, 1, dtype=torch.uint8, device=device),
            "scales": torch.empty(num_scales, dtype=torch.uint8, device=device),
        }
        outer = torch.empty(-(-num_scales // SCALES_BLOCK), dtype=torch.float32, device=device)
        return parameters, {
            "outer_scales": outer,
            "mean_scale": outer.new_empty(()),
            "scale_code": outer.new_empty(256),
        }

    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """A weight [out, in] as these tensors."""
        from bitsandbytes.functional import quantize_4bit, quantize_blockwise

        numbers, largest = [], []
        for piece in weight.reshape(-1).split(PIECE):  # bitsandbytes needs several times the memory of what it is given
            packed, state = quantize_4bit(piece.float(), blocksize=BLOCK, quant_type="nf4")
            numbers.append(packed)
            largest.append(state.absmax)
        scales = torch.cat(largest)
        mean = scales.mean()
        levels, outer = quantize_blockwise(scales - mean, blocksize=SCALES_BLOCK)
        return {
            "weight": torch.cat(numbers),
            "scales": levels,
            "outer_scales": outer.absmax,
            "mean_scale": mean,
            "scale_code": outer.code,
        }

    def unpack(self, layer: QuantisedLinear, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The weight [out, in], in the format of products."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        outer = QuantState(
            absmax=layer.outer_scales, code=layer.scale_code, blocksize=SCALES_BLOCK, dtype=torch.float32
        )
        state = QuantState(
            absmax=scales,
            shape=torch.Size((layer.out_features, layer.in_features)),
            dtype=torch.float32 if layer.compute is torch.float64 else layer.compute,
            blocksize=BLOCK,
            quant_type="nf4",
            offset=layer.mean_scale,
            state2=outer,
        )
        weight: torch.Tensor = dequantize_4bit(numbers, state)
        return weight.to(layer.compute)


def require_library(what: str) -> None:
    """Raise ModelError where bitsandbytes is not installed. what: the words of the job that ask for it."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"{what} needs bitsandbytes, which is not among the packages of this Python",
            seen=str(error)[:300],
            fix="pip install bitsandbytes there, or set environment: {kind: locked} for the host",
        ) from error
