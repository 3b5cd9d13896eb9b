"""The cases of the trainer benchmark: which model, which rows, how many steps, and who takes part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SIDES = ("ours", "hf", "hf-liger", "trl", "trl-liger")
"""`ours` is gangline's Loop; the others are HF Trainer and TRL's SFTTrainer, with and without Liger's kernels."""

RANK, ALPHA = 16, 32
LEARNING_RATE, CLIP_NORM, SEED = 2e-4, 1.0, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama with random weights."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison: every side trains the same model on the same rows for the same steps."""

    name: str
    shape: Shape
    method: Literal["full", "lora"]
    packed: bool
    """Rows full of several documents, loss on all tokens; else prompt and completion, of unequal length."""
    sequence_length: int
    micro_batch: int
    accumulation: int
    steps: int
    warmup_steps: int
    """Steps at the start that are trained, but not timed."""
    precision: Literal["fp32", "bf16"] = "fp32"
    pure: bool = False
    """Trained weights, gradients and optimizer states in the compute dtype, without autocast."""
    device: Literal["cpu", "cuda"] = "cpu"
    sides: tuple[str, ...] = ("ours", "hf")

    @property
    def batch(self) -> int:
        """Rows of one optimizer step."""
        return self.micro_batch * self.accumulation

    @property
    def loss_tolerance(self) -> float:
        """How far two sides' losses may be apart. bf16 keeps 8 bits, and sums in another order round otherwise."""
        return 1e-3 if self.precision == "fp32" else 1e-2


TINY = Shape(name="tiny", hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, vocabulary=512)
SMALL = Shape(name="llama-4x256", hidden=256, intermediate=688, layers=4, heads=4, kv_heads=4, vocabulary=8192)
LLAMA_1B = Shape(
    name="llama-3.2-1b",
    hidden=2048,
    intermediate=8192,
    layers=16,
    heads=32,
    kv_heads=8,
    vocabulary=128256,
    tied=True,
)
LLAMA_8B = Shape(name="llama-3-8b", hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocabulary=128256)

CPU_CASES = (
    Case(
        name="full",
        shape=SMALL,
        method="full",
        packed=True,
        sequence_length=256,
        micro_batch=4,
        accumulation=1,
        steps=22,
        warmup_steps=2,
    ),
    Case(
        name="lora",
        shape=SMALL,
        method="lora",
        packed=False,
        sequence_length=256,
        micro_batch=4,
        accumulation=2,
        steps=18,
        warmup_steps=2,
    ),
)


def _gpu_case(name: str, shape: Shape, *, length: int, micro_batch: int, accumulation: int) -> Case:
    return Case(
        name=f"{name}-{length}",
        shape=shape,
        method="lora" if name.endswith("lora") else "full",
        packed=True,
        sequence_length=length,
        micro_batch=micro_batch,
        accumulation=accumulation,
        steps=13,
        warmup_steps=3,
        precision="bf16",
        pure=name.endswith("full"),
        device="cuda",
        sides=SIDES,
    )


GPU_CASES = (
    _gpu_case("1b-lora", LLAMA_1B, length=2048, micro_batch=4, accumulation=2),
    _gpu_case("1b-full", LLAMA_1B, length=2048, micro_batch=4, accumulation=2),
    _gpu_case("8b-lora", LLAMA_8B, length=4096, micro_batch=1, accumulation=4),
    _gpu_case("8b-full", LLAMA_8B, length=4096, micro_batch=1, accumulation=4),
)


def _tiny_case(name: str, *, packed: bool = True, pure: bool = False, precision: Literal["fp32", "bf16"]) -> Case:
    """The code path of a larger case, in a second on a CPU."""
    return Case(
        name=f"tiny-{name}",
        shape=TINY,
        method="lora" if name.startswith("lora") else "full",
        packed=packed,
        sequence_length=64,
        micro_batch=2,
        accumulation=2,
        steps=4,
        warmup_steps=1,
        precision=precision,
        pure=pure,
        sides=("ours", "hf", "trl"),
    )


TINY_CASES = (
    _tiny_case("full", precision="fp32"),
    _tiny_case("lora-rows", packed=False, precision="fp32"),
    _tiny_case("lora-bf16", precision="bf16"),
    _tiny_case("full-bf16", precision="bf16", pure=True),
)

SUITES = {"cpu": CPU_CASES, "gpu": GPU_CASES, "tiny": TINY_CASES}
CASES = {case.name: case for suite in SUITES.values() for case in suite}
