"""TrainingArguments of transformers 5 and the configuration of `trl sft` (trl 1.16): every key, and what it becomes.

Their own words for defaults and meanings: transformers/training_args.py, trl/trainer/sft_config.py,
trl/trainer/model_config.py, trl/scripts/utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gangline.convert import features as lacks
from gangline.convert.outcomes import (
    Default,
    Foreign,
    Outcome,
    Rule,
    Tool,
    as_number,
    drop,
    dropped,
    each,
    equivalent,
    is_off,
    number_to,
    off_or,
    only,
    refuse,
    refused,
    same,
    switch,
    to,
    where_on,
)
from gangline.convert.strategy_files import ACCELERATE, DEEPSPEED, deepspeed_file

SPEED = drop("speed and memory only")
KERNELS = drop("kernels: speed only, and rounding")
WHERE = drop("a place or a label; gangline keeps runs in its own home")
FIGURES = drop("figures of every step are in metrics.jsonl")
LOADING = drop("how rows are read into memory; no sample changes")
HUB = drop("nothing is published; `gangline export` writes the model")
SPLITTING = drop("how devices share the work changes no number: the plan chooses (`strategy: auto`)")
LAST_BATCH = drop("the last step of an epoch takes the remaining samples; none is lost")

# Optimizers and schedules by the names that transformers and everything above it give them.

_ADAMW = "AdamW by torch"
_8_BIT = "8-bit moments in blocks of 256, by bitsandbytes"
OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_torch_xla", "adamw"), ("adamw", _ADAMW)),
    **dict.fromkeys(("adamw_apex_fused", "adamw_torch_npu_fused", "optimi_adamw"), ("adamw", f"{_ADAMW}, not fused")),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), ("adamw", f"{_ADAMW}; moments are not paged out")),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit"), ("adamw-8bit", _8_BIT)),
    "adamw_torch_8bit": ("adamw-8bit", f"{_8_BIT} in place of torchao's: the same update, moments rounded otherwise"),
    "adamw_torch_4bit": ("adamw-8bit", f"{_8_BIT} in place of torchao's of 4 bits: the same update, less rounding"),
    "paged_adamw_8bit": ("paged-adamw-8bit", _8_BIT),
    **dict.fromkeys(("lion_32bit", "lion", "paged_lion_32bit"), ("lion", "Lion; moments are not paged out")),
    "sgd": ("sgd", "SGD without momentum"),
    "adafactor": ("adafactor", "Adafactor without relative steps"),
}
"""Name -> kind of optimizer, and what to say of it."""

_CONSTANT = "constant"
SCHEDULES: Mapping[str, str] = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": _CONSTANT,
    "constant_with_warmup": _CONSTANT,
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine-restarts",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse-sqrt",
    "warmup_stable_decay": "wsd",
}


def optimizer(value: Any, _foreign: Foreign) -> Outcome:
    """`optim`, and `optimizer` of Axolotl."""
    name = str(value).lower().removeprefix("optimizernames.")
    if name not in OPTIMIZERS:
        return refused(f"{lacks.OTHER_OPTIMIZER} ({name})", settled_by=("optimizer.kind",))
    kind, reason = OPTIMIZERS[name]
    job = {"optimizer.kind": kind}
    return same(job) if reason in {_ADAMW, _8_BIT} else equivalent(job, reason)


def schedule(value: Any, _foreign: Foreign) -> Outcome:
    """`lr_scheduler_type`, and `lr_scheduler` of Axolotl."""
    name = str(value).lower().removeprefix("schedulertype.")
    if name not in SCHEDULES:
        return refused(f"{lacks.OTHER_SCHEDULE} ({name})", settled_by=("schedule.kind",))
    return same({"schedule.kind": SCHEDULES[name]})


def schedule_name(foreign: Foreign) -> str:
    """Its name there: `cosine`."""
    name = foreign.get("lr_scheduler_type", foreign.get("lr_scheduler", ""))
    return str(name).lower()


FROM_ZERO: Mapping[str, Any] = {"schedule.warmup_from_zero": True}
"""A warm-up of transformers begins with a step at a rate of 0."""


def schedule_words(key: str) -> Rule:
    """A key of `lr_scheduler_kwargs`, which means something to some schedules only."""

    def rule(value: Any, foreign: Foreign) -> Outcome:
        name, number = schedule_name(foreign), as_number(value)
        found = _SCHEDULE_WORDS.get((name, key))
        if found is not None and number is not None:
            return same({found: number})
        if key in {"lr_end", "min_lr"} and name in {"polynomial", "cosine_with_min_lr"} and number is not None:
            return same({"schedule.final_ratio": number / foreign.number("learning_rate", 5e-5)})
        if key == "num_cycles" and name == "cosine" and number == 0.5:
            return dropped("one fall, as here")
        if name == "warmup_stable_decay" and key == "decay_type" and value in {"cosine", "linear", "1-sqrt"}:
            return same({"schedule.decay": value})
        return refused(f"{lacks.SCHEDULE_DETAIL} ({key})", settled_by=("schedule",))

    return rule


_SCHEDULE_WORDS: Mapping[tuple[str, str], str] = {
    ("cosine_with_min_lr", "min_lr_rate"): "schedule.final_ratio",
    ("cosine_with_restarts", "num_cycles"): "schedule.cycles",
    ("polynomial", "power"): "schedule.power",
    ("inverse_sqrt", "timescale"): "schedule.timescale",
    ("warmup_stable_decay", "num_decay_steps"): "schedule.decay_steps",
    ("warmup_stable_decay", "min_lr_ratio"): "schedule.final_ratio",
}
SCHEDULE_KEYS = ("min_lr", "lr_end", "decay_type", *(key for _, key in _SCHEDULE_WORDS))
"""Keys of `lr_scheduler_kwargs` that mean something to a schedule of ours."""


def of_adam(rule: Rule) -> Rule:
    """A key of the moments of Adam, which SGD and Adafactor do not read."""
    return lambda value, foreign: rule(value, foreign) if has_moments(foreign) else dropped("no moments to decay")


def has_moments(foreign: Foreign) -> bool:
    """Whether the optimizer reads the betas and epsilon of Adam."""
    return str(foreign.get("optim", foreign.get("optimizer", ""))) not in {"sgd", "adafactor"}


def if_moments(value: Any) -> Callable[[Foreign], Any]:
    """A default of those."""
    return lambda foreign: value if has_moments(foreign) else None


def _epsilon(foreign: Foreign) -> float | None:
    """Lion has none."""
    name = str(foreign.get("optim", foreign.get("optimizer", "")))
    return 1e-8 if has_moments(foreign) and "lion" not in name else None


def _polynomial_end(foreign: Foreign) -> float | None:
    """Transformers lets the rate of `polynomial` fall to 1e-7, whatever it was."""
    return 1e-7 / foreign.number("learning_rate", 5e-5) if schedule_name(foreign) == "polynomial" else None


MOMENTS: tuple[Default, ...] = (
    Default(job="optimizer.beta1", value=if_moments(0.9), reason="adam_beta1 is 0.9"),
    Default(job="optimizer.beta2", value=if_moments(0.999), reason="adam_beta2 is 0.999"),
    Default(job="optimizer.epsilon", value=_epsilon, reason="adam_epsilon is 1e-8"),
    Default(job="optimizer.weight_decay", value=lambda _f: 0.0, reason="weight_decay is 0"),
    Default(job="optimizer.clip_norm", value=lambda _f: 1.0, reason="max_grad_norm is 1"),
    Default(job="schedule.final_ratio", value=_polynomial_end, reason="the rate falls to 1e-7"),
    Default(job="seed", value=lambda _f: 42, reason="seed is 42"),
)
"""Defaults of transformers that trainers above it have, too."""


def warmup(value: Any, foreign: Foreign) -> Outcome:
    """`warmup_steps` (a part of all steps below 1, since transformers 5) and `warmup_ratio`."""
    number = as_number(value)
    if number is None or number < 0:
        return refused(f"a value that is no warm-up: {value!r}")
    if schedule_name(foreign) == "constant":
        return dropped("their `constant` has no warm-up")
    if number == 0:
        return same({"schedule.warmup_steps": 0})
    if number < 1:
        return same({"schedule.warmup_ratio": float(number), **FROM_ZERO}, "a part of all steps")
    return same({"schedule.warmup_steps": int(number), **FROM_ZERO})


def warmup_ratio(value: Any, foreign: Foreign) -> Outcome:
    """A part of all steps, unless `warmup_steps` says more."""
    if foreign.number("warmup_steps", 0) > 0:
        return dropped("`warmup_steps` counts")
    number = as_number(value)
    if number is None or not 0 <= number <= 1:
        return refused(f"a value that is no part of the steps: {value!r}")
    if schedule_name(foreign) == "constant":
        return dropped("their `constant` has no warm-up")
    return same({"schedule.warmup_ratio": float(number), **FROM_ZERO} if number else {"schedule.warmup_steps": 0})


def clip_norm(value: Any, _foreign: Foreign) -> Outcome:
    """0 and null switch it off."""
    number = as_number(value)
    if value is not None and number is None:
        return refused(f"a value that is no number: {value!r}")
    return same({"optimizer.clip_norm": number or "none"})


def seed(value: Any, _foreign: Foreign) -> Outcome:
    """The same number drives another generator."""
    number = as_number(value)
    if number is None or number < 0:
        return refused(f"a seed that is none: {value!r}")
    return equivalent({"seed": int(number)}, "another generator: other draws of the same distribution")


def lengths(value: Any, foreign: Foreign) -> Outcome:
    """`num_train_epochs`, which `max_steps` outweighs."""
    if foreign.number("max_steps", -1) > 0:
        return dropped("`max_steps` counts")
    number = as_number(value)
    return refused(f"a value that is no number: {value!r}") if not number else same({"epochs": number})


def max_steps(value: Any, _foreign: Foreign) -> Outcome:
    """Below 1 it says nothing."""
    number = as_number(value)
    return same({"steps": int(number)}) if number and number > 0 else dropped("off: epochs count")


def checkpointing(value: Any, _foreign: Foreign) -> Outcome:
    """Memory against time."""
    return same({"activation_checkpointing": not is_off(value)})


def precision(name: str) -> Rule:
    """`bf16` and `fp16`; whether trained weights are in fp32 as well is for each tool to say."""

    def rule(value: Any, foreign: Foreign) -> Outcome:
        if is_off(value):
            return dropped("off")
        if name == "fp16" and foreign.says("bf16"):
            return dropped("`bf16` counts")
        return same({"precision.compute": name})

    return rule


def fp8(value: Any, _foreign: Foreign) -> Outcome:
    """Products rounded to 8 bits for speed; ours are nearer to what they stand for."""
    if is_off(value):
        return dropped("off, as here")
    return equivalent({"precision.compute": "bf16"}, "products in bf16: without the rounding to 8 bits")


def tf32(value: Any, foreign: Foreign) -> Outcome:
    """Concerns products of fp32 only."""
    if is_off(value):
        return dropped("off, as here")
    if any(foreign.says(key) for key in ("bf16", "fp16", "bfloat16", "float16")) or value == "auto":
        return dropped("products are in 16 bits: nothing is left in fp32 that it rounds")
    return refused(f"{lacks.PRECISION} (tf32)")


def cadence(job: str, *, epochs: str) -> Rule:
    """`save_steps` and `eval_steps`: steps, or below 1 a part of all steps. `epochs`: the key with the epochs."""

    def rule(value: Any, foreign: Foreign) -> Outcome:
        number = as_number(value)
        if not number:
            return dropped("off")
        if number >= 1:
            return same({f"{job}.every_steps": int(number)})
        steps = foreign.number("max_steps", -1)
        if steps > 0:
            return same({f"{job}.every_steps": max(1, round(number * steps))})
        return same({f"{job}.every_epochs": number * foreign.number(epochs, 3.0 if "train" in epochs else 1.0)})

    return rule


def reports(value: Any, foreign: Foreign) -> Outcome:
    """`report_to`: those that gangline has, too; figures lie in metrics.jsonl in any case."""
    names = [str(each).lower() for each in (value if isinstance(value, list) else [value])]
    job: dict[str, Any] = {"report.tensorboard": True} if "tensorboard" in names or "all" in names else {}
    if "wandb" in names:
        job["report.wandb"] = str(foreign.get("wandb_project", foreign.get("project", "huggingface")))
    if job:
        return same(job)
    return dropped("figures of every step are in metrics.jsonl and as TensorBoard files")


def strategy_word(job: str) -> Rule:
    """`save_strategy` and `eval_strategy`: the word; the number stands in another key."""

    def rule(value: Any, _foreign: Foreign) -> Outcome:
        word = str(value).lower()
        steps = "save_steps" if job == "checkpoint" else "eval_steps"
        if word == "epoch":
            return same({f"{job}.every_epochs": 1.0})
        if word in {"steps", "best"} or is_off(value):
            return dropped(f"`{steps}` has the number" if word == "steps" else "gangline saves when it is best, too")
        return refused(f"a word that is not known here: {word}")

    return rule


def _eval_steps(value: Any, foreign: Foreign) -> Outcome:
    if str(foreign.get("eval_strategy", foreign.get("evaluation_strategy", "no"))).lower() != "steps":
        return dropped("`eval_strategy` is not steps")
    return cadence("evaluation", epochs="num_train_epochs")(value, foreign)


def _save_steps(value: Any, foreign: Foreign) -> Outcome:
    if str(foreign.get("save_strategy", "steps")).lower() != "steps":
        return dropped("`save_strategy` is not steps")
    return cadence("checkpoint", epochs="num_train_epochs")(value, foreign)


def batch(foreign: Foreign, micro: str = "per_device_train_batch_size", fallback: int = 8) -> int:
    """Samples in one step over all processes."""
    accumulation = foreign.count("gradient_accumulation_steps", 1)
    return foreign.count(micro, fallback) * accumulation * foreign.world_size


def _micro_batch(value: Any, foreign: Foreign) -> Outcome:
    number = as_number(value)
    if not number:
        return refused(f"a value that is no number: {value!r}")
    if foreign.says("accelerator_config.split_batches"):
        return refused("a batch that is split over processes (split_batches)")
    return same({"micro_batch": int(number), "batch": batch(foreign)}, told_batch(foreign, int(number)))


def told_batch(foreign: Foreign, micro: int) -> str:
    """How the batch came about: "4 samples x 2 accumulation x 3 processes"."""
    accumulation = foreign.count("gradient_accumulation_steps", 1)
    return f"batch = {micro} samples x {accumulation} accumulation x {foreign.world_size} processes"


def _accumulation(value: Any, foreign: Foreign) -> Outcome:
    if not as_number(value):
        return refused(f"a value that is no number: {value!r}")
    micro = foreign.count("per_device_train_batch_size", 8)
    return equivalent({"batch": batch(foreign)}, told_batch(foreign, micro))


def best_at_end(value: Any, _foreign: Foreign) -> Outcome:
    """Gangline keeps the best beside the last; which one is exported is said then."""
    if is_off(value):
        return dropped("off; gangline exports the last, and keeps the best beside it")
    return equivalent({"checkpoint.keep_best": True}, "the best is kept beside the last; export the one you want")


RATE: Mapping[str, Rule] = {
    "adam_beta1": of_adam(number_to("optimizer.beta1")),
    "adam_beta2": of_adam(number_to("optimizer.beta2")),
    "adam_epsilon": of_adam(number_to("optimizer.epsilon")),
    "learning_rate": number_to("optimizer.learning_rate"),
    "weight_decay": number_to("optimizer.weight_decay"),
    "max_grad_norm": clip_norm,
    "seed": seed,
    "data_seed": lambda _value, _foreign: equivalent({}, "`seed` decides the order of samples, too"),
    "neftune_noise_alpha": off_or(lacks.NOISE),
    "resume_from_checkpoint": off_or(lacks.CONTINUED),
}
"""Keys that several trainers took over from transformers as they are."""

TRAINING: Mapping[str, Rule] = {
    **RATE,
    "output_dir": WHERE,
    "overwrite_output_dir": WHERE,
    "run_name": WHERE,
    "project": WHERE,
    "per_device_train_batch_size": _micro_batch,
    "gradient_accumulation_steps": _accumulation,
    "auto_find_batch_size": where_on(
        lambda _value, _foreign: equivalent(
            {"failures.smaller_micro_batch": True}, "the batch stays, micro-batches shrink"
        )
    ),
    "num_train_epochs": lengths,
    "max_steps": max_steps,
    "lr_scheduler_type": schedule,
    "lr_scheduler_kwargs": only({}, otherwise=lacks.SCHEDULE_DETAIL),
    **{f"lr_scheduler_kwargs.{key}": schedule_words(key) for key in SCHEDULE_KEYS},
    "lr_scheduler_kwargs.*": refuse(lacks.SCHEDULE_DETAIL),
    "warmup_steps": warmup,
    "warmup_ratio": warmup_ratio,
    "optim": optimizer,
    "optim_args": off_or(lacks.OPTIMIZER_DETAIL),
    "optim_args.*": refuse(lacks.OPTIMIZER_DETAIL),
    "optim_target_modules": off_or(lacks.OPTIMIZER_DETAIL),
    "average_tokens_across_devices": only(True, otherwise=lacks.AVERAGING),
    "label_smoothing_factor": off_or(f"{lacks.OTHER_LOSS} (label smoothing)"),
    "bf16": precision("bf16"),
    "fp16": precision("fp16"),
    "tf32": tf32,
    "half_precision_backend": SPEED,
    "fp16_opt_level": SPEED,
    "bf16_full_eval": drop("evaluation is in the precision of training"),
    "fp16_full_eval": drop("evaluation is in the precision of training"),
    "gradient_checkpointing": checkpointing,
    "activation_checkpointing": checkpointing,
    "gradient_checkpointing_kwargs.*": SPEED,
    "gradient_checkpointing_kwargs": SPEED,
    "activation_checkpointing_kwargs.*": SPEED,
    "torch_compile": KERNELS,
    "torch_compile_backend": KERNELS,
    "torch_compile_mode": KERNELS,
    "use_liger_kernel": KERNELS,
    "liger_kernel_config.*": KERNELS,
    "use_cache": SPEED,
    "use_cpu": SPEED,
    "no_cuda": SPEED,
    "torch_empty_cache_steps": SPEED,
    "logging_strategy": FIGURES,
    "logging_steps": FIGURES,
    "logging_first_step": FIGURES,
    "logging_dir": FIGURES,
    "log_on_each_node": FIGURES,
    "logging_nan_inf_filter": FIGURES,
    "include_num_input_tokens_seen": FIGURES,
    "include_tokens_per_second": FIGURES,
    "log_level": FIGURES,
    "log_level_replica": FIGURES,
    "disable_tqdm": FIGURES,
    "report_to": reports,
    "trackio_space_id": FIGURES,
    "trackio_bucket_id": FIGURES,
    "trackio_static_space_id": FIGURES,
    "do_train": drop("gangline train does"),
    "do_eval": drop("evaluation follows from data.eval"),
    "do_predict": off_or(lacks.GENERATION),
    "predict_with_generate": off_or(lacks.GENERATION),
    "eval_strategy": strategy_word("evaluation"),
    "evaluation_strategy": strategy_word("evaluation"),
    "eval_steps": _eval_steps,
    "eval_delay": drop("evaluation changes no weight"),
    "per_device_eval_batch_size": SPEED,
    "prediction_loss_only": SPEED,
    "eval_on_start": switch("evaluation.at_start"),
    "eval_do_concat_batches": SPEED,
    "eval_use_gather_object": SPEED,
    "eval_accumulation_steps": SPEED,
    "include_for_metrics": SPEED,
    "batch_eval_metrics": SPEED,
    "save_strategy": strategy_word("checkpoint"),
    "save_steps": _save_steps,
    "save_only_model": drop("checkpoints hold the whole state"),
    "save_on_each_node": drop("every host keeps what it needs to resume"),
    "save_safetensors": drop("safetensors always"),
    "save_total_limit": where_on(number_to("checkpoint.keep_last")),
    "enable_jit_checkpoint": drop("a signal saves before the end anyway"),
    **each(HUB, "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision"),
    "load_best_model_at_end": best_at_end,
    "metric_for_best_model": only("loss", "eval_loss", otherwise=lacks.STOPPING, reason="the evaluation loss, as here"),
    "greater_is_better": only(False, otherwise=lacks.STOPPING, reason="the lowest loss is best, as here"),
    "ignore_data_skip": drop("gangline resumes at the exact sample"),
    "restore_callback_states_from_checkpoint": drop("gangline resumes its whole state"),
    "full_determinism": drop("runs are reproducible as far as the hardware is"),
    "accelerator_config.split_batches": off_or("a batch that is split over processes (split_batches)"),
    "accelerator_config.*": LOADING,
    "parallelism_config.*": SPLITTING,
    "dataloader_drop_last": LAST_BATCH,
    **each(
        LOADING,
        """
            dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
            dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
            remove_unused_columns length_column_name
        """,
    ),
    "label_names": off_or(lacks.ROWS),
    "deepspeed": deepspeed_file,
    "group_by_length": off_or(f"{lacks.ORDER} (by length)"),
    "train_sampling_strategy": only("random", otherwise=lacks.ORDER),
    **each(
        SPLITTING,
        """
            ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
            ddp_timeout fsdp fsdp_config fsdp_config.* fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params
             local_rank debug skip_memory_metrics
        """,
    ),
}
"""Every field of TrainingArguments, and those of earlier versions that files still have."""

DEFAULTS: tuple[Default, ...] = (
    *MOMENTS,
    Default(job="batch", value=batch, reason="per_device_train_batch_size is 8, gradient_accumulation_steps 1"),
    Default(
        job="micro_batch",
        value=lambda foreign: foreign.count("per_device_train_batch_size", 8),
        reason="per_device_train_batch_size is 8",
    ),
    Default(
        job="epochs",
        value=lambda foreign: None if foreign.number("max_steps", -1) > 0 else 3.0,
        reason="num_train_epochs is 3",
    ),
    Default(job="optimizer.learning_rate", value=lambda _f: 5e-5, reason="learning_rate is 5e-5"),
    Default(job="optimizer.kind", value=lambda _f: "adamw", reason="optim is adamw_torch_fused"),
    Default(job="schedule.kind", value=lambda _f: "linear", reason="lr_scheduler_type is linear"),
    Default(
        job="schedule.warmup_steps",
        value=lambda f: None if f.number("warmup_ratio", 0) or f.number("warmup_steps", 0) else 0,
        reason="warmup_steps is 0",
    ),
    Default(
        job="precision.compute",
        value=lambda f: None if f.says("bf16") or f.says("fp16") else "fp32",
        reason="neither bf16 nor fp16",
    ),
)
"""What TrainingArguments does where a file is silent."""

# TRL: `trl sft --config FILE` has ModelConfig, SFTConfig and the words for data sets.


def _dataset(_value: Any, foreign: Foreign) -> Outcome:
    return same({"data.train": _named(foreign, "dataset_train_split", "train")})


def _named(foreign: Foreign, split: str, fallback: str) -> str:
    config = foreign.get("dataset_config")
    part = f"/{config}" if config else ""
    return f"hub:{foreign.get('dataset_name')}{part}#{foreign.get(split, fallback)}"


def _split(key: str, job: str, fallback: str) -> Rule:
    def rule(_value: Any, foreign: Foreign) -> Outcome:
        if not foreign.get("dataset_name"):
            return dropped("no `dataset_name`")
        if job == "data.eval" and is_off(foreign.get("eval_strategy")):
            return dropped("`eval_strategy` is no")
        return same({job: _named(foreign, key, fallback)})

    return rule


def _mixture(_value: Any, foreign: Foreign) -> Outcome:
    """`datasets` of TRL: each item is a hub data set, or files."""
    sources = [source_of(item) for item in foreign.items("datasets")]
    return same({"data.train": sources[0] if len(sources) == 1 else sources})


def source_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """One data set of the hub, or files: `path`, `name`, `split`, `data_files`, `revision`."""
    files = item.get("data_files")
    if files and str(item.get("path")) in {"json", "csv", "parquet", "arrow", "text"}:
        return {"files": files if isinstance(files, list) else [files]}
    words = {
        "hub": item.get("path"),
        "config": item.get("name"),
        "split": item.get("split") or "train",
        "revision": item.get("revision"),
    }
    return {key: value for key, value in words.items() if value is not None}


def _text_field(value: Any, _foreign: Foreign) -> Outcome:
    return same({"data.format": "text", "data.fields": {"text": value}})


def _assistant_only(value: Any, _foreign: Foreign) -> Outcome:
    if is_off(value):
        return refused(f"{lacks.BOTH_SIDES} (of conversations)", settled_by=("data.format", "data.learn"))
    return same({"data.format": "chat"})


def _completion_only(value: Any, _foreign: Foreign) -> Outcome:
    return refused(lacks.BOTH_SIDES) if is_off(value) else same({"data.format": "completion"})


def _method(value: Any, foreign: Foreign) -> Outcome:
    if is_off(value):
        return same({"method.kind": "full"})
    if foreign.says("load_in_4bit"):
        return same({"method.kind": "qlora"})
    return (
        same({"method.kind": "qlora", "method.bits": 8})
        if foreign.says("load_in_8bit")
        else same({"method.kind": "lora"})
    )


def _adapter(rule: Rule) -> Rule:
    return lambda value, foreign: rule(value, foreign) if foreign.says("use_peft") else dropped("`use_peft` is off")


def _bits(bits: int) -> Rule:
    def rule(value: Any, foreign: Foreign) -> Outcome:
        if is_off(value):
            return dropped("off")
        if not foreign.says("use_peft"):
            return refused(f"{lacks.QUANTISED_MODEL}: quantised weights without adapters")
        if bits == 8:
            return equivalent({"method.kind": "qlora", "method.bits": 8}, EIGHT_BITS)
        if not foreign.says("use_bnb_nested_quant"):
            return refused(
                f"{lacks.QUANTISED_MODEL}: NF4 with scales that are not quantised (use_bnb_nested_quant: false)"
            )
        return same({"method.kind": "qlora", "method.bits": 4})

    return rule


EIGHT_BITS = "weights rounded as by LLM.int8(); products are not, which is nearer to the unrounded model"


def targets(value: Any, _foreign: Foreign) -> Outcome:
    """Names of modules; `all-linear`; or one text, which peft reads as a regular expression."""
    if isinstance(value, list):
        names = [str(name) for name in value]
        return same({"method.targets": "all-linear" if names in (["all-linear"], ["all"]) else names})
    text = str(value).strip()
    if text in {"all-linear", "all"}:
        return same({"method.targets": "all-linear"})
    return same({"method.targets": f"regex:{text}"}, "one regular expression")


def dtype(value: Any, foreign: Foreign) -> Outcome:
    """The number format in which weights are loaded: trained weights stay in it, frozen ones are in 16 bits anyway."""
    name = str(value).lower().removeprefix("torch.")
    short = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "float32": "fp32", "fp32": "fp32"}.get(name)
    if foreign.says("use_peft"):
        return dropped("adapters are in fp32, frozen weights in the format of products")
    if short == "bf16":
        return same({"precision.parameters": "compute"}, "trained weights in bf16, as they are loaded")
    if short == "fp32":
        return same({"precision.parameters": "fp32"})
    return refused(f"{lacks.PRECISION} ({name})")


def trust(_value: Any, _foreign: Foreign) -> Outcome:
    """A permission, no number: a model that transformers knows needs none."""
    return dropped("a permission: models that transformers knows need none; any other needs `model.revision`, too")


def attention(value: Any, _foreign: Foreign) -> Outcome:
    """Kernels compute the same attention; the choice of gangline is `auto`."""
    if str(value) in {"eager", "sdpa"}:
        return same({"model.attention": str(value)})
    return equivalent({}, "the same attention by another kernel (`model.attention: auto`)")


TRL: Mapping[str, Rule] = {
    **TRAINING,
    "model_name_or_path": to("model.path"),
    "model_revision": lambda value, _f: (
        dropped("main, as here") if value == "main" else same({"model.revision": value})
    ),
    "dtype": dtype,
    "torch_dtype": dtype,
    "trust_remote_code": trust,
    "attn_implementation": attention,
    "model_init_kwargs.*": refuse(lacks.MODEL_CHANGE),
    "use_peft": _method,
    "lora_r": _adapter(number_to("method.rank")),
    "lora_alpha": _adapter(number_to("method.alpha")),
    "lora_dropout": _adapter(number_to("method.dropout")),
    "lora_target_modules": _adapter(targets),
    "lora_target_parameters": _adapter(to("method.target_parameters")),
    "lora_modules_to_save": _adapter(to("method.modules_to_save")),
    "lora_task_type": only("CAUSAL_LM", otherwise=lacks.PREFERENCE),
    "use_rslora": _adapter(switch("method.rslora")),
    "use_dora": _adapter(switch("method.dora")),
    "load_in_8bit": _bits(8),
    "load_in_4bit": _bits(4),
    "bnb_4bit_quant_type": only("nf4", otherwise=lacks.QUANTISED_MODEL),
    "use_bnb_nested_quant": lambda value, f: (
        dropped("NF4 with quantised scales, as here")
        if not is_off(value) or not f.says("load_in_4bit")
        else dropped("`load_in_4bit` says it")
    ),
    "bnb_4bit_quant_storage": SPEED,
    "dataset_name": _dataset,
    "dataset_config": _split("dataset_train_split", "data.train", "train"),
    "dataset_train_split": _split("dataset_train_split", "data.train", "train"),
    "dataset_test_split": _split("dataset_test_split", "data.eval", "test"),
    "dataset_streaming": LOADING,
    "datasets.*.path": _mixture,
    "datasets.*.name": _mixture,
    "datasets.*.split": _mixture,
    "datasets.*.data_files": _mixture,
    "datasets.*.data_dir": off_or(lacks.SOURCES),
    "datasets.*.columns": LOADING,
    "datasets.*.fraction": off_or(lacks.SOURCES),
    "streaming": LOADING,
    "test_split_size": lambda value, _f: equivalent({"data.eval": value}, "the same part; other rows are drawn"),
    "ignore_bias_buffers": SPEED,
    "dataset_text_field": _text_field,
    "dataset_kwargs.*": refuse(lacks.ROWS),
    "dataset_num_proc": LOADING,
    "chat_template_path": lambda value, _f: same({"data.chat_template": value}),
    "eos_token": lambda value, _f: same({"tokens.special": {"eos_token": value}}),
    "pad_token": drop("padding is never learned nor attended to"),
    "max_length": number_to("data.sequence_length"),
    "max_seq_length": number_to("data.sequence_length"),
    "truncation_mode": only("keep_start", otherwise=lacks.TRUNCATION),
    "shuffle_dataset": drop("samples are shuffled in every epoch anyway"),
    "packing": switch("data.packing"),
    "packing_strategy": lambda value, f: (
        refused(lacks.LEAKING)
        if value == "wrapped" and f.says("packing")
        else dropped("rows do not see each other, as here")
    ),
    "padding_free": SPEED,
    "pad_to_multiple_of": SPEED,
    "eval_packing": SPEED,
    "completion_only_loss": _completion_only,
    "assistant_only_loss": _assistant_only,
    "loss_type": only("nll", "chunked_nll", otherwise=lacks.OTHER_LOSS, reason="cross entropy, as here"),
    "router_aux_loss_coef": off_or(lacks.BALANCE_LOSS),
    "activation_offloading": switch("activation_offloading"),
}

_ADAPTERS = (
    ("method.rank", 16, "lora_r is 16"),
    ("method.alpha", 32, "lora_alpha is 32"),
    ("method.dropout", 0.05, "lora_dropout is 0.05"),
)


def _with_peft(value: Any) -> Any:
    return lambda foreign: value if foreign.says("use_peft") else None


TRL_DEFAULTS: tuple[Default, ...] = (
    *(each for each in DEFAULTS if each.job not in {"optimizer.learning_rate", "precision.compute"}),
    Default(job="optimizer.learning_rate", value=lambda _f: 2e-5, reason="SFTConfig has a learning_rate of 2e-5"),
    Default(
        job="precision.compute",
        value=lambda f: "fp32" if f.get("bf16") is False and not f.says("fp16") else None if f.says("fp16") else "bf16",
        reason="SFTConfig takes bf16 where neither bf16 nor fp16 is given",
    ),
    Default(job="data.sequence_length", value=lambda _f: 1024, reason="max_length is 1024"),
    Default(job="data.packing", value=lambda _f: False, reason="packing is off"),
    Default(job="activation_checkpointing", value=lambda _f: True, reason="gradient_checkpointing is on"),
    *(Default(job=job, value=_with_peft(value), reason=reason) for job, value, reason in _ADAPTERS),
)

TRAINER_TOOL = Tool(
    name="transformers' Trainer",
    keys=TRL,
    defaults=DEFAULTS,
    parts={"deepspeed": DEEPSPEED, "accelerate": ACCELERATE},
    null_counts=frozenset({"max_grad_norm"}),
)
TRL_TOOL = Tool(
    name="TRL",
    keys=TRL,
    defaults=TRL_DEFAULTS,
    parts={"deepspeed": DEEPSPEED, "accelerate": ACCELERATE},
    null_counts=frozenset({"max_grad_norm"}),
)
