"""JSON records on disk with their version: stamped when they are written, checked when they are read.

    {"schema_version": "1.0", "run_id": "calm-otter-7", ...}

A new key, or a new file, raises the minor version: readers of another minor version take what they know. A key or a
value that gets another meaning raises the major version: readers of an older major version refuse the record. A record
without a version of this form was written before there were versions; `old_format` translates it.

Only regular files are read: a FIFO would never end. A damaged record raises a RecordError that names the file, a
missing one a FileNotFoundError.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import gangline
from gangline.errors import NewerRecord, RecordError
from gangline.runs import old_format
from gangline.runs.decode import build, known_part
from gangline.runs.files import parse_json, write_atomic
from gangline.runs.layout import PATTERN, SCHEMA_VERSION

if TYPE_CHECKING:
    from typing_extensions import Self

VERSION_KEY, RUN_KEY = "schema_version", "run_id"
LIMIT_BYTES = 64 << 20
"""A longer file is no record: the request of a thousand hosts has 5 MB."""

T = TypeVar("T")
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,6})")


class Record:
    """A frozen dataclass that lies on disk as JSON under the names of its fields. A base of such a dataclass."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Plain data for the file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The record that `to_json` gave; raises DecodeError for anything else."""
        return build(cls, data)

    def save(self, path: Path) -> None:
        """Write the record so that it is whole or absent."""
        write_record(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the record; raises FileNotFoundError and RecordError."""
        return load_record(path, cls)


def stamped(value: dict[str, Any], *, run_id: str | None) -> dict[str, Any]:
    """A record as it is written: with the version, and with the run that it belongs to where there is one."""
    head = {VERSION_KEY: "{}.{}".format(*SCHEMA_VERSION)}
    return {**value, **head, **({RUN_KEY: run_id} if run_id is not None else {})}


def encode_record(value: dict[str, Any], path: PurePath) -> bytes:
    """The bytes of a record that is to lie at `path`, on this computer or another one."""
    return (json.dumps(stamped(value, run_id=run_of(path)), indent=2, sort_keys=True) + "\n").encode()


def write_record(path: Path, value: dict[str, Any]) -> None:
    """Write a record so that it is whole or absent."""
    write_atomic(path, encode_record(value, path))


def load_record(path: Path, kind: type[T] | Callable[[dict[str, Any]], T]) -> T:
    """The record at `path`; raises FileNotFoundError, and RecordError for one that is damaged or too new.

    kind: a dataclass (its `from_json`, where it has one), or a function of the record's keys.
    """
    return decode_record(read_regular(path), path_on_disk(path), kind)


def load_if_there(path: Path, kind: type[T] | Callable[[dict[str, Any]], T]) -> T | None:
    """As `load_record`; None where there is no such file."""
    try:
        return load_record(path, kind)
    except FileNotFoundError:
        return None


def decode_record(data: bytes, path: PurePath, kind: type[T] | Callable[[dict[str, Any]], T], *, host: str = "") -> T:
    """The record in `data`, which lies at `path` on `host` ("": this computer); raises RecordError."""
    where = f"{host}:{path}" if host else str(path)
    try:
        value = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise damaged(where, _json_fault(data, error)) from error
    if isinstance(value, list) and path.name in old_format.LISTS:
        value = {old_format.LISTS[path.name]: value}
    if not isinstance(value, dict):
        raise damaged(where, f"expected a JSON object, found {type(value).__name__}")
    try:
        return cast("T", _decoded(value, path, where, kind))
    except RecordError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, ArithmeticError) as error:
        raise damaged(where, str(error)[:300] or type(error).__name__) from error


def _decoded(value: dict[str, Any], path: PurePath, where: str, kind: Any) -> Any:
    version = version_of(value, where)
    if version is None:
        value = old_format.translated(path.name, value)
    value.pop(VERSION_KEY, None)
    of_run, here = value.get(RUN_KEY), run_of(path)
    if isinstance(of_run, str) and here is not None and of_run != here:
        raise damaged(where, f"it belongs to the run {of_run[:80]}, not to {here}")
    fields = getattr(kind, "__dataclass_fields__", {})
    if RUN_KEY not in fields:
        value.pop(RUN_KEY, None)
    if not fields:
        return kind(value)
    if version is not None and version[1] > SCHEMA_VERSION[1]:
        value = known_part(kind, value)
    from_json = getattr(kind, "from_json", None)
    return from_json(value) if from_json is not None else build(kind, value)


def version_of(value: dict[str, Any], where: str) -> tuple[int, int] | None:
    """Major and minor version of a record; None: older than versions. Raises RecordError for a newer major version."""
    said = value.get(VERSION_KEY)
    if said is None or type(said) is int:
        return None
    found = _VERSION.fullmatch(said) if isinstance(said, str) else None
    if found is None:
        raise damaged(where, f"{VERSION_KEY}: expected major.minor such as 1.0, found {str(said)[:40]!r}")
    version = int(found[1]), int(found[2])
    if version[0] > SCHEMA_VERSION[0]:
        raise NewerRecord(
            f"{where} was written by a newer gangline",
            seen=f"expected version {SCHEMA_VERSION[0]}.x, found {said}; this is gangline {gangline.__version__}",
            fix="upgrade gangline on this computer: pip install --upgrade gangline",
        )
    return version


def run_of(path: PurePath) -> str | None:
    """The run whose folder `path` is in: .../runs/<id>/..."""
    return next(
        (each.name for each in path.parents if each.parent.name == "runs" and PATTERN.fullmatch(each.name)), None
    )


def path_on_disk(path: Path) -> Path:
    """The file under its name of now, or of the old format where only that one is there."""
    there = (path.with_name(name) for name in (path.name, *old_format.old_names(path.name)))
    return next(filter(os.path.lexists, there), path)


def read_regular(path: Path, *, limit: int = LIMIT_BYTES) -> bytes:
    """The content of a regular file, under its name of now or of the old format; raises FileNotFoundError, and
    RecordError for anything else that cannot be read.
    """
    path = path_on_disk(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # O_NONBLOCK: a FIFO without a writer
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise damaged(str(path), "expected a regular file, found a folder, pipe, socket or device")
            if status.st_size > limit:
                raise damaged(str(path), f"expected at most {limit >> 20} MiB, found {status.st_size >> 20} MiB")
            return stream.read(limit)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise damaged(str(path), error.strerror or str(error)) from error


def damaged(where: str, seen: str) -> RecordError:
    """The error for a record that cannot be used."""
    return RecordError(
        f"{where} is damaged",
        seen=seen,
        fix="put the file back from a backup, or remove the run's folder once nothing of the run is needed",
    )


def _json_fault(data: bytes, error: Exception) -> str:
    if not data.strip():
        return "expected a JSON object, found an empty file"
    if isinstance(error, RecursionError):
        return "expected a JSON object, found brackets nested too deep"
    return f"expected a JSON object: {error}"[:300]
