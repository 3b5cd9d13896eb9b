"""Saving a part: this host's whole copy of the trainable state, or the local shards of its ranks.

Why not `dcp.async_save`: replicated state needs no collective, and DCP would spread it over the ranks, so that the
loss of one disk loses a piece of what every rank holds. Its thread also ends where ours begins: the hashes, part.json
and the rename belong to the same background work (and it refuses a group without a CPU backend that it would not use).

Local shards do not leave the host: its ranks send them to its first rank, some megabytes at a time (`buckets`), over
the CPU group (gloo). The threads that train do it between two steps, so whatever ends a wait of a step that has lost a
rank ends this one, too (`worker/process_group.py`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from gangline.errors import CheckpointError
from gangline.runs import checkpoints as disk
from gangline.runs.files import sync_folder
from gangline.runs.job import CheckpointJob
from gangline.runs.manifest import describe_part
from gangline.units import format_bytes
from gangline.worker.bench_collective import proc_bytes
from gangline.worker.buckets import in_buckets, receive_json, send_json
from gangline.worker.process_group import ProcessGroup

log = logging.getLogger(__name__)

STATE_FILE = "state.json"
BEAT_S = 1.0
SPARED_BYTES = 256 << 20
"""Of the machine's memory, which copies of the state leave alone."""
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPart:
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
    description: `attempt`, `hosts`, `num_ranks`, `fingerprints`, as `manifest.describe_part` takes them, and `held` of
    a host whose ranks hold a part of the state only.
    beat: called once a second while somebody waits for a write, which is not taken for a hang then.

    A write that fails never raises: it sets `failure` and leaves older checkpoints alone. There is no thread before
    the first save, so a process that forks may hold a Saver. An interpreter that ends waits for the write in flight.
    """

    def __init__(
        self,
        checkpoints: Path,
        *,
        host: str,
        job: CheckpointJob,
        description: Mapping[str, Any],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._checkpoints = checkpoints
        self._host = host
        self._job = job
        self._description = description
        self._beat = beat
        self._thread: threading.Thread | None = None
        self._staged: dict[object, torch.Tensor] = {}
        self.failure: CheckpointError | None = None
        """Why the last write failed; None again after one that succeeded."""
        self.saved: WrittenPart | None = None
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
        """Write `tensors` (any device) and `state` (JSON; its `evaluation_loss` decides the best) as this host's part:
        the whole of it.

        Returns once both are copied, and the tensors may change; with `wait`, or where the job wants it so, once the
        part is on the disk. Waits first for the save before this one. Raises TypeError for what is not a tensor or
        not JSON.
        """
        if strangers := [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]:
            raise TypeError(f"a checkpoint holds tensors only; not one: {', '.join(strangers)}")
        self._save(step, own_shards(tensors), state, description={**self._description, "held": {}}, wait=wait)

    def save_shards(
        self, step: int, pieces: Iterable[LocalShard], state: Mapping[str, Any], *, wait: bool = False
    ) -> None:
        """The same for what the ranks of this host hold of it. `pieces` is gone through once, and always to its end:
        other ranks may be waiting to hand theirs over.
        """
        self._save(step, pieces, state, description=self._description, wait=wait)

    def _save(
        self,
        step: int,
        pieces: Iterable[LocalShard],
        state: Mapping[str, Any],
        *,
        description: Mapping[str, Any],
        wait: bool,
    ) -> None:
        started_s = time.perf_counter()
        text = json.dumps(dict(state), sort_keys=True)
        self.wait()
        part = _Part(step=step, state=text, description=description, evaluation_loss=state.get("evaluation_loss"))
        waits = wait or not self._job.asynchronous
        given, suffices = (list(pieces), True) if waits else self._stage(pieces)
        if not suffices:
            log.warning("step %d: memory does not suffice for a copy of the state; training waits for the disk", step)
            waits = True
        self._thread = threading.Thread(target=self._write, args=(part, given), name="gangline-save")
        self._thread.start()
        if waits:
            self.wait()
        self.stall_s = time.perf_counter() - started_s

    def wait(self) -> None:
        """Until no write is in flight, however long that takes."""
        while (thread := self._thread) is not None:
            thread.join(BEAT_S)
            self._beat()
            if not thread.is_alive():
                self._thread = None

    def _stage(self, pieces: Iterable[LocalShard]) -> tuple[list[LocalShard], bool]:
        """Copies in this process's memory, kept for the next save: pinned pages are slow to get. Where memory does not
        suffice, the rest as it is, and False: that has to be on the disk before it changes.
        """
        kept, self._staged = self._staged, {}
        staged, on_gpu, suffices = [], False, True
        for piece in pieces:
            tensor, copy = piece.tensor, kept.pop(piece.key, None)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                suffices = suffices and copy_bytes(tensor) + SPARED_BYTES <= available_bytes()
                if not suffices:
                    staged.append(piece)
                    continue
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._staged[piece.key] = copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            staged.append(replace(piece, tensor=copy))
            on_gpu = on_gpu or tensor.is_cuda
        if on_gpu:
            torch.cuda.synchronize()
        return staged, suffices

    def _write(self, part: _Part, pieces: Sequence[LocalShard]) -> None:
        started_s = time.perf_counter()
        folder = disk.part_folder(self._checkpoints, part.step, self._host)
        temporary = folder.with_name(f"{folder.name}.tmp")
        try:
            disk.prune(
                self._checkpoints,
                keep_last=self._job.keep_last,
                keep_best=self._job.keep_best,
                writing=frozenset({part.step}),
            )
            num_bytes = self._write_part(temporary, part, pieces)
            _put_in_place(temporary, folder)
        except (Exception, CheckpointException) as error:  # noqa: BLE001
            # Not narrower: what is lost in a thread is lost for good. DCP's exception is a BaseException.
            self.failure = _explain(error, temporary, sum(piece.tensor.nbytes for piece in pieces))
            shutil.rmtree(temporary, ignore_errors=True)
            with contextlib.suppress(OSError):  # it may hold an older part
                temporary.parent.rmdir()
            return
        write_s = time.perf_counter() - started_s
        self.saved = WrittenPart(step=part.step, folder=folder, num_bytes=num_bytes, write_s=write_s)
        self.failure = None

    def _write_part(self, temporary: Path, part: _Part, pieces: Sequence[LocalShard]) -> int:
        disk.at_point("save: begin")
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        sync_folder(self._checkpoints)
        disk.at_point("save: folder made")
        _write_tensors(temporary, pieces)
        disk.at_point("save: tensors written")
        (temporary / STATE_FILE).write_text(part.state, encoding="utf-8")
        disk.at_point("save: state written")
        for path in temporary.iterdir():
            sync_folder(path)
        disk.at_point("save: files on disk")
        described = describe_part(
            temporary,
            step=part.step,
            host=self._host,
            description=part.description,
            evaluation_loss=part.evaluation_loss,
        )
        disk.at_point("save: part described")
        return sum(file.size_bytes for file in described.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What is written besides the tensors."""

    step: int
    state: str
    description: Mapping[str, Any]
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


class _PiecesPlanner(_Planner):
    """The same for blocks of tensors, of which those that other hosts have are not missing."""

    def __init__(self, pieces: Sequence[LocalShard]) -> None:
        super().__init__()
        self._pieces = {MetadataIndex(piece.name, torch.Size(piece.offsets)): piece for piece in pieces}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_block(index, piece) for index, piece in self._pieces.items()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._pieces[index].tensor


def _block(index: MetadataIndex, piece: LocalShard) -> WriteItem:
    sizes = piece.tensor.size()
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=sizes),
        properties=TensorProperties.create_from_tensor(piece.tensor),
        size=torch.Size(piece.shape),
    )
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


def _write_tensors(folder: Path, pieces: Sequence[LocalShard]) -> None:
    # Said by DCP whenever no_dist is asked for. Not catch_warnings: that swaps the filters of all threads.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
    are_whole = all(piece.is_whole for piece in pieces)
    dcp.save(
        {piece.name: piece.tensor for piece in pieces} if are_whole else {},
        storage_writer=_Writer(folder, sync_files=False),
        planner=_Planner() if are_whole else _PiecesPlanner(pieces),
        no_dist=True,
    )


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename the part. An older part of the same step (of an attempt before) goes first, and its record before it."""
    if folder.exists():
        disk.remove_record(folder.parent)
        shutil.rmtree(folder)
    disk.at_point("save: old part gone")
    temporary.rename(folder)
    disk.at_point("save: part renamed")
    sync_folder(folder.parent)
    disk.at_point("save: end")


def copy_bytes(tensor: torch.Tensor) -> int:
    """What a copy in this machine's memory takes: torch gets pinned memory, for those of a GPU, in powers of two."""
    return 1 << max(0, tensor.nbytes - 1).bit_length() if tensor.is_cuda else tensor.nbytes


def available_bytes() -> float:
    """Memory that this machine can give; without a bound where the kernel does not say."""
    try:
        return proc_bytes(Path("/proc/meminfo"), "MemAvailable")
    except (OSError, ValueError):
        return math.inf


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """A block of one tensor of the state."""

    name: str
    tensor: torch.Tensor
    offsets: tuple[int, ...]
    """Where in the whole tensor it begins."""
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """The same for two copies of one piece."""
        return self.name, self.offsets

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its tensor."""
        return tuple(self.tensor.shape) == self.shape


def own_shards(tensors: Mapping[str, torch.Tensor]) -> Iterator[LocalShard]:
    """What this rank has: the live tensors."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            yield LocalShard(name=name, tensor=tensor.detach(), offsets=(0,) * tensor.ndim, shape=tuple(tensor.shape))
            continue
        local = tensor.detach().to_local()
        if local.numel():
            yield LocalShard(name=name, tensor=local, offsets=shard_offsets(tensor), shape=tuple(tensor.shape))


def shard_offsets(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's shard begins in the whole tensor, by dimension; DTensor's own word to DCP."""
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets)


def shards_of_host(tensors: Mapping[str, torch.Tensor], world: ProcessGroup) -> Iterator[LocalShard]:
    """All pieces of this host, each once: this rank's own, which are live, and then those of its other ranks.

    For the first rank of a host, while the others `send`. Of what others have one bucket is held at a time.
    """
    seen: set[object] = set()
    for piece in own_shards(tensors):
        seen.add(piece.key)
        yield piece
    for rank in world.gang.ranks_on(world.host)[1:]:
        for piece in _received(rank):
            if piece.key not in seen:
                seen.add(piece.key)
                yield piece


def send(tensors: Mapping[str, torch.Tensor], world: ProcessGroup) -> None:
    """Give this rank's pieces to the first rank of its host."""
    first = world.gang.ranks_on(world.host)[0]
    pieces = list(own_shards(tensors))
    send_json([[p.name, _word(p.tensor.dtype), list(p.tensor.shape), p.offsets, p.shape] for p in pieces], [first])
    left = iter(pieces)
    for bucket in in_buckets([_like(piece.tensor.dtype, piece.tensor.shape) for piece in pieces]):
        dist.send(torch.cat([next(left).tensor.reshape(-1).cpu() for _ in bucket]), dst=first)


def _received(rank: int) -> Iterator[LocalShard]:
    rows = receive_json(rank)
    left = iter(rows)
    for bucket in in_buckets([_like(getattr(torch, dtype), shape) for _, dtype, shape, _, _ in rows]):
        row = torch.empty(sum(each.numel() for each in bucket), dtype=bucket[0].dtype)
        dist.recv(row, src=rank)
        for part in row.split([each.numel() for each in bucket]):
            name, _, shape, offsets, whole = next(left)
            yield LocalShard(name=name, tensor=part.view(shape), offsets=tuple(offsets), shape=tuple(whole))


def _like(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Without numbers: both ends cut their buckets by such, whatever device a piece is on."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
