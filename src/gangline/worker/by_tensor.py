"""An export that never holds the model: tensor by tensor from the parts of a checkpoint into safetensors files.

For checkpoints in parts, whose model may fit no host. At the most one file's worth of tensors is in memory, and the
tensor that is on its way. What was written is read again and compared, tensor by tensor, and its names are held against
those that transformers looks for; logits, which take a whole model, are not computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gangline.errors import ModelError
from gangline.worker.data.model_folder import weights_folder
from gangline.worker.model import base_of, load_config, load_tokenizer, trainable
from gangline.worker.restore import Blocks
from gangline.worker.trained import (
    Checkpoint,
    adapted_layers,
    check_weight,
    check_weights,
    digest_of_tensor,
    misfit,
    refuse_shared,
)
from gangline.worker.weights import Files, meta_model, read_whole

FILE_BYTES = 2 << 30
"""Of one file at the most, unless a single tensor is larger."""


class Wrong(Exception):
    """What was written is not what was to be."""


class _Writer:
    """Tensors into files of some size, in the layout of transformers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, torch.Tensor] = {}
        self._files: list[list[str]] = []
        self._num_bytes = 0
        self.digests: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One more tensor."""
        held = sum(each.nbytes for each in self._waiting.values())
        if self._waiting and held + tensor.nbytes > FILE_BYTES:
            self._flush()
        self._waiting[name] = tensor.contiguous()
        self._num_bytes += tensor.nbytes
        self.digests[name] = digest_of_tensor(tensor)

    def finish(self) -> None:
        """The last file, and where everything lies."""
        self._flush()
        count = len(self._files)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        names = ["model.safetensors"] if count == 1 else names
        for number, name in enumerate(names):
            (self._folder / f"{number}.part").rename(self._folder / name)
        if count > 1:
            where = {key: name for name, keys in zip(names, self._files, strict=True) for key in keys}
            index = {"metadata": {"total_size": self._num_bytes}, "weight_map": dict(sorted(where.items()))}
            path = self._folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._waiting, self._folder / f"{len(self._files)}.part", {"format": "pt"})
        self._files.append(list(self._waiting))
        self._waiting = {}


def write_full(checkpoint: Checkpoint, folder: Path) -> int:
    """A model of which every weight was trained; the number of tensors. Raises CheckpointError, ModelError, Wrong."""
    from transformers.core_model_loading import revert_weight_conversion

    model = _skeleton(checkpoint)
    writer = _Writer(folder)
    for name, value in _full_weights(checkpoint, model):
        stored = value.to(checkpoint.stored) if value.is_floating_point() else value
        for key, tensor in revert_weight_conversion(model, {name: stored}).items():
            writer.add(key, tensor)
    writer.finish()
    _write_surroundings(model, checkpoint, folder)
    _compare(folder, writer.digests)
    _require_loadable(folder, checkpoint)
    return len(writer.digests)


def write_merged(checkpoint: Checkpoint, folder: Path) -> int | None:
    """The base model with the adapter folded in; None where the base cannot be read by parts, or its adapters are none
    of matrices. Raises as `write_full` does.
    """
    found = _with_adapter(checkpoint)
    if found is None:
        return None
    model, files = found
    core = base_of(model)
    layers = {f"{name}.weight": layer for name, layer in adapted_layers(core)}
    if not layers.keys() <= files.rows.keys() or any(files.rows[name].by_expert for name in layers):
        return None
    for name, layer in layers.items():
        refuse_shared(model, name, layer.get_base_layer().weight)
    buffers = dict(core.named_buffers())
    writer = _Writer(folder)
    for name in files.rows:
        dtype = buffers[name].dtype if name in buffers else checkpoint.stored
        for key, value in read_whole(files, name):
            merged = _merged(layers[name], value) if name in layers else value
            writer.add(key, merged.to(dtype))
    writer.finish()
    _write_surroundings(_skeleton(checkpoint), checkpoint, folder)
    _compare(folder, writer.digests)
    _require_loadable(folder, checkpoint)
    return len(writer.digests)


def write_adapter_alone(checkpoint: Checkpoint, folder: Path) -> int | None:
    """The adapter in peft's format; None where its base cannot be read by parts. Raises as `write_full` does."""
    from peft import get_peft_model_state_dict

    found = _with_adapter(checkpoint)
    if found is None:
        return None
    model: Any = found[0]
    config = model.peft_config["default"]
    config.base_model_name_or_path, config.revision = checkpoint.job.model.path, checkpoint.job.model.revision
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    _compare(folder, {name: digest_of_tensor(tensor) for name, tensor in tensors.items()})
    return len(tensors)


def _skeleton(checkpoint: Checkpoint) -> Any:
    """The model without weights; buffers are there."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    job = checkpoint.job
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            load_config(job.model), trust_remote_code=job.model.trust_remote_code, dtype=checkpoint.stored
        )
    model.tie_weights()
    return model


def _full_weights(checkpoint: Checkpoint, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that a folder of this model holds, one after the other."""
    blocks = Blocks(checkpoint.parts)
    blocks.open_all()
    saved = {name: each for name, each in blocks.empty().items() if name.startswith("model.")}
    wanted = {f"model.{name}": each for name, each in model.named_parameters()}
    if problem := misfit(wanted, saved, checkpoint):
        raise problem
    for name, empty in saved.items():
        value = torch.empty_like(empty, device="cpu")
        blocks.read({name: value})
        check_weight(name.removeprefix("model."), value)
        yield name.removeprefix("model."), value
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kept = [name for name in model.state_dict() if name not in every]
    yield from _buffers(checkpoint, model, kept) if kept else ()


def _buffers(checkpoint: Checkpoint, model: nn.Module, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """What is saved with weights and not trained: of the base model."""
    if checkpoint.job.model.start == "random":
        buffers = dict(model.named_buffers())
        yield from ((name, buffers[name]) for name in names)
        return
    files = Files.covering(weights_folder(checkpoint.job.model), model)
    if files is None:
        raise ModelError(
            f"{checkpoint.job.model.path} cannot be read tensor by tensor",
            seen=f"expected safetensors files with {', '.join(names[:3])}, which are not trained and in no checkpoint",
            fix="copy the model to a folder with safetensors files, and name that as model.path in job.json of the run",
        )
    for name in names:
        yield from read_whole(files, name)


def _with_adapter(checkpoint: Checkpoint) -> tuple[nn.Module, Files] | None:
    """The model with its adapter, and without the weights of its base."""
    job = checkpoint.job
    job = replace(job, method=replace(job.method, kind="lora"), activation_checkpointing=False)
    found = meta_model(job, compute=checkpoint.stored)
    if found is None:
        return None
    model, files = found
    wanted = {f"model.{name}": each.detach() for name, each in trainable(model).items()}
    blocks = Blocks(checkpoint.parts)
    blocks.open_all()
    saved = {name: each for name, each in blocks.empty().items() if name.startswith("model.")}
    if problem := misfit(wanted, saved, checkpoint):
        raise problem
    blocks.read(wanted)
    check_weights(model)
    return model, files


@torch.no_grad()
def _merged(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """W + scale * B A in fp32, as `merge_adapter` has it."""
    total = weight.float()
    for adapter in layer.active_adapters:
        total = (total + layer.get_delta_weight(adapter).float()).to(weight.dtype).float()
    return total


def _write_surroundings(model: Any, checkpoint: Checkpoint, folder: Path) -> None:
    """What else belongs to a model's folder, in the words of transformers."""
    model.config.dtype = str(checkpoint.stored).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    load_tokenizer(checkpoint.job.model).save_pretrained(folder)


def _compare(folder: Path, expected: Mapping[str, str]) -> None:
    """Read everything again, a tensor at a time."""
    from safetensors import SafetensorError, safe_open

    left = dict(expected)
    differing: list[str] = []
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as stream:
                names = list(stream.keys())
                differing += [
                    name for name in names if left.pop(name, None) != digest_of_tensor(stream.get_tensor(name))
                ]
    except (SafetensorError, OSError) as error:
        raise Wrong(f"it cannot be read again: {type(error).__name__}: {str(error)[:300]}") from error
    if differing or left:
        raise Wrong(f"these tensors are not what was written: {', '.join(sorted([*differing, *left])[:3])}")


def _require_loadable(folder: Path, checkpoint: Checkpoint) -> None:
    written = replace(checkpoint.job, model=replace(checkpoint.job.model, path=str(folder), start="pretrained"))
    if Files.covering(folder, _skeleton(replace(checkpoint, job=written))) is None:
        raise Wrong("transformers would look for tensors of other names")
