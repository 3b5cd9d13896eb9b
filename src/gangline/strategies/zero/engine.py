"""A DeepSpeed engine over our process group, on our device, with our numbers; nothing of it is read from elsewhere.

The optimizer's states may lie on a disk of the host: its operator and the room are checked before a model is loaded.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gangline.errors import UsageError
from gangline.runs.job import Job
from gangline.units import format_bytes
from gangline.worker import compat
from gangline.worker.loss import CausalLoss
from gangline.worker.model import base_of, trainable
from gangline.worker.precision import Precision
from gangline.worker.process_group import ProcessGroup
from gangline.worker.weights import is_empty

BUCKET_NUMBERS = {1: 500_000_000, 2: 500_000_000, 3: 50_000_000}
"""Gradients that are exchanged at once, at the most, by stage: DeepSpeed's own choice, but where layers are cut."""


def require_possible(job: Job, precision: Precision, world: ProcessGroup) -> None:
    """Raise UsageError, naming what of a job DeepSpeed's ZeRO does not do here."""
    kind = world.gang.strategy
    if world.gang.shares_gpus:
        raise UsageError(
            f"strategy: {kind} wants a GPU for every rank",
            seen="several ranks on one GPU, whose exchanges go over gloo; those of DeepSpeed do not",
            fix="set slots of every host to the number of its GPUs, or write strategy: ddp",
        )
    if job.method.kind == "qlora":
        raise UsageError(
            f"strategy: {kind} does not train over weights of {job.method.bits} bits",
            seen="method: qlora; expected full or lora",
            fix="write strategy: fsdp, which has these in parts, or method: lora",
        )
    if job.optimizer.kind != "adamw":
        raise UsageError(
            f"strategy: {kind} has moments of 32 bits only",
            seen=f"optimizer.kind: {job.optimizer.kind}, whose blocks of 256 numbers would lie on two ranks",
            fix="write optimizer.kind: adamw, whose moments are in parts; or strategy: ddp",
        )
    compute_only = job.parameters == "compute" and precision.name == "bf16"
    if precision.name not in ("fp32", "bf16") or compute_only:
        seen = "pure bf16 (precision.parameters: compute)" if compute_only else f"precision {precision.name}"
        raise UsageError(
            f"strategy: {kind} trains in fp32, or in bf16 over weights of fp32",
            seen=seen,
            fix="set precision: fp32 (or bf16 where every device can), or write strategy: ddp",
        )


def load_deepspeed(device: torch.device) -> Any:
    """The package, told which device it is on. Raises UsageError where it is not installed."""
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # it takes that for the number of its device
    try:
        import deepspeed
    except ImportError as error:
        raise UsageError(
            "strategy: zero-1, zero-2 and zero-3 are done by DeepSpeed, which is not installed",
            seen=f"{type(error).__name__}: {error}",
            fix="pip install 'gangline[deepspeed]' into the environment of every host, or write strategy: fsdp",
        ) from error
    # it calls collectives by names that torch 2.13 has others for, several times a step
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    # it would build an operator for CPUs of one host, for a minute; gloo does the same
    compat.OPERATORS.put(deepspeed.ops, defaultdict(bool))  # 0.19.0 asks for a row, later ones whether there is one
    logger = logging.getLogger("DeepSpeed")  # into this rank's log, not on its screen
    logger.handlers.clear()
    logger.propagate = True
    # our group, which has our time limits, and no second one
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, dist_init_required=False)
    compat.WORLD_GROUP.put(deepspeed.utils.groups, dist.group.WORLD)
    return deepspeed


def takes_parts(job: Job, world: ProcessGroup) -> bool:
    """Whether ranks can read the parts of weights that they keep, and need no whole ones: not where these are packed
    as they are cut, or cut twice.
    """
    asked = job.strategy.deepspeed.get("zero_optimization", {})
    packed = any(asked.get(key) for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"))
    return stage_of(world) == 3 and not packed and asked.get("zero_hpz_partition_size", 1) == 1


def divide(deepspeed: Any, loss: nn.Module, config: dict[str, Any], world: ProcessGroup) -> None:
    """Cut every weight into as many parts as there are ranks, one after another: no device has to hold all of them.

    Of one that takes no memory yet only the part will: what is in it is read later.
    """

    def divide_all(init: Any, param_list: Iterable[nn.Parameter]) -> None:
        for parameter in param_list:
            dtype = torch.bfloat16 if config["bf16"]["enabled"] else parameter.dtype
            if is_empty(parameter):  # nothing is written, so on the CPU it takes no memory now, either
                parameter.data = torch.empty(parameter.shape, dtype=dtype, device=init.local_device)
            else:
                parameter.data = parameter.data.to(init.local_device, dtype)
            divide_one(init, parameter)

    def divide_one(init: Any, parameter: nn.Parameter) -> None:
        # without its exchange: weights are equal already, as for `start`
        compat.MAKE_DIVISIBLE.of(init)(parameter)
        parameter.partition()  # type: ignore[attr-defined]

    one_by_one = compat.overriding(deepspeed.zero.Init, {compat.DIVIDE_ALL: divide_all, compat.DIVIDE_ONE: divide_one})
    one_by_one(module=loss, config_dict_or_path=config, mem_efficient_linear=False)
    for buffer in loss.buffers():
        buffer.data = buffer.data.to(world.device)


def start(deepspeed: Any, loss: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    """The engine; collective."""
    # weights are equal already (`agree_weights`); sending frozen ones would cost minutes on a slow link
    with compat.BROADCAST.replaced(deepspeed.runtime.engine.DeepSpeedEngine, lambda _engine: None):
        engine, *_ = deepspeed.initialize(model=loss, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def configuration(job: Job, precision: Precision, world: ProcessGroup, loss: CausalLoss) -> dict[str, Any]:
    """What DeepSpeed is told: what the job says of it, and over that what is gangline's."""
    asked = job.strategy.deepspeed
    return {
        "steps_per_print": None,
        **asked,
        "zero_optimization": _zero(job, world, loss),
        # ranks do unequally many micro-batches, and it is told which one is the last
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": 1,
        "train_batch_size": job.micro_batch * world.size,
        "gradient_clipping": job.optimizer.clip_norm or 0.0,
        "bf16": {"enabled": precision.mixed, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": job.exchange,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _zero(job: Job, world: ProcessGroup, loss: CausalLoss) -> dict[str, Any]:
    stage = stage_of(world)
    asked = dict(job.strategy.deepspeed.get("zero_optimization", {}))
    hidden = base_of(loss.model).config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
    # as transformers fills them in
    filled = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    asked |= {key: filled[key] for key, value in asked.items() if value == "auto"}
    numbers = sum(parameter.numel() for parameter in trainable(loss.model).values())
    found = {"reduce_bucket_size": min(BUCKET_NUMBERS[stage], numbers), **asked, "stage": stage}
    found["memory_efficient_linear"] = False  # it would replace torch's for the whole process
    pinned = world.device.type == "cuda"
    for key, what in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        if what in job.strategy.offload:
            found[key] = {"pin_memory": pinned, **found.get(key, {}), "device": "cpu"}
    if disk := on_disk(job, world):
        found["offload_optimizer"] |= disk
        found.setdefault("sub_group_size", GROUP_NUMBERS)
    return found


def stage_of(world: ProcessGroup) -> int:
    """1, 2 or 3."""
    return int(world.gang.strategy.removeprefix("zero-"))


def require_valid(deepspeed: Any, config: dict[str, Any], job: Job) -> None:
    """Raise UsageError where DeepSpeed does not understand what it is told."""
    try:
        deepspeed.DeepSpeedConfig(config)
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise UsageError(
            "strategy.deepspeed: DeepSpeed does not take its keys",
            seen=f"{type(error).__name__}: {str(error)[:500]}; passed on were {', '.join(_names(job))}",
            fix="put them right in the file, or delete them",
        ) from error


def _names(job: Job) -> list[str]:
    asked = job.strategy.deepspeed
    inside = [f"zero_optimization.{key}" for key in asked.get("zero_optimization", {})]
    return [*(key for key in asked if key != "zero_optimization"), *inside] or ["none"]


GROUP_NUMBERS = 100_000_000
"""Of what comes from the disk at once: four times as many numbers of fp32 are in memory."""
NUMBER_BYTES = 16
"""On the disk, of each number: fp32 weight, gradient, two moments."""


def on_disk(job: Job, world: ProcessGroup) -> dict[str, Any]:
    """What DeepSpeed is told of the disk; {} where there is none in the job."""
    folder = job.strategy.offload_to
    return {} if folder is None else {"device": "nvme", "nvme_path": str(_folder(folder, world))}


def require_operator(deepspeed: Any, job: Job) -> None:
    """Raise UsageError where states are to lie on a disk, and DeepSpeed's operator for it cannot be built or loaded."""
    if job.strategy.offload_to is None:
        return
    builder = deepspeed.ops.op_builder.AsyncIOBuilder()
    seen = "it does not fit this host: libaio and its headers are not found"
    try:
        if builder.is_compatible(verbose=False):
            builder.load(verbose=False)  # builds it where that was not done yet, for some minutes
            return
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        seen = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
    raise UsageError(
        "strategy.offload_to: DeepSpeed's operator async_io cannot be loaded",
        seen=seen,
        fix="install libaio-dev (libaio-devel), g++ and ninja on every host; or delete offload_to: states in memory",
    )


def require_room(job: Job, world: ProcessGroup, *, num_trained: int) -> None:
    """Raise UsageError where the folder is not there or cannot be written to, or the disk has no room; collective.

    What an attempt before this one has left there is deleted first.
    """
    if job.strategy.offload_to is None:
        return
    path = Path(job.strategy.offload_to)
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise UsageError(
            "strategy.offload_to: nothing can be written there",
            seen=f"{path} on {world.host} is {'not writable' if path.exists() else 'not there'}",
            fix="make the folder on every host for the user of the run, or delete offload_to",
        )
    ours = _folder(job.strategy.offload_to, world)
    if world.is_first_of_host:
        shutil.rmtree(ours, ignore_errors=True)
    dist.barrier()
    ours.mkdir(parents=True, exist_ok=True)
    needed = NUMBER_BYTES * -(-num_trained // world.size) * world.gang.num_ranks(world.host)
    free = shutil.disk_usage(path).free
    if free < needed:
        raise UsageError(
            "strategy.offload_to: the disk has no room for the optimizer's states",
            seen=f"{format_bytes(free)} in {path} on {world.host}; expected {format_bytes(needed)} for its ranks",
            fix="name a folder on a larger disk, add hosts, or delete offload_to",
        )


def clear(job: Job, world: ProcessGroup) -> None:
    """Delete this rank's files at the end of a run, and the folders of it that are empty then."""
    if job.strategy.offload_to is None:
        return
    place = _folder(job.strategy.offload_to, world) / "zero_stage_3" / "optimizer" / f"rank{world.rank}"
    shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):  # other ranks have theirs there
        for parent in place.parents[:4]:
            parent.rmdir()


def _folder(folder: str, world: ProcessGroup) -> Path:
    """Of this run and host: several hosts may have one disk."""
    return Path(folder) / f"gangline-{world.gang.run_id}" / world.host
