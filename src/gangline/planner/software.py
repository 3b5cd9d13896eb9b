"""The software that people train with, as far as bytes depend on it: a row for every `--stack`.

A row says what a published library does, by version, read from its source or its documentation. None knows a single
measured run; `python -m benchmarks.plan_gpu_memory` compares the measured ones with peaks that others published.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace

from gangline.planner.architecture import Architecture
from gangline.planner.training import (
    BYTES,
    GANGLINE,
    GANGLINE_CPU,
    FusedPart,
    Number,
    PlannedStrategy,
    SoftwareStack,
    Training,
)
from gangline.strategies.table import ALONE

PEFT = "peft (0.12 and later): adapters are fp32 over frozen weights of 16 bits (autocast_adapter_dtype)"
UPCAST = "peft, prepare_model_for_kbit_training: norms, embedding and head in fp32, and the residual stream with them"
HF_LOSS = "transformers (loss/loss_utils.py): logits in fp32 for cross-entropy; log-softmax, two gradients in backward"
HF_LOSS_OLD = "transformers 4.46 to 4.48: in forward logits, fp32 logits, shifted ones and log-softmax"
FOREACH = "torch.optim.AdamW: the foreach path makes one more copy of all trained numbers"
FSDP1 = "torch FSDP1: hooks on frozen weights hold each layer's input and its gradient until backward is over"
TRITON_CE = "the kernel of cross-entropy writes the gradient over the logits"
LIGER = "Liger (fused_linear_cross_entropy.py): logits and gradients a chunk at a time"
UNSLOTH = "github.com/unslothai/unsloth (kernels/fast_lora.py, cross_entropy_loss.py; unsloth_zoo: fused_losses)"
FMS = "github.com/foundation-model-stack/fms-acceleration (scripts/benchmarks: defaults.yaml, scenarios.yaml, refs)"
LITGPT = "github.com/Lightning-AI/litgpt (litgpt/finetune/lora.py, model.py, lora.py, utils.py)"
ANSWER = "github.com/AnswerDotAI/fsdp_qlora (train.py, benchmarks_03_2024.md)"
PRIME = "github.com/PrimeIntellect-ai/prime-rl (src/prime_rl/trainer: model.py, models/layers/lm_head.py, lora)"

HF = SoftwareStack(
    name="hf",
    about="transformers' Trainer under autocast (bf16: true), sdpa",
    known="reasoned",
    sources=(HF_LOSS, FOREACH),
    loss="plain",
    pooled_logit_bytes=2,
    foreach=True,
    holds_inputs=True,
)
HF_PURE = replace(
    HF,
    name="hf-pure",
    about="transformers on a model in bf16 throughout, without autocast",
    known="measured",
    sources=(HF_LOSS, FOREACH, "fitcheck (T4): tests/fixtures/planning/public_rows.json"),
    autocast=False,
)
HF_KBIT = replace(
    HF,
    name="hf-kbit",
    about="a loop of one's own with peft's prepare_model_for_kbit_training, without autocast: queries in fp32, for "
    "which sdpa has no flash kernel, and none but the plain one where heads are grouped",
    known="measured",
    sources=(UPCAST, HF_LOSS, "canifinetune (RTX 4080), fitcheck (T4): tests/fixtures/planning/public_rows.json"),
    kept_logits_bytes=4,
    pooled_logit_bytes=0,
    upcasts=True,
    autocast=False,
)
HF_LORA = replace(
    HF,
    name="hf-lora",
    about="transformers' Trainer with peft LoRA, bf16: true and flash_attention_2",
    sources=(PEFT, HF_LOSS, FOREACH),
    adapters="fp32",
    masks="never",
)
HF_QLORA = replace(
    HF_LORA,
    name="hf-qlora",
    about="the same over 4-bit weights, after prepare_model_for_kbit_training",
    sources=(PEFT, UPCAST, HF_LOSS, FOREACH),
    upcasts=True,
)
TRL = replace(
    HF_LORA,
    name="trl",
    about="TRL's SFTTrainer with transformers 4.46 to 4.48 and flash_attention_2; autocast over 4-bit weights only",
    known="measured",
    sources=(PEFT, HF_LOSS_OLD, FSDP1, FMS),
    logit_bytes=14,
    pooled_logit_bytes=6,
    upcast_norms=True,
    autocasts_lora=False,
    repeats_heads=("mistral", "mixtral"),
    expert_modules=True,
    reduces="bf16",
)
FMS_PEFT = replace(
    TRL,
    name="fms-accelerated-peft",
    about="fms-acceleration: 4-bit weights without k-bit preparation",
    upcast_norms=False,
)
FMS_FOAK = replace(
    FMS_PEFT,
    name="fms-foak",
    about="fms-acceleration with its kernels for cross-entropy, RMSNorm and RoPE",
    sources=(*FMS_PEFT.sources, TRITON_CE),
    loss="inplace",
    logit_bytes=10,
    fused=("norm", "rope"),
)
FMS_FOAK_AMP = replace(
    FMS_FOAK,
    name="fms-foak-amp",
    about="the same with autocast throughout, and transformers 4.45",
    sources=(PEFT, HF_LOSS, FSDP1, FMS, TRITON_CE),
    logit_bytes=8,
    autocasts_lora=True,
)
FMS_LIGER = replace(
    FMS_FOAK_AMP,
    name="fms-liger",
    about="the same with Liger's cross-entropy, fused with the head",
    sources=(PEFT, FSDP1, FMS, LIGER),
    loss="fused",
)
AXOLOTL = replace(
    HF_QLORA,
    name="axolotl",
    about="Axolotl's examples: flash_attention, sample_packing, 8-bit AdamW or the job's, bf16",
    known="reasoned",
    sources=(PEFT, UPCAST, "github.com/axolotl-ai-cloud/axolotl (examples/llama-3, src/axolotl/loaders/model.py)"),
)
LLAMA_FACTORY = replace(
    HF_LORA,
    name="llama-factory",
    about="LLaMA-Factory's examples: flash_attn: fa2, upcast_layernorm: false, checkpointing without k-bit preparation",
    known="reasoned",
    sources=(PEFT, HF_LOSS, "github.com/hiyouga/LLaMA-Factory (src/llamafactory/model/model_utils, examples)"),
)
UNSLOTH_STACK = replace(
    HF_LORA,
    name="unsloth",
    about="Unsloth: its kernels for LoRA, norms, RoPE and cross-entropy; layers' inputs in the machine's memory if "
    "activation_offloading is set (use_gradient_checkpointing: unsloth)",
    known="reasoned",
    sources=(UNSLOTH,),
    loss="fused",
    fused=("norm", "rope", "mlp"),
)
TORCHTUNE = SoftwareStack(
    name="torchtune",
    about="torchtune's recipes, compiled: bf16 throughout, cross-entropy in 8 chunks, fused AdamW, packing by flex",
    known="reasoned",
    sources=("github.com/pytorch/torchtune (recipes/configs, modules/loss/cross_entropy_loss.py)",),
    loss="plain",
    logit_bytes=4,
    fused=("norm", "rope"),
    autocast=False,
    adapters="compute",
    masks="never",
)
LITGPT_STACK = SoftwareStack(
    name="litgpt",
    about="litgpt's recipes (2024): bf16-true, head and loss in chunks of 128 positions, bnb.nf4",
    sources=(LITGPT, "Lightning Fabric (plugins/precision): a model returns fp32; the head is quantised, too"),
    loss="chunked",
    chunk_positions=128,
    kept_logits_bytes=4,
    kept_softmax_bytes=4,
    fused=("activation",),
    joins_qkv=True,
    repeats_heads=("*",),
    keeps_quantised_inputs=True,
    doubles_embedding=True,
    unties=True,
    quantises_head=True,
    unpacked_copies=2,
    double_quant=False,
    adapters="compute",
    foreach=True,
    autocast=False,
)
FSDP_QLORA = replace(
    HF_PURE,
    name="fsdp-qlora",
    about="Answer.AI's fsdp_qlora: bf16 throughout, reentrant checkpointing, FSDP1, logits held during backward",
    known="measured",
    sources=(ANSWER, FSDP1),
    kept_logits_bytes=4,
    pooled_logit_bytes=6,
    adapters="compute",
    reduces="bf16",
)
DEEPSPEED = replace(
    HF_PURE,
    name="deepspeed",
    about="transformers' Trainer with DeepSpeed's bf16, buckets of 500 million numbers, overlap_comm and "
    "flash_attention_2; with `strategy: zero-2` or `zero-3`",
    known="reasoned",
    sources=(
        "deepspeed (runtime/zero): whole buffers of reduce_bucket_size, two with overlap_comm; max_live_parameters",
        "transformers (docs, DeepSpeed): its example for stage 2",
        HF_LOSS,
    ),
    adapters="compute",
    bucket_numbers=500_000_000,
    masks="never",
    foreach=False,
)
PRIME_RL = SoftwareStack(
    name="prime-rl",
    about="prime-rl's RL trainer: FSDP2 on one GPU, too, weights in fp32, head and loss in chunks, up to 4 adapters",
    sources=(PRIME,),
    chunk_numbers=1 << 26,
    chunk_bytes=18,
    adapters="fp32",
    num_adapters=4,
    frozen="fp32",
    grouped_adapters=True,
    weighs_in_fp32=True,
    native_attention=True,
    always_sharded=True,
    gathers_adapters=True,
    autocast=False,
    caches_casts=False,
    masks="never",
    foreach=True,
)
PRIME_SFT = replace(
    PRIME_RL,
    name="prime-rl-sft",
    about="prime-rl's SFT trainer with the whole logits at once",
    loss="plain",
    kept_logits_bytes=4,
    pooled_logit_bytes=2,
    num_adapters=1,
)
STACKS = {
    stack.name: stack
    for stack in (
        GANGLINE,
        GANGLINE_CPU,
        HF,
        HF_PURE,
        HF_KBIT,
        HF_LORA,
        HF_QLORA,
        TRL,
        AXOLOTL,
        LLAMA_FACTORY,
        UNSLOTH_STACK,
        TORCHTUNE,
        LITGPT_STACK,
        FSDP_QLORA,
        DEEPSPEED,
        PRIME_RL,
        PRIME_SFT,
        FMS_PEFT,
        FMS_FOAK,
        FMS_FOAK_AMP,
        FMS_LIGER,
    )
}


def with_kernels(stack: SoftwareStack, names: Collection[str], *, compute: Number) -> SoftwareStack:
    """Gangline's own stack with kernels in place of torch's operators: names of `gangline.kernel_table`."""
    parts: dict[str, FusedPart] = {"rms-norm": "norm", "rotary": "rope", "gated-mlp": "gated-mlp"}
    return replace(
        stack,
        fused=tuple(part for name, part in parts.items() if name in names),
        adds_adapters="lora" in names,
        chunk_bytes=BYTES[compute] if "cross-entropy" in names else stack.chunk_bytes,
        joins_documents=stack.joins_documents and "packed-attention" not in names,
    )


def without_kernels(stack: SoftwareStack) -> SoftwareStack:
    """Gangline's own stack with torch's operators, as its traces run it."""
    joins = GANGLINE.joins_documents
    return replace(stack, fused=(), adds_adapters=False, chunk_bytes=GANGLINE.chunk_bytes, joins_documents=joins)


def settled(architecture: Architecture, training: Training, strategy: PlannedStrategy) -> Training:
    """The training as its software does it with this model and this strategy."""
    half = strategy.half
    repeats = not {architecture.model_type, "*"}.isdisjoint(training.stack.repeats_heads)
    return _settled(
        training,
        is_sharded=half.parts == "weights",
        repeats_heads=training.stack.repeats_heads if repeats else (),
        is_by_module=half.capabilities.weights_by_module,
        is_masked=_is_masked(architecture, training),
    )


@functools.lru_cache(maxsize=1024)  # a plan asks for the memory of thousands of ranks that train in few ways
def _settled(
    training: Training, *, is_sharded: bool, repeats_heads: tuple[str, ...], is_by_module: bool, is_masked: bool
) -> Training:
    stack = training.stack
    prepared = training.method == "qlora" and not is_sharded
    return replace(
        training,
        stack=replace(
            stack,
            autocast=stack.autocast and (training.method == "qlora" or stack.autocasts_lora),
            upcasts=stack.upcasts and prepared,
            upcast_norms=stack.upcast_norms and prepared,
            repeats_heads=repeats_heads,
            holds_inputs=stack.holds_inputs and is_sharded,
            adds_adapters=stack.adds_adapters and not is_by_module,
            masks="always" if is_masked else "never",
        ),
    )


OWN_MASKS = {"bloom", "falcon", "gptj", "gpt_bigcode", "opt"}
"""Families for which the worker has no attention inside documents (worker/documents)."""


def _is_masked(architecture: Architecture, training: Training) -> bool:
    """Whether attention gets a mask where documents share a sample."""
    windows = [layer.window for layer in architecture.layers if layer.window is not None]
    short = any(window < training.sequence_length for window in windows) or architecture.model_type in OWN_MASKS
    return training.stack.masks == "always" or (training.stack.masks == "windows" and short)


def placed(training: Training, strategy: PlannedStrategy) -> PlannedStrategy:
    """The strategy as the software of a training does it: with FSDP2 a rank by itself has one part."""
    if training.stack.always_sharded and strategy.half.kind == ALONE:
        return PlannedStrategy(kind="fsdp", world_size=1, shard_size=1)
    return strategy
