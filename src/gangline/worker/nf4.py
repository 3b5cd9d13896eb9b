"""Frozen weights of 4 bits (QLoRA): NF4 by bitsandbytes, its scales quantised in their turn.

Every `nn.Linear` inside the layers is taken, not the output head; what is frozen and no linear (norms, embeddings)
stays as it is, and so do adapters. A weight is unpacked for as long as it is multiplied, in forward and again in
backward, and its product is then that of an `nn.Linear`. Numbers and scales are parameters of their own that nothing is
trained of, so that a strategy may divide them as it divides any other weight.

Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs (2023), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gangline.errors import ModelError

BLOCK = 64
"""Weights with one scale between them."""
SCALES_BLOCK = 256
"""Scales with one scale between them: what bitsandbytes has."""
PIECE = 1 << 20
"""Weights that are packed at a time: a multiple of BLOCK."""


class Nf4Linear(nn.Module):
    """A linear layer whose weight has 4 bits a number. It is empty at first: `take` gives it a weight."""

    def __init__(self, like: nn.Linear, *, compute: torch.dtype) -> None:
        """like: whose shape and bias it has, and on whose device it is. compute: of products."""
        super().__init__()
        self.in_features, self.out_features = like.in_features, like.out_features
        self.compute = compute
        device, count = like.weight.device, like.weight.numel()
        num_scales = -(-count // BLOCK)
        bytes_of = {"dtype": torch.uint8, "device": device}
        self.weight = nn.Parameter(torch.empty((count + 1) // 2, 1, **bytes_of), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(num_scales, **bytes_of), requires_grad=False)
        self.bias = like.bias
        outer = torch.empty(-(-num_scales // SCALES_BLOCK), dtype=torch.float32, device=device)
        self.register_buffer("outer_scales", outer, persistent=False)
        self.register_buffer("mean_scale", outer.new_empty(()), persistent=False)
        self.register_buffer("scale_code", outer.new_empty(256), persistent=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Value [..., in] -> [..., out], in the format of products."""
        product: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            value.to(self.compute), self.weight, self.scales, self
        )
        return product

    @torch.no_grad()
    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """A weight [out, in] as the tensors of such a layer, by their names, on the device that it is on."""
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

    def unpack(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The weight [out, in] that these numbers and scales stand for, in the format of products."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        outer = QuantState(absmax=self.outer_scales, code=self.scale_code, blocksize=SCALES_BLOCK, dtype=torch.float32)
        state = QuantState(
            absmax=scales,
            shape=torch.Size((self.out_features, self.in_features)),
            dtype=torch.float32 if self.compute is torch.float64 else self.compute,
            blocksize=BLOCK,
            quant_type="nf4",
            offset=self.mean_scale,
            state2=outer,
        )
        weight: torch.Tensor = dequantize_4bit(numbers, state)
        return weight.to(self.compute)

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _Product(torch.autograd.Function):
    """value @ weight.T + bias, which keeps 4 bits of each number for backward; the bias is frozen, too."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, layer: Nf4Linear
    ) -> torch.Tensor:
        ctx.save_for_backward(numbers, scales)
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(layer.compute)
        return F.linear(value, layer.unpack(numbers, scales), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        weight = ctx.layer.unpack(*ctx.saved_tensors)
        return gradients[0].to(weight.dtype) @ weight, None, None, None


def put_empty(core: nn.Module, layers: nn.ModuleList, *, compute: torch.dtype) -> list[tuple[Nf4Linear, nn.Linear]]:
    """Put an empty layer of 4 bits in the place of every linear inside `layers`: what came for what.

    Raises ModelError where bitsandbytes is not there, and for experts in tensors of three dimensions, which are no
    linears and would stay as they are.
    """
    require_library("method: qlora")
    _refuse_experts(layers)
    total = _numbers(layers)
    found = []
    for parent, key, linear in list(_linears(core, layers)):
        made = Nf4Linear(linear, compute=compute)
        setattr(parent, key, made)
        found.append((made, linear))
    taken = sum(linear.weight.numel() for _, linear in found)
    if taken < total / 2:
        raise _few(taken / total)
    return found


def _numbers(layers: nn.ModuleList) -> int:
    """In all weights of the base model's layers."""
    return sum(each.numel() for name, each in layers.named_parameters() if ".lora_" not in name)


def _few(share: float) -> ModelError:
    return ModelError(
        "method: qlora finds too few linears in this model",
        seen=f"{100 * share:.0f} % of the weights of its layers are in torch's nn.Linear; the others would stay as "
        "they are",
        fix="write method: lora, with a strategy that divides the model if no device holds it",
    )


@torch.no_grad()
def quantise(core: nn.Module, layers: nn.ModuleList, *, compute: torch.dtype, device: torch.device | str) -> None:
    """Turn the linears of a model that is loaded into those of 4 bits on `device`, one after the other.

    On the meta device they stay empty. Raises ModelError as `put_empty` does.
    """
    for made, linear in put_empty(core, layers, compute=compute):
        if torch.device(device).type == "meta":
            continue
        packed = made.pack(linear.weight.to(device))
        linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
        for name, tensor in packed.items():
            _put(made, name, tensor)


def num_weights(model: nn.Module) -> int:
    """Numbers in all weights, those of 4 bits counted as what they stand for."""
    packed = [layer for layer in model.modules() if isinstance(layer, Nf4Linear)]
    inside = sum(layer.weight.numel() + layer.scales.numel() for layer in packed)
    stand_for = sum(layer.in_features * layer.out_features for layer in packed)
    # DeepSpeed's zero-3 leaves none of a weight in its place
    found = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    return found - inside + stand_for


def _put(layer: Nf4Linear, name: str, tensor: torch.Tensor) -> None:
    """Give a layer one of its tensors, on whatever device that is."""
    if name in layer._parameters:
        layer._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    else:
        layer._buffers[name] = tensor


def _linears(core: nn.Module, layers: nn.ModuleList) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Parent, name there, and linear: the base model's, not those of adapters."""
    inside = {id(module) for module in layers.modules()}
    for prefix, parent in core.named_modules():
        if id(parent) not in inside or ".lora_" in f".{prefix}.":
            continue
        for key, module in parent.named_children():
            if type(module) is nn.Linear and not key.startswith("lora_"):
                yield parent, key, module


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


def _refuse_experts(layers: nn.ModuleList) -> None:
    total = sum(parameter.numel() for parameter in layers.parameters())
    experts = sum(parameter.numel() for parameter in layers.parameters() if parameter.ndim > 2)
    if experts:
        raise ModelError(
            "method: qlora cannot quantise the experts of this model",
            seen=f"they are tensors of three dimensions, {100 * experts / total:.0f} % of the weights of all layers, "
            "which would stay as they are",
            fix="write method: lora, with strategy: fsdp or hsdp if no device holds the model",
        )
