"""One compute dtype for the whole run: what every device of the gang can do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gangline.errors import UsageError
from gangline.runs.job import Job

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
# What `auto` picks, by the least able device of the gang.
_BY_ABILITY = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of a run. `compute`: matrix products; `parameters`: trainable weights and optimizer states."""

    name: str
    compute: torch.dtype
    parameters: torch.dtype

    @property
    def mixed(self) -> bool:
        """Whether products run in another dtype than the trainable weights have."""
        return self.compute != self.parameters

    @property
    def scaled(self) -> bool:
        """Whether gradients need a loss scale (fp16 underflows)."""
        return self.compute is torch.float16

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context of every forward pass."""
        if not self.mixed:
            return nullcontext()
        # Its cache holds a copy of every weight until forward ends, though none is used twice. With recomputation these
        # copies are what the peak is made of: 12 GiB for all weights of a 7B model.
        return torch.autocast(device.type, dtype=self.compute, cache_enabled=False)


def _ability(device: torch.device) -> int:
    """Index into `_BY_ABILITY`. A CPU can do bf16, but slower than fp32 on most, so it asks for fp32."""
    if device.type != "cuda":
        return 0
    return 2 if torch.cuda.is_bf16_supported(including_emulation=False) else 1


def _agreed(value: int, *, world_size: int) -> tuple[int, int]:
    """The least and the greatest value over the gang, on the CPU: devices may differ."""
    low, high = torch.tensor([value]), torch.tensor([value])
    if world_size > 1:
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return int(low.item()), int(high.item())


def agree_precision(job: Job, device: torch.device, *, world_size: int) -> Precision:
    """Resolve the job's precision over the gang (tiny all-reduces where there are several ranks).

    Raises UsageError for a combination that cannot train.
    """
    with_gpu = _agreed(int(device.type == "cuda"), world_size=world_size)
    if with_gpu[0] != with_gpu[1]:
        raise UsageError(
            "some ranks of the gang have a GPU and some have none",
            seen=f"this rank computes on {device}; expected the same kind everywhere",
            fix="leave the hosts without a GPU out of the cluster, or hide the GPUs with CUDA_VISIBLE_DEVICES: ''",
        )
    name: str = job.precision
    if name == "auto":
        name = _BY_ABILITY[_agreed(_ability(device), world_size=world_size)[0]]
    if name == "bf16" and device.type == "cuda" and _ability(device) < 2:
        raise UsageError(
            f"precision.compute: this GPU ({torch.cuda.get_device_name(device)}) has no bf16",
            seen="expected a card of compute capability 8.0 or later",
            fix="set precision: auto (all cards then use fp16 with a loss scale) or fp32",
        )
    if name == "fp64" and job.parameters == "fp32":
        raise UsageError(
            "precision.parameters: fp64 products on fp32 weights",
            seen="compute fp64 with parameters fp32; weights that are rounded to fp32 make fp64 products pointless",
            fix="remove precision.parameters, or set compute: fp32",
        )
    compute = _DTYPES[name]
    parameters = compute if name == "fp64" or job.parameters == "compute" else torch.float32
    if parameters is torch.float16:
        raise UsageError(
            "precision.parameters: fp16 weights cannot be trained",
            seen="parameters: compute with fp16 products; updates smaller than 6e-8 vanish",
            fix="set precision.parameters: fp32, or use bf16",
        )
    return Precision(name=name, compute=compute, parameters=parameters)
