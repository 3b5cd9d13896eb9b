"""The cases of the trainer benchmark and of the speed table: which model, which rows, how many steps, and who."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

SIDES = ("ours", "ours-torch", "ours-compiled", "hf", "hf-liger", "trl", "trl-liger")
"""`ours` is gangline's Loop with `kernels: auto`, `ours-torch` without, `ours-compiled` with `compile: true`, too; the
others are HF Trainer and TRL's SFTTrainer, with and without Liger's kernels."""

RANK, ALPHA = 16, 32
CLIP_NORM, SEED = 1.0, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder with random weights."""

    name: str
    family: Literal["llama", "qwen3", "qwen3_moe"] = "llama"
    """transformers' model_type."""
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    """In every layer, each with `intermediate` numbers inside; 0: one block that all tokens go through."""
    active_experts: int = 0
    """Through which a token goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison: every side trains the same model on the same rows for the same steps."""

    name: str
    shape: Shape
    method: Literal["full", "lora", "qlora"]
    packed: bool
    """Rows full of several documents, loss on all tokens; else prompt and completion, of unequal length."""
    one_document: bool = False
    """Each packed row is one document: then no side needs a mask."""
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
    recompute: bool = False
    """Activations are computed again in backward (gradient checkpointing, not reentrant, every layer)."""
    drawn: bool = False
    """Each side draws the weights on the device; else it reads them from a folder."""
    learning_rate: float = 2e-4
    sides: tuple[str, ...] = ("ours", "hf")
    expected_s: float = 0.0
    """What one side takes on an H200, about: a row of the speed table is not begun with less time left."""

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
QWEN3_8B = Shape(
    name="qwen3-8b",
    family="qwen3",
    hidden=4096,
    intermediate=12288,
    layers=36,
    heads=32,
    kv_heads=8,
    vocabulary=151936,
)
QWEN3_MOE_2B = Shape(
    name="qwen3-moe-2b",
    family="qwen3_moe",
    hidden=1024,
    intermediate=512,
    layers=16,
    heads=16,
    kv_heads=8,
    vocabulary=151936,
    experts=64,
    active_experts=8,
)
"""1.6 billion weights in experts, as small as Qwen3-30B-A3B's are against its hidden size."""

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


TABLE_SIDES = ("ours", "trl-liger", "hf")


def _table_row(  # noqa: PLR0913 - a row of a table
    name: str,
    shape: Shape,
    *,
    expected_s: float,
    length: int = 2048,
    accumulation: int = 1,
    recompute: bool = False,
    sides: tuple[str, ...] = TABLE_SIDES,
) -> Case:
    """A row of the speed table: micro-batches of 8,192 tokens in packed rows of `length`."""
    method: Literal["full", "lora", "qlora"] = "full"
    if "lora" in name:
        method = "qlora" if "qlora" in name else "lora"
    return Case(
        name=name,
        shape=shape,
        method=method,
        packed=True,
        one_document=name.endswith("-one-document"),
        sequence_length=length,
        micro_batch=8192 // length,
        accumulation=accumulation,
        steps=8,
        warmup_steps=2,
        precision="bf16",
        pure=method == "full",
        device="cuda",
        recompute=recompute,
        drawn=True,
        learning_rate=2e-5 if method == "full" else 2e-4,
        sides=sides,
        expected_s=expected_s,
    )


TABLE = (
    _table_row("1b-lora-2048", LLAMA_1B, accumulation=2, expected_s=8),
    _table_row("8b-lora-2048", LLAMA_8B, expected_s=16),
    _table_row("8b-qlora-2048", LLAMA_8B, expected_s=20),
    _table_row("1b-full-2048", LLAMA_1B, accumulation=2, expected_s=8),
    _table_row("1b-lora-2048-one-document", LLAMA_1B, accumulation=2, expected_s=8, sides=("ours", "trl-liger")),
    _table_row("qwen3-8b-lora-2048", QWEN3_8B, expected_s=16),
    _table_row("moe-lora-2048", QWEN3_MOE_2B, accumulation=2, expected_s=12),
    _table_row("8b-lora-8192", LLAMA_8B, expected_s=16, length=8192),
    _table_row("8b-full-2048", LLAMA_8B, expected_s=20, recompute=True),
    _table_row("1b-lora-8192", LLAMA_1B, length=8192, accumulation=2, expected_s=8),
    _table_row("8b-lora-8192-recompute", LLAMA_8B, length=8192, recompute=True, expected_s=18),
)
"""The speed table, in the order of worth."""


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


def _tiny_row(row: Case) -> Case:
    """The code path of a row of the speed table, in seconds on a CPU."""
    experts = {"experts": 8, "active_experts": 2, "intermediate": 32} if row.shape.experts else {}
    shape = replace(TINY, name=f"tiny-{row.shape.name}", family=row.shape.family, **experts)
    size = {"sequence_length": 64, "micro_batch": 2, "steps": 4, "warmup_steps": 1}
    sides = ("ours", "trl", "hf")
    return replace(row, name=f"tiny-{row.name}", shape=shape, device="cpu", expected_s=3, sides=sides, **size)


TINY_TABLE = tuple(map(_tiny_row, TABLE))

SUITES = {"cpu": CPU_CASES, "tiny": TINY_CASES}
TABLES = {"card": TABLE, "tiny": TINY_TABLE}
CASES = {case.name: case for suite in (*SUITES.values(), *TABLES.values()) for case in suite}
