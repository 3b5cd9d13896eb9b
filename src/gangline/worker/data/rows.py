"""Rows as they come from files: text, JSON lines and parquet, never a whole file in memory.

The kind of a file follows from its name (`.gz` may come last): `.jsonl`, `.ndjson` and `.json` hold one JSON object
per line, `.parquet` is read by record batches, everything else is UTF-8 text. A text file is one document. It is read
in pieces of `PIECE_CHARS`, cut where a word ends, so that the tokens are those of the whole file with the usual
tokenizers; when a part of the rows is set apart for evaluation it is cut into passages of about `PASSAGE_CHARS` that
are documents of their own.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from gangline.errors import DataError

PIECE_CHARS = 1 << 18
PASSAGE_CHARS = 1 << 13
PARQUET_BATCH_ROWS = 1000
SHOWN_BAD_ROWS = 10

FileKind = Literal["text", "json", "parquet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """One row of a source: its place, and its columns."""

    file: str
    number: int
    """Line of a file, or row of a table; the first is 1."""
    values: Mapping[str, Any]
    continues: bool = False
    """The next row goes on with the same document (pieces of a long text)."""
    follows: bool = False
    """This row goes on with the document of the row before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that cannot be used, and why."""

    file: str
    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.reason}"


@dataclass(slots=True)
class BadRows:
    """All rows that cannot be used: how many, and the first ones in words."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, bad: BadRow) -> None:
        """Count a bad row and keep the first `SHOWN_BAD_ROWS`."""
        self.count += 1
        if len(self.examples) < SHOWN_BAD_ROWS:
            self.examples.append(str(bad))


@dataclass(slots=True)
class ReadPosition:
    """How far a reader is, in bytes of all its files."""

    done_bytes: int = 0


def file_kind(path: str) -> FileKind:
    """What a file holds, by its name."""
    name = path.lower().removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "json"
    return "parquet" if name.endswith(".parquet") else "text"


def read_files(
    files: tuple[str, ...], *, columns: frozenset[str], passages: bool, position: ReadPosition
) -> Iterator[SourceRow | BadRow]:
    """The rows of all files, in order; raises DataError for a file that cannot be read at all.

    columns: what the format needs; parquet reads nothing else.
    passages: cut text files into documents of about `PASSAGE_CHARS`.
    """
    base = 0
    for file in files:
        kind = file_kind(file)
        with _readable(file):
            if kind == "parquet":
                yield from _read_parquet(file, columns, base, position)
            elif kind == "json":
                yield from _read_json(file, base, position)
            else:
                yield from _read_text(file, passages, base, position)
            base += Path(file).stat().st_size
        position.done_bytes = base


@contextmanager
def _readable(file: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{file}: cannot be read",
            seen=f"{type(error).__name__}: {error}",
            fix="look at the file and its permissions; a compressed file that ends early was copied only in part",
        ) from error


@contextmanager
def _open(file: str) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """(decompressed stream, the file itself, whose position tells the progress)."""
    with Path(file).open("rb") as raw:
        if file.lower().endswith(".gz"):
            with gzip.open(raw, "rb") as stream:
                yield stream, raw  # type: ignore[misc]
        else:
            yield raw, raw


def _read_json(file: str, base: int, position: ReadPosition) -> Iterator[SourceRow | BadRow]:
    with _open(file) as (stream, raw):
        for number, line in enumerate(stream, start=1):
            if number == 1:
                _refuse_documents(file, line)
            if not number % 256:
                position.done_bytes = base + raw.tell()
            if line.strip():
                yield _parse(file, number, line)


def _parse(file: str, number: int, line: bytes) -> SourceRow | BadRow:
    try:
        values = json.loads(line.strip().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRow(file=file, number=number, reason=f"not UTF-8 (byte {error.start} of the line)")
    except (ValueError, RecursionError) as error:
        return BadRow(file=file, number=number, reason=f"not JSON: {error}")
    if not isinstance(values, dict):
        return BadRow(file=file, number=number, reason=f"a JSON {type(values).__name__}, not an object with fields")
    return SourceRow(file=file, number=number, values=values)


def _refuse_documents(file: str, line: bytes) -> None:
    text = line.removeprefix(b"\xef\xbb\xbf").strip()
    if text[:1] == b"[" or text == b"{":
        raise DataError(
            f"{file}: one JSON document, not JSON lines",
            seen=f"expected one object per line; the file begins with {text[:20].decode('utf-8', 'replace')!r}",
            fix=f"write one row per line: jq -c '.[]' {Path(file).name} > {Path(file).stem}.jsonl",
        )


def _read_text(file: str, passages: bool, base: int, position: ReadPosition) -> Iterator[SourceRow | BadRow]:
    size = PASSAGE_CHARS if passages else PIECE_CHARS
    rest, line, follows = "", 1, False
    with _open(file) as (stream, raw):
        # surrogateescape: a wrong byte is then found by its line, instead of ending the whole file
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape")
        last = False
        while not last:
            rest += text.read(size + 1 - len(rest))
            last = len(rest) <= size
            at = cut(rest, size, lines=passages)
            piece, rest = rest[:at], rest[at:]
            position.done_bytes = base + raw.tell()
            yield from _undecodable(file, line, piece)
            if piece:
                values = {"text": _decodable(piece)}
                yield SourceRow(
                    file=file, number=line, values=values, follows=follows, continues=not (last or passages)
                )
            follows = not passages
            line += piece.count("\n")


def _undecodable(file: str, line: int, piece: str) -> Iterator[BadRow]:
    try:
        piece.encode("utf-8")
    except UnicodeEncodeError:
        for number, text in enumerate(piece.split("\n"), start=line):
            if text != _decodable(text):
                yield BadRow(file=file, number=number, reason="not UTF-8 text")


def _decodable(piece: str) -> str:
    """The piece without its lines that are not UTF-8."""
    try:
        piece.encode("utf-8")
    except UnicodeEncodeError:
        return "".join(line for line in piece.splitlines(keepends=True) if not _has_surrogate(line))
    return piece


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def cut(text: str, size: int, *, lines: bool = False) -> int:
    """Where to end a piece of at most `size` characters.

    After a line (`lines`), else where a word ends and white space follows: there byte-level and SentencePiece
    tokenizers start a new word anyway, so that cutting does not change a token.
    """
    if len(text) <= size:
        return len(text)
    if lines:
        return text.rfind("\n", 0, size) + 1 or size
    at = size
    while (at := text.rfind(" ", max(0, size - (1 << 16)), at)) > 0:
        if not text[at - 1].isspace():
            return at
    return size


def _read_parquet(
    file: str, columns: frozenset[str], base: int, position: ReadPosition
) -> Iterator[SourceRow | BadRow]:
    import pyarrow as pa
    from pyarrow import parquet

    size = Path(file).stat().st_size
    try:
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
        # a column that is missing shows up in the rows, with the names that are there
        wanted = [name for name in table.schema_arrow.names if name in columns] or None
        number, total = 0, max(1, table.metadata.num_rows)
        if wanted and len(wanted) < len(columns):
            wanted = None
        for batch in table.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=wanted):
            for values in batch.to_pylist():
                number += 1
                yield SourceRow(file=file, number=number, values=values)
            position.done_bytes = base + size * number // total
    except pa.ArrowException as error:
        raise DataError(
            f"{file}: not a readable parquet file",
            seen=str(error)[:300],
            fix="write the file again, or take it out of data.train.files",
        ) from error
