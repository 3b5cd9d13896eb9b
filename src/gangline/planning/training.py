"""What a rank computes, with which software, and how ranks work together: the questions that a plan is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Number = Literal["bf16", "fp16", "fp32", "fp64"]
BYTES: dict[Number, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
Method = Literal["full", "lora", "qlora"]
OptimizerKind = Literal["adamw", "adamw-8bit", "paged-adamw-8bit"]
Kind = Literal["single", "ddp", "zero-1", "zero-2", "zero-3", "fsdp", "hsdp", "pipeline", "local-sgd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The software as far as bytes depend on it."""

    name: str
    loss: Literal["fused", "chunked", "plain"] = "fused"
    """fused: logits exist a chunk at a time, and never for all tokens; chunked: the same without the gradient of
    the hidden states computed at once; plain: all logits at once."""
    chunk_numbers: int = 1 << 27
    """Logits held at once by a fused or chunked loss."""
    kept_logits_bytes: int = 0
    """Bytes per logit that the caller still holds during backward (plain only)."""
    upcasts: bool = False
    """Whether what is not quantised is turned into fp32, and the residual stream with it (peft's k-bit preparation)."""
    attention: Literal["flash", "math"] = "flash"
    """math keeps the matrix of attention weights: bytes grow with the square of the length."""
    foreach: bool = False
    """Whether the optimizer makes a copy of all trained weights for a moment (AdamW's foreach path)."""
    autocast: bool = True
    """Whether products run under autocast, which keeps casted copies of trained fp32 weights."""


GANGLINE = Stack(name="gangline")
"""Our own trainer: cross-entropy fused with the head, fused AdamW, sdpa."""
HF_KBIT = Stack(name="hf-kbit", loss="plain", kept_logits_bytes=4, upcasts=True, foreach=True)
"""transformers' Trainer with peft's prepare_model_for_kbit_training."""
HF = Stack(name="hf", loss="plain", kept_logits_bytes=2, foreach=True)
"""transformers' Trainer on a half-precision model."""
STACKS = {stack.name: stack for stack in (GANGLINE, HF_KBIT, HF)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One forward-backward of one rank, and the update that follows."""

    method: Method
    micro_batch: int
    """Samples at once."""
    sequence_length: int
    """Tokens of a sample at the most: what memory has to be there for."""
    compute: Number = "bf16"
    parameters: Number = "fp32"
    """Of trained weights, their gradients and the optimizer's states."""
    rank: int = 16
    """Of the adapters (lora, qlora)."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names of linears with adapters; ("all-linear",): all inside layers."""
    dropout: float = 0.0
    checkpointing: bool = False
    optimizer: OptimizerKind = "adamw"
    stack: Stack = GANGLINE

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch * self.sequence_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How ranks share the work."""

    kind: Kind
    world_size: int
    shard_size: int = 1
    """Ranks that hold one copy of the sharded state together: the world for fsdp and zero, a part of it for hsdp."""
    stages: tuple[int, ...] = ()
    """pipeline: layers of each rank; they sum to the model's depth."""
    inner_steps: int = 1
    """local-sgd: optimizer steps between two exchanges."""
    reshard: bool = True
    """fsdp: whether a layer's weights are given up after forward and gathered again for backward."""

    @property
    def replicas(self) -> int:
        """Copies of the model, each of which computes other samples."""
        return 1 if self.kind == "pipeline" else self.world_size
