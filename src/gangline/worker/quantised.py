"""Frozen linears with few bits a number (`method: qlora`): NF4, or rows of int8.

Every `nn.Linear` inside the layers is taken, and whatever computes as one does, not the output head; what is frozen and
no linear (norms, embeddings) stays as it is, and so do adapters. A weight is unpacked for as long as it is multiplied,
in forward and again in backward, and its product is then that of an `nn.Linear`. Numbers and scales are parameters of
their own that are not trained, so that a strategy may divide them as it divides any other weight.

4 bits: NF4 by bitsandbytes, its scales quantised in their turn (Dettmers et al., QLoRA: Efficient Finetuning of
Quantized LLMs, 2023, section 3).

Experts that lie in tensors of three dimensions are taken where `method.quantise_experts` says so: rows of all of them
are those of one matrix, as in Axolotl's `quantize_moe_experts`. They are unpacked while their module runs, adapters
around them included, and autograd keeps what it multiplied with: recomputation (`activation_checkpointing`, without
which the job is refused) bounds that by one layer.

8 bits: whole numbers from -127 to 127, in rows with one scale each, the numbers of bitsandbytes' int8 (Dettmers et al.,
LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale, 2022, section 2.1). Only weights are rounded.
LLM.int8() rounds activations, too, and takes the columns of a micro-batch with an outlier out of that: a sample's
gradient would then depend on the samples beside it (decision 0021). Packed by torch itself: bitsandbytes goes by way of
fp16, which bf16 and fp32 weights may not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gangline.errors import ModelError
from gangline.runs.job import MethodJob


class QuantisedLinear(nn.Module):
    """A linear layer over a weight of few bits. It is empty at first: `pack` makes what is put into it."""

    weight: nn.Parameter
    scales: nn.Parameter

    def __init__(self, like: nn.Linear, *, stored_as: Nf4 | Int8, compute: torch.dtype) -> None:
        """like: whose shape and bias it has, and on whose device it is. compute: of products."""
        super().__init__()
        self.in_features, self.out_features = like.in_features, like.out_features
        self.stored_as, self.compute = stored_as, compute
        parameters, buffers = stored_as.empty(self.out_features, self.in_features, like.weight.device)
        for name, tensor in parameters.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor, persistent=False)
        self.bias = like.bias

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Value [..., in] -> [..., out], in the format of products."""
        value = value.to(self.compute)
        # others change in place what a function of our own returns (Falcon, adapters), which may be no view then; a
        # product with a bias would be one, but of rows
        given = value if self.bias is None else value.reshape(-1, self.in_features)
        product: torch.Tensor = _Product.apply(given, self.weight, self.scales, self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product.view(*value.shape[:-1], self.out_features)

    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """A weight [out, in] as the tensors of such a layer, by their names, on the device that it is on."""
        with torch.no_grad():
            return self.stored_as.pack(weight)

    def unpack(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The weight [out, in] that these numbers and scales stand for, in the format of products."""
        return self.stored_as.unpack(self, numbers, scales)

    def extra_repr(self) -> str:
        """For print(model)."""
        shape = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, bias={self.bias is not None}, bits={self.stored_as.bits}"


class QuantisedExperts(QuantisedLinear):
    """The weights of experts, a tensor of three dimensions under `key` of their module, of few bits."""

    def __init__(self, experts: nn.Module, key: str, *, stored_as: Nf4 | Int8, compute: torch.dtype) -> None:
        weight = getattr(experts, key)
        self.shape, self.key = weight.shape, key
        with torch.device("meta"):
            like = nn.Linear(weight.shape[2], weight.shape[0] * weight.shape[1], bias=False)
        super().__init__(like, stored_as=stored_as, compute=compute)
        self.to_empty(device=weight.device)

    def unpack(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The weights [experts, rows, columns], in the format of products."""
        return super().unpack(numbers, scales).view(self.shape)

    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Weights [experts, rows, columns] as the tensors of this module."""
        return super().pack(weight.reshape(self.out_features, self.in_features))

    def serve(self, core: nn.Module, experts: nn.Module) -> None:
        """Unpack them for as long as their module runs, or the outermost adapter around it; else nothing is there."""
        outer = next(part for part in core.modules() if part is experts or _wraps(part, experts))
        empty = torch.empty(0, dtype=self.compute, device=self.weight.device)
        setattr(experts, self.key, nn.Parameter(empty, requires_grad=False))

        def put(*_: Any) -> None:
            with torch.no_grad():
                weight = self.unpack(self.weight, self.scales)
            setattr(experts, self.key, nn.Parameter(weight, requires_grad=False))

        def take(*_: Any) -> None:
            nothing = self.weight.new_empty(0, dtype=self.compute)
            setattr(experts, self.key, nn.Parameter(nothing, requires_grad=False))

        outer.register_forward_pre_hook(put)
        outer.register_forward_hook(take, always_call=True)  # recomputation ends with an exception


def _wraps(part: nn.Module, experts: nn.Module) -> bool:
    """Whether it is an adapter of peft's around these experts."""
    return hasattr(part, "parameter_name") and part.get_base_layer() is experts  # type: ignore[operator]


class _Product(torch.autograd.Function):
    """value @ weight.T + bias, which keeps the few bits of each number for backward; the bias is frozen, too."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, layer: QuantisedLinear
    ) -> torch.Tensor:
        ctx.save_for_backward(numbers, scales)
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(layer.compute)
        return F.linear(value, layer.unpack(numbers, scales), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        weight = ctx.layer.unpack(*ctx.saved_tensors)
        return gradients[0].to(weight.dtype) @ weight, None, None, None


def replace_linears(
    core: nn.Module, layers: nn.ModuleList, method: MethodJob, *, compute: torch.dtype
) -> list[tuple[QuantisedLinear, nn.Parameter]]:
    """Put an empty layer of few bits in the place of every linear inside `layers`: what came for which weight.

    Raises ModelError where what packs them is not there, and for experts in tensors of three dimensions, which are no
    linears and would stay as they are unless `quantise_experts` says so.
    """
    stored_as = FORMATS[method.bits]
    stored_as.require()
    total = sum(each.numel() for name, each in layers.named_parameters() if ".lora_" not in name)
    others = [part for part in layers.modules() if not isinstance(part, nn.Conv1d)]
    experts = sum(each.numel() for part in others for each in part.parameters(recurse=False) if each.ndim > 2)
    if experts and not method.quantise_experts:
        raise ModelError(
            "method: qlora cannot quantise the experts of this model",
            seen=f"they are tensors of three dimensions, {100 * experts / total:.0f} % of the weights of all layers, "
            "which it cannot quantise",
            fix="add quantise_experts: true below method:, or write method: lora, with strategy: fsdp or hsdp if no "
            "device holds the model",
        )
    found: list[tuple[QuantisedLinear, nn.Parameter]] = []
    for parent, key, linear in list(_linears(core, layers)):
        made = QuantisedLinear(linear, stored_as=stored_as, compute=compute)
        setattr(parent, key, made)
        found.append((made, linear.weight))
    for parent, key, weight in list(_experts(layers)) if method.quantise_experts else []:
        packed = QuantisedExperts(parent, key, stored_as=stored_as, compute=compute)
        parent.add_module(f"{PACKED}{key}", packed)
        packed.serve(core, parent)
        found.append((packed, weight))
    share = sum(weight.numel() for _, weight in found) / total
    if share < 0.5:
        raise ModelError(
            "method: qlora finds too few linears in this model",
            seen=f"{100 * share:.0f} % of the weights of its layers are in an nn.Linear; the others would stay as they "
            "are",
            fix="write method: lora, with a strategy that divides the model if no device holds it",
        )
    return found


@torch.no_grad()
def quantise(
    core: nn.Module,
    layers: nn.ModuleList,
    method: MethodJob,
    *,
    compute: torch.dtype,
    device: torch.device | str,
) -> None:
    """Turn the linears of a model that is loaded into those of few bits on `device`, one after the other.

    On the meta device they stay empty. Raises ModelError as `replace_linears` does.
    """
    for made, weight in replace_linears(core, layers, method, compute=compute):
        if torch.device(device).type == "meta":
            continue
        packed = made.pack(weight.to(device))
        weight.data = weight.new_empty(0)
        for name, tensor in packed.items():
            is_parameter = isinstance(getattr(made, name), nn.Parameter)
            setattr(made, name, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def num_weights(model: nn.Module) -> int:
    """Numbers in all weights, those of few bits counted as what they stand for."""
    packed = [layer for layer in model.modules() if isinstance(layer, QuantisedLinear)]
    inside = sum(layer.weight.numel() + layer.scales.numel() for layer in packed)
    stand_for = sum(layer.in_features * layer.out_features for layer in packed)
    # DeepSpeed's zero-3 leaves none of a weight in its place
    found = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    return found - inside + stand_for


def _linears(core: nn.Module, layers: nn.ModuleList) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Parent, name there, and linear: the base model's, not those of adapters."""
    inside = {id(module) for module in layers.modules()}
    kinds = {kind for kind in {type(module) for module in layers.modules()} if multiplies(kind)}
    for prefix, parent in core.named_modules():
        if id(parent) not in inside or ".lora_" in f".{prefix}.":
            continue
        for key, module in parent.named_children():
            if isinstance(module, nn.Linear) and type(module) in kinds and not key.startswith("lora_"):
                yield parent, key, module


PACKED = "packed_"
"""What the name of a module of few bits begins with, before that of the tensor of experts that it stands for."""


def _experts(layers: nn.ModuleList) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Module, name there, and weight: the tensors of experts, not other ones of three dimensions (convolutions)."""
    for prefix, parent in layers.named_modules():
        for key, parameter in list(parent.named_parameters(recurse=False)):
            if parameter.ndim == 3 and "expert" in prefix and not prefix.endswith("conv1d"):
                yield parent, key, parameter


@torch.no_grad()
def multiplies(kind: type[nn.Module]) -> bool:
    """Whether modules of this kind compute what an `nn.Linear` with their weight and bias does.

    Of a subclass (Falcon has one) that is tried on a small linear, not looked up; one that needs more than weight and
    bias is none.
    """
    if kind is nn.Linear or not issubclass(kind, nn.Linear):
        return kind is nn.Linear
    value = torch.linspace(-1, 1, 12, dtype=torch.float64, device="cpu").view(4, 3)
    for bias in (True, False):
        # nothing is drawn: a run's random numbers stay where they are
        plain = nn.utils.skip_init(nn.Linear, 3, 2, bias=bias, dtype=torch.float64, device="cpu")
        for number, parameter in enumerate(plain.parameters(), 1):
            numbers = torch.arange(parameter.numel(), dtype=torch.float64, device="cpu")
            parameter.copy_(torch.sin(number + numbers).view_as(parameter))
        try:
            made: object = kind.forward(plain, value)
        except (TypeError, AttributeError, RuntimeError, ValueError, IndexError, AssertionError):
            return False
        if not isinstance(made, torch.Tensor) or not torch.allclose(made, plain(value), rtol=1e-12, atol=1e-12):
            return False
    return True


BLOCK = 64
"""Weights with one scale between them."""
SCALES_BLOCK = 256
"""Scales with one scale between them: what bitsandbytes has."""
PIECE = 1 << 20
"""Weights that are packed at a time: a multiple of BLOCK."""


class Nf4:
    """Four bits: packed and unpacked by bitsandbytes."""

    bits = 4

    def require(self) -> None:
        """Raise ModelError where bitsandbytes is missing."""
        require_library("method: qlora")

    def empty(
        self, rows: int, columns: int, device: torch.device
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Memory for a weight: `weight` and `scales`, which strategies may shard by rows; and tensors to be kept whole.

        Two numbers a byte, a byte for each scale; and the scales' own scales, their mean, and the values of 8 bits.
        """
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
        """A weight [out, in] as all of these tensors, on the device that it is on."""
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
        """The weight [out, in] of these numbers and scales, in the dtype of the layer's products."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        outer = QuantState(
            absmax=layer.outer_scales, code=layer.scale_code, blocksize=SCALES_BLOCK, dtype=torch.float32
        )
        state = QuantState(
            absmax=scales,
            shape=torch.Size((1, layer.out_features * layer.in_features)),  # its CPU kernel mixes up narrow rows
            dtype=torch.float32 if layer.compute is torch.float64 else layer.compute,
            blocksize=BLOCK,
            quant_type="nf4",
            offset=layer.mean_scale,
            state2=outer,
        )
        weight: torch.Tensor = dequantize_4bit(numbers, state)
        return weight.view(layer.out_features, layer.in_features).to(layer.compute)


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


LARGEST = 127
LOT = 1 << 20
"""Numbers that are packed at once, and that a processor unpacks at once: formats are widened in copies. A GPU unpacks
all in one go, and without a copy.
"""


class Int8:
    """Eight bits in rows of one scale each, with the methods of `Nf4`; torch alone packs and unpacks them."""

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


FORMATS: dict[int, Nf4 | Int8] = {4: Nf4(), 8: Int8()}
"""By the bits of a number, scales left out."""
