"""LLaMA-Factory's YAML (0.9.6, August 2026): every key, and what it becomes.

Their own words: llamafactory/hparams/ (keys and defaults), data/parser.py (dataset_info.json), data/converter.py
(rows), data/template.py (chat templates), data/processor/ (what is learned). The trainer below is transformers'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gangline.convert import features as lacks
from gangline.convert.hugging_face import (
    DEFAULTS,
    EIGHT_BITS,
    FIGURES,
    HUB,
    KERNELS,
    LOADING,
    SPEED,
    SPLITTING,
    TRAINING,
    WHERE,
    batch,
    fp8,
    trust,
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
from gangline.convert.strategy_files import ACCELERATE, DEEPSPEED

# Chat templates: the words around a message, as LLaMA-Factory joins them. `{}` is the message.


def _chat(user: str, header: str, end: str, *, system: str, **more: str) -> dict[str, str]:
    return {
        "user": user,
        "header": header,
        "end": end,
        "system": system,
        "default": "",
        "begin": "",
        "thought": "",
        **more,
    }


_THOUGHT = "<think>\n\n</think>\n\n"
_WIDE = "\N{FULLWIDTH VERTICAL LINE}"
_IM = {
    "user": "<|im_start|>user\n{}<|im_end|>\n",
    "header": "<|im_start|>assistant\n",
    "end": "<|im_end|>\n",
    "system": "<|im_start|>system\n{}<|im_end|>\n",
}
_LLAMA_3 = {
    "user": "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
    "header": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "end": "<|eot_id|>",
    "system": "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
}
TEMPLATES: Mapping[str, dict[str, str]] = {
    "chatml": _chat(**_IM),
    "qwen": _chat(**_IM, default="You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "qwen3_nothink": _chat(**_IM),
    "qwen3_5_nothink": _chat(**_IM),
    "qwen3": _chat(**_IM, thought=_THOUGHT),
    "qwen3_5": _chat(**_IM, thought=_THOUGHT),
    "llama3": _chat(**_LLAMA_3, begin="BOS"),
    "deepseek": _chat("User: {}\n\n", "Assistant:", "EOS", system="{}\n\n", begin="BOS"),
    "deepseek3": _chat(f"<{_WIDE}User{_WIDE}>{{}}", f"<{_WIDE}Assistant{_WIDE}>", "EOS", system="{}", begin="BOS"),
}
"""Those whose rows without tools can be written down in a few words. `thought` begins an answer that has none, and is
learned with it."""
_THINKING = frozenset(name for name, words in TEMPLATES.items() if words["thought"])


def template_text(name: str) -> str | None:
    """The Jinja text that renders rows without tools as LLaMA-Factory's template of this name does."""
    words = TEMPLATES.get(name)
    if words is None:
        return None
    system = _printed(words["system"])
    default = "".join(_printed(words["system"], literal=words["default"])) if words["default"] else ""
    lines = [
        "{{ bos_token }}" if words["begin"] else "",
        "{% if messages[0]['role'] != 'system' %}" + default + "{% endif %}" if default else "",
        "{% for message in messages %}",
        "{% if message['role'] == 'system' %}" + system,
        "{% elif message['role'] == 'user' %}" + _printed(words["user"]),
        "{% else %}" + _quoted(words["header"]) + _thought(words["thought"]),
        "{{ message['content'] }}" + _quoted(words["end"]),
        "{% endif %}{% endfor %}",
        "{% if add_generation_prompt %}" + _quoted(words["header"]) + "{% endif %}",
    ]
    return "".join(lines)


def _thought(words: str) -> str:
    """An empty thought before an answer that thinks of nothing."""
    if not words:
        return ""
    absent = "'<think>' not in message['content'] and '</think>' not in message['content']"
    return "{% if " + absent + " %}" + _quoted(words) + "{% endif %}"


def _printed(words: str, literal: str | None = None) -> str:
    before, _, after = words.partition("{}")
    content = "{{ message['content'] }}" if literal is None else _quoted(literal)
    return _quoted(before) + content + _quoted(after)


def _quoted(text: str) -> str:
    """Text as an expression: Jinja drops line breaks after tags."""
    if not text:
        return ""
    if text == "EOS":
        return "{{ eos_token }}"
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return "{{ '" + escaped + "' }}"


def template_name(foreign: Foreign) -> str | None:
    """The template that the rows go through."""
    name = foreign.get("template")
    return None if is_off(name) or foreign.get("stage") == "pt" else str(name)


def _template(value: Any, foreign: Foreign) -> Outcome:
    if foreign.get("stage") == "pt":
        return dropped("texts go through no chat template")
    if is_off(value):
        return dropped("the model's own, as here")
    if foreign.template is not None:
        return same({"data.chat_template": foreign.template}, "written out, for rows without tools")
    return refused(f"{lacks.TEMPLATE} ({value})", settled_by=("data.chat_template",))


# Data sets by the names of dataset_info.json.

_LIKE_A_PICTURE = ("images", "videos", "audios")


def _names(value: Any) -> list[str]:
    parts = value if isinstance(value, list) else str(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def _data_set(name: str, foreign: Foreign) -> Outcome | dict[str, Any]:
    """One data set as our words have it, or why it cannot be one."""
    entry = foreign.data_sets.get(name)
    if not isinstance(entry, Mapping):
        return refused(f"{lacks.SOURCES}: {name}, of which dataset_info.json is not here", settled_by=("data.train",))
    columns = entry.get("columns") or {}
    if entry.get("ranking") or columns.get("kto_tag"):
        return refused(lacks.PREFERENCE)
    if any(columns.get(key) for key in _LIKE_A_PICTURE):
        return refused(lacks.IMAGES)
    if entry.get("script_url") or entry.get("folder") or not (entry.get("hf_hub_url") or entry.get("file_name")):
        return refused(f"{lacks.SOURCES}: {name}, by a script, a cloud or another hub", settled_by=("data.train",))
    if columns.get("tools"):
        return refused(f"{lacks.TEMPLATE} with tools ({name})", settled_by=("data.train", "data.chat_template"))
    return _place(entry, foreign) | _rows(entry, columns, foreign)


def _place(entry: Mapping[str, Any], foreign: Foreign) -> dict[str, Any]:
    limit = foreign.get("max_samples") or entry.get("num_samples")
    cut = {"max_samples": int(limit)} if limit else {}
    if entry.get("hf_hub_url"):
        words = {"hub": entry["hf_hub_url"], "config": entry.get("subset"), "split": entry.get("split") or "train"}
        return {key: value for key, value in words.items() if value is not None} | cut
    return {"files": [f"{foreign.get('dataset_dir', 'data')}/{entry['file_name']}"]} | cut


def _rows(entry: Mapping[str, Any], columns: Mapping[str, Any], foreign: Foreign) -> dict[str, Any]:
    if foreign.get("stage") == "pt":
        column = columns.get("prompt", "instruction")
        return {"format": "text"} | ({} if column == "text" else {"fields": {"text": column}})
    if entry.get("formatting", "alpaca") == "alpaca":
        ours = {"prompt": "instruction", "query": "input", "response": "output"}
        ours |= {key: key for key in ("system", "history") if columns.get(key)}
        given = columns or ours
        told = {ours[key]: given[key] for key in ours if given.get(key) not in (None, ours[key])}
        return {"format": "chat"} | ({"fields": told} if told else {})
    tags = entry.get("tags") or {}
    fields = {
        "messages": columns.get("messages") or "conversations",
        "role": tags.get("role_tag") or "from",
        "content": tags.get("content_tag") or "value",
    }
    roles = {
        tags.get("user_tag") or "human": "user",
        tags.get("assistant_tag") or "gpt": "assistant",
        tags.get("system_tag") or "system": "system",
    }
    return {
        "format": "chat",
        "fields": {role: column for role, column in fields.items() if role != column},
        "roles": {name: role for name, role in roles.items() if name != role},
    }


def _sources(job: str) -> Rule:
    def rule(value: Any, foreign: Foreign) -> Outcome:
        if str(foreign.get("dataset_dir", "")).startswith(("REMOTE:", "ONLINE")):
            return refused(f"{lacks.SOURCES}: dataset_info.json on a hub", settled_by=(job,))
        found = [_data_set(name, foreign) for name in _names(value)]
        bad = [each for each in found if isinstance(each, Outcome)]
        if bad:
            return bad[0]
        return same(_joined([each for each in found if not isinstance(each, Outcome)], job))

    return rule


def _joined(sources: list[dict[str, Any]], job: str) -> dict[str, Any]:
    shared = [{key: each[key] for key in ("format", "fields", "roles") if each.get(key)} for each in sources]
    if any(each != shared[0] for each in shared) or job != "data.train":
        return {job: [{key: value for key, value in each.items() if value} for each in sources]}
    places = [
        {key: value for key, value in each.items() if key not in {"format", "fields", "roles"}} for each in sources
    ]
    return {job: places[0] if len(places) == 1 else places} | {f"data.{key}": value for key, value in shared[0].items()}


def _limit(value: Any, _foreign: Foreign) -> Outcome:
    return equivalent({}, f"the first {as_number(value)} rows of each data set, in data.train")


def _part_for_evaluation(value: Any, _foreign: Foreign) -> Outcome:
    number = as_number(value)
    if not number:
        return dropped("no rows for evaluation")
    if number >= 1:
        return refused(f"{lacks.EVALUATION}: a number of rows", settled_by=("data.eval",))
    return equivalent({"data.eval": number}, "the same part; other rows are drawn")


# The batch: ranks of Megatron that compute a sample together count once.


def _together(foreign: Foreign) -> Foreign:
    sharing = 1
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        sharing *= max(1, foreign.count(key, 1))
    return replace(foreign, world_size=max(1, foreign.world_size // sharing))


def _shared(rule: Rule) -> Rule:
    return lambda value, foreign: rule(value, _together(foreign))


# What trains.


def _stage(value: Any, foreign: Foreign) -> Outcome:
    if value == "sft":
        return dropped("supervised, as here")
    if value != "pt":
        return refused(f"{lacks.PREFERENCE} ({value})")
    if foreign.get("packing") is not False:
        return refused(f"{lacks.LEAKING} (stage pt packs texts one behind the other)", settled_by=("data.packing",))
    return dropped("texts, as data.format says")


def _kind(foreign: Foreign) -> str:
    return str(foreign.get("finetuning_type", "lora"))


def _method(value: Any, foreign: Foreign) -> Outcome:
    if value in {"freeze", "oft"}:
        return refused(lacks.FREEZING if value == "freeze" else f"{lacks.OTHER_ADAPTER} (OFT)")
    return same(_adapter_kind(foreign))


def _adapter_kind(foreign: Foreign) -> dict[str, Any]:
    if _kind(foreign) == "full":
        return {"method.kind": "full"}
    bits = as_number(foreign.get("quantization_bit"))
    return {"method.kind": "qlora", "method.bits": int(bits)} if bits in {4, 8} else {"method.kind": "lora"}


def _bits(value: Any, foreign: Foreign) -> Outcome:
    number = as_number(value)
    if number not in {4, 8} or str(foreign.get("quantization_method", "bnb")) not in {"bnb", "bitsandbytes"}:
        return refused(lacks.QUANTISED_MODEL)
    if _kind(foreign) != "lora":
        return refused(f"{lacks.OTHER_ADAPTER} over quantised weights")
    return equivalent(_adapter_kind(foreign), EIGHT_BITS) if number == 8 else same(_adapter_kind(foreign))


def _of_lora(rule: Rule) -> Rule:
    return lambda value, foreign: rule(value, foreign) if _kind(foreign) == "lora" else dropped("no adapter of LoRA")


def _targets(value: Any, _foreign: Foreign) -> Outcome:
    names = _names(value)
    return same({"method.targets": "all-linear" if names == ["all"] else names})


def _pissa(value: Any, foreign: Foreign) -> Outcome:
    if is_off(value):
        return dropped("off")
    if foreign.number("pissa_iter", 16) == -1:
        return same({"method.init": "pissa"})
    return equivalent({"method.init": "pissa"}, "the whole decomposition in place of a few iterations towards it")


def _muon(value: Any, foreign: Foreign) -> Outcome:
    """Its Muon: momentum 0.95, Nesterov's, updates as large as AdamW's; decay on vectors, too."""
    if is_off(value):
        return dropped("off")
    if foreign.number("weight_decay", 0):
        return refused(
            f"{lacks.OPTIMIZER_DETAIL} (weight decay on norms and biases)", settled_by=("optimizer.weight_decay",)
        )
    return same({"optimizer.kind": "muon", "optimizer.momentum": 0.95, "optimizer.scale": "match-adamw"})


def _attention(value: Any, _foreign: Foreign) -> Outcome:
    if str(value) in {"disabled", "off"}:
        return same({"model.attention": "eager"})
    if str(value) == "sdpa":
        return same({"model.attention": "sdpa"})
    return equivalent({}, "the same attention by another kernel (`model.attention: auto`)")


def _packing(value: Any, foreign: Foreign) -> Outcome:
    if is_off(value) and not foreign.says("neat_packing"):
        return same({"data.packing": False})
    if foreign.says("neat_packing"):
        return equivalent({"data.packing": True}, "as many packed samples in a step; which rows share one differs")
    return refused(f"{lacks.LEAKING} (without neat_packing)", settled_by=("data.packing",))


def _neat(value: Any, _foreign: Foreign) -> Outcome:
    return dropped("off") if is_off(value) else equivalent({"data.packing": True}, "which rows share a sample differs")


def _loss_on_prompt(value: Any, foreign: Foreign) -> Outcome:
    return dropped("off, as here") if is_off(value) or foreign.get("stage") == "pt" else refused(lacks.BOTH_SIDES)


def _tokens(value: Any, _foreign: Foreign) -> Outcome:
    return same({"tokens.add": _names(value)})


def _checkpointing(value: Any, _foreign: Foreign) -> Outcome:
    return same({"activation_checkpointing": is_off(value)})


def _pure(value: Any, _foreign: Foreign) -> Outcome:
    if is_off(value):
        return dropped("off")
    return same({"precision.compute": "bf16", "precision.parameters": "compute"})


def _unit(feature: str, *names: str) -> dict[str, Rule]:
    """A switch that asks for a feature, and the keys that only say how."""
    first, *others = names
    return {first: off_or(feature)} | {name: drop(f"of {first} only") for name in others}


def _all(rule: Rule, *names: str) -> Iterator[tuple[str, Rule]]:
    return ((name, rule) for name in names)


PICTURES = drop("no picture is in the rows")
_OF_GENERATION = drop("of generating text only")

KEYS: Mapping[str, Rule] = {
    **TRAINING,
    **{key: _shared(TRAINING[key]) for key in ("per_device_train_batch_size", "gradient_accumulation_steps")},
    "do_train": lambda value, _f: dropped("gangline train does") if not is_off(value) else refused(lacks.GENERATION),
    "stage": _stage,
    "finetuning_type": _method,
    "model_name_or_path": to("model.path"),
    "model_revision": lambda value, _f: (
        dropped("main, as here") if value == "main" else same({"model.revision": value})
    ),
    "trust_remote_code": trust,
    "adapter_name_or_path": _of_lora(to("method.adapter")),
    "create_new_adapter": off_or(f"{lacks.ADAPTER_DETAIL} (a new one over another)"),
    "lora_rank": _of_lora(number_to("method.rank")),
    "lora_alpha": _of_lora(number_to("method.alpha")),
    "lora_dropout": _of_lora(number_to("method.dropout")),
    "lora_target": _of_lora(_targets),
    "additional_target": _of_lora(lambda value, _f: same({"method.modules_to_save": _names(value)})),
    "use_rslora": _of_lora(switch("method.rslora")),
    "use_dora": _of_lora(switch("method.dora")),
    "pissa_init": _of_lora(_pissa),
    "pissa_iter": drop("pissa_init says it"),
    "pissa_convert": drop("an export is one over the model as it was anyway"),
    "loraplus_lr_ratio": off_or(lacks.RATES),
    "loraplus_lr_embedding": drop("of loraplus_lr_ratio only"),
    "quantization_bit": _bits,
    "quantization_method": drop("quantization_bit says it"),
    "quantization_type": only("nf4", otherwise=lacks.QUANTISED_MODEL, reason="NF4, as here"),
    "double_quantization": lambda value, f: (
        dropped("NF4 with quantised scales, as here")
        if not is_off(value) or f.get("quantization_bit") != 4
        else refused(lacks.QUANTISED_MODEL)
    ),
    "quantization_device_map": SPEED,
    "pure_bf16": _pure,
    "compute_dtype": off_or(lacks.PRECISION),
    "upcast_layernorm": off_or(lacks.PRECISION),
    "upcast_lmhead_output": off_or(lacks.PRECISION),
    "fp8": fp8,
    "fp8_backend": drop("of fp8 only"),
    "fp8_enable_fsdp_float8_all_gather": drop("of fp8 only"),
    "flash_attn": _attention,
    "shift_attn": off_or(lacks.MODEL_CHANGE),
    "mixture_of_depths": off_or(lacks.MODEL_CHANGE),
    "rope_scaling": off_or(f"{lacks.MODEL_CHANGE} (rope_scaling)"),
    "moe_aux_loss_coef": off_or(lacks.BALANCE_LOSS),
    "train_from_scratch": where_on(
        lambda _v, _f: equivalent({"model.start": "random"}, "fresh weights of the same kind")
    ),
    "disable_gradient_checkpointing": _checkpointing,
    "block_diag_attn": drop("neat_packing says it"),
    **each(KERNELS, "use_unsloth use_unsloth_gc enable_liger_kernel use_v1_kernels"),
    **each(
        SPEED,
        """
            use_reentrant_gc low_cpu_mem_usage use_kv_cache offload_folder device_map preprocessing_batch_size
            print_param_status ray_num_workers ray_init_kwargs.* ray_run_name ray_storage_path
            resources_per_worker.* placement_strategy master_addr master_port enable_torch_profiler
            profile_modules
        """,
    ),
    **each(
        LOADING,
        """
            cache_dir overwrite_cache preprocessing_num_workers streaming buffer_size tokenized_path
            data_shared_file_system ignore_pad_token_for_loss dataset_dir media_dir use_fast_tokenizer
        """,
    ),
    "dataset": _sources("data.train"),
    "eval_dataset": _sources("data.eval"),
    "template": _template,
    "cutoff_len": number_to("data.sequence_length"),
    "max_samples": _limit,
    "val_size": _part_for_evaluation,
    "eval_on_each_dataset": SPEED,
    "mix_strategy": only("concat", otherwise=lacks.SOURCES, reason="one behind the other, as here"),
    "interleave_probs": off_or(lacks.SOURCES),
    "packing": _packing,
    "neat_packing": _neat,
    "train_on_prompt": _loss_on_prompt,
    "mask_history": off_or(f"{lacks.MASK}: the last turn alone"),
    "tool_format": off_or(f"{lacks.TEMPLATE} (with tools)"),
    "default_system": off_or(f"{lacks.TEMPLATE} (another default for the system message)"),
    "enable_thinking": lambda _value, f: (
        dropped("a thought that is empty is learned, as the template has it")
        if f.get("template") not in _THINKING or f.get("enable_thinking") is not False
        else refused(f"{lacks.MASK} (no thinking)")
    ),
    "preserve_thinking": off_or(f"{lacks.MASK} (thinking)"),
    "resize_vocab": drop("tokens that are added get their rows"),
    "split_special_tokens": off_or(lacks.TOKENS),
    "add_tokens": _tokens,
    "add_special_tokens": _tokens,
    "new_special_tokens_config": off_or(lacks.TOKENS),
    "init_special_tokens": only("noise_init", otherwise=lacks.TOKENS),
    "disable_shuffling": off_or(lacks.ORDER),
    "early_stopping_steps": where_on(number_to("early_stopping.patience")),
    "compute_accuracy": FIGURES,
    "plot_loss": FIGURES,
    "include_effective_tokens_per_second": FIGURES,
    **each(
        FIGURES,
        """
            use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key
            swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret
        """,
    ),
    **each(
        HUB,
        """
            hf_hub_token ms_hub_token om_hub_token export_size export_device export_legacy_format
            export_hub_model_id
        """,
    ),
    **each(refuse(lacks.GENERATION), "export_dir export_quantization_bit export_quantization_dataset"),
    **dict(_all(drop("of quantised exports only"), "export_quantization_nsamples", "export_quantization_maxlen")),
    **each(
        _OF_GENERATION,
        """
            infer_backend infer_dtype do_sample temperature top_p top_k num_beams max_length max_new_tokens
            repetition_penalty length_penalty skip_special_tokens eval_num_beams vllm_maxlen vllm_gpu_util
            vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size
        """,
    ),
    **each(off_or(f"{lacks.OTHER_LOSS} (DFT, ASFT, EAFT)"), "use_dft_loss use_asft_loss use_eaft_loss"),
    **dict(_all(drop("of another loss only"), "asft_alpha", "eaft_alpha")),
    **each(refuse(lacks.PREFERENCE), "ref_model ref_model_adapters reward_model reward_model_type"),
    **each(
        drop("of preference tuning only"),
        """
            pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing kto_chosen_weight
            kto_rejected_weight simpo_gamma ld_alpha ppo_buffer_size ppo_epochs ppo_score_norm ppo_target
            ppo_whiten_rewards
        """,
    ),
    **_unit(
        f"{lacks.OTHER_OPTIMIZER} (GaLore)",
        "use_galore",
        "galore_target",
        "galore_rank",
        "galore_update_interval",
        "galore_scale",
        "galore_proj_type",
        "galore_layerwise",
    ),
    **_unit(
        f"{lacks.OTHER_OPTIMIZER} (APOLLO)",
        "use_apollo",
        "apollo_target",
        "apollo_rank",
        "apollo_update_interval",
        "apollo_scale",
        "apollo_proj",
        "apollo_proj_type",
        "apollo_scale_type",
        "apollo_layerwise",
        "apollo_scale_front",
    ),
    **_unit(
        f"{lacks.OTHER_OPTIMIZER} (BAdam)",
        "use_badam",
        "badam_mode",
        "badam_start_block",
        "badam_switch_mode",
        "badam_switch_interval",
        "badam_update_ratio",
        "badam_mask_mode",
        "badam_verbose",
    ),
    "use_adam_mini": off_or(f"{lacks.OTHER_OPTIMIZER} (Adam-mini)"),
    "use_muon": _muon,
    "optim": lambda value, f: dropped("`use_muon` says it") if f.says("use_muon") else TRAINING["optim"](value, f),
    "use_llama_pro": off_or(lacks.FREEZING),
    **each(drop("of freezing only"), "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules"),
    **each(drop("of OFT only"), "oft_rank oft_block_size oft_target module_dropout"),
    **each(
        PICTURES,
        """
            freeze_vision_tower freeze_multi_modal_projector image_max_pixels image_min_pixels
            image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels video_fps video_maxlen
            use_audio_in_video audio_sampling_rate
        """,
    ),
    "freeze_language_model": off_or(lacks.FREEZING),
    "use_kt": where_on(lambda _v, _f: equivalent({}, "experts are computed where the rest is; see kt_config")),
    "kt_config.kt_expert_weight_format": only("bf16", otherwise=lacks.QUANTISED_MODEL, reason="experts as they are"),
    "kt_config.kt_backend": only("AMXBF16", "auto", otherwise=lacks.QUANTISED_MODEL, reason="products in bf16"),
    **dict(_all(SPEED, "kt_cpu_activation", "kt_config.*")),
    **each(
        off_or("adapters of experts by KTransformers"),
        "kt_use_lora_experts kt_lora_expert_num kt_lora_expert_intermediate_size kt_expert_checkpoint_path",
    ),
    **dict(_all(refuse(lacks.QUANTISED_MODEL), "kt_weight_path", "kt_non_expert_weight_path")),
    **each(
        SPLITTING,
        """
            tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size sequence_parallel
            use_distributed_optimizer overlap_param_gather overlap_grad_reduce
            virtual_pipeline_model_parallel_size account_for_embedding_in_pipeline_split
            account_for_loss_in_pipeline_split
        """,
    ),
    **each(SPEED, "recompute_granularity recompute_method recompute_num_layers"),
    **each(KERNELS, "bias_activation_fusion apply_rope_fusion masked_softmax_fusion cross_entropy_loss_fusion"),
    "expert_model_parallel_size": only(1, otherwise=f"{lacks.BALANCE_LOSS} (of Megatron)"),
    **dict(_all(off_or(f"{lacks.BALANCE_LOSS} (of Megatron)"), "moe_grouped_gemm", "moe_token_dispatcher_type")),
    "use_packed_sequences": off_or(lacks.LEAKING),
    "mixed_precision": only("bf16_mixed", otherwise=lacks.PRECISION, reason="`bf16` says it"),
    "megatron_pretrained_checkpoint": off_or(lacks.CONTINUED),
    "calculate_per_token_loss": SPEED,
    "extra_config": off_or("keys of Megatron in a text"),
    "export_hf_on_finish": HUB,
    **dict(_all(off_or("training by Megatron"), "use_mca", "use_megatron_bridge")),
    **_unit("training by HyperParallel", "use_hyper_parallel", "hyper_parallel_args", "hyper_parallel_cp_size"),
    "use_ray": WHERE,
}
"""Every key of a training job; those of transformers' trainer are read as it does."""


def _lora_default(value: Any) -> Any:
    return lambda foreign: value if _kind(foreign) == "lora" else None


OWN_DEFAULTS: tuple[Default, ...] = (
    Default(
        job="batch",
        value=lambda f: batch(_together(f)),
        reason="per_device_train_batch_size is 8, gradient_accumulation_steps 1",
    ),
    *(each for each in DEFAULTS if each.job != "batch"),
    Default(job="method.kind", value=lambda f: _adapter_kind(f)["method.kind"], reason="finetuning_type is lora"),
    Default(job="method.rank", value=_lora_default(8), reason="lora_rank is 8"),
    Default(
        job="method.alpha",
        value=lambda f: 2 * f.count("lora_rank", 8) if _kind(f) == "lora" else None,
        reason="lora_alpha is twice lora_rank",
    ),
    Default(job="method.dropout", value=_lora_default(0.0), reason="lora_dropout is 0"),
    Default(job="method.targets", value=_lora_default("all-linear"), reason="lora_target is all"),
    Default(job="data.sequence_length", value=lambda _f: 2048, reason="cutoff_len is 2048"),
    Default(job="data.packing", value=lambda _f: False, reason="packing is off"),
    Default(
        job="data.overlong",
        value=lambda f: None if f.get("stage") == "pt" else "truncate",
        reason="rows that are too long are cut (there both sides in proportion)",
    ),
    Default(job="activation_checkpointing", value=lambda _f: True, reason="gradient checkpointing is on"),
)


def _missing(foreign: Foreign) -> Mapping[str, Outcome]:
    found: dict[str, Outcome] = {}
    if not foreign.says("do_train"):
        found["do_train"] = refused(f"{lacks.GENERATION} (do_train is not on)")
    if not foreign.says("dataset"):
        found["dataset"] = refused(f"{lacks.SOURCES}: no dataset", settled_by=("data.train",))
    return found


LLAMA_FACTORY_TOOL = Tool(
    name="LLaMA-Factory",
    keys=KEYS,
    defaults=OWN_DEFAULTS,
    parts={"deepspeed": DEEPSPEED, "accelerate": ACCELERATE},
    null_counts=frozenset({"max_grad_norm"}),
    world_size=lambda foreign: (
        foreign.count("ray_num_workers", 1) if foreign.number("ray_num_workers", 1) > 1 else None
    ),
    missing=_missing,
    template=template_name,
    template_text=template_text,
)
