"""`accelerate launch`: its options and its configuration file become the variables that it would set.

They are those of `accelerate.commands.launch.launch_command_parser` and of `accelerate.utils.launch`, version 1.15;
tests/process/launch/test_other_launchers.py compares the variables with the ones that accelerate sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gangline.launch.launchers.taking_off import (
    IN_CLUSTER_FILE,
    MEETING,
    OUTPUT,
    OptionTable,
    Wishes,
    dropped,
    kept,
    node_filter,
    refused,
    require_rows,
)

DEFAULTS: Mapping[str, Any] = {
    "dynamo_backend": "no",
    "dynamo_mode": "default",
    "dynamo_use_fullgraph": False,
    "dynamo_use_dynamic": False,
    "dynamo_use_regional_compilation": False,
    "fsdp_version": "1",
    "fsdp_offload_params": "false",
    "fsdp_min_num_params": 100000000,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_reshard_after_forward": "true",
    "fsdp_forward_prefetch": "false",
    "fsdp_use_orig_params": "true",
    "fsdp_cpu_ram_efficient_loading": "true",
    "fsdp_sync_module_states": "true",
    "fsdp_activation_checkpointing": "false",
    "fsdp_activation_checkpointing_offload": "false",
    "fp8_use_autocast_during_eval": False,
    "fp8_margin": 0,
    "fp8_interval": 1,
    "fp8_format": "HYBRID",
    "fp8_amax_history_len": 1024,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_override_linear_precision": (False, False, False),
    "fp8_opt_level": "O2",
    "fp8_enable_fsdp_float8_all_gather": True,
    "fp8_pad_inner_dim": True,
    "parallelism_config_dp_replicate_size": 1,
    "parallelism_config_dp_shard_size": 1,
    "parallelism_config_tp_size": 1,
    "parallelism_config_cp_size": 1,
    "parallelism_config_cp_backend": "torch",
    "parallelism_config_cp_comm_strategy": "allgather",
    "parallelism_config_sp_size": 1,
    "parallelism_config_sp_backend": "deepspeed",
    "parallelism_config_sp_seq_length": None,
    "parallelism_config_sp_seq_length_is_variable": True,
    "parallelism_config_sp_attn_implementation": "sdpa",
}
"""Values of options that always become variables."""
DYNAMO = ("mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")
FSDP: Mapping[str, str] = {
    "FSDP_VERSION": "fsdp_version",
    "FSDP_SHARDING_STRATEGY": "fsdp_sharding_strategy",
    "FSDP_MIN_NUM_PARAMS": "fsdp_min_num_params",
    "FSDP_AUTO_WRAP_POLICY": "fsdp_auto_wrap_policy",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "fsdp_transformer_layer_cls_to_wrap",
    "FSDP_BACKWARD_PREFETCH": "fsdp_backward_prefetch",
    "FSDP_STATE_DICT_TYPE": "fsdp_state_dict_type",
    "FSDP_IGNORED_MODULES": "fsdp_ignored_modules",
}
"""Variable -> its option; the value stays as it is."""
FSDP_FLAGS = [
    "reshard_after_forward",
    "offload_params",
    "forward_prefetch",
    "use_orig_params",
    "cpu_ram_efficient_loading",
    "sync_module_states",
    "activation_checkpointing",
    "activation_checkpointing_offload",
]
"""FSDP_<NAME> is `fsdp_<name>` in small letters."""
DEEPSPEED: Mapping[str, str] = {
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "zero3_init_flag",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model",
}
"""Variable -> its option, in small letters."""
DEEPSPEED_AS_IS: Mapping[str, str] = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "deepspeed_moe_layer_cls_names",
}
PARALLELISM = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "sp_size", "sp_backend")
PREFIXED = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
"""Sections of the file whose keys may lack the beginning that options have."""
UNUSABLE = {
    "MEGATRON_LM": "Megatron-LM by options of accelerate",
    "XLA": "a TPU",
    "TPU": "a TPU",
}
"""Values of `distributed_type` that gangline does not start."""


def _finish(wishes: Wishes) -> None:
    config, values = _config(wishes), dict(wishes.given)
    _require_usable(wishes, config)
    settings = _merged(values, config)
    if config.get("parallelism_config") and not any(f"use_{kind}" in values for kind in ("deepspeed", "fsdp")):
        settings["use_parallelism_config"] = True
    kind = _kind(values, config)
    if kind == "deepspeed":
        _set(wishes, _deepspeed(settings, _fields(config, values)))
    else:
        _set(wishes, _common(settings))
        if kind == "fsdp":
            _set(wishes, _fsdp(settings))
        elif values.get("cpu") or settings.get("use_cpu"):
            _set(wishes, {"ACCELERATE_USE_CPU": "True", "KMP_AFFINITY": "granularity=fine,compact,1,0"})
            _set(wishes, {"KMP_BLOCKTIME": "1"})
    _set(wishes, _others(settings))
    _place(wishes, settings)


def _config(wishes: Wishes) -> Mapping[str, Any]:
    """The values of its configuration file: the one that is named, or the user's own, if there is one."""
    # imported here: reading YAML costs 0.1 s, which a command without a file need not pay
    from gangline.config.load import read_values

    named = wishes.given.get("config_file")
    path = _default_file(wishes.variables) if named is None else Path(named).expanduser()
    if named is None and (path is None or not path.is_file() or "cpu" in wishes.given):
        return {}
    assert path is not None
    if not path.is_absolute() and (wishes.folder / path).is_file():
        path = wishes.folder / path
    wishes.notes.append(f"{path}: read")
    return read_values(path, kind="configuration")


def _default_file(variables: Mapping[str, str]) -> Path | None:
    cache = variables.get("XDG_CACHE_HOME") or (f"{variables['HOME']}/.cache" if variables.get("HOME") else None)
    home = variables.get("HF_HOME") or (f"{cache}/huggingface" if cache else None)
    return Path(home).expanduser() / "accelerate" / "default_config.yaml" if home else None


def _require_usable(wishes: Wishes, config: Mapping[str, Any]) -> None:
    kind = str(config.get("distributed_type", "NO"))
    if kind in UNUSABLE:
        raise wishes.refuse(f"distributed_type: {kind}", f"gangline does not start {UNUSABLE[kind]}", "choose another")
    if str(config.get("compute_environment", "LOCAL_MACHINE")) != "LOCAL_MACHINE":
        raise wishes.refuse(
            f"compute_environment: {config['compute_environment']}",
            "gangline starts on your own hosts",
            "choose another",
        )


def _merged(given: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting: options first, then the file, then defaults."""
    settings: dict[str, Any] = dict(DEFAULTS)
    if "dynamo_backend" in config:
        settings["dynamo_backend"] = str(config["dynamo_backend"])
    for name, value in config.items():
        if isinstance(value, Mapping):
            begin = PREFIXED.get(name, "")
            settings |= {key if key.startswith(begin) else begin + key: each for key, each in value.items()}
        elif name not in {"compute_environment", "distributed_type"} and value is not None:
            settings.setdefault(name, value)
    return {**settings, **given}


def _kind(given: Mapping[str, str], config: Mapping[str, Any]) -> str:
    """deepspeed, fsdp, or "" for ranks without either."""
    if "cpu" in given:
        return ""
    if asked := [kind for kind in ("deepspeed", "fsdp") if f"use_{kind}" in given]:
        return asked[0]
    if "multi_gpu" in given:
        return ""
    kind = str(config.get("distributed_type", "NO")).lower()
    return kind if kind in {"deepspeed", "fsdp"} else ""


def _fields(config: Mapping[str, Any], given: Mapping[str, str]) -> list[str]:
    """The keys for DeepSpeed that the file has."""
    fields = list(config.get("deepspeed_config") or {})
    has_precision = config.get("mixed_precision") is not None and "mixed_precision" not in given
    return [*fields, *(["mixed_precision"] if has_precision else [])]


def _set(wishes: Wishes, variables: Mapping[str, Any]) -> None:
    wishes.env |= {name: str(value) for name, value in variables.items() if value is not None}


def _common(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ACCELERATE_MIXED_PRECISION": str(settings.get("mixed_precision") or "no").lower(),
        "ACCELERATE_DYNAMO_BACKEND": str(settings["dynamo_backend"]).upper(),
        **{f"ACCELERATE_DYNAMO_{name.upper()}": settings[f"dynamo_{name}"] for name in DYNAMO},
    }


def _fsdp(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ACCELERATE_USE_FSDP": "true",
        **{variable: settings.get(option) for variable, option in FSDP.items()},
        **{f"FSDP_{name.upper()}": str(settings[f"fsdp_{name}"]).lower() for name in FSDP_FLAGS},
    }


def _deepspeed(settings: Mapping[str, Any], fields: list[str]) -> dict[str, Any]:
    small = {name: settings.get(option) for name, option in DEEPSPEED.items()}
    return {
        "ACCELERATE_MIXED_PRECISION": str(settings.get("mixed_precision") or "no").lower(),
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_CONFIG_DS_FIELDS": ",".join(fields).lower(),
        **{name: str(value).lower() for name, value in small.items() if value is not None},
        **{name: settings.get(option) for name, option in DEEPSPEED_AS_IS.items()},
    }


def _others(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Variables that do not depend on the kind."""
    found: dict[str, Any] = {"OMP_NUM_THREADS": settings.get("num_cpu_threads_per_process")}
    if settings.get("debug"):
        found["ACCELERATE_DEBUG_MODE"] = "true"
    if settings.get("enable_cpu_affinity") == "True":  # from the command line: accelerate ignores the file's
        found["ACCELERATE_CPU_AFFINITY"] = "1"
    if str(settings.get("gpu_ids") or "all") != "all":
        found["CUDA_VISIBLE_DEVICES"] = settings["gpu_ids"]
    if str(settings.get("mixed_precision")).lower() == "fp8":
        found |= _fp8(settings)
    if settings.get("use_parallelism_config"):
        found |= _parallelism(settings)
    return found


def _fp8(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = {f"ACCELERATE_{key.upper()}": value for key, value in settings.items() if key.startswith("fp8_")}
    precise = found.pop("ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION")
    if isinstance(precise, str):
        precise = tuple(word.strip().lower() in {"1", "true", "yes", "y", "on", "t"} for word in precise.split(","))
    return found | {
        f"ACCELERATE_FP8_OVERRIDE_{name}": precise[at] for at, name in enumerate(("FPROP", "DGRAD", "WGRAD"))
    }


def _parallelism(settings: Mapping[str, Any]) -> dict[str, Any]:
    begin = "parallelism_config_"
    names = list(PARALLELISM)
    if int(settings[f"{begin}cp_size"]) > 1:
        names.append("cp_comm_strategy")
    if int(settings[f"{begin}sp_size"]) > 1:
        names += ["sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"]
    found = {f"PARALLELISM_CONFIG_{name.upper()}": str(settings[begin + name]) for name in names}
    return {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **found}


def _place(wishes: Wishes, settings: Mapping[str, Any]) -> None:
    """How many ranks a host has: accelerate divides all of them among its machines."""
    total, machines = settings.get("num_processes"), str(settings.get("num_machines") or 1)
    if (filters := settings.get("deepspeed_inclusion_filter")) is not None:
        wishes.place(included=node_filter(wishes, "--deepspeed_inclusion_filter", str(filters)))
    if (filters := settings.get("deepspeed_exclusion_filter")) is not None:
        wishes.place(excluded=node_filter(wishes, "--deepspeed_exclusion_filter", str(filters)))
    if total is None or str(total) == "-1":
        return
    number = wishes.count("--num_processes", str(total)) // wishes.count("--num_machines", machines)
    if number < 1:
        raise wishes.refuse(
            f"--num_processes {total} --num_machines {machines}", "fewer processes than machines", "raise the first"
        )
    wishes.place(ranks_per_host=number)
    wishes.notes.append(
        f"num_processes {total} on num_machines {machines}: {number} rank{'s' if number > 1 else ''} on every host"
    )


ACCELERATE = require_rows(
    OptionTable(
        rows=(
            *kept(
                "--config_file= --cpu --multi_gpu --mixed_precision= --num_processes= --num_machines= "
                "--num_cpu_threads_per_process= --enable_cpu_affinity --dynamo_backend= --dynamo_mode= "
                "--dynamo_use_fullgraph --dynamo_use_dynamic --dynamo_use_regional_compilation --use_deepspeed "
                "--use_fsdp --use_parallelism_config --gpu_ids= -m|--module --no_python --debug"
            ),
            *kept(
                "--deepspeed_config_file= --zero_stage= --offload_optimizer_device= --offload_param_device= "
                "--gradient_accumulation_steps= --gradient_clipping= --zero3_init_flag= --zero3_save_16bit_model= "
                "--deepspeed_exclusion_filter= --deepspeed_inclusion_filter= --deepspeed_moe_layer_cls_names="
            ),
            *kept(
                "--fsdp_version= --fsdp_offload_params= --fsdp_min_num_params= --fsdp_sharding_strategy= "
                "--fsdp_reshard_after_forward= --fsdp_auto_wrap_policy= --fsdp_transformer_layer_cls_to_wrap= "
                "--fsdp_backward_prefetch= --fsdp_state_dict_type= --fsdp_forward_prefetch= --fsdp_use_orig_params= "
                "--fsdp_cpu_ram_efficient_loading= --fsdp_sync_module_states= --fsdp_activation_checkpointing= "
                "--fsdp_activation_checkpointing_offload="
            ),
            *kept(
                "--fp8_backend= --fp8_use_autocast_during_eval --fp8_margin= --fp8_interval= --fp8_format= "
                "--fp8_amax_history_len= --fp8_amax_compute_algo= --fp8_override_linear_precision= --fp8_opt_level= "
                "--fp8_enable_fsdp_float8_all_gather= --fp8_pad_inner_dim="
            ),
            *kept(
                "--parallelism_config_dp_replicate_size= --parallelism_config_dp_shard_size= "
                "--parallelism_config_tp_size= --parallelism_config_cp_size= --parallelism_config_cp_backend= "
                "--parallelism_config_cp_comm_strategy= --parallelism_config_sp_size= "
                "--parallelism_config_sp_backend= --parallelism_config_sp_seq_length= "
                "--parallelism_config_sp_seq_length_is_variable= --parallelism_config_sp_attn_implementation="
            ),
            *dropped(IN_CLUSTER_FILE, "--machine_rank= --same_network --deepspeed_hostfile= --mpirun_hostfile="),
            *dropped(MEETING, "--main_process_ip= --main_process_port= --rdzv_backend= --rdzv_conf="),
            *dropped("gangline reaches the hosts in its own way", "--deepspeed_multinode_launcher="),
            *dropped(OUTPUT, "-q|--quiet -t|--tee= --log_dir= --role="),
            *dropped("gangline run --restarts N starts a command again", "--max_restarts= --monitor_interval="),
            *dropped("accelerate uses it on TPUs only", "--main_training_function= --downcast_bf16"),
            *dropped("accelerate makes no variable of it", "--offload_optimizer_nvme_path= --offload_param_nvme_path="),
            *refused(
                "gangline starts on your own hosts",
                "leave it out",
                "--tpu --tpu_cluster --no_tpu_cluster --tpu_use_sudo --vm= --env= --aws_access_key_id= "
                "--aws_secret_access_key=",
            ),
            *refused(
                "gangline does not start Megatron-LM by options of accelerate",
                "leave it out",
                "--use_megatron_lm --megatron_lm_tp_degree= --megatron_lm_use_custom_fsdp= "
                "--megatron_lm_no_load_optim= --megatron_lm_eod_mask_loss= "
                "--megatron_lm_overlap_cpu_optimizer_d2h_h2d= "
                "--megatron_lm_no_save_optim= --megatron_lm_optimizer_cpu_offload= "
                "--megatron_lm_use_precision_aware_optimizer= --megatron_lm_decoder_last_pipeline_num_layers= "
                "--megatron_lm_pp_degree= --megatron_lm_num_micro_batches= --megatron_lm_sequence_parallelism= "
                "--megatron_lm_recompute_activations= --megatron_lm_use_distributed_optimizer= "
                "--megatron_lm_gradient_clipping= --megatron_lm_recompute_granularity= "
                "--megatron_lm_recompute_method= "
                "--megatron_lm_recompute_num_layers= --megatron_lm_attention_backend= "
                "--megatron_lm_expert_model_parallel_size= --megatron_lm_context_parallel_size= "
                "--megatron_lm_attention_dropout= --megatron_lm_hidden_dropout= "
                "--megatron_lm_attention_softmax_in_fp32= "
                "--megatron_lm_expert_tensor_parallel_size= --megatron_lm_calculate_per_token_loss= "
                "--megatron_lm_use_rotary_position_embeddings=",
            ),
        ),
        runs_python=True,
        finish=_finish,
    )
)
