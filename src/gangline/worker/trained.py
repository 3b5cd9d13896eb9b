"""The model of a run at one checkpoint, in memory: what `export` writes and `generate` talks with."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gangline.errors import CheckpointError, UsageError
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.manifest import COMMIT_FILE, Commit
from gangline.worker.model import base_of, load_config, load_model, trainable
from gangline.worker.restore import read_part


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A run's model with the weights of one of its checkpoints."""

    job: Job
    run_id: str
    step: int
    stored: torch.dtype
    """The dtype in which the base model is stored; frozen weights have it here, too."""
    model: Any
    """A peft model for LoRA and QLoRA; in evaluation mode."""


def load_trained(run: Path, part: Path, *, packed: bool = False) -> Trained:
    """Load the base model and the weights of a checkpoint's part.

    run: the run directory. part: the folder `checkpoints/step-<k>/part-<host>`, of that run or of a copy of it.
    packed: frozen weights have 4 bits where they had them in training (QLoRA); otherwise they are those of the base.
    Raises UsageError, ModelError, CheckpointError.
    """
    job = _load_job(run)
    commit = _commit_of(part)
    stored = stored_dtype(job)
    method = job.method if packed or job.method.kind == "full" else dataclasses.replace(job.method, kind="lora")
    model = load_model(dataclasses.replace(job, method=method, activation_checkpointing=False), compute=stored)
    saved = read_part(part, digest=commit.parts[_host_of(part)], prefix="model.")
    _fill(model, saved, part)
    model.eval()
    base = base_of(model)
    # Training turns the cache off; what is written and used from here on has the model's own setting.
    base.config.use_cache = load_config(job.model).use_cache  # type: ignore[union-attr]
    return Trained(job=job, run_id=RunLayout.of(run.absolute()).run_id, step=commit.step, stored=stored, model=model)


def hush_libraries() -> None:
    """No progress bars, and nothing of what transformers and peft have to say to each other, on the user's screen."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
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


def _fill(model: nn.Module, saved: dict[str, torch.Tensor], part: Path) -> None:
    wanted = trainable(model)
    strangers = sorted(set(wanted) ^ set(saved))
    strangers += [name for name in wanted if name in saved and wanted[name].shape != saved[name].shape]
    if strangers:
        raise CheckpointError(
            f"{part} does not fit the model of this run",
            seen=f"expected the same trainable tensors in both; they differ in {', '.join(strangers[:5])}"
            + (f" and {len(strangers) - 5} more" if len(strangers) > 5 else ""),
            fix="use the run directory that the checkpoint came from; its model folder may have changed since",
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(saved[name])
