"""Which token sets a job needs, and the content hash of each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gangline.errors import DataError
from gangline.formats import FORMATS
from gangline.plugins import package_digest
from gangline.runs.job import DataJob, Job, SourceJob
from gangline.worker.data.model_folder import DigestCache, Hub, combine
from gangline.worker.data.row_formats import Format
from gangline.worker.data.rows import BadRow, ReadPosition, SourceRow, file_kind, read_files
from gangline.worker.data.tokens import FORMAT_VERSION

TOKENISER_VERSION = 2
"""Raise it when the same rows would become other tokens or other samples: every cached set is then made anew."""

Side = Literal["train", "evaluation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRequest:
    """One token set to find or to make."""

    purpose: Side
    source: SourceJob
    data: DataJob
    side: Side | None
    """Which part of the source is meant when a fraction is cut off for evaluation; None: all of it."""
    seed: int
    commit: str | None
    """Of a hub data set."""
    stamps: tuple[tuple[int, int], ...]
    """(size, time of change in ns) of every file when it was hashed."""
    content_hash: str

    @property
    def num_bytes(self) -> int:
        """Bytes to read; 0 for a hub data set, whose size is not known beforehand."""
        return sum(size for size, _ in self.stamps)

    def refuse_changes(self) -> None:
        """Raise DataError if a file was changed after it was hashed: the tokens would bear a wrong name."""
        for file, stamp in zip(self.source.files, self.stamps, strict=True):
            if _stamp(file) != stamp:
                raise DataError(
                    f"{file}: changed while it was read",
                    seen=f"expected {stamp[0]} bytes as at the start; now {_stamp(file)[0]} bytes, written since",
                    fix="start again when nothing writes to the file any more",
                )

    def rows(self, hub: Hub, position: ReadPosition) -> Iterator[SourceRow | BadRow]:
        """All rows of the source, both sides."""
        if self.source.hub is not None:
            return hub.rows(self.source, str(self.commit))
        columns = Format.of(self.data).columns
        return read_files(self.source.files, columns=columns, passages=self.side is not None, position=position)

    def has(self, values: Mapping[str, Any]) -> bool:
        """Whether a row with these values (by role) belongs to this set.

        The same words always fall on the same side: blake2b of (seed, values), read as a number below 1, under
        `evaluation_fraction` means evaluation.
        """
        if self.side is None:
            return True
        text = json.dumps([self.seed, values], sort_keys=True, default=str)
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
        return (number < self.data.evaluation_fraction) == (self.side == "evaluation")


def plan_sets(
    job: Job, *, tokenizer_digest: str, vocab_size: int | None, cache: DigestCache, hub: Hub
) -> list[SetRequest]:
    """The training set, and the evaluation set if the job has one. Digests the files; raises DataError."""
    data = job.data
    common: dict[str, Any] = {
        "version": [TOKENISER_VERSION, FORMAT_VERSION],
        "tokenizer": tokenizer_digest,
        "vocab_size": vocab_size,
        "format": data.format,
        "fields": dict(Format.of(data).fields),
        **_plugin_digest(data.format),
        "sequence_length": data.sequence_length,
        "packing": data.packing,
        "overlong": data.overlong,
        "skip_bad_rows": data.skip_bad_rows,
    }

    def request(purpose: Side, source: SourceJob, side: Side | None) -> SetRequest:
        stamps = tuple(_stamp(file) for file in source.files)
        content, commit = _source_digest(source, cache.digest, hub)
        split = None if side is None else {"side": side, "seed": job.seed, "fraction": data.evaluation_fraction}
        content_hash = combine({**common, "source": content, "split": split})
        return SetRequest(
            purpose=purpose,
            source=source,
            data=data,
            side=side,
            seed=job.seed,
            commit=commit,
            stamps=stamps,
            content_hash=content_hash,
        )

    _check(data)
    if data.evaluation is not None:
        return [request("train", data.train, None), request("evaluation", data.evaluation, None)]
    if data.evaluation_fraction:
        return [request("train", data.train, "train"), request("evaluation", data.train, "evaluation")]
    return [request("train", data.train, None)]


def _plugin_digest(name: str) -> dict[str, str]:
    """The code of a plug-in's format decides about tokens, too."""
    plugin = FORMATS.plugin(name)
    return {} if plugin is None else {"plugin": package_digest(plugin.package)}


def _check(data: DataJob) -> None:
    if data.evaluation is not None and data.evaluation_fraction:
        raise DataError(
            "data.eval has both files and a fraction",
            seen="expected one of them: rows of their own, or a part of the training rows",
            fix="remove one of the two",
        )
    missing = []
    for name, source in (("train", data.train), ("eval", data.evaluation)):
        for file in source.files if source else ():
            if not Path(file).is_file():
                missing.append(f"data.{name}: {file}")
            elif not FORMATS[data.format].whole and file_kind(file) == "text":
                raise DataError(
                    f"data.{name}: {file} is plain text, data.format is {data.format}",
                    seen="expected rows with fields: .jsonl, .jsonl.gz or .parquet",
                    fix="set data.format: text, or write the rows as JSON lines",
                )
        if source and not source.files and source.hub is None:
            missing.append(f"data.{name}: neither files nor a hub data set")
    if missing:
        raise DataError(
            "\n".join(missing),
            seen="expected a file on the head of the cluster; there is none",
            fix="check the path, or copy the file there",
        )


def _source_digest(source: SourceJob, digest: Callable[[Path], str], hub: Hub) -> tuple[Any, str | None]:
    if source.hub is not None:
        commit = hub.revision(source)
        return {"hub": source.hub, "config": source.hub_config, "split": source.split, "commit": commit}, commit
    return [[_reading(file), digest(Path(file))] for file in source.files], None


def _stamp(file: str) -> tuple[int, int]:
    status = Path(file).stat()
    return status.st_size, status.st_mtime_ns


def _reading(file: str) -> str:
    return file_kind(file) + (".gz" if file.lower().endswith(".gz") else "")
