"""Saving and loading a part: this host's whole copy of the trainable state.

Why not `dcp.async_save`: replicated state needs no collective, and DCP would spread it over the ranks, so that the
loss of one disk loses a piece of what every rank holds. Its thread also ends where ours begins: the hashes, part.json
and the rename belong to the same background work (and it refuses a group without a CPU backend that it would not use).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from gangline.errors import CheckpointError
from gangline.runs import checkpoints as disk
from gangline.runs import retention
from gangline.runs.files import sync_folder
from gangline.runs.job import CheckpointJob
from gangline.runs.manifest import describe_part
from gangline.units import format_bytes

STATE_FILE = "state.json"
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A part that is on the disk, whole."""

    step: int
    folder: Path
    num_bytes: int
    """Of all its files."""
    write_s: float
    """In the background, unless the save was synchronous."""


class Saver:
    """Writes this host's part of one checkpoint after another; made by the first rank of a host only.

    checkpoints: the run's folder of checkpoints on this host.
    description: `attempt`, `hosts`, `num_ranks`, `fingerprints`, as `manifest.describe_part` takes them.

    A write that fails never raises: it sets `failure` and leaves older checkpoints alone. There is no thread before
    the first save, so a process that forks may hold a Saver. An interpreter that ends waits for the write in flight.
    """

    def __init__(self, checkpoints: Path, *, host: str, job: CheckpointJob, description: Mapping[str, Any]) -> None:
        self._checkpoints = checkpoints
        self._host = host
        self._job = job
        self._description = description
        self._thread: threading.Thread | None = None
        self._staged: dict[str, torch.Tensor] = {}
        self.failure: CheckpointError | None = None
        """Why the last write failed; None again after one that succeeded."""
        self.saved: Saved | None = None
        """The last part that was written."""
        self.stall_s = 0.0
        """How long the last `save` held training up: waiting for the one before, and copying."""

    @property
    def busy(self) -> bool:
        """Whether a write is in flight."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], *, wait: bool = False
    ) -> None:
        """Write `tensors` (any device) and `state` (JSON; its `evaluation_loss` decides the best) as this host's part.

        Returns once both are copied, and the tensors may change; with `wait`, or where the job wants it so, once the
        part is on the disk. Waits first for the save before this one. Raises TypeError for what is not a tensor or
        not JSON.
        """
        started_s = time.perf_counter()
        text = json.dumps(dict(state), sort_keys=True)
        if strangers := [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]:
            raise TypeError(f"a checkpoint holds tensors only; not one: {', '.join(strangers)}")
        self.wait()
        part = _Part(step=step, state=text, evaluation_loss=state.get("evaluation_loss"))
        if wait or not self._job.asynchronous:
            self._write(part, tensors)
        else:
            staged = self._stage(tensors)
            self._thread = threading.Thread(target=self._write, args=(part, staged), name="gangline-save")
            self._thread.start()
        self.stall_s = time.perf_counter() - started_s

    def wait(self) -> None:
        """Until no write is in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies in this process's memory, kept for the next save: pinned pages are slow to get."""
        kept, self._staged = self._staged, {}
        for name, tensor in tensors.items():
            copy = kept.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._staged[name] = copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return self._staged

    def _write(self, part: _Part, tensors: Mapping[str, torch.Tensor]) -> None:
        started_s = time.perf_counter()
        folder = disk.part_folder(self._checkpoints, part.step, self._host)
        temporary = folder.with_name(f"{folder.name}.tmp")
        try:
            retention.prune(
                self._checkpoints,
                keep_last=self._job.keep_last,
                keep_best=self._job.keep_best,
                writing=frozenset({part.step}),
            )
            num_bytes = self._write_part(temporary, part, tensors)
            _put_in_place(temporary, folder)
        except (Exception, CheckpointException) as error:  # noqa: BLE001
            # Not narrower: what is lost in a thread is lost for good. DCP's exception is a BaseException.
            self.failure = _explain(error, temporary, _num_bytes(tensors))
            shutil.rmtree(temporary, ignore_errors=True)
            with contextlib.suppress(OSError):  # it may hold an older part
                temporary.parent.rmdir()
            return
        write_s = time.perf_counter() - started_s
        self.saved = Saved(step=part.step, folder=folder, num_bytes=num_bytes, write_s=write_s)
        self.failure = None

    def _write_part(self, temporary: Path, part: _Part, tensors: Mapping[str, torch.Tensor]) -> int:
        disk.at_point("save: begin")
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        sync_folder(self._checkpoints)
        disk.at_point("save: folder made")
        _write_tensors(temporary, tensors)
        disk.at_point("save: tensors written")
        (temporary / STATE_FILE).write_text(part.state, encoding="utf-8")
        disk.at_point("save: state written")
        for path in temporary.iterdir():
            _sync_file(path)
        disk.at_point("save: files on disk")
        described = describe_part(
            temporary,
            step=part.step,
            host=self._host,
            description=self._description,
            evaluation_loss=part.evaluation_loss,
        )
        disk.at_point("save: part described")
        return sum(file.size_bytes for file in described.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What is written besides the tensors."""

    step: int
    state: str
    evaluation_loss: float | None


class _Planner(dcp.DefaultSavePlanner):
    """DCP's planner, with a point for crash tests in the middle of the file."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        disk.at_point("save: within tensors")
        return super().resolve_data(write_item)


class _Writer(dcp.FileSystemWriter):
    """DCP's writer without the path and the random id in .metadata: equal state gives equal files on every host."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def _write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    # Said by DCP whenever no_dist is asked for. Not catch_warnings: that swaps the filters of all threads.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
    writer = _Writer(folder, sync_files=False)
    dcp.save(dict(tensors), storage_writer=writer, planner=_Planner(), no_dist=True)


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename the part. An older part of the same step (of an attempt before) goes first, and its record before it."""
    if folder.exists():
        retention.remove_record(folder.parent)
        shutil.rmtree(folder)
    disk.at_point("save: old part gone")
    temporary.rename(folder)
    disk.at_point("save: part renamed")
    sync_folder(folder.parent)
    disk.at_point("save: end")


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _explain(error: BaseException, folder: Path, num_bytes: int) -> CheckpointError:
    step = folder.parent.name
    causes = list(_causes(error))
    system = next((cause for cause in causes if isinstance(cause, OSError)), None)
    if system is not None and system.errno in _DISK_FULL:
        existing = next(path for path in folder.parents if path.exists())
        free_bytes = shutil.disk_usage(existing).free
        return CheckpointError(
            f"no room to save {step} in {existing}: {os.strerror(system.errno)}",
            seen=f"the part needs {format_bytes(num_bytes)}; {format_bytes(free_bytes)} are free with what was written",
            fix="make room on that disk (or raise the quota), or lower checkpoint.keep_last; "
            "the checkpoints saved before are untouched: gangline resume goes on from them",
        )
    return CheckpointError(
        f"{step} cannot be saved in {folder.parent}",
        seen="; ".join(f"{type(cause).__name__}: {cause}" for cause in causes[:3]),
        fix="look at the rank's log; the checkpoints saved before are untouched: gangline resume goes on from them",
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The errors below an error, the nearest to the cause first."""
    if isinstance(error, CheckpointException):
        for failure, _ in error.failures.values():
            yield from _causes(failure)
        return
    below = error.__cause__ or error.__context__
    if below is not None:
        yield from _causes(below)
    yield error
