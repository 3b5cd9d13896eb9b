"""Loading parts of a checkpoint, and broadcasting the state to hosts that lack it.

Nothing of a part is used before every file of it matched its digest. After a failure the hosts that are left have saved
a step that others lack. Copying files between hosts first takes longer than the rest of a restart; the ranks are
connected anyway, so one that has read the state sends it, through the machines' memory, over the CPU group (gloo). The
disks of the other hosts have the next step that is saved.
"""

from __future__ import annotations

import errno
import json
import math
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from gangline.errors import CheckpointError
from gangline.optimizers import kind_of_states
from gangline.runs.manifest import PART_FILE, CheckpointPart, digest_of, verify_part
from gangline.worker import compat
from gangline.worker.buckets import named_buckets, receive_json, receive_tensors, send_json, send_tensors
from gangline.worker.checkpoint import STATE_FILE
from gangline.worker.process_group import ProcessGroup

_METADATA_FILE = ".metadata"
_MAX_SHOWN = 5
_UNREADABLE = frozenset({errno.EIO, errno.ESTALE})


def load_parts(
    parts: Sequence[tuple[Path, str]],
    tensors: Mapping[str, torch.Tensor],
    *,
    elsewhere: Collection[str] = (),
    take: Callable[[dict[str, torch.Tensor]], None] | None = None,
) -> dict[str, Any]:
    """Fill `tensors` in place from as many parts of a step as it takes, in this order, and give back the state that was
    saved with them.

    parts: folders beside each other, and of each the blake2b-256 of its part.json, from the commit record
    (`checkpoints.find_parts` gives both).
    tensors: the template: exactly the names, shapes and dtypes that were saved, on any device, or what this rank has of
    them; but for names that are `elsewhere`, which other ranks have. It is read block by block as it was written, so
    beside the template there has to be memory for the largest block.
    take: gets some of them after others, whole, in the machine's memory; then none is filled, and they may be meta.
    Raises CheckpointError when a file is not what was committed, before any of them is interpreted; when .metadata
    asks for anything but DCP's own records; when the template is another, and when parts are missing. `tensors` are
    untouched then; they are not when a forged part with right digests turns out unreadable half-way, which raises
    CheckpointError, too.
    """
    found = Blocks(parts)
    found.open_for(tensors)
    saved = found.metadata.state_dict_metadata
    expected = {name: each for name, each in tensors.items() if name in saved or not found.lacking}
    _compare(found.folder, expected, found.metadata, elsewhere)
    if take is None:
        found.read(tensors)
    else:
        for bucket in named_buckets(tensors):
            read = empty_bucket(bucket)
            found.read(read)
            take(read)
    state: dict[str, Any] = json.loads((found.folder / STATE_FILE).read_bytes())
    return state


class Blocks:
    """Where in the parts of a step each block of each tensor lies; parts are opened one after the other.

    parts: as `load_parts` takes them. Raises CheckpointError as it does.
    """

    def __init__(self, parts: Sequence[tuple[Path, str]]) -> None:
        self.folder = parts[0][0]
        """Of the first part."""
        self._left = list(parts)
        self._here = {folder.name.removeprefix("part-") for folder, _ in parts}
        self.lacking: dict[str, str] = {}
        """Parts of the step that are not here: host -> what it holds."""
        self.metadata = Metadata(state_dict_metadata={}, storage_data={})

    def open_for(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Open parts until all of these are found, or there are no more."""
        while self._left:
            self._open(*self._left.pop(0))
            with _distrust(self.folder):
                if not _missing(tensors, self.metadata):
                    return

    def open_all(self) -> None:
        """Open all parts."""
        while self._left:
            self._open(*self._left.pop(0))

    def empty(self) -> dict[str, torch.Tensor]:
        """Every tensor that is known of, on the meta device."""
        saved = self.metadata.state_dict_metadata
        return {
            name: torch.empty(item.size, dtype=item.properties.dtype, device="meta") for name, item in saved.items()
        }

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors in place; they have to be there."""
        with _distrust(self.folder):
            names = _missing(tensors, self.metadata)
            if not names:
                _read_tensors(self.folder.parent, tensors, self.metadata)
                return
        others = "; ".join(f"part-{host} is not here, which holds {words}" for host, words in self.lacking.items())
        raise CheckpointError(
            f"{self.folder.parent} lacks what this rank reads",
            seen=f"{others or 'there are all parts'}; some values are nowhere of {some(names)}",
            fix="gangline resume brings the parts that lie on other hosts",
        )

    def _open(self, folder: Path, digest: str) -> None:
        """Add what one part has; of what several have, as numbers that every rank has, the first counts."""
        part = _verified(folder, digest)
        metadata = _read_metadata(folder, part)
        self.lacking = {host: words for host, words in part.held.items() if host not in self._here}
        with _distrust(folder):
            self._add(folder, metadata)

    def _add(self, folder: Path, metadata: Metadata) -> None:
        known = self.metadata.state_dict_metadata
        for name, item in metadata.state_dict_metadata.items():
            mine = known.setdefault(name, replace(item, chunks=[]))
            if (mine.size, mine.properties.dtype) != (item.size, item.properties.dtype):
                raise _suspicious(folder, f"{name} as another tensor than in {self.folder.name}")
            taken = {chunk.offsets for chunk in mine.chunks}
            mine.chunks += [chunk for chunk in item.chunks if chunk.offsets not in taken]
        for index, place in metadata.storage_data.items():
            inside = replace(place, relative_path=f"{folder.name}/{place.relative_path}")
            self.metadata.storage_data.setdefault(index, inside)


def _verified(folder: Path, digest: str) -> CheckpointPart:
    try:
        data = (folder / PART_FILE).read_bytes()
    except OSError as error:
        raise _damaged(folder, [f"{PART_FILE} cannot be read: {error.strerror}"]) from error
    problems = [] if digest_of(data) == digest else [f"{PART_FILE} is not the one of the commit record"]
    problems += verify_part(folder)
    if problems:
        raise _damaged(folder, problems)
    return CheckpointPart.from_bytes(data)


def _read_metadata(folder: Path, part: CheckpointPart) -> Metadata:
    try:
        with (folder / _METADATA_FILE).open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
    except Exception as error:  # a broken pickle raises almost anything
        raise _suspicious(folder, f"{_METADATA_FILE}, {type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(metadata, Metadata):
        raise _suspicious(folder, f"a {type(metadata).__name__}")
    if strangers := [name for name, item in metadata.state_dict_metadata.items() if not _is_tensor(item)]:
        raise _suspicious(folder, f"items that are not tensors (DCP would unpickle them): {some(strangers)}")
    files = {file.name for file in part.files}
    if outside := {info.relative_path for info in metadata.storage_data.values()} - files:
        raise _suspicious(folder, f"files that are not of the part: {some(sorted(outside))}")
    return metadata


def _is_tensor(item: object) -> bool:
    return isinstance(item, TensorStorageMetadata)


def _read_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Metadata) -> None:
    """What `dcp.load` does for one process, minus its own reading of .metadata. folder: of the step."""
    planner, plan = _plan(tensors, metadata)
    reader = dcp.FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    (plan,) = planner.create_global_plan([plan])
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _plan(tensors: Mapping[str, torch.Tensor], metadata: Metadata) -> tuple[dcp.DefaultLoadPlanner, dcp.LoadPlan]:
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    return planner, planner.create_local_plan()


def _missing(tensors: Mapping[str, torch.Tensor], metadata: Metadata) -> list[str]:
    """Tensors of which some numbers lie in no part that was opened: DCP would leave them as they are."""
    saved = metadata.state_dict_metadata
    there = {name: each for name, each in tensors.items() if name in saved and saved[name].size == each.size()}
    counts = dict.fromkeys(tensors, 0)
    for item in _plan(there, metadata)[1].items:
        counts[item.dest_index.fqn] += math.prod(item.lengths)
    return [name for name, each in tensors.items() if counts[name] != _local(each).numel()]


@contextmanager
def _distrust(folder: Path) -> Iterator[None]:
    """Unless a disk or memory fails, only a forger gets here: weights-only loading refuses, or a place is wrong."""
    try:
        yield
    except (CheckpointError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _UNREADABLE:
            raise CheckpointError(
                f"{folder} cannot be read",
                seen=f"expected its files to be readable; {error.strerror}",
                fix="look at the disk (dmesg) or the shared folder, then resume",
            ) from error
        raise _suspicious(folder, f"{type(error).__name__} while reading tensors: {_first_line(error)}") from error


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _compare(folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Metadata, elsewhere: Collection[str]) -> None:
    saved = metadata.state_dict_metadata
    _compare_optimizers(folder, _optimizer_of(saved), _optimizer_of(tensors))
    rows = (
        [f"missing in the checkpoint: {some(sorted(set(tensors) - set(saved)))}"] if set(tensors) - set(saved) else []
    )
    if unexpected := sorted(set(saved) - set(tensors) - set(elsewhere)):
        rows.append(f"unknown to this job: {some(unexpected)}")
    others = [
        f"{name} is {_form(saved[name].properties.dtype, saved[name].size)} in the checkpoint "
        f"and {_form(tensor.dtype, tensor.shape)} in this job"
        for name, tensor in sorted(tensors.items())
        if name in saved and (saved[name].size != tensor.shape or saved[name].properties.dtype != tensor.dtype)
    ]
    rows += [some(others)] if others else []
    if rows:
        raise CheckpointError(
            f"{folder} holds the state of another model, method or precision",
            seen="expected the names, shapes and dtypes of this job; " + "; ".join(rows),
            fix="resume with the job that wrote it (job.json of the run), or start a new run",
        )


def _optimizer_of(names: Iterable[str]) -> str:
    """In the words of a job; empty where there is none that is known."""
    return kind_of_states(frozenset(name.rpartition(".")[2] for name in names if name.startswith("optimizer.")))


def _compare_optimizers(folder: Path, saved: str, wanted: str) -> None:
    if saved and wanted and saved != wanted:
        raise CheckpointError(
            f"{folder} holds the state of another optimizer",
            seen=f"saved with optimizer.kind: {saved}; this job has {wanted}",
            fix=f"resume with the job that wrote it (job.json of the run, optimizer.kind: {saved}), or export the "
            "weights and start a new run from them",
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _form(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more


def _damaged(folder: Path, problems: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{folder} is not what was committed",
        seen="; ".join(problems[:_MAX_SHOWN]),
        fix="gangline resume takes a whole copy from another host, or the checkpoint before",
    )


def _suspicious(folder: Path, seen: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} asks for what no checkpoint of gangline holds; nothing of it was executed",
        seen=f"expected the names, shapes and places of tensors; seen {seen}",
        fix="do not trust this folder; resume from another checkpoint, and find out who wrote it",
    )


def _names(*kinds: Any) -> dict[tuple[str, str], Any]:
    return {(kind.__module__, kind.__qualname__): kind for kind in kinds}


_MEMORY_FORMATS = compat.MEMORY_FORMATS.get()
_DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]


def _memory_format(kind: object, name: object) -> Any:
    """What getattr may do for a pickle: some Pythons (3.11.2 among them) write a member as getattr(enum, name)."""
    members = _MEMORY_FORMATS.__members__
    if kind is not _MEMORY_FORMATS or not isinstance(name, str) or name not in members:
        raise pickle.UnpicklingError(f"getattr of {kind!r}, {name!r}")
    return members[name]


_ALLOWED: dict[tuple[str, str], Any] = {
    **_names(
        dcp_metadata.Metadata,
        dcp_metadata.TensorStorageMetadata,
        dcp_metadata.BytesStorageMetadata,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.TensorProperties,
        _MEMORY_FORMATS,
        dcp_metadata.MetadataIndex,
        dcp_metadata.StorageMeta,
        compat.STORAGE_INFO.get(),
    ),
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in _DTYPES},
    ("torch", "Size"): torch.Size,
    ("builtins", "getattr"): _memory_format,
    ("torch.serialization", compat.GET_LAYOUT.name): compat.GET_LAYOUT.get(),
}


class _MetadataUnpickler(pickle.Unpickler):
    """DCP's .metadata is a pickle. Its hash was compared before; whoever can rewrite every hash still gets only this.

    The whole pair of names is looked up, and never an attribute of a module: protocol 4 allows dotted names, and
    through them every module that an allowed module has imported.
    """

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name}") from None


def lacks_state(world: ProcessGroup) -> bool:
    """Whether the step to go on from is not on this rank's host."""
    return world.host in world.gang.lacking


def give(tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], world: ProcessGroup) -> None:
    """Send what this rank has read to its `receivers`."""
    if lacking := receivers(world):
        send_json(dict(state), lacking)
        send_tensors(tensors.values(), lacking)


def receive(tensors: Mapping[str, torch.Tensor], world: ProcessGroup) -> dict[str, Any]:
    """Fill `tensors` in place, and give back the state that was saved with them; see `load_parts`."""
    state: dict[str, Any] = receive_json(giver(world))
    receive_tensors(tensors.values(), giver(world))
    return state


def giver(world: ProcessGroup) -> int:
    """The rank that sends the state: the first one that does not lack it."""
    return next(rank for rank, each in enumerate(world.gang.ranks) if each.host not in world.gang.lacking)


def receivers(world: ProcessGroup) -> list[int]:
    """The ranks that this one sends the state to."""
    lacking = [rank for rank, each in enumerate(world.gang.ranks) if each.host in world.gang.lacking]
    return lacking if world.rank == giver(world) else []


def empty_bucket(bucket: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """New tensors of the same shapes and formats, in the machine's memory."""
    return {name: torch.empty(each.shape, dtype=each.dtype) for name, each in bucket.items()}
