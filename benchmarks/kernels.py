"""Times of each kernel against torch's operators, and against Liger's where liger-kernel is installed, on one card.

    python -m benchmarks.kernels [--tokens 8192] [--rounds 15] [--seconds 35] [--out FILE]

The shapes are those of Llama-3.2-1B in bf16. The sides take turns; a round is forward and backward, between two events
of the card. A line for each kernel and side: median and worst milliseconds, and the most memory in MiB beyond what was
there before. Nothing is timed on a processor.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from gangline.worker import documents
from gangline.worker.borders import remember_borders
from gangline.worker.loss import LinearCrossEntropy

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD, VOCABULARY, RANK = 2048, 8192, 32, 8, 64, 128_256, 16
DTYPE = torch.bfloat16
HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None
Step = Callable[[], object]
Begin = Callable[[], Step]
"""Makes fresh inputs, as some kernels write over theirs, and gives the step that is timed."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One kernel: its sides, each of which does forward and backward of the same thing."""

    name: str
    sides: dict[str, Begin]


def tensor(*shape: int, grad: bool = True) -> torch.Tensor:
    """Normal numbers in bf16 on the card."""
    return torch.randn(shape, device="cuda", dtype=DTYPE).requires_grad_(grad)


def there_and_back(function: Callable[..., object], leaves: list[torch.Tensor]) -> Begin:
    """Forward and backward of a function of these tensors, whose numbers stay."""
    made = function(*fresh(leaves))
    outputs = [made] if isinstance(made, torch.Tensor) else list(made)
    kept = [torch.randn_like(each) for each in outputs]

    def begin() -> Step:
        inputs, gradients = fresh(leaves), [each.clone() for each in kept]
        return lambda: torch.autograd.grad(function(*inputs), inputs, gradients)

    return begin


def fresh(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with gradients of their own."""
    return [each.detach().clone().requires_grad_() for each in leaves]


def norms(tokens: int) -> Trial:
    """The norm before a layer, with a frozen weight as under LoRA."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from gangline.worker.kernels.rms_norm import Form, RmsNorm

    x, own = tensor(1, tokens, HIDDEN), LlamaRMSNorm(HIDDEN).to("cuda", DTYPE).requires_grad_(False)
    form = Form(0.0, True, "variance_epsilon")
    sides = {"torch": own, "ours": lambda x: RmsNorm.apply(x, own.weight, 1e-6, form)}
    if HAS_LIGER:
        from liger_kernel.ops import LigerRMSNormFunction

        sides["liger"] = lambda x: LigerRMSNormFunction.apply(x, own.weight, 1e-6, 0.0, "llama", False, None)
    return Trial("rms-norm", {side: there_and_back(function, [x]) for side, function in sides.items()})


def products(tokens: int) -> Trial:
    """silu(gate) * up."""
    from gangline.worker.kernels.gated_mlp import GatedProduct

    leaves = [tensor(1, tokens, INTERMEDIATE), tensor(1, tokens, INTERMEDIATE)]
    sides = {"torch": lambda a, b: F.silu(a) * b, "ours": lambda a, b: GatedProduct.apply(a, b, False)}
    if HAS_LIGER:
        from liger_kernel.ops import LigerSiLUMulFunction

        sides["liger"] = LigerSiLUMulFunction.apply
    return Trial("gated-mlp", {side: there_and_back(function, leaves) for side, function in sides.items()})


def turns(tokens: int) -> Trial:
    """Queries and keys by their positions."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from gangline.worker.kernels.rotary_embedding import rotate

    leaves = [tensor(4, tokens // 4, heads, HEAD) for heads in (HEADS, KV_HEADS)]
    cos, sin = tensor(4, tokens // 4, HEAD, grad=False), tensor(4, tokens // 4, HEAD, grad=False)
    functions: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
        "torch": apply_rotary_pos_emb,
        "ours": rotate,
    }
    if HAS_LIGER:
        from liger_kernel.ops import LigerRopeFunction

        functions["liger"] = LigerRopeFunction.apply

    def side(function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Begin:
        return there_and_back(lambda *each: function(*(one.transpose(1, 2) for one in each), cos, sin), leaves)

    return Trial("rotary", {name: side(function) for name, function in functions.items()})


def losses(tokens: int) -> Trial:
    """The output head and the loss with a frozen head, as under LoRA."""
    from gangline.worker.kernels.cross_entropy import cross_entropy_in_place

    hidden, head = tensor(tokens, HIDDEN), tensor(VOCABULARY, HIDDEN, grad=False) * 0.02
    goal = torch.randint(VOCABULARY, (tokens,), device="cuda")
    functions = {
        "torch": lambda hidden: LinearCrossEntropy.apply(hidden, head, None, goal, DTYPE, True, None),
        "ours": lambda hidden: LinearCrossEntropy.apply(hidden, head, None, goal, DTYPE, True, cross_entropy_in_place),
    }
    if HAS_LIGER:
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        functions["liger"] = lambda hidden: liger(head, hidden, goal)
    return Trial("cross-entropy", {side: there_and_back(function, [hidden]) for side, function in functions.items()})


def adapters(tokens: int) -> Trial:
    """A linear with an adapter in fp32 under autocast, as in a job with `method: lora`."""
    import peft

    from gangline.worker.kernels.lora import AdaptedLinear

    base = nn.Sequential(nn.Linear(HIDDEN, INTERMEDIATE, bias=False))
    config = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules=["0"], init_lora_weights=False)
    model = peft.get_peft_model(base, config).cuda()
    layer = model.base_model.model[0]
    layer.base_layer.to(DTYPE).requires_grad_(False)
    first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = tensor(1, tokens, HIDDEN)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return AdaptedLinear.apply(x, layer.base_layer.weight, None, first, second, 2.0)

    def side(function: Callable[..., torch.Tensor]) -> Begin:
        gradient = tensor(1, tokens, INTERMEDIATE, grad=False)

        def step() -> object:
            with torch.autocast("cuda", dtype=DTYPE, cache_enabled=False):
                out = function(x).view(1, tokens, INTERMEDIATE)
            return torch.autograd.grad(out, [x, first, second], gradient)

        return lambda: step

    return Trial("lora", {"torch": side(layer), "ours": side(ours)})


def attention(tokens: int) -> Trial:
    """Four packed rows with documents of 20 to 400 tokens."""
    length = tokens // 4
    draw = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(4):
        parts: list[torch.Tensor] = []
        while sum(map(len, parts)) < length:
            parts.append(torch.arange(int(torch.randint(20, 400, (), generator=draw))))
        rows.append(torch.cat(parts)[:length])
    here = torch.stack(rows)
    positions = here.cuda()
    remember_borders(positions, here)
    layer = SimpleNamespace(is_causal=True, num_key_value_groups=HEADS // KV_HEADS)
    leaves = [tensor(4, length, heads, HEAD) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    functions = {"torch": documents.attend, "ours": documents.attend_at_once}

    def side(function: Callable[..., tuple[torch.Tensor, None]]) -> Begin:
        gradient = tensor(4, length, HEADS, HEAD, grad=False)

        def step() -> object:
            out, _ = function(layer, *(each.transpose(1, 2) for each in leaves), None, position_ids=positions)
            return torch.autograd.grad(out, leaves, gradient)

        return lambda: step

    return Trial("packed-attention", {name: side(function) for name, function in functions.items()})


TRIALS = (attention, losses, adapters, norms, products, turns)


def measure(trial: Trial, *, rounds: int) -> list[dict[str, object]]:
    """The figures of each side; one that fails has its error in their place."""
    times: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    errors: dict[str, str] = {}
    for number in range(rounds + 2):  # two to compile and to warm up
        for side, prepare in trial.sides.items():
            if side in errors:
                continue
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            try:
                step = prepare()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                begin.record()
                step()
                end.record()
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - a side that cannot is a result
                errors[side] = f"{type(error).__name__}: {str(error)[:300]}"
                continue
            if number >= 2:
                times.setdefault(side, []).append(begin.elapsed_time(end))
                peaks[side] = (torch.cuda.max_memory_allocated() - before) / (1 << 20)
    return [
        {"kernel": trial.name, "side": side, "error": errors[side]}
        if side in errors
        else {
            "kernel": trial.name,
            "side": side,
            "median_ms": round(statistics.median(times[side]), 4),
            "worst_ms": round(max(times[side]), 4),
            "peak_mib": round(peaks[side], 1),
        }
        for side in trial.sides
    ]


def main() -> None:
    """Measure all kernels, within the seconds given, and print a line for each side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=35.0)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.kernels needs a card: torch.cuda.is_available() is False; run it on a machine with a GPU")
    began = time.monotonic()
    card = torch.cuda.get_device_name()
    for make in TRIALS:
        if time.monotonic() - began > words.seconds:
            print(json.dumps({"kernel": make.__name__, "error": "no time was left"}))
            continue
        try:
            lines = measure(make(words.tokens), rounds=words.rounds)
        except Exception as error:  # noqa: BLE001 - one that cannot begin leaves time for the others
            lines = [{"kernel": make.__name__, "error": f"{type(error).__name__}: {str(error)[:300]}"}]
        for line in lines:
            text = json.dumps({**line, "tokens": words.tokens, "card": card, "torch": torch.__version__})
            print(text, flush=True)
            if words.out is not None:
                with words.out.open("a", encoding="utf-8") as stream:
                    stream.write(text + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
