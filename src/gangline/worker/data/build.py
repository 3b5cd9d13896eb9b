"""The token sets of a job: plan them with their content hashes, find each by its hash, or make it once.

A document longer than a sample follows the job's rule (`data.overlong`):

split      a text goes on in the next row, and no label is lost; rows of other formats are truncated (an answer cut in
           the middle of a conversation would be learned without its question)
truncate   tokens beyond the sample's end are left out, and counted; a row of which nothing is left to learn is dropped
drop       the row is left out, and counted
fail       the row cannot be used
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from gangline.errors import DataError, GanglineError
from gangline.formats import FORMATS, RowError, expected_columns
from gangline.plugins import package_digest
from gangline.row_files import KINDS, BadRow, BadRows, ReadPosition, SourceRow, compression, file_kind
from gangline.runs.job import NO_TOKENS, DataJob, Job, SourceJob
from gangline.worker.data.choose import ChosenRow, Part, chosen_rows, needs_seed, num_passes
from gangline.worker.data.model_folder import DigestCache, Hub, combine
from gangline.worker.data.row_formats import Format, TokenSpan
from gangline.worker.data.rows import read_files
from gangline.worker.data.tokenise import Encoded, Encoder
from gangline.worker.data.tokens import FORMAT_VERSION, SetWriter, TokenSet, verify

TOKENISER_VERSION = 3
"""Raise it when the same rows would become other tokens or other samples: every cached set is then made anew."""

CHOICE_VERSION = 1
"""Raise it when `choose` would choose other rows."""

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
    commits: tuple[str | None, ...]
    """Of each part that is a hub data set."""
    stamps: tuple[tuple[int, int], ...]
    """(size, time of change in ns) of every file when it was hashed."""
    content_hash: str

    @property
    def num_bytes(self) -> int:
        """Bytes to read; 0 for a hub data set, whose size is not known beforehand."""
        return sum(size for size, _ in self.stamps) * num_passes(self.source, self.data, self.max_samples)

    @property
    def max_samples(self) -> int | None:
        """Rows of all parts at the most."""
        return _max_samples(self.data, self.purpose, self.side)

    def refuse_changes(self) -> None:
        """Raise DataError if a file was changed after it was hashed: the tokens would bear a wrong name."""
        for file, stamp in zip(self.source.all_files, self.stamps, strict=True):
            if _stamp(file) != stamp:
                raise DataError(
                    f"{file}: changed while it was read",
                    seen=f"expected {stamp[0]} bytes as at the start; now {_stamp(file)[0]} bytes, written since",
                    fix="start again when nothing writes to the file any more",
                )

    def rows(self, format_: Format, hub: Hub, position: ReadPosition) -> Iterator[ChosenRow]:
        """The chosen rows of all parts, both sides. format_: that of the job, which renders conversations."""
        parts = [
            self._part(part, commit, Format.of(self.data.of(part), format_.render), hub, position)
            for part, commit in zip(self.source.parts, self.commits, strict=True)
        ]
        rows = chosen_rows(parts, self.data, seed=self.seed, max_samples=self.max_samples)
        # a weight is for training: what is set apart of the same rows is evaluated once
        return (each for each in rows if not (each.again and self.side == "evaluation"))

    def _part(self, source: SourceJob, commit: str | None, format_: Format, hub: Hub, position: ReadPosition) -> Part:
        def read() -> Iterator[SourceRow | BadRow]:
            if source.hub is not None:
                return hub.rows(source, str(commit))
            passages = self.side is not None
            return read_files(source.files, columns=format_.columns, passages=passages, position=position)

        return Part(source=source, format=format_, read=read)

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
        **({"roles": data.roles} if data.roles else {}),
        **({"tokens": dataclasses.asdict(job.tokens)} if job.tokens != NO_TOKENS else {}),
        **_plugin_digest(data.format),
        "sequence_length": data.sequence_length,
        "packing": data.packing,
        "overlong": data.overlong,
        "skip_bad_rows": data.skip_bad_rows,
        "chat_template": data.chat_template.text if data.chat_template else None,
        "learn": dataclasses.asdict(data.learn),
    }

    def request(purpose: Side, source: SourceJob, side: Side | None) -> SetRequest:
        stamps = tuple(_stamp(file) for file in source.all_files)
        digests = [_source_digest(part, cache.digest, hub) for part in source.parts]
        split = None if side is None else {"side": side, "seed": job.seed, "fraction": data.evaluation_fraction}
        content: Any = digests[0][0]
        if choice := _choice(job, source, _max_samples(data, purpose, side)):
            content = {"sources": [digest for digest, _ in digests], **choice}
        return SetRequest(
            purpose=purpose,
            source=source,
            data=data,
            side=side,
            seed=job.seed,
            commits=tuple(commit for _, commit in digests),
            stamps=stamps,
            content_hash=combine({**common, "source": content, "split": split}),
        )

    _check(data)
    if data.evaluation is not None:
        return [request("train", data.train, None), request("evaluation", data.evaluation, None)]
    if data.evaluation_fraction:
        return [request("train", data.train, "train"), request("evaluation", data.train, "evaluation")]
    return [request("train", data.train, None)]


def _max_samples(data: DataJob, purpose: Side, side: Side | None) -> int | None:
    """`data.max_samples` is of the rows to train on, with those that are set apart of them."""
    return data.max_samples if purpose == "train" or side is not None else None


def _choice(job: Job, source: SourceJob, max_samples: int | None) -> dict[str, Any]:
    """What decides which rows of the sources belong to the set, and how they are read; empty for all of one source."""
    data = job.data
    own = [
        {
            "rows": part.rows and dataclasses.asdict(part.rows),
            "max_samples": part.max_samples,
            "weight": part.weight,
            "format": part.format,
            "fields": part.fields,
            "roles": part.roles,
            **_plugin_digest(data.of(part).format),
        }
        for part in source.parts
    ]
    plain = source.is_whole and not any(part.format or part.fields or part.roles for part in source.parts)
    if plain and not source.mix and max_samples is None and not data.deduplicate:
        return {}
    seed = job.seed if needs_seed(source, data, max_samples) else None
    cut = {"max_samples": max_samples, "shuffle": data.shuffle, "deduplicate": data.deduplicate}
    return {"version": CHOICE_VERSION, "parts": own, **cut, "seed": seed}


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
        forms = [(file, data.of(part).format) for part in (source.parts if source else ()) for file in part.files]
        for file, form in forms:
            if not Path(file).is_file():
                missing.append(f"data.{name}: {file}")
            elif not FORMATS[form].whole and file_kind(file) == "text":
                raise DataError(
                    f"data.{name}: {file} is plain text, data.format is {form}",
                    seen=f"expected rows with fields: {', '.join(KINDS)}",
                    fix="set data.format: text, or write the rows as JSON lines",
                )
        if source and any(not part.files and part.hub is None for part in source.parts):
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
    return file_kind(file) + compression(file)


BATCH_DOCUMENTS = 1000
BATCH_CHARS = 1 << 20
_LOCK_POLL_S = 0.2

Tick = Callable[[int, int], None]
"""(bytes read of this source, rows read): called often, cheap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tooling:
    """The parts that turn rows into tokens; loaded only if a set must be made."""

    encoder: Encoder
    format: Format
    vocab_size: int


@dataclass(slots=True)
class RowTally:
    """The rows of a set, counted as they are read."""

    rows: int = 0
    """Rows of this set, good and bad."""
    bad: BadRows = field(default_factory=BadRows)


def ensure_set(
    request: SetRequest, root: Path, *, tooling: Callable[[], Tooling], hub: Hub, tick: Tick
) -> tuple[TokenSet, bool]:
    """(the token set of a request, whether it was there already); raises DataError.

    Several processes of a host may ask at once: the first makes it under a file lock, the others wait and find it.
    One that is found is read and hashed; a damaged one is made again.
    """
    folder = root / "data" / request.content_hash
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock"), beat=lambda: tick(0, 0)):
        if folder.exists():
            try:
                return verify(folder), True
            except DataError:
                shutil.rmtree(folder)
        try:
            _build(request, folder, tooling(), hub=hub, tick=tick)
        except OSError as error:
            raise GanglineError(
                f"{folder}: the tokens cannot be written",
                seen=f"{type(error).__name__}: {error}",
                fix="make room on this disk, or look at the permissions of the folder",
            ) from error
        return TokenSet.open(folder), False


def sweep(root: Path) -> None:
    """Remove half-written sets of killed processes; a set that another process is writing stays."""
    for temporary in (root / "data").glob("*.tmp"):
        with _lock_file(temporary.with_suffix(".lock")) as lock:
            if _take(lock):
                # the writer may have published it while we looked
                shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(path: Path, *, beat: Callable[[], None]) -> Iterator[None]:
    with _lock_file(path) as lock:
        while not _take(lock):
            beat()
            time.sleep(_LOCK_POLL_S)
        yield


@contextmanager
def _lock_file(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Whether the lock was free. flock: the kernel drops it when its holder dies, however it dies."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _build(request: SetRequest, folder: Path, tooling: Tooling, *, hub: Hub, tick: Tick) -> None:
    data, tally, position = request.data, RowTally(), ReadPosition()
    writer = SetWriter(
        folder,
        vocab_size=tooling.vocab_size,
        sequence_length=data.sequence_length,
        masked=not all(FORMATS[data.of(part).format].whole for part in request.source.parts),
    )
    with writer:
        fitter = Fitter(writer, data)
        rows = request.rows(tooling.format, hub, position)
        fill(fitter, request, tooling, tally, rows=rows, tick=lambda: tick(position.done_bytes, tally.rows))
        tick(position.done_bytes, tally.rows)
        _refuse_bad(request, tally, all_bad=not writer.num_rows)
        _refuse_empty(request, tally, writer, num_dropped=fitter.num_dropped)
        request.refuse_changes()
        manifest = {
            "hash": request.content_hash,
            "format": data.format,
            "counts": {
                "source_rows": tally.rows,
                "skipped_rows": tally.bad.count,
                "truncated_rows": fitter.num_truncated,
                "dropped_rows": fitter.num_dropped,
            },
            "bad_rows": tally.bad.examples,
        }
        writer.publish(manifest, packing=data.packing)


def fill(
    fitter: Fitter,
    request: SetRequest,
    tooling: Tooling,
    tally: RowTally,
    *,
    rows: Iterator[ChosenRow],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Tokenise rows and hand them to a fitter. tick: is called now and then."""
    for batch in _batches(_documents(request, rows, tally)):
        for encoded in tooling.encoder.encode(batch):
            check_ids(encoded.ids, tooling.vocab_size, encoded.document.row)
            try:
                fitter.take(encoded)
            except RowError as error:
                row = encoded.document.row
                tally.bad.add(BadRow(file=row.file, number=row.number, reason=str(error), unit=row.unit))
        tick()


def _documents(request: SetRequest, rows: Iterator[ChosenRow], tally: RowTally) -> Iterator[TokenSpan]:
    for chosen in rows:
        row, format_ = chosen.row, chosen.format
        # a row that says nothing readable has no side: the training set counts it
        counted = request.side != "evaluation"
        try:
            if isinstance(row, BadRow):
                raise RowError(row.reason)
            values = format_.values(row)
            counted = request.has(values)
            if counted:
                tally.rows += not (row.follows or chosen.again)
                yield from format_.documents(row, values)
        except RowError as error:
            if counted and not chosen.again:
                reason = str(error)
                tally.bad.add(BadRow(file=row.file, number=row.number, reason=reason, unit=row.unit, values=row.values))


def _batches(documents: Iterator[TokenSpan]) -> Iterator[list[TokenSpan]]:
    batch: list[TokenSpan] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += sum(len(part.text) for part in document.segments)
        if len(batch) >= BATCH_DOCUMENTS or chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def check_ids(ids: list[int], vocab_size: int, row: SourceRow) -> None:
    """Raise DataError for a token that the model does not know."""
    if ids and max(ids) >= vocab_size:
        raise DataError(
            f"{row.place}: the tokenizer gives token {max(ids)}, which the model does not know",
            seen=f"config.json of the model has vocab_size {vocab_size}",
            fix="use the tokenizer that belongs to the model; tokens that were added need a model resized for them",
        )


def _refuse_bad(request: SetRequest, tally: RowTally, *, all_bad: bool) -> None:
    if not tally.bad.count or request.data.skip_bad_rows:
        return
    forms = [request.data.of(part) for part in request.source.parts]
    names = "; or ".join(dict.fromkeys(f"{form.format} rows with {_columns(form)}" for form in forms))
    rows = "1 row" if tally.bad.count == 1 else f"{tally.bad.count} rows"
    raise DataError(
        f"data.{request.purpose}: {rows} cannot be used:\n  " + "\n  ".join(tally.bad.examples),
        seen=f"expected {names}",
        fix="mend the rows, data.fields or data.sequence_length"
        + ("" if all_bad else ", or set data.skip_bad_rows: true to leave them out"),
    )


def _columns(data: DataJob) -> str:
    return expected_columns(data.format, Format.of(data).fields)


def _refuse_empty(request: SetRequest, tally: RowTally, writer: SetWriter, *, num_dropped: int) -> None:
    if writer.num_label_tokens:
        return
    key = "data.eval" if request.purpose == "evaluation" else "data.train"
    cut_off = f" after data.eval: {request.data.evaluation_fraction}" if request.side else ""
    source = ", ".join(str(name) for part in request.source.parts for name in ([part.hub] if part.hub else part.files))
    examples = "".join(f"\n  {example}" for example in tally.bad.examples)
    seen = f"{tally.rows} rows with words, {tally.bad.count} that cannot be used{examples}"
    fix = "name files with rows" + ("; with few rows, name an evaluation file instead" if request.side else "")
    if num_dropped:
        rows = "1 row" if num_dropped == 1 else f"{num_dropped} rows"
        seen = f"in {rows} the prompt alone fills a sample of {request.data.sequence_length} tokens"
        fix = "raise data.sequence_length"
    raise DataError(f"{key}: no token to learn in {source}{cut_off}", seen=seen, fix=fix)


class RowWriter(Protocol):
    """What takes the rows of a set."""

    def add(self, ids: Sequence[int], learned: bytearray) -> None:
        """See `SetWriter.add`."""
        ...

    def add_text(self, ids: Sequence[int], *, continues: bool) -> None:
        """See `SetWriter.add_text`."""
        ...


class Fitter:
    """Hands documents to a writer, row by row."""

    def __init__(self, writer: RowWriter, data: DataJob, *, see: Callable[[Encoded], None] = lambda _: None) -> None:
        """see: gets every document before anything is done to it."""
        self._writer = writer
        self._see = see
        self._limit = data.sequence_length
        self._rule = data.overlong
        self._pending: list[int] = []
        self._pending_learned = bytearray()
        self.num_truncated = 0
        self.num_dropped = 0

    def take(self, encoded: Encoded) -> None:
        """Add a document or a piece of one; raises RowError for a row that cannot be used."""
        self._see(encoded)
        if encoded.document.whole and self._rule == "split":
            self._writer.add_text(encoded.ids, continues=encoded.document.continues)
            return
        # one token more than fits is enough to know that the document is too long
        room = self._limit + 1 - len(self._pending)
        self._pending += encoded.ids[:room]
        self._pending_learned += encoded.learned[:room]
        if not encoded.document.continues:
            ids, learned = self._pending, self._pending_learned
            self._pending, self._pending_learned = [], bytearray()
            self._finish(ids, learned)

    def _finish(self, ids: list[int], learned: bytearray) -> None:
        overlong = len(ids) > self._limit
        if overlong and self._rule == "fail":
            raise RowError(f"longer than data.sequence_length ({self._limit} tokens)")
        if overlong and self._rule == "drop":
            self.num_dropped += 1
            return
        ids, learned = ids[: self._limit], learned[: self._limit]
        if not any(learned[1:]):
            if not overlong:
                raise RowError("no token to learn")
            self.num_dropped += 1
            return
        self.num_truncated += overlong
        self._writer.add(ids, learned)
