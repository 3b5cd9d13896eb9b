"""torchtune's YAML (0.6, its last series): every key of its fine-tuning recipes, and what it becomes.

Their own words: recipes/configs/, recipes/{full,lora}_finetune_*.py, torchtune/datasets/. Every part of a configuration
names its class as `_component_`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gangline.convert import features as lacks
from gangline.convert.hugging_face import (
    EIGHT_BITS,
    FIGURES,
    FROM_ZERO,
    KERNELS,
    LOADING,
    SPEED,
    SPLITTING,
    WHERE,
    seed,
    told_batch,
)
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
)

_NO_CHAT = ("data.format", "data.train")


def _class(foreign: Foreign, part: str) -> str:
    """The last name of a part's class: `lora_llama3_1_8b`."""
    return str(foreign.get(f"{part}._component_", "")).rpartition(".")[2]


def _kind(foreign: Foreign) -> str:
    name = _class(foreign, "model")
    if name.startswith("qlora_") or foreign.says("model.quantize_base"):
        return "qlora"
    return "lora" if name.startswith(("lora_", "dora_")) else "full"


def _model(value: Any, foreign: Foreign) -> Outcome:
    kind = _kind(foreign)
    if "vision" in str(value) or "multimodal" in str(value) or "clip" in str(value):
        return refused(f"{lacks.IMAGES} ({value})")
    if "phi" in str(value) and kind != "full":
        return refused(
            f"{lacks.ADAPTER_DETAIL} (names of modules that transformers has in one)", settled_by=("method.targets",)
        )
    if kind == "qlora":
        return equivalent({"method.kind": kind, "method.bits": 4}, "NF4 by our own kernels in place of torchao's")
    return same({"method.kind": kind})


_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}


def _targets(_value: Any, foreign: Foreign) -> Outcome:
    if foreign.says("model.apply_lora_to_output"):
        return refused(f"{lacks.ADAPTER_DETAIL} (an adapter of the output head)", settled_by=("method.targets",))
    names = [_ATTENTION.get(str(name), str(name)) for name in foreign.get("model.lora_attn_modules", [])]
    if foreign.says("model.apply_lora_to_mlp"):
        names += ["gate_proj", "up_proj", "down_proj"]
    return same({"method.targets": names}, "under transformers' names")


def _samples(foreign: Foreign) -> int:
    return foreign.count("batch_size", 1) * foreign.count("gradient_accumulation_steps", 1) * foreign.world_size


def _micro_batch(value: Any, foreign: Foreign) -> Outcome:
    if not as_number(value):
        return refused(f"a value that is no number: {value!r}")
    micro = foreign.count("batch_size", 1)
    return same({"micro_batch": micro, "batch": _samples(foreign)}, told_batch(foreign, micro))


def _accumulation(_value: Any, foreign: Foreign) -> Outcome:
    return equivalent({"batch": _samples(foreign)}, told_batch(foreign, foreign.count("batch_size", 1)))


def _rows(value: Any, foreign: Foreign) -> Outcome:
    name = _class(foreign, "dataset")
    source = foreign.get("dataset.source")
    hub = {"data.train": f"hub:{source}#{foreign.get('dataset.split', 'train')}"}
    if name == "text_completion_dataset" and source:
        column = foreign.get("dataset.column", "text")
        return same({**hub, "data.format": "text"} | ({} if column == "text" else {"data.fields": {"text": column}}))
    if name == "chat_dataset" and source:
        fields = {"messages": foreign.get("dataset.conversation_column", "messages")}
        if foreign.get("dataset.conversation_style") == "sharegpt":
            fields |= {"role": "from", "content": "value"}
            roles = {"data.roles": {"human": "user", "gpt": "assistant"}}
        else:
            roles = {}
        told = {role: column for role, column in fields.items() if role != column}
        return equivalent(
            {**hub, "data.format": "chat", **roles} | ({"data.fields": told} if told else {}),
            "the model's chat template as transformers has it",
        )
    if "multimodal" in str(value):
        return refused(lacks.IMAGES)
    return refused(f"{lacks.ROWS} ({name}: its own words inside a chat template)", settled_by=_NO_CHAT)


def _part_of_rows(_value: Any, foreign: Foreign) -> Outcome:
    return (
        dropped("dataset._component_ says it")
        if _class(foreign, "dataset")
        else refused(lacks.ROWS, settled_by=_NO_CHAT)
    )


def _both_sides(value: Any, foreign: Foreign) -> Outcome:
    if is_off(value):
        return dropped("off, as here")
    return (
        dropped("every token of a text is learned")
        if _class(foreign, "dataset") == "text_completion_dataset"
        else refused(lacks.BOTH_SIDES)
    )


def _length(value: Any, _foreign: Foreign) -> Outcome:
    number = as_number(value)
    if number is None:
        return refused("samples of any length (max_seq_len: null)", settled_by=("data.sequence_length",))
    return same({"data.sequence_length": int(number)})


_OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    "AdamW": ("adamw", ""),
    "PagedAdamW": ("adamw", "moments are not paged out"),
    "AdamW8bit": ("adamw-8bit", ""),
    "PagedAdamW8bit": ("paged-adamw-8bit", ""),
}


def _optimizer(value: Any, foreign: Foreign) -> Outcome:
    name = _class(foreign, "optimizer")
    if name not in _OPTIMIZERS:
        return refused(f"{lacks.OTHER_OPTIMIZER} ({value})", settled_by=("optimizer.kind",))
    kind, reason = _OPTIMIZERS[name]
    return equivalent({"optimizer.kind": kind}, reason) if reason else same({"optimizer.kind": kind})


def _decay(value: Any, foreign: Foreign) -> Outcome:
    number = as_number(value)
    if number is None:
        return refused(f"a value that is no number: {value!r}")
    if number and _kind(foreign) == "full":
        return refused(
            f"{lacks.OPTIMIZER_DETAIL} (weight decay on norms and biases)", settled_by=("optimizer.weight_decay",)
        )
    return same({"optimizer.weight_decay": number})


def _betas(value: Any, _foreign: Foreign) -> Outcome:
    if isinstance(value, list) and len(value) == 2:
        return same({"optimizer.beta1": value[0], "optimizer.beta2": value[1]})
    return refused(f"{lacks.OPTIMIZER_DETAIL} (betas)")


def _schedule(value: Any, foreign: Foreign) -> Outcome:
    if _class(foreign, "lr_scheduler") == "get_cosine_schedule_with_warmup":
        return same({"schedule.kind": "cosine"})
    return refused(f"{lacks.OTHER_SCHEDULE} ({value})", settled_by=("schedule.kind",))


def _warmup(value: Any, _foreign: Foreign) -> Outcome:
    number = as_number(value)
    if number is None:
        return refused(f"a value that is no number: {value!r}")
    return same({"schedule.warmup_steps": int(number)} | (dict(FROM_ZERO) if number else {}))


def _loss(value: Any, foreign: Foreign) -> Outcome:
    known = {"CEWithChunkedOutputLoss", "LinearCrossEntropyLoss", "CrossEntropyLoss"}
    return (
        dropped("cross entropy, as here")
        if _class(foreign, "loss") in known
        else refused(f"{lacks.OTHER_LOSS} ({value})")
    )


def _epochs(value: Any, foreign: Foreign) -> Outcome:
    if foreign.get("max_steps_per_epoch"):
        return dropped("max_steps_per_epoch counts")
    return same({"epochs": value})


def _steps(value: Any, foreign: Foreign) -> Outcome:
    if foreign.count("epochs", 1) != 1:
        return refused(f"{lacks.ORDER} (a part of the rows in every epoch)", settled_by=("steps",))
    return same({"steps": int(as_number(value) or 0)})


def _clip(value: Any, _foreign: Foreign) -> Outcome:
    return same({"optimizer.clip_norm": as_number(value) or "none"})


def _dtype(value: Any, foreign: Foreign) -> Outcome:
    if value not in {"bf16", "fp32"}:
        return refused(f"{lacks.PRECISION} ({value})")
    if value == "bf16" and _kind(foreign) == "full":
        return same({"precision.compute": "bf16", "precision.parameters": "compute"}, "weights are in bf16, too")
    if value == "bf16":
        return equivalent({"precision.compute": "bf16"}, "adapters are in fp32 here: less rounding")
    return same({"precision.compute": "fp32"})


KEYS: Mapping[str, Rule] = {
    "model._component_": _model,
    "model.lora_attn_modules": _targets,
    "model.apply_lora_to_mlp": _targets,
    "model.apply_lora_to_output": off_or(f"{lacks.ADAPTER_DETAIL} (an adapter of the output head)"),
    "model.lora_rank": number_to("method.rank"),
    "model.lora_alpha": number_to("method.alpha"),
    "model.lora_dropout": number_to("method.dropout"),
    "model.use_dora": switch("method.dora"),
    "model.quantize_base": lambda value, _f: (
        dropped("off")
        if is_off(value)
        else equivalent({"method.kind": "qlora", "method.bits": 4}, EIGHT_BITS.replace("by LLM.int8()", "to NF4"))
    ),
    "model.*": refuse(lacks.MODEL_CHANGE),
    "tokenizer.max_seq_len": _length,
    "tokenizer.prompt_template": off_or(lacks.TEMPLATE),
    "tokenizer.*": drop("the tokenizer that comes with the model"),
    "checkpointer._component_": lambda value, _f: (
        dropped("the model's folder")
        if str(value).endswith("FullModelHFCheckpointer")
        else refused("weights in another form than transformers'", settled_by=("model.path",))
    ),
    "checkpointer.checkpoint_dir": to("model.path"),
    "checkpointer.recipe_checkpoint": off_or(lacks.CONTINUED),
    "checkpointer.adapter_checkpoint": off_or(lacks.CONTINUED),
    "checkpointer.*": WHERE,
    "resume_from_checkpoint": off_or(lacks.CONTINUED),
    "save_adapter_weights_only": drop("checkpoints hold the whole state of training"),
    "dataset._component_": _rows,
    "dataset.packed": switch("data.packing"),
    "dataset.train_on_input": _both_sides,
    **each(
        _part_of_rows,
        "dataset.source dataset.split dataset.column dataset.conversation_column dataset.conversation_style",
    ),
    "dataset.*": refuse(lacks.ROWS),
    "datasets.*": refuse(lacks.SOURCES),
    "dataloader.*": LOADING,
    "collate_fn": off_or(lacks.CODE),
    "seed": seed,
    "shuffle": only(True, otherwise=lacks.ORDER, reason="shuffled in every epoch, as here"),
    "batch_size": _micro_batch,
    "gradient_accumulation_steps": _accumulation,
    "epochs": _epochs,
    "max_steps_per_epoch": _steps,
    "optimizer._component_": _optimizer,
    "optimizer.lr": number_to("optimizer.learning_rate"),
    "optimizer.weight_decay": _decay,
    "optimizer.betas": _betas,
    "optimizer.eps": number_to("optimizer.epsilon"),
    "optimizer.fused": SPEED,
    "optimizer.foreach": SPEED,
    "optimizer.*": refuse(lacks.OPTIMIZER_DETAIL),
    "optimizer_in_bwd": drop("when weights are updated within a step: the same numbers"),
    "lr_scheduler._component_": _schedule,
    "lr_scheduler.num_warmup_steps": _warmup,
    "lr_scheduler.num_cycles": only(0.5, otherwise=lacks.SCHEDULE_DETAIL),
    "lr_scheduler.*": refuse(lacks.SCHEDULE_DETAIL),
    "loss._component_": _loss,
    "loss.num_output_chunks": SPEED,
    "loss.*": refuse(lacks.OTHER_LOSS),
    "clip_grad_norm": _clip,
    "dtype": _dtype,
    "enable_activation_checkpointing": switch("activation_checkpointing"),
    "enable_activation_offloading": switch("activation_offloading"),
    **each(SPEED, "ac_mode ac_option low_cpu_ram enable_kv_cache device activation_offloading_use_streams"),
    **each(KERNELS, "compile compile.*"),
    **each(WHERE, "output_dir"),
    **each(FIGURES, "metric_logger.* log_every_n_steps log_peak_memory_stats log_level profiler.*"),
    **each(
        SPLITTING,
        "fsdp.* fsdp_cpu_offload fsdp_sharding_strategy custom_sharded_layers memory_efficient_fsdp_wrap"
        " tensor_parallel_dim tensor_parallel_plan.* data_parallel_shard_dim data_parallel_replicate_dim"
        " fsdp_reshard_after_forward",
    ),
    "quantizer": off_or(lacks.FAKE_QUANTISATION),
    "quantizer.*": refuse(lacks.FAKE_QUANTISATION),
    **each(refuse(f"{lacks.OTHER_LOSS} (distillation)"), "teacher_model.* teacher_checkpointer.* kd_loss.* kd_ratio"),
    **each(refuse(lacks.PREFERENCE), "ref_checkpointer.* reward_and_value_model.* policy_model.*"),
    **each(refuse(lacks.GENERATION), "prompt.* max_new_tokens temperature top_k tasks limit"),
}
"""Keys of the recipes."""


def _adapters(value: Any) -> Any:
    return lambda foreign: None if _kind(foreign) == "full" else value


TORCHTUNE_TOOL = Tool(
    name="torchtune",
    keys=KEYS,
    null_counts=frozenset({"tokenizer.max_seq_len", "clip_grad_norm"}),
    defaults=(
        Default(job="batch", value=_samples, reason="batch_size times gradient_accumulation_steps"),
        Default(job="epochs", value=lambda f: None if f.get("max_steps_per_epoch") else 1, reason="one epoch"),
        Default(job="optimizer.beta1", value=lambda _f: 0.9, reason="AdamW's betas are 0.9 and 0.999"),
        Default(job="optimizer.beta2", value=lambda _f: 0.999, reason="AdamW's betas are 0.9 and 0.999"),
        Default(job="optimizer.epsilon", value=lambda _f: 1e-8, reason="AdamW's eps is 1e-8"),
        Default(
            job="optimizer.weight_decay", value=lambda _f: 0.01, reason="AdamW of torch has a weight_decay of 0.01"
        ),
        Default(job="optimizer.clip_norm", value=lambda _f: "none", reason="clip_grad_norm is null"),
        Default(job="schedule.kind", value=lambda _f: "constant", reason="no lr_scheduler"),
        Default(job="schedule.warmup_steps", value=lambda _f: 0, reason="no warm-up"),
        Default(job="method.dropout", value=_adapters(0.0), reason="lora_dropout is 0"),
        Default(job="data.packing", value=lambda _f: False, reason="packed is false"),
        Default(
            job="data.overlong",
            value=lambda f: None if _class(f, "dataset") == "text_completion_dataset" else "truncate",
            reason="rows that are too long are cut",
        ),
    ),
)
