"""The software of measured rows as stacks of the memory model: what each row's settings mean for bytes.

A stack says what a published library does, by version, read from its source where that can be read; nothing here knows
a single row. Numbers that were read off rows of the fitting half, because no source explains them fully, say so.
"""

from __future__ import annotations

from dataclasses import replace

from gangline.planner.architecture import Architecture, Linear
from gangline.planner.config import read_architecture
from gangline.planner.memory import CUDA, Memory, rank_memory
from gangline.planner.training import FusedPart, Number, OptimizerKind, PlannedStrategy, SoftwareStack, Training
from tests.unit.planner.rows import Row, Run, model_config

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
QKV = ("q_proj", "k_proj", "v_proj")
REPEATING = ("mistral", "mixtral")
"""Models of transformers 4 that repeat keys and values in front of flash attention."""


def predicted(row: Run) -> Memory:
    """The model's answer for the settings of a row (rank 0)."""
    return rank_memory(architecture(row), training(row), strategy(row), device=CUDA)


def architecture(row: Run) -> Architecture:
    """The model of a row; litgpt makes queries, keys and values with one matrix in every model."""
    found = read_architecture(model_config(row.model))
    if row.source != "litgpt":
        return found
    return replace(found, layers=tuple(replace(layer, linears=_joined(layer.linears)) for layer in found.layers))


def _joined(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
    parts = [each for each in linears if each.name in QKV]
    if not parts:
        return linears
    whole = replace(parts[0], name="query_key_value", outputs=sum(each.outputs for each in parts))
    return whole, *(each for each in linears if each not in parts)


def strategy(row: Run) -> PlannedStrategy:
    """How its GPUs work together."""
    kinds = {"single": "single", "ddp": "ddp", "fsdp1": "fsdp", "fsdp2": "fsdp", "zero2": "zero-2", "zero3": "zero-3"}
    return PlannedStrategy(kind=kinds[row.strategy], world_size=row.num_gpus, shard_size=row.num_gpus)


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


def stack(row: Run) -> SoftwareStack:
    """The software of a row."""
    common = SoftwareStack(
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


def _fused(row: Run) -> tuple[FusedPart, ...]:
    kernels = str(row.stack.get("kernels"))
    parts: dict[str, FusedPart] = {"RMSNorm": "norm", "RoPE": "rope"}
    return tuple(part for name, part in parts.items() if name in kernels)


def _trainer(row: Run, common: SoftwareStack) -> SoftwareStack:
    """transformers' Trainer, 4.45 to 4.48, with accelerate's FSDP1."""
    return replace(
        common,
        logit_bytes=_logit_bytes(row),
        repeats_heads=REPEATING,
        holds_inputs=row.strategy == "fsdp1",
        reduces="bf16",
    )


def _logit_bytes(row: Run) -> int:
    if row.model.startswith("gpt-bigcode"):
        # its loss is computed on logits as they are; read off the fitting half
        return (18 if row.autocast else 8) - (0 if row.loss == "plain" else 4 if row.autocast else 2)
    minor = int(str(row.stack["transformers"]).split(".")[1])
    return (14 if 46 <= minor <= 48 else 12) - (0 if row.loss == "plain" else 4)


def _litgpt(row: Run, common: SoftwareStack) -> SoftwareStack:
    """lit_gpt 8641822 with the Lightning of its requirements.txt (71aed75) and bitsandbytes 0.41.1, as their source says.

    Norms (lit_gpt/rmsnorm.py) and gelu (lit_gpt/model.py) keep their input, in its own width. One adapter serves
    queries and values of the joint matrix; LoRAQKVLinear.zero_pad (lit_gpt/lora.py) spreads it with index_copy.
    finetune/lora.py asks for logits in chunks of 128 positions of all samples, and holds the list while backward runs;
    Fabric turns what the model returns into fp32 (HalfPrecision.convert_output; also litgpt issue 1508), so a logit
    takes 4 bytes, and 4 for its log-softmax. BitsandbytesPrecision replaces every nn.Linear, the head too, and
    quantises them from fp16 (_quantize_weight): bitsandbytes unpacks to fp16 and then casts to the input's bf16.

    Not explained: rows of Llama 2 hold a tenth more per token than this code saves. RMS norms in fp32 would be most of
    it, but came on 2023-10-24 (6178c7c); the figures were there on 2023-10-20, those of 7B on 2023-10-04 (0892959).
    """
    parts = sum(target in QKV for target in row.adapter.targets) if row.adapter else len(QKV)
    return replace(
        common,
        fused=("activation", "norm"),
        adapter_share=parts / len(QKV),
        keeps_quantised_inputs=row.method == "qlora",
        quantises_head=row.method == "qlora",
        unpacked_copies=2,
        chunk_numbers=128 * row.micro_batch * architecture(row).vocabulary,
        kept_logits_bytes=4,
        kept_softmax_bytes=4,
    )


def error(row: Row) -> float:
    """Predicted allocated memory over measured, minus one."""
    return predicted(row).allocated_bytes / row.value_bytes - 1
