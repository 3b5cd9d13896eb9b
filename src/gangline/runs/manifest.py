"""The manifests of a checkpoint: `part.json` (one host's files) and `COMMITTED` (all parts of a step).

Both contain a digest of their own content, which detects any flipped byte in them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gangline import __version__
from gangline.errors import CheckpointError
from gangline.runs.decode import build
from gangline.runs.files import file_digest, write_atomic

SCHEMA_VERSION = 1
PART_FILE = "part.json"
COMMIT_FILE = "COMMITTED"
KINDS = ("replica", "shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFile:
    """One file of a part."""

    name: str
    size_bytes: int
    digest: str
    """blake2b-256 of the content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPart:
    """One host's part of a checkpoint: a replica, which holds the whole state, or a shard, which holds what the ranks
    of that host have of it.

    With local-sgd weights and outer momentum are equal in all replicas; the optimizer's states are those of its host.
    """

    step: int
    host: str
    attempt: int
    hosts: tuple[str, ...]
    """All hosts of the attempt, head first; the checkpoint is complete when each has its part."""
    num_ranks: int
    fingerprints: dict[str, Any]
    """The keys of inputs.json: content hashes of data and model, and counts of the data."""
    evaluation_loss: float | None
    """Of an evaluation at this very step, else None; retention keeps the lowest."""
    files: tuple[PartFile, ...]
    kind: str = "replica"
    """replica: any one part is enough; shard: it takes the parts of all hosts."""
    held: dict[str, str] = field(default_factory=dict)
    """Of a shard: host -> what its part holds, in words (`runs.held`)."""
    gangline: str = __version__
    schema_version: int = SCHEMA_VERSION

    def to_bytes(self) -> bytes:
        """The content of part.json."""
        return _seal(dataclasses.asdict(self))

    @staticmethod
    def from_bytes(data: bytes) -> CheckpointPart:
        """The part that `to_bytes` wrote; raises ValueError for anything else."""
        part = _unseal(CheckpointPart, data)
        if part.kind not in KINDS:
            raise ValueError(f"it is of kind {part.kind!r}, and this version reads {' and '.join(KINDS)}")
        of_hosts = set(part.hosts) if part.kind == "shard" else set()
        if not isinstance(part.held, dict) or part.held.keys() != of_hosts:
            raise ValueError("it does not say what the parts of all its hosts hold")
        if any(Path(file.name).name != file.name for file in part.files):
            raise ValueError("it lists a file outside its folder")
        return part


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The commit record of a step: with it, and with one whole replica or all shards, the checkpoint is valid."""

    step: int
    attempt: int
    parts: dict[str, str]
    """Host -> blake2b-256 of its part.json."""
    evaluation_loss: float | None
    schema_version: int = SCHEMA_VERSION

    def to_bytes(self) -> bytes:
        """The content of COMMITTED."""
        return _seal(dataclasses.asdict(self))

    @staticmethod
    def from_bytes(data: bytes) -> Commit:
        """The record that `to_bytes` wrote; raises ValueError for anything else."""
        return _unseal(Commit, data)


def digest_of(data: bytes) -> str:
    """blake2b-256 in hexadecimal."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def describe_part(
    folder: Path, *, step: int, host: str, description: Mapping[str, Any], evaluation_loss: float | None = None
) -> CheckpointPart:
    """Write part.json over all files of `folder`: the last file of a part, after the others reached the disk.

    description: `attempt`, `hosts`, `num_ranks`, `fingerprints`, and of a shard `held`. A loss that is not finite is
    nobody's best.
    """
    files = [
        PartFile(name=path.name, size_bytes=path.stat().st_size, digest=file_digest(path))
        for path in sorted(folder.iterdir())
        if path.name != PART_FILE
    ]
    loss = evaluation_loss if evaluation_loss is not None and math.isfinite(evaluation_loss) else None
    part = CheckpointPart(
        step=step,
        host=host,
        evaluation_loss=loss,
        files=tuple(files),
        kind="shard" if description.get("held") else "replica",
        **description,
    )
    write_atomic(folder / PART_FILE, part.to_bytes())
    return part


def verify_part(folder: Path, *, hashes: bool = True) -> list[str]:
    """The problems of a part, one line per file; [] when it is whole. `hashes=False` looks at names and sizes."""
    try:
        part = CheckpointPart.from_bytes((folder / PART_FILE).read_bytes())
    except FileNotFoundError:
        return [f"{PART_FILE} is missing"]
    except (OSError, ValueError) as error:
        return [f"{PART_FILE} cannot be used: {error}"]
    problems = [problem for file in part.files if (problem := _check_file(folder, file, hashes=hashes))]
    known = {PART_FILE, *(file.name for file in part.files)}
    extra = sorted(path.name for path in folder.iterdir() if path.name not in known)
    return problems + [f"{name} is not listed in {PART_FILE}" for name in extra]


def commit_record(parts: Mapping[str, bytes], *, of_some: bool = False) -> bytes:
    """The commit record over the part.json of every host of the attempt, or, of_some, of those that have one.

    Some replicas are enough to go on from, for each holds the whole state; all are wanted while the hosts live, so that
    losing a disk loses nothing. Of shards all are always wanted. Raises CheckpointError when a part is missing, cannot
    be read, or belongs to another step, attempt or input.
    """
    try:
        read = {host: CheckpointPart.from_bytes(data) for host, data in parts.items()}
    except ValueError as error:
        raise _uncommittable(f"a {PART_FILE} cannot be used: {error}") from error
    if not read:
        raise _uncommittable("no host has a part")
    first = next(iter(read.values()))
    for host, part in read.items():
        if part.host != host:
            raise _uncommittable(f"the part given for {host} was written by {part.host}")
        if _identity(part) != _identity(first):
            raise _uncommittable(f"the parts of {first.host} and {host} are not of one step, attempt and input")
    some_suffice = of_some and first.kind == "replica"
    if not some_suffice and (absent := [host for host in first.hosts if host not in read]):
        held = "".join(f"; {host} held {first.held[host]}" for host in absent if host in first.held)
        raise _uncommittable(f"no part of {', '.join(absent)} (step {first.step}){held}")
    digests = {host: digest_of(data) for host, data in parts.items()}
    loss = read.get(first.hosts[0], first).evaluation_loss
    commit = Commit(step=first.step, attempt=first.attempt, parts=digests, evaluation_loss=loss)
    return commit.to_bytes()


def _identity(part: CheckpointPart) -> tuple[object, ...]:
    return part.step, part.attempt, part.hosts, part.num_ranks, part.fingerprints, part.kind, part.held


def _uncommittable(seen: str) -> CheckpointError:
    return CheckpointError(
        "a checkpoint cannot be committed",
        seen=f"expected a part of every host of the attempt; {seen}",
        fix="the checkpoint committed before stays in use; the next save tries again",
    )


def _check_file(folder: Path, file: PartFile, *, hashes: bool) -> str | None:
    path = folder / file.name
    try:
        size_bytes = path.stat().st_size
        if size_bytes != file.size_bytes:
            return f"{file.name} has {size_bytes} bytes instead of {file.size_bytes}"
        if hashes and file_digest(path) != file.digest:
            return f"{file.name} differs from its digest"
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    return None


def _encode(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _seal(value: Mapping[str, Any]) -> bytes:
    return _encode({**value, "seal": digest_of(_encode(value))})


_T = TypeVar("_T", CheckpointPart, Commit)


def _unseal(kind: type[_T], data: bytes) -> _T:
    """Only the bytes that `_seal` writes pass, so that no flip hides in white space or in an ignored key."""
    value = json.loads(data)
    if not isinstance(value, dict) or value.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"it is not a JSON object with schema_version {SCHEMA_VERSION}")
    seal = value.pop("seal", None)
    if seal != digest_of(_encode(value)) or _seal(value) != data:
        raise ValueError("it differs from its own digest")
    try:
        return build(kind, value)
    except TypeError as error:
        raise ValueError(f"a field is missing: {error}") from error
