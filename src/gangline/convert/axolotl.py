"""Axolotl's YAML (0.17, July 2026): every key, and what it becomes.

Their own words: axolotl/utils/schemas/ (keys and defaults), axolotl/core/builders/ (what of them reaches the trainer),
axolotl/prompt_strategies/ (what a row looks like and what of it is learned).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gangline.convert import features as lacks
from gangline.convert.axolotl_rows import ROWS, template_name, train_rows
from gangline.convert.hugging_face import (
    EIGHT_BITS,
    FIGURES,
    HUB,
    KERNELS,
    LOADING,
    MOMENTS,
    RATE,
    SCHEDULE_KEYS,
    SPEED,
    SPLITTING,
    WHERE,
    attention,
    best_at_end,
    cadence,
    checkpointing,
    fp8,
    max_steps,
    optimizer,
    precision,
    schedule,
    schedule_words,
    strategy_word,
    targets,
    tf32,
    trust,
    warmup,
    warmup_ratio,
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
    where_on,
)
from gangline.convert.strategy_files import ACCELERATE, DEEPSPEED, deepspeed_file

# The batch.


def _accumulation_of(foreign: Foreign) -> int:
    """Axolotl's `batch_size` is that of one process over all its micro-batches."""
    whole, micro = foreign.number("batch_size", 0), foreign.count("micro_batch_size", 1)
    return foreign.count("gradient_accumulation_steps", int(whole // micro) if whole else 1)


def _replicas(foreign: Foreign) -> int:
    """Processes that get samples of their own: tensor and context parallelism share theirs."""
    sharing = foreign.count("tensor_parallel_size", 1) * max(
        foreign.count("context_parallel_size", 1), foreign.count("sequence_parallel_degree", 1)
    )
    return max(1, foreign.world_size // max(1, sharing))


def batch(foreign: Foreign) -> int:
    """Samples in one step over all processes."""
    return foreign.count("micro_batch_size", 1) * _accumulation_of(foreign) * _replicas(foreign)


def _told(foreign: Foreign) -> str:
    micro, replicas = foreign.count("micro_batch_size", 1), _replicas(foreign)
    return f"batch = {micro} samples x {_accumulation_of(foreign)} accumulation x {replicas} processes with their own"


def _micro_batch(value: Any, foreign: Foreign) -> Outcome:
    if not as_number(value):
        return refused(f"a value that is no number: {value!r}")
    return same({"micro_batch": foreign.count("micro_batch_size", 1), "batch": batch(foreign)}, _told(foreign))


def _part_of_batch(value: Any, foreign: Foreign) -> Outcome:
    if not as_number(value):
        return refused(f"a value that is no number: {value!r}")
    return equivalent({"batch": batch(foreign)}, _told(foreign))


# What trains.


def _adapter_kind(foreign: Foreign) -> dict[str, Any]:
    if is_off(foreign.get("adapter")):
        return {"method.kind": "full"}
    if foreign.says("load_in_8bit") and not foreign.says("load_in_4bit"):
        return {"method.kind": "qlora", "method.bits": 8}
    quantised = foreign.says("load_in_4bit") or foreign.get("adapter") == "qlora"
    return {"method.kind": "qlora", "method.bits": 4} if quantised else {"method.kind": "lora"}


def _adapter(value: Any, foreign: Foreign) -> Outcome:
    if not is_off(value) and value not in {"lora", "qlora"}:
        return refused(f"{lacks.OTHER_ADAPTER} ({value})")
    return same(_adapter_kind(foreign))


def _bits(bits: int) -> Rule:
    def rule(value: Any, foreign: Foreign) -> Outcome:
        if is_off(value):
            return dropped("off")
        if is_off(foreign.get("adapter")):
            return refused(f"{lacks.QUANTISED_MODEL}: quantised weights without adapters")
        if bits == 8 and not foreign.says("load_in_4bit"):
            return equivalent(_adapter_kind(foreign), EIGHT_BITS)
        return same(_adapter_kind(foreign))

    return rule


def _experts(_value: Any, foreign: Foreign) -> Outcome:
    """Every tensor of experts, by the same NF4 as linears; of 8 bits in rows with one scale each."""
    kind = _adapter_kind(foreign)
    if kind["method.kind"] != "qlora":
        return refused(f"{lacks.EXPERTS}: of a model that is not loaded in few bits")
    if not _recomputes(foreign):
        return refused(f"{lacks.EXPERTS}: without recomputation", settled_by=("activation_checkpointing",))
    job = {"method.quantise_experts": True}
    return equivalent(job, EIGHT_BITS) if kind["method.bits"] == 8 else same(job)


def _recomputes(foreign: Foreign) -> bool:
    return any(
        foreign.says(key)
        for key in (
            "gradient_checkpointing",
            "activation_offloading",
            "fsdp_config.activation_checkpointing",
            "fsdp_config.fsdp_activation_checkpointing",
        )
    )


def _of_adapter(rule: Rule) -> Rule:
    """A key that says something where there is an adapter."""
    return lambda value, foreign: dropped("no adapter") if is_off(foreign.get("adapter")) else rule(value, foreign)


def _target_linear(value: Any, foreign: Foreign) -> Outcome:
    if is_off(value):
        return dropped("off")
    named = foreign.get("lora_target_modules", [])
    if isinstance(named, list) and not is_off(named):
        return equivalent(
            {"method.targets": "all-linear"}, "every linear layer but the output head; the names add none"
        )
    if named:
        return refused(f"{lacks.ADAPTER_DETAIL}: all linear layers beside a regular expression")
    return same({"method.targets": "all-linear"})


def _target_modules(value: Any, foreign: Foreign) -> Outcome:
    if is_off(value):
        return dropped("none named")
    if foreign.says("lora_target_linear") and isinstance(value, list):
        beyond = [name for name in value if name in {"lm_head", "embed_tokens", "output_layer", "embed_out"}]
        return (
            refused(f"{lacks.ADAPTER_DETAIL}: adapters of {', '.join(beyond)} beside all linear layers")
            if beyond
            else (equivalent({"method.targets": "all-linear"}, "lora_target_linear has them all"))
        )
    return targets(value, foreign)


_OF_LANGUAGE = frozenset({"model.language_model", "language_model", "lm_head", "embed_tokens"})


def _unfrozen(value: Any, _foreign: Foreign) -> Outcome:
    """Names of what trains. All of a language model is what text reaches, beside the tower for pictures."""
    if is_off(value):
        return dropped("everything trains, as here")
    names = {str(name).strip("^$.*") for name in (value if isinstance(value, list) else [value])}
    if {"model.language_model", "lm_head"} <= names <= _OF_LANGUAGE:
        return dropped("all that text reaches; no picture reaches the rest")
    return refused(lacks.FREEZING)


def _initial(value: Any, _foreign: Foreign) -> Outcome:
    if value is True:
        return dropped("peft's own start, as here")
    return same({"method.init": value}) if isinstance(value, str) else refused(f"{lacks.ADAPTER_DETAIL} ({value})")


# Plug-ins by the last part of their path.

_PLUGINS: Mapping[str, Outcome] = {
    **dict.fromkeys(
        ("CutCrossEntropyPlugin", "LigerPlugin", "KernelsPlugin", "FusedAttnPlugin"),
        dropped("kernels: speed only, and rounding"),
    ),
    "ExpertParallelPlugin": dropped("how devices share the work changes no number"),
    **dict.fromkeys(("SwanLabPlugin", "LMEvalPlugin"), dropped("figures of every step are in metrics.jsonl")),
    "DiffusionPlugin": refused(f"{lacks.OTHER_LOSS} (diffusion)"),
    "LLMCompressorPlugin": refused(f"{lacks.MODEL_CHANGE} (sparsity)"),
    "SpectrumPlugin": refused(lacks.FREEZING),
    "KDPlugin": refused(f"{lacks.OTHER_LOSS} (distillation)"),
    "GrokfastPlugin": refused(lacks.OPTIMIZER_DETAIL),
    "NemoGymPlugin": refused(lacks.PREFERENCE),
    "HatcheryPlugin": refused(lacks.PREFERENCE),
}


def _plugins(value: Any, _foreign: Foreign) -> Outcome:
    found = [
        _PLUGINS.get(str(name).rpartition(".")[2], refused(f"{lacks.CODE} ({name})"))
        for name in (value if isinstance(value, list) else [value])
    ]
    return next((each for each in found if each.verdict == "refused"), found[0] if found else dropped("none"))


def _weights(name: str) -> Rule:
    """`bfloat16` and `float16`: without automatic mixed precision trained weights are in 16 bits, too."""

    def rule(value: Any, _foreign: Foreign) -> Outcome:
        if is_off(value):
            return dropped("off")
        if name == "fp16":
            return refused(f"{lacks.PRECISION}: trained weights in fp16")
        return same({"precision.compute": name, "precision.parameters": "compute"})

    return rule


def _model_type(value: Any, _foreign: Foreign) -> Outcome:
    name = str(value)
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return dropped("transformers finds the class of the model")
    if name.endswith("ForSequenceClassification"):
        return refused(lacks.PREFERENCE)
    return refused(
        f"{lacks.IMAGES} ({name})"
        if "ConditionalGeneration" in name or "Image" in name
        else f"{lacks.MODEL_CHANGE} ({name})"
    )


def _same_model(feature: str) -> Rule:
    def rule(value: Any, foreign: Foreign) -> Outcome:
        return (
            dropped("the model's own, as here")
            if value == foreign.get("base_model")
            else refused(f"{feature} ({value})")
        )

    return rule


def _offloaded(value: Any, _foreign: Foreign) -> Outcome:
    if is_off(value):
        return dropped("off")
    return same({"activation_checkpointing": True, "activation_offloading": True})


def _checkpointing(value: Any, foreign: Foreign) -> Outcome:
    if str(value).startswith("offload"):
        return _offloaded(value, foreign)
    above = (
        "activation_offloading",
        "fsdp_config.activation_checkpointing",
        "fsdp_config.fsdp_activation_checkpointing",
    )
    said = [key for key in above if foreign.says(key)]
    return dropped(f"`{said[0]}` says it") if said else checkpointing(value, foreign)


def _per_epoch(job: str) -> Rule:
    """So many times in an epoch; Axolotl takes the part of all steps that this is."""

    def rule(value: Any, foreign: Foreign) -> Outcome:
        number = as_number(value)
        if not number:
            return dropped("off")
        if job == "evaluation" and not foreign.number("val_set_size", 0) and not foreign.items("test_datasets"):
            return dropped("no rows for evaluation")
        return same({f"{job}.every_epochs": 1 / number})

    return rule


def _eval_steps(value: Any, foreign: Foreign) -> Outcome:
    if not foreign.number("val_set_size", 0) and not foreign.items("test_datasets"):
        return dropped("no rows for evaluation")
    return cadence("evaluation", epochs="num_epochs")(value, foreign)


def _eval_strategy(value: Any, foreign: Foreign) -> Outcome:
    if not foreign.number("val_set_size", 0) and not foreign.items("test_datasets"):
        return dropped("no rows for evaluation")
    return strategy_word("evaluation")(value, foreign)


def _unless_per_epoch(key: str, rule: Rule) -> Rule:
    return lambda value, foreign: dropped(f"`{key}` says it") if foreign.says(key) else rule(value, foreign)


def _epochs(value: Any, foreign: Foreign) -> Outcome:
    if foreign.number("max_steps", 0) > 0:
        return dropped("`max_steps` counts")
    number = as_number(value)
    return same({"epochs": number}) if number else refused(f"a value that is no number: {value!r}")


_OWN_TOKENS = re.compile(
    r"(NousResearch|meta-llama)/Llama-2-|codellama/|openlm-research/open_llama|mistralai/Mistral-7B-v0"
)
"""Models whose own special tokens are <s>, </s> and <unk>."""


def _special(name: str, own: str) -> Rule:
    def rule(value: Any, foreign: Foreign) -> Outcome:
        if value == own and _OWN_TOKENS.match(str(foreign.get("base_model", ""))):
            return dropped("the model's own, as here")
        return same({f"tokens.special.{name}": value})

    return rule


def _warmup(rule: Rule) -> Rule:
    def whole(value: Any, foreign: Foreign) -> Outcome:
        found = rule(value, foreign)
        if found.verdict == "same" and "schedule.warmup_ratio" in found.job:
            return equivalent(found.job, "Axolotl rounds the steps down, gangline up")
        return found

    return whole


RUNS: Mapping[str, Rule] = {
    **RATE,
    "micro_batch_size": _micro_batch,
    "gradient_accumulation_steps": _part_of_batch,
    "batch_size": _part_of_batch,
    "eval_batch_size": SPEED,
    "auto_find_batch_size": where_on(
        lambda _value, _foreign: equivalent(
            {"failures.smaller_micro_batch": True}, "the batch stays, micro-batches shrink"
        )
    ),
    "num_epochs": _epochs,
    "max_steps": max_steps,
    "lr_scheduler": schedule,
    **{f"lr_scheduler_kwargs.{key}": schedule_words(key) for key in SCHEDULE_KEYS},
    "lr_scheduler_kwargs.*": refuse(lacks.SCHEDULE_DETAIL),
    "lr_quadratic_warmup": off_or(lacks.SCHEDULE_DETAIL),
    "cosine_min_lr_ratio": where_on(number_to("schedule.final_ratio")),
    "cosine_constant_lr_ratio": where_on(refuse(lacks.SCHEDULE_DETAIL)),
    "lr_div_factor": off_or(lacks.SCHEDULE_DETAIL),
    "eta_min": drop("no key of Axolotl: it reads nothing there"),
    "warmup_steps": _warmup(warmup),
    "warmup_ratio": _warmup(warmup_ratio),
    "optimizer": optimizer,
    "optim_args": off_or(lacks.OPTIMIZER_DETAIL),
    "optim_args.*": refuse(lacks.OPTIMIZER_DETAIL),
    "optim_target_modules": off_or(lacks.OPTIMIZER_DETAIL),
    "adam_eps": drop("no key of Axolotl (adam_epsilon is): it reads nothing there"),
    "adam_epsilon2": off_or(lacks.OPTIMIZER_DETAIL),
    "adam_beta3": off_or(lacks.OPTIMIZER_DETAIL),
    **each(off_or(lacks.RATES), "lr_groups lr_groups.* embedding_lr embedding_lr_scale loraplus_lr_ratio"),
    "loraplus_lr_embedding": lambda _value, f: (
        refused(lacks.RATES) if f.says("loraplus_lr_ratio") else dropped("no loraplus_lr_ratio")
    ),
    **each(drop("of the optimizer dion only"), "dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of"),
    **each(
        drop("of the optimizer q_galore only"),
        """
            qgalore_rank qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant
            qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj
            qgalore_queue_size
        """,
    ),
    "torchdistx_path": drop("of the optimizer adamw_anyprecision only"),
    "noisy_embedding_alpha": off_or(lacks.NOISE),
    "bf16": precision("bf16"),
    "fp16": precision("fp16"),
    "bfloat16": _weights("bf16"),
    "float16": _weights("fp16"),
    "float32": where_on(lambda _value, _foreign: same({"precision.compute": "fp32"})),
    "tf32": tf32,
    "fp8": fp8,
    "fp8_enable_fsdp_float8_all_gather": drop("of fp8 only"),
    "fp32_norms": off_or(lacks.PRECISION),
    "fp32_norm_classes": off_or(lacks.PRECISION),
    "torch_dtype": drop("no key of Axolotl: it reads nothing there"),
    "gradient_checkpointing": _checkpointing,
    "gradient_checkpointing_kwargs": SPEED,
    "gradient_checkpointing_kwargs.*": SPEED,
    "selective_checkpointing": SPEED,
    "selective_checkpointing.*": SPEED,
    "activation_offloading": _offloaded,
    "layer_offloading": SPEED,
    "early_stopping_patience": where_on(number_to("early_stopping.patience")),
    "load_best_model_at_end": best_at_end,
    "metric_for_best_model": only("loss", "eval_loss", otherwise=lacks.STOPPING, reason="the evaluation loss, as here"),
    "greater_is_better": only(False, otherwise=lacks.STOPPING, reason="the lowest loss is best, as here"),
    "loss_watchdog_threshold": drop("a stop for a loss that runs away; before it no number changes"),
    "loss_watchdog_patience": drop("a stop for a loss that runs away; before it no number changes"),
    "save_steps": _unless_per_epoch("saves_per_epoch", cadence("checkpoint", epochs="num_epochs")),
    "saves_per_epoch": _per_epoch("checkpoint"),
    "save_strategy": _unless_per_epoch("saves_per_epoch", strategy_word("checkpoint")),
    "save_total_limit": where_on(number_to("checkpoint.keep_last")),
    "save_first_step": SPEED,
    "save_only_model": drop("checkpoints hold the whole state"),
    "save_safetensors": drop("safetensors always"),
    "eval_steps": _unless_per_epoch("evals_per_epoch", _eval_steps),
    "evals_per_epoch": _per_epoch("evaluation"),
    "eval_strategy": _eval_strategy,
    "evaluation_strategy": _eval_strategy,
}
"""Keys that say how the run goes."""

MODEL: Mapping[str, Rule] = {
    "base_model": to("model.path"),
    "base_model_config": _same_model(lacks.MODEL_CHANGE),
    "cls_model_config": drop("transformers finds the class of the configuration"),
    "model_type": _model_type,
    "type_of_model": _model_type,
    "revision_of_model": to("model.revision"),
    "base_model_ignore_patterns": drop("which files are fetched"),
    "tokenizer_config": _same_model(lacks.TOKENS),
    "tokenizer_type": drop("transformers finds the class of the tokenizer"),
    "tokenizer_use_fast": drop("the fast tokenizer, as here"),
    "tokenizer_legacy": only(True, otherwise=lacks.TOKENS, reason="the tokenizer as its files say"),
    "tokenizer_use_mistral_common": where_on(
        lambda _v, _f: equivalent({}, "the same tokenizer and template by transformers, as the model's files have them")
    ),
    "tokenizer_save_jinja_files": HUB,
    "processor_type": where_on(refuse(lacks.IMAGES)),
    "processor_kwargs.*": refuse(lacks.IMAGES),
    "image_size": off_or(lacks.IMAGES),
    "image_resize_algorithm": off_or(lacks.IMAGES),
    "role_boundaries": off_or(lacks.MASK),
    "role_boundaries.*": refuse(lacks.MASK),
    "freeze_mm_modules": drop("no image reaches them"),
    "trust_remote_code": trust,
    "reinit_weights": where_on(lambda _v, _f: equivalent({"model.start": "random"}, "fresh weights of the same kind")),
    "model_config.*": refuse(f"{lacks.MODEL_CHANGE} (keys of its configuration)"),
    "overrides_of_model_config.*": refuse(f"{lacks.MODEL_CHANGE} (keys of its configuration)"),
    "overrides_of_model_kwargs.*": refuse(f"{lacks.MODEL_CHANGE} (arguments of its class)"),
    "model_quantization_config": off_or(lacks.QUANTISED_MODEL),
    "model_quantization_config_kwargs.*": refuse(lacks.QUANTISED_MODEL),
    "use_onebitllms": off_or(lacks.QUANTISED_MODEL),
    "rope_scaling": off_or(f"{lacks.MODEL_CHANGE} (rope_scaling)"),
    "special_tokens": only({}, otherwise=lacks.TOKENS),
    "special_tokens.pad_token": drop("padding is never learned nor attended to"),
    "special_tokens.eos_token": _special("eos_token", "</s>"),
    "special_tokens.bos_token": _special("bos_token", "<s>"),
    "special_tokens.unk_token": _special("unk_token", "<unk>"),
    "special_tokens.additional_special_tokens": to("tokens.add"),
    "tokens": where_on(to("tokens.add")),
    "tokens.*": drop("a mapping, which Axolotl reads no more (special_tokens is)"),
    "added_tokens_overrides.*": refuse(lacks.TOKENS),
    "resize_token_embeddings_to_32x": drop("rows of embeddings that no token has"),
    "shrink_embeddings": drop("rows of embeddings that no token has"),
    "mean_resizing_embeddings": off_or(lacks.TOKENS),
    "embeddings_skip_upcast": SPEED,
    "fix_untrained_tokens": off_or(lacks.TOKENS),
    "attn_implementation": attention,
    **each(
        where_on(lambda _v, f: attention("flash_attention_2", f)),
        "flash_attention xformers_attention sdp_attention flex_attention eager_attention",
    ),
    "sage_attention": off_or(lacks.FP8),
    "s2_attention": off_or(lacks.MODEL_CHANGE),
    **each(
        KERNELS,
        """
            flash_attn_cross_entropy flash_attn_fuse_mlp flash_attn_rms_norm flash_optimum flash_attn_d512
            sdpa_varlen fused_attn_kernel gemma4_hybrid_attn_impl large_head_attention experts_implementation
            flex_attn_compile_kwargs.* use_kernels use_scattermoe use_sonicmoe lora_mlp_kernel lora_qkv_kernel
            lora_o_kernel lora_embedding_kernel cut_cross_entropy chunked_cross_entropy
            chunked_cross_entropy_num_chunks tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp
            liger_rms_norm liger_rms_norm_gated liger_glu_activation liger_layer_norm liger_rope
            liger_cross_entropy liger_fused_linear_cross_entropy liger_use_token_scaling torch_compile
            torch_compile_backend torch_compile_mode torch_compile_options.* deepcompile use_dsv4_kernels
            use_glm_dsa_kernels
        """,
    ),
    "dsv4_fp4_grouped_mode": off_or(lacks.FP8),
    "nvfp4_merge_aware": off_or(lacks.FP8),
    "llama4_linearized_experts": off_or(f"{lacks.MODEL_CHANGE} (experts as linear layers)"),
    "scaling_softmax": off_or(lacks.MODEL_CHANGE),
    "scaling_softmax_factor": off_or(lacks.MODEL_CHANGE),
    "scaling_softmax_bias": off_or(lacks.MODEL_CHANGE),
    "plugins": _plugins,
}
"""Keys that say which model, and how it is computed."""

METHOD: Mapping[str, Rule] = {
    "adapter": _adapter,
    "load_in_4bit": _bits(4),
    "load_in_8bit": _bits(8),
    "bnb_config_kwargs.bnb_4bit_use_double_quant": only(
        True, otherwise=lacks.QUANTISED_MODEL, reason="NF4 with quantised scales, as here"
    ),
    "bnb_config_kwargs.bnb_4bit_quant_type": only("nf4", otherwise=lacks.QUANTISED_MODEL, reason="NF4, as here"),
    "bnb_config_kwargs.*": refuse(lacks.QUANTISED_MODEL),
    "gptq": off_or(lacks.QUANTISED_MODEL),
    **each(drop("of GPTQ only"), "gptq_groupsize gptq_model_v1 gptq_disable_exllama"),
    "quantize_moe_experts": _of_adapter(where_on(_experts)),
    "lora_r": _of_adapter(number_to("method.rank")),
    "lora_alpha": _of_adapter(number_to("method.alpha")),
    "lora_dropout": _of_adapter(number_to("method.dropout")),
    "lora_target_linear": _of_adapter(_target_linear),
    "lora_target_modules": _of_adapter(_target_modules),
    "lora_target_parameters": _of_adapter(to("method.target_parameters")),
    "lora_exclude_modules": _of_adapter(to("method.exclude")),
    "lora_modules_to_save": _of_adapter(where_on(to("method.modules_to_save"))),
    "lora_rank_pattern.*": lambda _v, f: same({"method.rank_pattern": _below(f, "lora_rank_pattern")}),
    "lora_alpha_pattern.*": lambda _v, f: same({"method.alpha_pattern": _below(f, "lora_alpha_pattern")}),
    "lora_fan_in_fan_out": drop("peft finds out by itself"),
    "lora_model_dir": _of_adapter(to("method.adapter")),
    "lora_on_cpu": SPEED,
    "peft_use_dora": _of_adapter(switch("method.dora")),
    "peft_use_rslora": _of_adapter(switch("method.rslora")),
    "peft_init_lora_weights": _of_adapter(_initial),
    "peft_layers_to_transform": _of_adapter(to("method.layers")),
    "peft_layers_pattern": _of_adapter(off_or(lacks.ADAPTER_DETAIL)),
    "peft_layer_replication": off_or(lacks.ADAPTER_DETAIL),
    "peft_trainable_token_indices": off_or(f"{lacks.ADAPTER_DETAIL} (tokens by number)"),
    "peft_ensure_weight_tying": off_or(lacks.ADAPTER_DETAIL),
    "peft_autocast_adapter_dtype": only(True, otherwise=lacks.PRECISION, reason="adapters in fp32, as here"),
    "peft.loftq_config.loftq_bits": refuse(f"{lacks.ADAPTER_DETAIL} (LoftQ)"),
    "peft.*": refuse(lacks.ADAPTER_DETAIL),
    "qlora_sharded_model_loading": LOADING,
    "merge_lora": HUB,
    "merge_method": HUB,
    "unfrozen_parameters": _unfrozen,
    **dict.fromkeys(("lisa_n_layers", "lisa_step_interval"), off_or(f"{lacks.FREEZING} (LISA)")),
    "lisa_layers_attribute": drop("of LISA only"),
    "relora": off_or(f"{lacks.OTHER_ADAPTER} (ReLoRA)"),
    "relora_steps": off_or(f"{lacks.OTHER_ADAPTER} (ReLoRA)"),
    **each(drop("of ReLoRA only"), "relora_prune_ratio relora_prune_method relora_cpu_offload relora_warmup_steps"),
    "jagged_restart_steps": off_or(f"{lacks.OTHER_SCHEDULE} (jagged restarts)"),
    **dict.fromkeys(("jagged_restart_warmup_steps", "jagged_restart_anneal_steps"), drop("of jagged restarts only")),
    "full_finetune": drop("no key of Axolotl: `adapter` says it"),
}
"""Keys that say which weights train."""

OTHER: Mapping[str, Rule] = {
    "deepspeed": deepspeed_file,
    **each(
        off_or(lacks.PREFERENCE),
        """
            rl reward_model process_reward_model num_labels center_rewards_coefficient rl_beta dpo_beta
            orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight dpo_use_weighting
            dpo_label_smoothing dpo_loss_type dpo_loss_weights dpo_norm_loss rpo_alpha precompute_ref_log_probs
            dpo_use_liger_kernel dpo_padding_free dpo_use_logits_to_keep dpo_generate_during_eval
        """,
    ),
    "trl.*": lambda _v, f: refused(lacks.PREFERENCE) if f.says("rl") else dropped("of `rl` only"),
    "ebft.*": lambda _v, f: refused(lacks.PREFERENCE) if f.says("rl") else dropped("of `rl` only"),
    "vllm.*": lambda _v, f: refused(lacks.PREFERENCE) if f.says("rl") else dropped("of `rl` only"),
    "qat.*": refuse(lacks.FAKE_QUANTISATION),
    "quantization.*": refuse("quantising a trained model"),
    "diffusion.*": refuse(f"{lacks.OTHER_LOSS} (diffusion)"),
    "llmcompressor.*": refuse(f"{lacks.MODEL_CHANGE} (sparsity)"),
    "use_eaft": off_or(f"{lacks.OTHER_LOSS} (EAFT)"),
    "eaft_alpha": drop("of EAFT only"),
    "eaft_k": drop("of EAFT only"),
    "kd_trainer": off_or(f"{lacks.OTHER_LOSS} (distillation)"),
    "trainer_cls": off_or(lacks.CODE),
    "expert_parallel_token_capacity": refuse(f"{lacks.MODEL_CHANGE} (experts that leave tokens out)"),
    "auto_resume_from_checkpoints": drop("`gangline resume` goes on with a run"),
    **each(
        WHERE,
        """
            output_dir strict debug wandb_name wandb_run_id wandb_mode wandb_entity wandb_watch wandb_log_model
            trackio_project_name trackio_run_name trackio_space_id project_name ray_run_name test_value
            axolotl_config_path
        """,
    ),
    "wandb_project": where_on(to("report.wandb")),
    "use_wandb": lambda value, f: (
        dropped("off, as here")
        if is_off(value)
        else (dropped("`wandb_project` says it") if f.says("wandb_project") else same({"report.wandb": "axolotl"}))
    ),
    "use_tensorboard": lambda value, _f: same({"report.tensorboard": not is_off(value)}),
    **each(FIGURES, "mlflow.* comet.* swanlab.*"),
    **each(
        FIGURES,
        """
            use_mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts
            use_comet comet_api_key comet_workspace comet_project_name comet_experiment_key comet_mode
            comet_online comet_experiment_config.* use_trackio use_swanlab swanlab_project
            swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace swanlab_log_model
            swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer
            swanlab_api_key swanlab_web_host swanlab_lark_webhook_url swanlab_lark_secret use_otel_metrics
            otel_metrics_host otel_metrics_port logging_steps include_tokens_per_second include_tkps
            profiler_steps profiler_steps_start eval_table_size eval_max_new_tokens do_causal_lm_eval
            eval_causal_lm_metrics do_bench_eval bench_dataset bench_split generate_samples
            num_generation_samples generation_max_new_tokens generation_temperature generation_top_p
            generation_top_k generation_prompt_ratio generation_do_sample
        """,
    ),
    **each(HUB, "hub_model_id hub_strategy hub_revision hf_use_auth_token"),
    **each(
        HUB,
        """
            gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens
            gradio_temperature
        """,
    ),
    **each(
        SPLITTING,
        """
            fsdp fsdp_config fsdp_config.* fsdp_version fsdp_final_state_dict_type dp_shard_size
            dp_replicate_size tensor_parallel_size context_parallel_size sequence_parallel_degree heads_k_stride
            ring_attn_func expert_parallel_size expert_parallel_num_nvl_bytes ddp ddp_timeout ddp_bucket_cap_mb
            ddp_broadcast_buffers ddp_find_unused_parameters local_rank world_size device device_map
            device_map.* max_memory.* gpu_memory_limit low_cpu_mem_usage experimental_skip_move_to_device
            use_ray ray_num_workers resources_per_worker.*
        """,
    ),
    "fsdp_config.activation_checkpointing": lambda value, _f: (
        dropped("off") if is_off(value) else same({"activation_checkpointing": True})
    ),
    "fsdp_config.fsdp_activation_checkpointing": lambda value, _f: (
        dropped("off") if is_off(value) else same({"activation_checkpointing": True})
    ),
    "accelerator_config.split_batches": off_or("a batch that is split over processes (split_batches)"),
    "accelerator_config.*": LOADING,
    **each(
        SPEED,
        """
            gc_steps gc_collect_steps torch_empty_cache_steps is_falcon_derived_model is_llama_derived_model
            is_mistral_derived_model is_qwen_derived_model dynamic_checkpoint.*
        """,
    ),
}
"""All the others."""


def _below(foreign: Foreign, key: str) -> dict[str, Any]:
    start = f"{key}."
    return {name.removeprefix(start): value for name, value in foreign.values.items() if name.startswith(start)}


def _sixteen_bits(foreign: Foreign) -> str | None:
    """Axolotl loads a model in bf16; a full fine-tuning stays in it without FSDP or DeepSpeed, which keep fp32."""
    full = is_off(foreign.get("adapter"))
    shared = (
        foreign.says("fsdp")
        or foreign.says("deepspeed")
        or any(name.startswith(("fsdp_config.", "deepspeed.")) for name in foreign.values)
    )
    bf16 = foreign.get("bf16", "auto")
    return "compute" if full and not shared and not is_off(bf16) and not foreign.says("float32") else None


def _warmup_default(foreign: Foreign) -> float | None:
    given = foreign.get("warmup_steps") is not None or foreign.get("warmup_ratio") is not None
    return None if given or foreign.get("lr_scheduler") == "constant" else 0.03


def _if_adapter(value: Any) -> Any:
    return lambda foreign: None if is_off(foreign.get("adapter")) else value


def _precision_default(foreign: Foreign) -> str | None:
    if any(foreign.says(key) for key in ("bf16", "fp16", "bfloat16", "float16", "float32")):
        return None
    return "fp32" if foreign.get("bf16") is False else "bf16"


DEFAULTS: tuple[Default, ...] = (
    *MOMENTS,
    Default(
        job="schedule.warmup_from_zero",
        value=lambda f: None if _warmup_default(f) is None else True,
        reason="a warm-up of transformers begins with a step at a rate of 0",
    ),
    Default(job="batch", value=batch, reason="micro_batch_size is 1, gradient_accumulation_steps 1"),
    Default(job="micro_batch", value=lambda f: f.count("micro_batch_size", 1), reason="micro_batch_size is 1"),
    Default(job="epochs", value=lambda f: None if f.number("max_steps", 0) > 0 else 1.0, reason="num_epochs is 1"),
    Default(job="optimizer.kind", value=lambda _f: "adamw", reason="optimizer is adamw_torch_fused"),
    Default(job="schedule.kind", value=lambda _f: "cosine", reason="lr_scheduler is cosine"),
    Default(
        job="schedule.warmup_ratio",
        value=_warmup_default,
        reason="a warm-up of 3 % of the steps (100 steps at the most)",
    ),
    Default(job="precision.compute", value=_precision_default, reason="bf16 is auto"),
    Default(job="precision.parameters", value=_sixteen_bits, reason="trained weights are in bf16, as they are loaded"),
    Default(job="method.kind", value=lambda f: _adapter_kind(f)["method.kind"], reason="no adapter"),
    Default(job="method.dropout", value=_if_adapter(0.0), reason="lora_dropout is 0"),
    Default(job="data.sequence_length", value=lambda _f: 512, reason="sequence_len is 512"),
    Default(job="data.packing", value=lambda _f: False, reason="sample_packing is off"),
    Default(
        job="data.overlong",
        value=lambda f: None if train_rows(f).get("data.format", "chat") == "text" else "drop",
        reason="rows that are too long are left out (excess_length_strategy: drop)",
    ),
)
"""What Axolotl does where a file is silent."""


def _world(foreign: Foreign) -> int | None:
    if foreign.says("use_ray") and foreign.number("ray_num_workers", 0):
        return foreign.count("ray_num_workers", 1)
    return None


AXOLOTL_TOOL = Tool(
    name="Axolotl",
    keys={**RUNS, **ROWS, **MODEL, **METHOD, **OTHER},
    defaults=DEFAULTS,
    parts={"deepspeed": DEEPSPEED, "accelerate": ACCELERATE},
    world_size=_world,
    template=template_name,
)
