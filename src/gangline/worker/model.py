"""Models and tokenizers from a folder or the hub; LoRA by peft (`adapters`); activations in the machine's memory.

With recomputation a layer keeps its input alone (torch.utils.checkpoint saves it like any other tensor). With
`activation_offloading` that input leaves the card until backward, so a card holds those of one layer in place of all.
Copies are asked for in the order of computation: nothing computed later overtakes them, and only the card waits.
"""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gangline.errors import ModelError, error_summary
from gangline.runs.job import Job, ModelJob
from gangline.worker import compat
from gangline.worker.adapters import attach_adapters, is_initial, saved_module
from gangline.worker.data.model_folder import weight_files
from gangline.worker.dropout import recomputation_contexts
from gangline.worker.quantised import quantise
from gangline.worker.tokenizer import refuse_remote_code, source_words
from gangline.worker.vocabulary import extend_model, extends, trained_rows


def load_model(
    job: Job,
    *,
    device: torch.device | str = "cpu",
    compute: torch.dtype = torch.float32,
    drawn: torch.dtype = torch.float32,
) -> nn.Module:
    """The model of a job on `device`, in training mode, wrapped by peft for LoRA.

    Weights that are trained have the dtype that `Precision.parameters` names (fp32 unless the job asks for pure
    `compute`); frozen ones have `compute`, and for QLoRA those of linears 4 or 8 bits. drawn: in which random ones are
    drawn, fp32 whatever a run computes in: an export draws the same weights again. Raises ModelError.
    """
    model = _load_base(job, dtype=weights_dtype(job, compute), drawn=drawn)
    if extends(job):
        extend_model(model, job)
    if job.method.kind != "qlora":
        model.to(device)
        return finish_model(model, job, compute=compute)
    ready = finish_model(model, job, compute=compute)
    core = base_of(ready)
    # no device has to hold what they were before
    quantise(core, layers_of(core), job.method, compute=compute, device=device)
    return ready.to(device)


def random_model(
    job: Job,
    config: Mapping[str, Any],
    *,
    device: torch.device,
    compute: torch.dtype,
    drawn: torch.dtype = torch.float32,
) -> nn.Module:
    """`load_model` for measurements: with random weights, and `config`, as config.json has it, in place of the job's.

    Drawn on the device: a processor would need a minute for a large model.
    """
    with tempfile.TemporaryDirectory(prefix="gangline-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        model = ModelJob(path=folder, start="random", attention=job.model.attention)
        with device:
            return load_model(replace(job, model=model), device=device, compute=compute, drawn=drawn)


def finish_model(model: Any, job: Job, *, compute: torch.dtype) -> nn.Module:
    """A base model made ready to be trained: adapters, recomputation, training mode. Raises ModelError."""
    if job.method.kind != "full":
        trained = _trained(job, compute)
        rows = trained_rows(model, job)
        model = attach_adapters(model, job.method, compute=compute, trained=trained, seed=job.seed, rows=rows)
    if job.activation_checkpointing:
        # reentrant checkpointing marks adapters ready twice under DDP
        how = {"use_reentrant": False, "context_fn": recomputation_contexts}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        if job.activation_offloading:
            keep_inputs_in_ram(model)
    model.train()
    whole: nn.Module = model
    return whole


def weights_dtype(job: Job, compute: torch.dtype) -> torch.dtype:
    """The dtype of the base model's weights: frozen ones have `compute`."""
    return _trained(job, compute) if job.method.kind == "full" else compute


def _trained(job: Job, compute: torch.dtype) -> torch.dtype:
    return compute if job.parameters == "compute" or compute is torch.float64 else torch.float32


def load_config(model: ModelJob, *, for_training: bool = False) -> Any:
    """The model's configuration; for training, without a cache of keys and values. Raises ModelError."""
    from transformers import AutoConfig

    refuse_remote_code(model)
    try:
        config = AutoConfig.from_pretrained(model.path, **source_words(model))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model.path: {model.path} has no configuration that transformers can read",
            seen=f"expected a folder with config.json, or the name of a model on the hub; {error_summary(error)}",
            fix="check the path; a hub model needs a network connection or an earlier download",
        ) from error
    if for_training:
        config.use_cache = False
    return config


def model_of(config: Any, model: ModelJob, *, dtype: torch.dtype) -> Any:
    """A model of this configuration with fresh weights, drawn with torch's present seed."""
    from transformers import AutoModelForCausalLM

    options = {"dtype": dtype, "trust_remote_code": model.trust_remote_code, **_attention(model)}
    return AutoModelForCausalLM.from_config(config, **options)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name, in the model's own order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def saved_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a checkpoint holds, by name: those that are trained, and what adapters began with."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad or is_initial(name)}


def base_of(model: nn.Module) -> nn.Module:
    """The transformers model inside a peft wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def output_head(core: Any) -> Any:
    """The module that makes logits: of a head whose copy is trained that copy."""
    get_head = getattr(core, "get_output_embeddings", None)
    return saved_module(get_head()) if get_head is not None else None


def layers_of(core: nn.Module) -> nn.ModuleList:
    """The stack of decoder layers of a transformers model. Raises ModelError."""
    depth = core.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
    for part in core.modules():
        if isinstance(part, nn.ModuleList) and len(part) == depth:
            return part
    raise ModelError(
        f"{type(core).__name__} keeps its layers in no list of {depth}",
        seen="expected one nn.ModuleList with an entry per layer",
        fix="use strategy: ddp, and plan this model by the closed form",
    )


def _load_base(job: Job, *, dtype: torch.dtype, drawn: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    config = load_config(job.model, for_training=True)
    if job.model.start == "random":
        torch.manual_seed(job.seed)
        model = model_of(config, job.model, dtype=drawn)
        for parameter in model.parameters():  # not buffers: the frequencies of positions need all their bits
            parameter.data = parameter.data.to(dtype)
        return model
    if Path(job.model.path).is_dir():
        weight_files(Path(job.model.path))
    options = {"dtype": dtype, **source_words(job.model), **_attention(job.model)}
    try:
        return AutoModelForCausalLM.from_pretrained(job.model.path, config=config, **options)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"model.path: the weights in {job.model.path} are a pickle that holds more than tensors",
            seen=f"expected plain tensors; {error_summary(error)}; nothing in it was executed",
            fix="do not use this file; get the model as safetensors from a source that you trust",
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"model.path: the weights in {job.model.path} cannot be loaded",
            seen=f"expected weights that fit config.json; {error_summary(error)}",
            fix="copy the model folder again and compare its files with the source",
        ) from error


def _attention(model: ModelJob) -> dict[str, str]:
    return {} if model.attention == "auto" else {"attn_implementation": model.attention}


RAM = torch.device("cpu")


def keep_inputs_in_ram(model: nn.Module) -> None:
    """Keep the inputs of every layer that recomputes in the machine's memory.

    Raises ModelError for a model whose layers do not recompute in transformers' way.
    """
    found = [module for module in model.modules() if compat.RECOMPUTE.is_in(module)]
    if not found:
        raise ModelError(
            "activation_offloading: this model's layers are not computed again in the way of transformers",
            seen=f"no module of {type(model).__name__} has {compat.RECOMPUTE.name} after recomputation was switched on",
            fix="set activation_offloading: false",
        )
    for module in found:
        compat.RECOMPUTE.put(module, partial(_checkpointed, compat.RECOMPUTE.of(module)))


def _checkpointed(checkpoint: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    # hooks inside of the recomputation are its own: these get what it saves, and no other tensor
    with torch.autograd.graph.saved_tensors_hooks(to_ram, from_ram):
        return checkpoint(*arguments, **options)


def to_ram(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    """A copy in pinned memory, and where the tensor was; itself where that is the machine's memory already."""
    if tensor.device == RAM:
        return RAM, tensor
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, device=RAM, pin_memory=True)
    return tensor.device, kept.copy_(tensor, non_blocking=True)


def from_ram(moved: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    """The tensor that `to_ram` got, on its own device."""
    device, kept = moved
    return kept.to(device, non_blocking=True)
