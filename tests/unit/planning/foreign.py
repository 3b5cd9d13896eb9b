"""The software of measured rows as stacks of the memory model: what each row's settings mean for bytes.

A stack says what a published library does, by version, read from its source where that can be read; nothing here knows
a single row. Numbers that were read off rows of the fitting half, because no source explains them fully, say so.
"""

from __future__ import annotations

from dataclasses import replace

from gangline.planning.architecture import Architecture
from gangline.planning.config import read_architecture
from gangline.planning.memory import Memory, rank_memory
from gangline.planning.overheads import CUDA
from gangline.planning.training import Number, OptimizerKind, Part, Stack, Strategy, Training
from tests.unit.planning.rows import Row, Run, model_config

DTYPES: dict[str, Number] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "paged_adamw_8bit": "paged-adamw-8bit",
    "paged_adamw_32bit": "paged-adamw-8bit",
    "adamw_8bit": "adamw-8bit",
}
LOSSES = {
    "plain": "plain",
    "triton_inplace": "inplace",
    "fused_linear": "fused",
    "chunked-8": "chunked",
    "chunked-128-tokens": "chunked",
}
ATTENTION = {"sdpa": "flash", "flash2": "flash", "sdpa-efficient": "efficient", "eager": "eager"}
REPEATING = ("mistral", "mixtral")
"""Models of transformers 4 that repeat keys and values in front of flash attention."""


def predicted(row: Run) -> Memory:
    """The model's answer for the settings of a row (rank 0)."""
    return rank_memory(architecture(row), training(row), strategy(row), device=CUDA)


def architecture(row: Run) -> Architecture:
    """The model of a row."""
    return read_architecture(model_config(row.model))


def strategy(row: Run) -> Strategy:
    """How its GPUs work together."""
    kinds = {"single": "single", "ddp": "ddp", "fsdp1": "fsdp", "fsdp2": "fsdp", "zero2": "zero-2", "zero3": "zero-3"}
    return Strategy(kind=kinds[row.strategy], world_size=row.num_gpus, shard_size=row.num_gpus)


def training(row: Run) -> Training:
    """What one GPU computes."""
    full = row.method == "full"
    stored = row.weights_dtype if full else row.adapter_dtype or "float32"
    adapter = row.adapter
    return Training(
        method=row.method,
        micro_batch=row.micro_batch,
        sequence_length=row.seq_len or 0,
        compute=DTYPES[row.compute_dtype],
        parameters=DTYPES[stored],
        rank=adapter.rank if adapter else 0,
        targets=_targets(row),
        dropout=adapter.dropout if adapter else 0.0,
        checkpointing=row.checkpointing == "full",
        double_quant=row.quant == "nf4-dq",
        optimizer=OPTIMIZERS[row.optimizer],
        stack=stack(row),
    )


def _targets(row: Run) -> tuple[str, ...]:
    if row.adapter is None:
        return ("all-linear",)
    names = {each.name for layer in architecture(row).layers for each in layer.linears}
    # litgpt names the parts of the one matrix that holds queries, keys and values
    return row.adapter.targets if names & set(row.adapter.targets) else ("query_key_value",)


def stack(row: Run) -> Stack:
    """The software of a row."""
    common = Stack(
        name=row.source,
        loss=LOSSES[row.loss],
        attention=ATTENTION[row.attention],
        upcasts=row.kbit_upcast == "all",
        upcast_norms=row.kbit_upcast == "norms",
        foreach=row.optimizer == "adamw_torch",
        autocast=row.autocast,
        expert_modules=True,
        fused=_fused(row),
    )
    if row.source.startswith("fms"):
        return _trainer(row, common)
    if row.source == "litgpt":
        return _litgpt(row, common)
    # a loop of one's own, which still holds the model's output during backward
    held = {"all": 4}.get(row.kbit_upcast, 2) if row.keeps_logits else 0
    math = row.source == "canifinetune" and row.kbit_upcast == "all"
    return replace(common, kept_logits_bytes=held, attention="math" if math else common.attention)


def _fused(row: Run) -> tuple[Part, ...]:
    kernels = str(row.stack.get("kernels"))
    parts: dict[str, Part] = {"RMSNorm": "norm", "RoPE": "rope"}
    return tuple(part for name, part in parts.items() if name in kernels)


def _trainer(row: Run, common: Stack) -> Stack:
    """transformers' Trainer, 4.45 to 4.48, with accelerate's FSDP1."""
    return replace(
        common,
        logit_bytes=_logit_bytes(row),
        repeats_heads=row.model.startswith(REPEATING),
        holds_inputs=row.strategy == "fsdp1",
        reduces="bf16",
    )


def _logit_bytes(row: Run) -> int:
    if row.model.startswith("gpt-bigcode"):
        # its loss is computed on logits as they are; read off the fitting half
        return (18 if row.autocast else 8) - (0 if row.loss == "plain" else 4 if row.autocast else 2)
    minor = int(str(row.stack["transformers"]).split(".")[1])
    return (14 if 46 <= minor <= 48 else 12) - (0 if row.loss == "plain" else 4)


def _litgpt(row: Run, common: Stack) -> Stack:
    """Its own models: native gelu; bitsandbytes of its time held inputs; the chunk is 128 tokens."""
    vocabulary = architecture(row).vocabulary
    return replace(
        common,
        fused=("activation",),
        keeps_quantised_inputs=row.method == "qlora",
        chunk_numbers=128 * vocabulary,
        # the list of all chunks' logits, and the log-softmax of each, in half precision
        kept_logits_bytes=4,
    )


def error(row: Row) -> float:
    """Predicted allocated memory over measured, minus one."""
    return predicted(row).allocated_bytes / row.value_bytes - 1
