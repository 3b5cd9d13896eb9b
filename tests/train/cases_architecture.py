"""What a rank does in test_architecture: build models on the meta device, and count."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from gangline.worker.slice import COLUMNS, NARROW_NORM, ROWS


def counts(configs: list[dict], *, rank: int, targets: list[list[str]]):
    """Per config: what transformers saves as its config.json, and numbers counted on the model itself."""
    return [_count(config, rank=rank, targets=targets) for config in configs]


def _count(config: dict, *, rank: int, targets: list[list[str]]):
    config = dict(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = AutoConfig.for_model(config.pop("model_type"), **config)
        model = _model(built)
        head = model.get_output_embeddings()
        linears = [part for part in model.modules() if isinstance(part, nn.Linear | Conv1D) and part is not head]
        return {
            "saved": {**built.to_diff_dict(), "model_type": built.model_type},
            "total": sum(parameter.numel() for parameter in model.parameters()),
            "embedding": sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Embedding)),
            "linear": sum(part.weight.numel() for part in linears),
            "lora": [_adapters(_model(built), rank=rank, names=names) for names in targets],
        }


def _model(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _adapters(model: nn.Module, *, rank: int, names: list[str]):
    from peft import LoraConfig, get_peft_model

    targets = "all-linear" if names == ["all-linear"] else names
    config = LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM")
    try:
        wrapped = get_peft_model(model, config, low_cpu_mem_usage=True)
    except ValueError:
        return None
    return sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad)


def known(names: list[str]):
    """Which of these model types transformers has."""
    from transformers import CONFIG_MAPPING

    return [name for name in names if name in CONFIG_MAPPING]


def plans(families):
    """Whether transformers' plan for a family cuts linears by columns and rows, and asks for nothing else."""
    from transformers import CONFIG_MAPPING

    known = {family: CONFIG_MAPPING[family] for family in families if family in CONFIG_MAPPING}
    words = {family: set((kind.base_model_tp_plan or {}).values()) for family, kind in known.items()}
    ours = {*COLUMNS, *ROWS, NARROW_NORM}
    return {family: bool(found) and found <= ours for family, found in words.items()}
