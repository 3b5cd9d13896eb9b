"""A model that no process ever holds: built on the meta device, sharded over the ranks, and then read shard by shard.

`meta_model` builds the model with its weights on the meta device; the strategy shards it; in `read_parts` every rank
reads its rows of each tensor from the safetensors files. So a rank needs memory for its shards and one tensor.
Weights of 4 or 8 bits (QLoRA) are read whole, a tensor at a time, and quantised before the next one is read.

That takes files whose names are those of the model, or of experts that it keeps in one tensor (transformers joins
those when it loads them). Everything else is loaded whole by every rank, as for other strategies: see `Files.of`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from gangline.errors import ModelError
from gangline.runs.job import Job, ModelJob
from gangline.worker import compat
from gangline.worker.checkpoint import shard_offsets
from gangline.worker.data.model_folder import ONE_WEIGHTS_FILE, WEIGHTS_INDEX, weights_folder
from gangline.worker.model import base_of, finish_model, layers_of, load_config, model_of, weights_dtype
from gangline.worker.quantised import PACKED, QuantisedExperts, QuantisedLinear, replace_linears
from gangline.worker.vocabulary import extends

_WRAPPED = re.compile(r"\.base_layer(?=\.)")
"""The part that peft adds to the name of a weight that it wraps; twice where it wraps two of a module."""


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Where a tensor of the model lies in the files."""

    keys: tuple[tuple[str, ...], ...]
    """One key: as it is. By expert: the tensors that are joined along their first dimension to its row."""
    by_expert: bool = False


@dataclass(frozen=True, slots=True)
class FlatShard:
    """This rank's shard of a flattened weight: some of its numbers, one after another, without regard to its rows."""

    shape: torch.Size
    """The shape of the whole weight."""
    start: int
    size: int
    store: Callable[[torch.Tensor], None]
    """Takes the numbers, in one row, in the dtype of the files."""


@dataclass(frozen=True, slots=True)
class Files:
    """The safetensors files of a model folder, and the place of every tensor of the model in them."""

    folder: Path
    file_of: Mapping[str, str]
    """Key -> name of its file."""
    rows: Mapping[str, TensorRows]
    """Name in the model, without what peft adds -> where it lies."""

    @staticmethod
    def of(source: ModelJob, model: nn.Module) -> Files | None:
        """The files of a model on the meta device; None where it cannot be read by shards.

        That is a model that keeps some weights in fp32, whatever the dtype of the others.
        """
        core: Any = base_of(model)
        in_fp32 = {*compat.KEEP_IN_FP32.of(core), *compat.KEEP_IN_FP32_STRICT.of(core)}
        if any(in_fp32 & set(name.split(".")) for name, _ in core.named_parameters()):
            return None
        return Files.covering(weights_folder(source), core)

    @staticmethod
    def covering(folder: Path, core: nn.Module) -> Files | None:
        """The files of a folder, if everything that a transformers model wants lies in them under known names."""
        with _readable(folder):
            file_of = _keys(folder)
        if file_of is None:
            return None
        rows: dict[str, TensorRows] = {}
        saved = core.state_dict().keys()
        for name in (_plain(name) for name, _ in _tensors(core) if name in saved):
            found = TensorRows(((name,),)) if name in file_of else _experts(core, name, file_of)
            if found is None:
                return None
            rows[name] = found
        return Files(folder, file_of, rows)


Target: TypeAlias = torch.Tensor | QuantisedLinear | FlatShard
"""A destination of `read_parts`."""


def meta_model(
    job: Job,
    *,
    compute: torch.dtype,
    prepare: Callable[[nn.Module], None] = lambda _model: None,
    begin: Callable[[nn.Module, Callable[[str], torch.Tensor]], None] = lambda _model, _weight_of: None,
) -> tuple[nn.Module, Files] | None:
    """The model of a job in training mode on the meta device, and its files; adapters have their usual values.

    prepare: changes the model before its tensors are looked up in the files. begin: gets the model before that, and
    what reads a whole weight of it, for adapters that begin with values of weights. None where the model cannot be
    read by shards (a random one, or one of which copies are trained), and `prepare` has to be called with another one.
    Raises ModelError.
    """
    from accelerate import init_empty_weights

    if job.model.start == "random" or not in_files(job):
        return None
    full = job.method.kind == "full"
    with init_empty_weights(include_buffers=False):
        config = load_config(job.model, for_training=True)
        model = model_of(config, job.model, dtype=weights_dtype(job, compute))
    if not full:
        _replace_placeholders(model, _placeholder)  # peft puts adapters where the weights are
    model.tie_weights()  # which was lost on the way to the meta device
    model = finish_model(model, job, compute=compute)
    if not full:
        _replace_placeholders(base_of(model), _meta)
        if (whole := Files.of(job.model, model)) is None:
            return None
        begin(model, partial(read_joined, whole))
    prepare(model)
    files = Files.of(job.model, model)
    if job.method.kind == "qlora":
        core = base_of(model)
        replace_linears(core, layers_of(core), job.method, compute=compute)
    return None if files is None else (model, files)


def in_files(job: Job) -> bool:
    """Whether everything but adapters lies in the files as it is: no rows beside theirs, and no copies."""
    return not (job.method.modules_to_save or job.method.train_tokens or extends(job))


def is_tied(model: nn.Module) -> bool:
    """Whether the output head is the embedding table."""
    core: Any = base_of(model)
    table, head = core.get_input_embeddings(), core.get_output_embeddings()
    return hasattr(head, "weight") and head.weight is getattr(table, "weight", None)


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device, *, parts: torch.device | None = None) -> None:
    """Give tensors on the meta device memory on this one: after sharding, that of a rank's shards. Ties stay ties.

    parts: the device of shards, if it is another one.
    """
    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        _replace_placeholders(module, lambda tensor: torch.empty_like(tensor, device=device))

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        where = parts if parts is not None and isinstance(tensor, DTensor) else device
        return torch.empty_like(tensor, device=where) if tensor.is_meta else tensor.to(where)

    compat.APPLY.of(module)(empty)


def use_placeholders(module: nn.Module) -> None:
    """Replace weights on the meta device by placeholders on the CPU, which take no memory, for DeepSpeed."""
    _replace_placeholders(module, _placeholder)


@torch.no_grad()
def read_parts(
    model: nn.Module,
    files: Files,
    *,
    targets: Mapping[str, torch.Tensor | FlatShard],
) -> None:
    """Read this rank's shard of every weight that was on the meta device, and the buffers that are saved with them.

    targets: destinations that stand in for parameters, by name: see `Strategy.read_targets`. Raises ModelError for
    files that cannot be read, or hold tensors of other shapes.
    """
    from safetensors import safe_open

    core = base_of(model)
    into: dict[str, Target] = {_plain(name): tensor for name, tensor in _tensors(core)}
    for name, target in targets.items():
        if ".lora_" not in name:
            into[_plain(name).removeprefix("base_model.model.")] = target
    for name, module in core.named_modules():
        if isinstance(module, QuantisedLinear):
            into[_plain(f"{name}.weight")] = module
        if isinstance(module, QuantisedExperts):
            into[_plain(name).replace(f".{PACKED}", ".")] = module
    by_file: dict[str, list[str]] = {}
    for name, rows in files.rows.items():
        by_file.setdefault(files.file_of[rows.keys[0][0]], []).append(name)
    for first, names in by_file.items():
        with _readable(files.folder), safe_open(files.folder / first, framework="pt") as stream:
            for name in names:
                _read(name, into[name], files, first, stream)


def _read(name: str, target: Target, files: Files, file: str, stream: Any) -> None:
    """One tensor: the rows that are this rank's."""
    rows = files.rows[name]
    shape = (target.out_features, target.in_features) if type(target) is QuantisedLinear else target.shape
    if not rows.by_expert:
        source = stream.get_slice(name)
        if source.get_shape() != list(shape):
            raise ValueError(f"{name} is {source.get_shape()} there, and {list(shape)} by config.json")
    if isinstance(target, QuantisedLinear):
        experts = [_row(rows, index, files, file, stream) for index in range(len(rows.keys) if rows.by_expert else 0)]
        _pack(target, torch.stack(experts) if experts else stream.get_tensor(name))
        return
    if isinstance(target, FlatShard):
        if target.size:
            target.store(_numbers(name, target, files, file, stream))
        return
    local, dim, start = _local(target)
    if not rows.by_expert:
        if local.ndim == 0:
            local.copy_(stream.get_tensor(name))
        elif len(local):
            own = [slice(None)] * dim + [slice(start, start + local.shape[dim])]
            local.copy_(source[tuple(own)])
        return
    for index in range(len(local)):
        row = _row(rows, index if dim else start + index, files, file, stream)
        local[index].copy_(row.narrow(dim - 1, start, local.shape[dim]) if dim else row)


def _numbers(name: str, target: FlatShard, files: Files, file: str, stream: Any) -> torch.Tensor:
    """The numbers of a flat shard, out of the rows in which it begins and ends."""
    rows, width = files.rows[name], math.prod(target.shape[1:])
    first, last = target.start // width, -(-(target.start + target.size) // width)
    if rows.by_expert:
        source = torch.stack([_row(rows, index, files, file, stream) for index in range(first, last)])
    else:
        source = stream.get_slice(name)[first:last] if target.shape else stream.get_tensor(name)
    return source.reshape(-1).narrow(0, target.start - first * width, target.size)


def _row(rows: TensorRows, index: int, files: Files, file: str, stream: Any) -> torch.Tensor:
    """The weight of one expert."""
    parts = [_get(key, files, file, stream) for key in rows.keys[index]]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _pack(layer: QuantisedLinear, weight: torch.Tensor) -> None:
    """Quantise a weight on the layer's device, and keep this rank's shard of it."""
    tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
    device = next(layer.buffers(), layer.scales).device  # buffers stay on the card where weights are kept off it
    for name, packed in layer.pack(weight.to(device)).items():
        local, _, start = _local(tensors[name])
        local.copy_(packed[start : start + len(local)] if local.ndim else packed)


def read_whole(files: Files, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the files that make up one of the model, under their names there. Raises ModelError."""
    from safetensors import safe_open

    for key in (key for several in files.rows[name].keys for key in several):
        with _readable(files.folder), safe_open(files.folder / files.file_of[key], framework="pt") as stream:
            tensor = stream.get_tensor(key)
        yield key, tensor


def read_joined(files: Files, name: str) -> torch.Tensor:
    """A tensor of the model, on the CPU. Raises ModelError."""
    rows = files.rows[name]
    tensors = dict(read_whole(files, name))
    if not rows.by_expert:
        return tensors[name]
    return torch.stack([torch.cat([tensors[key] for key in keys]) for keys in rows.keys])


def _get(key: str, files: Files, file: str, stream: Any) -> torch.Tensor:
    """A whole tensor, which may lie in another file than the one that is open."""
    from safetensors import safe_open

    elsewhere = files.file_of[key] != file
    with safe_open(files.folder / files.file_of[key], framework="pt") if elsewhere else nullcontext(stream) as source:
        found: torch.Tensor = source.get_tensor(key)
    return found


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """This rank's shard of a tensor, the dimension along which it is sharded, and its start there.

    Shards are those of `torch.chunk`.
    """
    if not isinstance(tensor, DTensor):
        return tensor, 0, 0
    (cut,) = (each for each in tensor.placements if isinstance(each, Shard))
    return tensor.to_local(), cut.dim, shard_offsets(tensor)[cut.dim]


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn errors of the files into one ModelError."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"model.path: the weights in {folder} cannot be loaded",
            seen=f"expected safetensors files that fit config.json; {type(error).__name__}: {str(error)[:300]}",
            fix="copy the model folder again and compare its files with the source",
        ) from error


def _keys(folder: Path) -> dict[str, str] | None:
    """Every key of the files, and in which it is; None for weights of another kind."""
    from safetensors import safe_open

    if (folder / WEIGHTS_INDEX).is_file():
        index: dict[str, str] = json.loads((folder / WEIGHTS_INDEX).read_text(encoding="utf-8"))["weight_map"]
        return index
    if not (folder / ONE_WEIGHTS_FILE).is_file():
        return None
    with safe_open(folder / ONE_WEIGHTS_FILE, framework="pt") as stream:
        return dict.fromkeys(stream.keys(), ONE_WEIGHTS_FILE)


def _tensors(core: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights and buffers of the base model, each once, without adapters."""
    for name, tensor in (*core.named_parameters(), *core.named_buffers()):
        if ".lora_" not in name:
            yield name, tensor


def _plain(name: str) -> str:
    return _WRAPPED.sub("", name)


def _experts(core: Any, name: str, file_of: Mapping[str, str]) -> TensorRows | None:
    """The keys of experts that transformers joins to one tensor when it loads them, as its own list says; else None."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    for each in get_model_conversion_mapping(core):
        if not isinstance(each, WeightConverter) or len(each.target_patterns) != 1:
            continue
        kinds = [(type(operation), operation.dim) for operation in each.operations]
        joins = [(MergeModulelist, 0), (Concatenate, 1)][: 2 if len(each.source_patterns) > 1 else 1]
        if kinds != joins or not name.endswith(each.target_patterns[0]):
            continue
        prefix = name.removesuffix(each.target_patterns[0])
        sources = [prefix + pattern for pattern in each.source_patterns]
        count = _count(sources[0], file_of)
        keys = tuple(tuple(source.replace("*", str(number)) for source in sources) for number in range(count))
        if count and all(key in file_of for several in keys for key in several):
            return TensorRows(keys, by_expert=True)
    return None


def _count(pattern: str, file_of: Mapping[str, str]) -> int:
    """How many experts there are."""
    compiled = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
    return sum(compiled.fullmatch(key) is not None for key in file_of)


def _replace_placeholders(core: nn.Module, make: Any) -> None:
    """Replace every weight that has no values yet by another such; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in core.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if is_placeholder(parameter):
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
                setattr(module, name, made[id(parameter)])


def is_placeholder(parameter: torch.Tensor) -> bool:
    """Whether it stands for a weight that has no values yet."""
    return parameter.is_meta or (parameter.numel() > 1 and not any(parameter.stride()))


def _placeholder(parameter: torch.Tensor) -> torch.Tensor:
    """The same shape on the CPU, made of one number."""
    return torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)


def _meta(parameter: torch.Tensor) -> torch.Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
