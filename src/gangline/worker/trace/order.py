"""The order of a trace, as the JSON that a controller sends."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from gangline.errors import UsageError
from gangline.runs.decode import DecodeError, build
from gangline.runs.job import DataJob, Job, MethodJob, ModelJob, OptimizerJob, SourceJob

AttentionKernel = Literal["flash", "math", "cpu"]
"""flash: the kernel of recent NVIDIA cards. math: the plain kernel everywhere. cpu: this machine's own."""

CUDA_ROUNDING_BYTES = 512
"""torch's caching allocator for CUDA gives out multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOrder:
    """One case. Exactly one of `config` and `model` is given; `runs.job` explains the fields."""

    config: dict[str, Any] | None = None
    """The contents of config.json."""
    model: str | None = None
    """A folder with config.json, or a name of the hub."""
    revision: str | None = None
    method: MethodJob = dataclasses.field(default_factory=MethodJob)
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    parameters: Literal["auto", "compute", "fp32"] = "auto"
    micro_batch: int = 1
    micro_batches: int = 1
    """Micro-batches of one step on this rank: from the second on, gradients are there during the forward pass."""
    sequence_length: int = 1024
    packing: bool = False
    """Two documents in each sample, which needs a mask in most kernels; otherwise full rows without padding."""
    activation_checkpointing: bool = False
    optimizer: OptimizerJob = dataclasses.field(default_factory=OptimizerJob)
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    attention_kernel: AttentionKernel = "flash"
    kernels: tuple[str, ...] = ("torch",)
    """See `runs.job`; those in Triton compute nothing without numbers, and cannot be traced."""
    ranks: int = 1
    """More than one: the gradient buckets of DDP are counted."""
    layers: tuple[int, ...] | None = None
    """Depths to run; None: two shallow ones that show every kind of layer."""
    rounding_bytes: int = CUDA_ROUNDING_BYTES
    """Allocations are rounded up to multiples of it; 1 counts exact bytes."""

    @staticmethod
    def from_json(data: Any) -> TraceOrder:
        """The order of this JSON object. Raises UsageError."""
        try:
            return build(TraceOrder, data)
        except DecodeError as error:
            raise UsageError(
                "the order for a trace is off",
                seen=f"expected the fields of TraceOrder; {error}",
                fix="correct this field of the order",
            ) from error

    def job(self, folder: str) -> Job:
        """The job whose step is traced, with the model of `folder`, which holds a config.json."""
        # with the kernel itself transformers would want its package; what it keeps is the same
        attention = "sdpa" if self.attention == "flash_attention_2" else self.attention
        return Job(
            name="trace",
            model=ModelJob(path=folder, start="random", attention=attention),
            data=DataJob(train=SourceJob(), sequence_length=self.sequence_length, packing=self.packing),
            batch=self.micro_batch * self.passes,
            micro_batch=self.micro_batch,
            method=self.method,
            epochs=None,
            steps=2,
            precision=self.precision,
            parameters=self.parameters,
            activation_checkpointing=self.activation_checkpointing,
            optimizer=self.optimizer,
            kernels=self.kernels,
        )

    @property
    def passes(self) -> int:
        """Micro-batches that are traced: the third is like the second."""
        return min(2, self.micro_batches)

    def __post_init__(self) -> None:
        if (self.config is None) == (self.model is None):
            raise ValueError("give one of config and model")
        sizes = (self.micro_batch, self.micro_batches, self.sequence_length - 1, self.ranks, self.rounding_bytes)
        if min(*sizes, *(self.layers or (1,))) < 1:
            raise ValueError("a size is too small; sequence_length is at least 2, the others are at least 1")
        if self.layers is not None and len(set(self.layers)) < 2:
            raise ValueError(f"layers is {list(self.layers)}; expected two depths or more, not alike")
