"""AdamW whose two moments have 8 bits a number, by bitsandbytes: 2 bytes for each trained number in place of 8.

256 numbers share a scale in fp32. A tensor of fewer than 4,096 numbers keeps its moments in fp32; that is bitsandbytes'
own rule. Paged moments lie in memory that a GPU's driver moves to the machine's own while the GPU has no room; on a
CPU they are as any others.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gangline.errors import UsageError
from gangline.runs.job import OptimizerJob
from gangline.worker.nf4 import require_library

log = logging.getLogger(__name__)


def make_adam8(groups: Sequence[dict[str, Any]], job: OptimizerJob) -> torch.optim.Optimizer:
    """The library's optimizer with all its states made, each of them a tensor.

    groups: `params` and `weight_decay`. Raises ModelError where bitsandbytes is not there, UsageError for weights in
    parts or in fp64.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    require_library(f"optimizer.kind: {job.kind}")
    _refuse(parameters, job.kind)
    optimizer: Any = _counting(_class_of(job.kind, parameters))(
        list(groups), lr=job.learning_rate, betas=(job.beta1, job.beta2), eps=job.epsilon
    )
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, index, place)
            optimizer.state[parameter]["step"] = torch.zeros((), dtype=torch.int64)
    # its first step would move states to the parameters' devices: they are there, and the counters stay on the CPU
    optimizer.initialized = True
    made: torch.optim.Optimizer = optimizer
    return made


def _class_of(kind: str, parameters: Iterable[nn.Parameter]) -> Any:
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    if kind != "paged-adamw-8bit":
        return AdamW8bit
    if any(parameter.device.type == "cuda" for parameter in parameters):
        return PagedAdamW8bit
    log.info("optimizer.kind: %s on a CPU: moments have 8 bits and are not paged", kind)
    return AdamW8bit


def _counting(kind: Any) -> Any:
    """A kind of optimizer whose count of steps is a tensor between two steps, so that a checkpoint can hold it.

    bitsandbytes has a number of Python there, one for each parameter.
    """

    class Counting(kind):  # type: ignore[misc]
        def update_step(self, group: Any, p: nn.Parameter, gindex: int, pindex: int) -> None:
            state = self.state[p]
            count = state["step"]
            state["step"] = int(count)
            try:
                super().update_step(group, p, gindex, pindex)
                count.fill_(state["step"])
            finally:
                state["step"] = count

    return Counting


def _refuse(parameters: Sequence[nn.Parameter], kind: str) -> None:
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise UsageError(
            f"optimizer.kind: {kind} cannot train weights that lie in parts",
            seen="every weight is trained under fsdp or hsdp; a block of 256 numbers with one scale would lie on two "
            "ranks, and on others in another gang",
            fix="write optimizer: {kind: adamw}, or strategy: ddp, or train adapters (method: lora)",
        )
    if any(parameter.dtype is torch.float64 for parameter in parameters):
        raise UsageError(
            f"optimizer.kind: {kind} in a run in fp64",
            seen="moments of 8 bits, and fp32 in between, make fp64 products pointless",
            fix="write optimizer: {kind: adamw}, or precision: fp32",
        )
