"""Everything that a rank imports in its life, imported beforehand, without a thread and without a GPU."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from gangline.exporters import EXPORTERS
from gangline.runs.job import Job

log = logging.getLogger(__name__)

LATER = (
    "gangline.worker.data.tokens",
    "torch.nn.parallel.distributed",
    "torch.distributed.checkpoint",
    "safetensors.torch",
    "transformers.models.auto.modeling_auto",
)
"""What a rank imports only when it needs it."""


def import_for(job: Path) -> None:
    """Import what the ranks of a job need. What cannot be imported is left to them: they say well what is wrong."""
    with _one_thread_of_blas():
        importlib.import_module("numpy")
    with _without_cuda():
        importlib.import_module("gangline.worker.train")
        for module in LATER:
            importlib.import_module(module)
        try:
            _import_of_job(Job.load(job))
        except Exception as error:  # noqa: BLE001 - a rank meets it again, and has words for it
            log.info("not imported beforehand: %s", error)


def what_forbids_a_fork() -> str:
    """Why a child of this process would not be what a fresh process is; "" where it would.

    A forked process has only the thread that forked it, whatever locks others held; and no GPU can be used in it once
    the driver was, before.
    """
    import torch

    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads != 1:
        return f"importing has started threads ({num_threads - 1})"
    if torch.cuda.is_initialized() or _driver_is_open():
        return "importing has opened the GPUs' driver"
    return ""


def _import_of_job(job: Job) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from gangline.worker.model import load_config

    if job.method.kind != "full":
        with _hidden("bitsandbytes"):
            importlib.import_module("peft")
    # code that comes with a model, or a talk with the hub, is for the rank
    if Path(job.model.path).is_dir() and not job.model.trust_remote_code:
        MODEL_FOR_CAUSAL_LM_MAPPING[type(load_config(job.model))]
    if os.environ.get("LOCAL_RANK", "0") == "0":  # the first rank of the head writes
        for name in job.report.exporters:
            for module in EXPORTERS[name].modules:
                importlib.import_module(module)


@contextlib.contextmanager
def _one_thread_of_blas() -> Iterator[None]:
    """The BLAS of numpy starts its threads when it is loaded; ours has no use for them. torch's own is not touched."""
    with _variable("OPENBLAS_NUM_THREADS", "1"):
        yield


@contextlib.contextmanager
def _without_cuda() -> Iterator[None]:
    """Whoever asks whether there are GPUs is answered without waking the driver (torch.cuda.is_available)."""
    with _variable("PYTORCH_NVML_BASED_CUDA_CHECK", "1"):
        yield


@contextlib.contextmanager
def _hidden(module: str) -> Iterator[None]:
    """It is not found. peft would import bitsandbytes, which opens the driver; `worker.nf4` needs nothing of peft's."""
    absent = module not in sys.modules
    if absent:
        sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if absent:
            del sys.modules[module]


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _driver_is_open() -> bool:
    """Whether this process has the device of CUDA's memory open: it does from `cuInit` on."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(entry.readlink()))
    return "/dev/nvidia-uvm" in found
