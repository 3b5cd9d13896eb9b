"""The model of a run at one checkpoint, in memory, for `export` and `generate`: loaded, merged, and looked over."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gangline.errors import CheckpointError, RunFailed, UsageError
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.manifest import COMMIT_FILE, PART_FILE, CheckpointPart, Commit
from gangline.worker.adapters import adapted_layers, fold_initial, round_saved
from gangline.worker.model import base_of, load_config, load_model, saved_weights, trainable
from gangline.worker.restore import Blocks, some


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint, and the run that it belongs to."""

    job: Job
    run_id: str
    step: int
    stored: torch.dtype
    """The dtype in which the base model is stored; frozen weights have it here, too."""
    parts: tuple[tuple[Path, str], ...]
    """Folders with the digests of their part.json: the part that was named, or, of a step in parts, all of them."""
    in_parts: bool
    """Whether each of them holds a part of the state only."""


def open_checkpoint(run: Path, part: Path) -> Checkpoint:
    """A checkpoint before its tensors are read.

    run: the run directory. part: the folder `checkpoints/step-<k>/part-<host>`, of that run or of a copy of it; of a
    step in parts any of them, and the others lie beside it. Raises UsageError, ModelError, CheckpointError.
    """
    job = _load_job(run)
    commit = _commit_of(part)
    in_parts = _is_shard(part)
    hosts = [_host_of(part), *(host for host in commit.parts if in_parts and host != _host_of(part))]
    return Checkpoint(
        job=job,
        run_id=RunLayout.of(run.absolute()).run_id,
        step=commit.step,
        stored=stored_dtype(job),
        parts=tuple((part.with_name(f"part-{host}"), commit.parts[host]) for host in hosts),
        in_parts=in_parts,
    )


def load_trained(checkpoint: Checkpoint, *, packed: bool = False) -> Any:
    """The model of a checkpoint, in evaluation mode: a peft model for LoRA and QLoRA.

    packed: frozen weights are quantised where they were in training (QLoRA); otherwise they are those of the base.
    """
    job = checkpoint.job
    method = job.method if packed or job.method.kind == "full" else dataclasses.replace(job.method, kind="lora")
    loaded = dataclasses.replace(job, method=method, activation_checkpointing=False)
    model = load_model(loaded, compute=checkpoint.stored)
    read_trained(checkpoint, model)
    round_saved(model, checkpoint.stored)
    model.eval()
    # training turns the cache off; from here on the model has its own setting
    base_of(model).config.use_cache = load_config(job.model).use_cache  # type: ignore[union-attr]
    return model


def hush_libraries() -> None:
    """No progress bars, and nothing of what transformers, peft and bitsandbytes say to each other, on the user's
    screen: peft imports bitsandbytes, which warns on processors with bf16 that faster products could be had.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\b")


def stored_dtype(job: Job) -> torch.dtype:
    """The dtype in which the base model's weights lie on the disk, as its config.json says; fp32 where it is silent."""
    dtype = getattr(load_config(job.model), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _load_job(run: Path) -> Job:
    path = RunLayout.of(run.absolute()).job
    try:
        return Job.load(path)
    except FileNotFoundError:
        raise UsageError(
            f"{run} is not a run directory", seen="expected job.json in it", fix="gangline ps lists the runs"
        ) from None


def _commit_of(part: Path) -> Commit:
    path = part.parent / COMMIT_FILE
    try:
        commit = Commit.from_bytes(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{part.parent} is not a committed checkpoint",
            seen=f"expected a whole {path}; {error}",
            fix="name a part of a committed checkpoint",
        ) from error
    if _host_of(part) not in commit.parts:
        raise CheckpointError(
            f"{part} does not belong to its checkpoint",
            seen=f"expected part-<host> of one of {', '.join(commit.parts)}",
            fix="name a part that the commit record lists",
        )
    return commit


def _host_of(part: Path) -> str:
    return part.name.removeprefix("part-")


def _is_shard(part: Path) -> bool:
    """Whether it holds a part of the state only. What cannot be read is found out where it is verified."""
    try:
        return CheckpointPart.from_bytes((part / PART_FILE).read_bytes()).kind == "shard"
    except (OSError, ValueError):
        return False


def require_fit(wanted: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], checkpoint: Checkpoint) -> None:
    """Raise CheckpointError where the tensors of a checkpoint are not those that the model of its run trains."""
    strangers = sorted(set(wanted) ^ set(saved))
    strangers += [name for name in wanted if name in saved and wanted[name].shape != saved[name].shape]
    if strangers:
        raise CheckpointError(
            f"{checkpoint.parts[0][0]} does not fit the model of this run",
            seen=f"expected the same trainable tensors in both; they differ in {some(strangers)}",
            fix="use the run directory that the checkpoint came from; its model folder may have changed since",
        )


def open_saved(checkpoint: Checkpoint, wanted: Mapping[str, torch.Tensor]) -> tuple[Blocks, dict[str, torch.Tensor]]:
    """The blocks of all parts, and every saved weight on the meta device. Raises CheckpointError as `require_fit`."""
    blocks = Blocks(checkpoint.parts)
    blocks.open_all()
    saved = {name: each for name, each in blocks.empty().items() if name.startswith("model.")}
    require_fit(wanted, saved, checkpoint)
    return blocks, saved


def read_trained(checkpoint: Checkpoint, model: Any) -> None:
    """Read the trained weights of a model in place; from then on adapters are over the base model as it is.

    Raises CheckpointError as `require_fit`.
    """
    wanted = {f"model.{name}": each.detach() for name, each in saved_weights(model).items()}
    open_saved(checkpoint, wanted)[0].read(wanted)
    fold_initial(model)


def digest_of_tensor(tensor: torch.Tensor) -> str:
    """A digest of shape and values, so that tensors are compared one at a time.

    Not of bytes: some models load a few layers in fp32 whatever the dtype of the others.
    """
    digest = hashlib.blake2b(f"{list(tensor.shape)}".encode(), digest_size=16)
    value = tensor.float() if tensor.dtype in {torch.bfloat16, torch.float16} else tensor
    digest.update(memoryview(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


@torch.no_grad()
def merge_adapter(model: Any) -> Any:
    """The base model of a peft model with W + scale * B A in place of W; the peft model is used up.

    Each sum is taken in fp32 and rounded once to the dtype of W. peft's own merge adds in the dtype of W, which
    rounds the small update before it is added. Raises UsageError where an adapted weight is shared by two layers.
    """
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for name, layer in adapted_layers(model):
        weight = layer.get_base_layer().weight
        refuse_shared(model, name, weight)
        weight.data = merged_weight(layer, weight.data)
    for part in [each for each in model.modules() if isinstance(each, TrainableTokensLayer)]:
        part.merge()
    return model.unload()


@torch.no_grad()
def merged_weight(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """W + scale * B A of the adapters of a layer, in the dtype of W; under DoRA its rows have the trained lengths."""
    for adapter in layer.active_adapters:
        merged = weight.float() + layer.get_delta_weight(adapter).float()
        if adapter in layer.lora_magnitude_vector:
            length = layer.lora_magnitude_vector[adapter].weight.float()
            rows = merged.T if layer.fan_in_fan_out else merged
            rows = rows * (length / torch.linalg.norm(rows, dim=1))[:, None]
            merged = rows.T if layer.fan_in_fan_out else rows
        weight = merged.to(weight.dtype)
    return weight


def refuse_shared(model: Any, name: str, weight: torch.Tensor) -> None:
    """Raises UsageError for a weight that two layers share."""
    owners = [other for other, value in model.named_parameters(remove_duplicate=False) if value is weight]
    if len(owners) > 1:
        raise UsageError(
            f"the adapter of {name} cannot be merged",
            seen=f"its weight is shared: {', '.join(owners)}; merging would change the other layer, too",
            fix="export the adapter without --merged",
        )


def check_weights(model: Any) -> None:
    """Raises RunFailed for useless weights: NaN, an empty tensor, an adapter that does nothing."""
    trained = trainable(model)
    for name, value in trained.items():
        check_weight(name, value)
    outputs = [value for name, value in trained.items() if "lora_B" in name or "lora_embedding_B" in name]
    if adapted_layers(model) and not any(value.any() for value in outputs):
        raise _useless("all B matrices of the adapter are zero, so that it changes nothing")


def check_weight(name: str, value: torch.Tensor) -> None:
    """Raises RunFailed for a useless weight."""
    if value.numel() == 0:
        raise _useless(f"{name} is empty")
    if not torch.isfinite(value).all():
        raise _useless(f"{name} holds values that are not finite")


def _useless(seen: str) -> RunFailed:
    return RunFailed(
        "the checkpoint is not worth exporting",
        seen=f"expected finite weights, and an adapter that changes something; {seen}",
        fix="export an earlier or a later checkpoint; metrics.jsonl shows the loss and the skipped steps",
    )
