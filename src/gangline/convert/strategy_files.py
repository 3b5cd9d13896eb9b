"""Files that say how devices share the work: DeepSpeed's JSON and the configuration of `accelerate launch`.

Alone they are no job: model and data come from the trainer's file, or from `key=value` on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gangline.convert import features as lacks
from gangline.convert.outcomes import (
    Foreign,
    Outcome,
    Rule,
    Tool,
    alike,
    as_number,
    drop,
    dropped,
    equivalent,
    is_off,
    number_to,
    off_or,
    only,
    refuse,
    refused,
    same,
)

AUTO = "auto"
SPLITTING = "how devices share the work changes no number: the plan chooses (`strategy: auto`)"
FITTED = drop("buckets and buffers: speed only")
FIGURES = drop("figures of every step are in metrics.jsonl")


def _unless_auto(rule: Rule) -> Rule:
    """`auto` takes what the trainer's file says."""
    return lambda value, foreign: dropped("auto: the trainer's file says it") if value == AUTO else rule(value, foreign)


def _alone(foreign: Foreign) -> bool:
    """Whether the file is converted by itself; inside a trainer's file the plan chooses."""
    return not foreign.prefix


def _stage(value: Any, foreign: Foreign) -> Outcome:
    stage = as_number(value)
    if not _alone(foreign) or not stage:
        return dropped(SPLITTING)
    offload = [
        name
        for key, name in (("offload_optimizer", "optimizer"), ("offload_param", "parameters"))
        if not is_off(foreign.get(f"zero_optimization.{key}.device"))
    ]
    return same({"strategy.kind": f"zero-{int(stage)}"} | ({"strategy.offload": offload} if offload else {}))


def _device(value: Any, foreign: Foreign) -> Outcome:
    if is_off(value):
        return dropped("off")
    if not _alone(foreign):
        return dropped(f"where states lie changes no number; {SPLITTING}")
    if value == "nvme" and not foreign.get("zero_optimization.offload_optimizer.nvme_path"):
        return refused("states on a disk without its folder (nvme_path)", settled_by=("strategy.offload_to",))
    return _stage(foreign.get("zero_optimization.stage", 0), foreign)


def _optimizer(value: Any, _foreign: Foreign) -> Outcome:
    if str(value) in {"AdamW", "Adam"}:
        return same({"optimizer.kind": "adamw"})
    return refused(f"{lacks.OTHER_OPTIMIZER} ({value})", settled_by=("optimizer.kind",))


def _betas(value: Any, _foreign: Foreign) -> Outcome:
    if isinstance(value, list) and len(value) == 2:
        return same({"optimizer.beta1": value[0], "optimizer.beta2": value[1]})
    return refused(f"{lacks.OPTIMIZER_DETAIL} (betas)")


def _schedule(value: Any, _foreign: Foreign) -> Outcome:
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if str(value) not in kinds:
        return refused(f"{lacks.OTHER_SCHEDULE} ({value})", settled_by=("schedule.kind",))
    return same({"schedule.kind": kinds[str(value)]})


def _enabled(name: str) -> Rule:
    def rule(value: Any, _foreign: Foreign) -> Outcome:
        return dropped("off") if is_off(value) else same({"precision.compute": name})

    return rule


def _batch(value: Any, _foreign: Foreign) -> Outcome:
    number = as_number(value)
    if not number:
        return refused(f"a value that is no number: {value!r}")
    return same({"batch": int(number)})


def _micro(value: Any, foreign: Foreign) -> Outcome:
    number = as_number(value)
    if not number:
        return refused(f"a value that is no number: {value!r}")
    whole = foreign.get("train_batch_size")
    accumulation = foreign.count("gradient_accumulation_steps", 1)
    total = int(as_number(whole) or number * accumulation * foreign.world_size)
    return same(
        {"micro_batch": int(number), "batch": total},
        f"batch = {int(number)} samples x {accumulation} accumulation x {foreign.world_size} processes",
    )


def _accumulation(_value: Any, foreign: Foreign) -> Outcome:
    if not _alone(foreign):
        return dropped("the trainer's file says it")
    micro = foreign.get("train_micro_batch_size_per_gpu")
    return (
        equivalent({}, "in the batch")
        if as_number(micro) or as_number(foreign.get("train_batch_size"))
        else refused("a batch without its micro-batch (train_micro_batch_size_per_gpu)", settled_by=("batch",))
    )


DEEPSPEED: Mapping[str, Rule] = {
    "train_batch_size": _unless_auto(_batch),
    "train_micro_batch_size_per_gpu": _unless_auto(_micro),
    "gradient_accumulation_steps": _unless_auto(_accumulation),
    "gradient_clipping": _unless_auto(lambda value, _f: same({"optimizer.clip_norm": as_number(value) or "none"})),
    "optimizer.type": _unless_auto(_optimizer),
    "optimizer.params.lr": _unless_auto(number_to("optimizer.learning_rate")),
    "optimizer.params.betas": _unless_auto(_betas),
    "optimizer.params.eps": _unless_auto(number_to("optimizer.epsilon")),
    "optimizer.params.weight_decay": _unless_auto(number_to("optimizer.weight_decay")),
    "optimizer.params.torch_adam": drop("torch's AdamW, as here"),
    "optimizer.params.adam_w_mode": only(True, otherwise=f"{lacks.OTHER_OPTIMIZER} (Adam with coupled decay)"),
    "optimizer.params.*": refuse(lacks.OPTIMIZER_DETAIL),
    "scheduler.type": _unless_auto(_schedule),
    "scheduler.params.warmup_num_steps": _unless_auto(number_to("schedule.warmup_steps")),
    "scheduler.params.warmup_max_lr": _unless_auto(number_to("optimizer.learning_rate")),
    "scheduler.params.warmup_min_lr": _unless_auto(only(0, otherwise=lacks.SCHEDULE_DETAIL)),
    "scheduler.params.warmup_type": only("linear", otherwise=lacks.SCHEDULE_DETAIL),
    "scheduler.params.total_num_steps": _unless_auto(number_to("steps")),
    "scheduler.params.cos_min_ratio": number_to("schedule.final_ratio"),
    "scheduler.params.*": refuse(lacks.SCHEDULE_DETAIL),
    "bf16.enabled": _unless_auto(_enabled("bf16")),
    "bf16.*": drop("accumulation of gradients is in fp32"),
    "fp16.enabled": _unless_auto(_enabled("fp16")),
    "fp16.*": drop("the scale of the loss is found anew; skipped steps are counted"),
    "fp8.*": refuse(lacks.FP8),
    "amp.enabled": off_or(lacks.PRECISION),
    "amp.*": drop("only with amp"),
    "torch_autocast.enabled": off_or(lacks.PRECISION),
    "torch_autocast.*": drop("only with torch_autocast"),
    "zero_optimization.stage": _stage,
    "zero_optimization.offload_optimizer.device": _device,
    "zero_optimization.offload_param.device": _device,
    "zero_optimization.offload_optimizer.nvme_path": lambda value, f: (
        same({"strategy.offload_to": value})
        if _alone(f) and f.get("zero_optimization.offload_optimizer.device") == "nvme"
        else dropped("states do not lie on a disk")
    ),
    "zero_optimization.zero_quantized_weights": off_or("weights that are rounded on the wire"),
    "zero_optimization.zero_quantized_gradients": off_or("gradients that are rounded on the wire"),
    "zero_optimization.zenflow.*": refuse("an update that lags behind (ZenFlow)"),
    "zero_optimization.cpu_offload": drop(SPLITTING),
    "zero_optimization.*": FITTED,
    "zero_allow_untested_optimizer": FITTED,
    "zero_force_ds_cpu_optimizer": FITTED,
    "communication_data_type": only("fp32", AUTO, otherwise="gradients that are rounded on the wire (see `exchange`)"),
    "prescale_gradients": drop("gradients are summed, and divided by the tokens of the step"),
    "gradient_predivide_factor": drop("gradients are summed, and divided by the tokens of the step"),
    "sparse_gradients": FITTED,
    "steps_per_print": FIGURES,
    "wall_clock_breakdown": FIGURES,
    "dump_state": FIGURES,
    "flops_profiler.*": FIGURES,
    "comms_logger.*": FIGURES,
    "monitor_config.*": FIGURES,
    "tensorboard.*": FIGURES,
    "wandb.*": FIGURES,
    "csv_monitor.*": FIGURES,
    "activation_checkpointing.*": FITTED,
    "aio.*": FITTED,
    "compile.*": FITTED,
    "checkpoint.*": drop("checkpoints are gangline's"),
    "tensor_parallel.*": drop(SPLITTING),
    "sequence_parallel_size": drop(SPLITTING),
    "data_parallel_size": drop(SPLITTING),
    "elasticity.*": refuse("a batch that changes with the machines (elasticity)"),
    "curriculum_learning.*": refuse(lacks.ORDER),
    "data_efficiency.*": refuse(lacks.ORDER),
    "progressive_layer_drop.*": refuse(lacks.MODEL_CHANGE),
    "compression_training.*": refuse(lacks.FAKE_QUANTISATION),
    "quantize_training.*": refuse(lacks.FAKE_QUANTISATION),
    "autotuning.*": FITTED,
}
"""Keys of a DeepSpeed configuration; `zero_optimization.*` has dozens that set sizes of buckets."""


def _world(foreign: Foreign) -> int | None:
    """Out of train_batch_size, where both other numbers are there, too."""
    whole, micro = as_number(foreign.get("train_batch_size")), as_number(foreign.get("train_micro_batch_size_per_gpu"))
    accumulation = as_number(foreign.get("gradient_accumulation_steps", 1))
    if whole and micro and accumulation and whole % (micro * accumulation) == 0:
        return int(whole // (micro * accumulation))
    return 1 if whole else None


DEEPSPEED_TOOL = Tool(name="DeepSpeed", keys=DEEPSPEED, world_size=_world)


def deepspeed_file(value: Any, _foreign: Foreign) -> Outcome:
    """A file of DeepSpeed that another names: it may say what numbers are, and so has to be here."""
    if is_off(value) or isinstance(value, dict):
        return dropped("off")
    return refused(f"a file of DeepSpeed that is not here ({value})", settled_by=("strategy",))


# accelerate config


def _kind(value: Any, foreign: Foreign) -> Outcome:
    name = str(value).upper()
    if name == "FSDP" and _alone(foreign):
        return same({"strategy.kind": "fsdp"})
    if name in {"TPU", "XLA", "MEGATRON_LM"}:
        return refused(f"training by {name}")
    return dropped(SPLITTING)


def _mixed(value: Any, _foreign: Foreign) -> Outcome:
    if is_off(value):
        return same({"precision.compute": "fp32"})
    if str(value) not in {"bf16", "fp16"}:
        return refused(f"{lacks.FP8} ({value})" if value == "fp8" else f"{lacks.PRECISION} ({value})")
    return same({"precision.compute": str(value)})


ACCELERATE: Mapping[str, Rule] = {
    "compute_environment": only("LOCAL_MACHINE", otherwise="machines of a cloud that are ordered by the start"),
    "distributed_type": _kind,
    "mixed_precision": _mixed,
    "num_processes": lambda value, f: (
        equivalent({}, "in the batch") if alike(value, f.world_size) else dropped("another world size was given")
    ),
    "num_machines": drop("hosts stand in cluster.yaml"),
    "machine_rank": drop("hosts stand in cluster.yaml"),
    "main_process_ip": drop("hosts stand in cluster.yaml"),
    "main_process_port": drop("the port is found at every start"),
    "gpu_ids": drop("slots stand in cluster.yaml"),
    "rdzv_backend": drop(SPLITTING),
    "same_network": drop("addresses stand in cluster.yaml"),
    "main_training_function": drop("gangline has its own trainer"),
    "use_cpu": drop("the device is found on every host"),
    "debug": drop("no number"),
    "enable_cpu_affinity": drop("speed only"),
    "downcast_bf16": off_or(lacks.PRECISION),
    "dynamo_backend": drop("kernels: speed only, and rounding"),
    "dynamo_config.*": drop("kernels: speed only, and rounding"),
    "fp8_config.*": refuse(lacks.FP8),
    "fsdp_config.fsdp_activation_checkpointing": lambda value, _f: (
        dropped("off") if is_off(value) else same({"activation_checkpointing": True})
    ),
    "fsdp_config.*": drop(SPLITTING),
    "deepspeed_config.deepspeed_config_file": drop("name that file, too: gangline convert FILE ds_config.json"),
    "deepspeed_config.gradient_accumulation_steps": drop("the trainer's file says it"),
    "deepspeed_config.gradient_clipping": _unless_auto(
        lambda value, _f: same({"optimizer.clip_norm": as_number(value) or "none"})
    ),
    "deepspeed_config.zero_stage": lambda value, f: (
        same({"strategy.kind": f"zero-{int(as_number(value) or 0)}"})
        if _alone(f) and as_number(value)
        else dropped(SPLITTING)
    ),
    "deepspeed_config.*": drop(SPLITTING),
    "parallelism_config.*": drop(SPLITTING),
    "megatron_lm_config.*": drop(SPLITTING),
    "mpirun_config.*": drop("see `backend` in cluster.yaml"),
    "tpu_name": off_or("training by TPU"),
    "tpu_zone": off_or("training by TPU"),
    "tpu_use_cluster": off_or("training by TPU"),
    "tpu_use_sudo": off_or("training by TPU"),
    "tpu_env": off_or("training by TPU"),
    "tpu_vm": off_or("training by TPU"),
    "command_file": off_or("training by TPU"),
    "commands": off_or("training by TPU"),
    "use_kt": off_or("experts on the processor (KTransformers)"),
    "kt_config.*": refuse("experts on the processor (KTransformers)"),
}
"""Keys of `accelerate config`."""


def _processes(foreign: Foreign) -> int | None:
    number = as_number(foreign.get("num_processes"))
    return int(number) if number and number > 0 else None


ACCELERATE_TOOL = Tool(name="accelerate", keys=ACCELERATE, parts={"deepspeed": DEEPSPEED}, world_size=_processes)
