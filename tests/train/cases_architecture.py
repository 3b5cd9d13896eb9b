"""What a rank does in test_architecture: build models on the meta device, and count."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from gangline.errors import ModelError
from gangline.runs.job import MethodJob
from gangline.strategies.pipeline.train import Pipeline, split_stages
from gangline.strategies.tensor_parallel.train import COLUMNS, NARROW_NORM, ROWS
from gangline.worker.adapters import lora_config
from gangline.worker.loss import CausalLoss
from gangline.worker.model import layers_of
from gangline.worker.quantised import multiplies, quantise


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
        kinds = {kind for kind in {type(part) for part in model.modules()} if kind is Conv1D or multiplies(kind)}
        linears = [part for part in model.modules() if type(part) in kinds and part is not head]
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
    from peft import get_peft_model

    config = lora_config(model, MethodJob(kind="lora", rank=rank, targets=tuple(names)))
    try:
        wrapped = get_peft_model(model, config, low_cpu_mem_usage=True)
    except ValueError:
        return None
    return sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad)


def adapted_modules(config: dict, options: list[dict]) -> list[list[str]]:
    """Per options of a method: last names of the modules that have an adapter in a model that then takes a step."""
    from peft import get_peft_model

    found = []
    for each in options:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own = dict(config)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(own.pop("model_type"), **own))
            wrapped = get_peft_model(model, lora_config(model, MethodJob(kind="lora", rank=4, **each)))
            wrapped(input_ids=_IDS, labels=_IDS).loss.backward()
        found.append(sorted({name.split(".")[-4] for name, _ in wrapped.named_parameters() if ".lora_A." in name}))
    return found


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


def staged(configs: list[dict]):
    """Per config: why three stages of a layer each are refused, or how far their logits are from the whole model's."""
    return [_staged(dict(config)) for config in configs]


def _staged(config: dict):
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    model.train()  # as a stage is tried
    try:
        _through_stages(model)
        model.eval()
        logits = _through_stages(model)
    except (ModelError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, AssertionError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    with torch.no_grad():
        expected = model(_IDS, position_ids=_POSITIONS, use_cache=False).logits
    return {"refused": "", "off": float((logits - expected).abs().max() / expected.abs().max())}


_IDS, _POSITIONS = torch.arange(10, 16)[None], torch.arange(6)[None]


@torch.no_grad()
def _through_stages(model: nn.Module) -> torch.Tensor:
    """Logits by the code of stages, each of which has the hidden states of the one before."""
    given = None
    for number in range(3):
        part = copy.deepcopy(model)
        stage = split_stages(part, number=number, stages=(1, 1, 1), stream=torch.float32)
        loss = CausalLoss(part, compute=torch.float32)
        if stage.is_last:
            logits = loss.logits(_IDS, _POSITIONS, entered=given)
            stage.require_plain(given)
            return logits
        given = Pipeline._decode(SimpleNamespace(_stage=stage, loss=loss), given, _IDS, _POSITIONS)
    raise AssertionError("no stage is the last one")


def packed(configs: list[dict]):
    """Per config: why its linears are not quantised; empty where they are."""
    return [_packed(dict(config)) for config in configs]


def _packed(config: dict) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _model(AutoConfig.for_model(config.pop("model_type"), **config))
    method = MethodJob(kind="qlora", bits=8)
    try:
        quantise(model, layers_of(model), method, compute=torch.float32, device="meta")
    except ModelError as error:
        return str(error)
    return ""
