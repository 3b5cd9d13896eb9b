"""Rows out of files: JSON lines, JSON arrays, csv, tsv and plain text, compressed or not, each row with its place.

The kind of a file follows from its name, once the ending of a compression (`.gz`, `.bz2`, `.xz`, `.zst`) is taken off:

    .jsonl .ndjson .json   one JSON object per line, or one JSON array of objects, whichever the file begins with
    .csv .tsv              a table whose first row names the columns; every value is a text
    .parquet               a table of columns, read by `worker.data.rows`
    .arrow .feather        the same
    everything else        UTF-8 text, one document; `cut` into pieces where a word ends

The standard library suffices, so that the controller reads rows as ranks do. `.zst` takes Python 3.14, or pyarrow,
which comes with the packages for training. Memory is bounded by one row, not by the file.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from gangline.errors import DataError

PIECE_CHARS = 1 << 18
PASSAGE_CHARS = 1 << 13
LIMIT_CHARS = 1 << 26
"""A row of JSON or csv that is longer is no row: a quote or a bracket is open."""
SHOWN_BAD_ROWS = 10
"""Reasons, each with its first row."""
SHOWN_ALIKE = 4
"""Numbers of further rows that cannot be used for the same reason."""

FileKind = Literal["text", "json", "csv", "tsv", "parquet", "arrow"]
Unit = Literal["line", "row"]

KINDS: Mapping[str, FileKind] = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
"""Ending of a file's name -> what the file holds."""


class SourceRow(NamedTuple):
    """One row of a source: its place, and its columns. A tuple: a frozen dataclass costs four times as much to make."""

    file: str
    number: int
    """Line of a file, or row of a table or of a JSON array (see `unit`); the first is 1."""
    values: Mapping[str, Any]
    continues: bool = False
    """The next row goes on with the same document (pieces of a long text)."""
    follows: bool = False
    """This row goes on with the document of the row before."""
    unit: Unit = "line"

    @property
    def place(self) -> str:
        """Where the row stands, for messages."""
        return place(self.file, self.number, self.unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that cannot be used, and why."""

    file: str
    number: int
    reason: str
    unit: Unit = "line"
    within: bool = False
    """A line of a text, which is a row only as a whole."""
    values: Mapping[str, Any] | None = None
    """Its columns, where it has any."""

    def __str__(self) -> str:
        return f"{place(self.file, self.number, self.unit)}: {self.reason}"


@dataclass(slots=True)
class BadRows:
    """All rows that cannot be used: how many, and the first reasons with the places of the first rows."""

    count: int = 0
    told: list[str] = field(default_factory=list)
    """`examples` of another process."""
    values: list[Mapping[str, Any]] = field(default_factory=list)
    """Columns of the first `SHOWN_ALIKE` rows that have any, to see which format they fit."""
    _alike: dict[tuple[str, str], _Alike] = field(default_factory=dict)
    _num_others: int = 0

    def add(self, bad: BadRow) -> None:
        """Count a bad row and keep the first `SHOWN_BAD_ROWS` reasons."""
        self.count += 1
        if bad.values is not None and len(self.values) < SHOWN_ALIKE:
            self.values.append(bad.values)
        alike = self._alike.get((bad.file, bad.reason))
        if alike is not None:
            alike.count += 1
            if len(alike.numbers) < SHOWN_ALIKE:
                alike.numbers.append(bad.number)
        elif len(self._alike) < SHOWN_BAD_ROWS:
            self._alike[bad.file, bad.reason] = _Alike(bad)
        else:
            self._num_others += 1

    @property
    def examples(self) -> list[str]:
        """A line for each reason: `rows.jsonl:2: 'prompt' is null; also in lines 5, 7`."""
        rest = [f"and {self._num_others} more, for other reasons"] if self._num_others else []
        return [*map(str, self._alike.values()), *rest, *self.told]


@dataclass(slots=True)
class _Alike:
    """Rows of a file that cannot be used for the same reason."""

    first: BadRow
    numbers: list[int] = field(default_factory=list)
    """Of the next ones."""
    count: int = 0
    """How many next ones there are."""

    def __str__(self) -> str:
        if not self.count:
            return str(self.first)
        rest = f" and {self.count - len(self.numbers)} more" if self.count > len(self.numbers) else ""
        unit = self.first.unit if self.count == 1 else f"{self.first.unit}s"
        return f"{self.first}; also in {unit} {', '.join(map(str, self.numbers))}{rest}"


@dataclass(slots=True)
class ReadPosition:
    """How far a reader is, in bytes of all its files."""

    done_bytes: int = 0


def place(file: str, number: int, unit: Unit = "line") -> str:
    """Where a row stands: `rows.jsonl:7` for a line, which editors jump to; `rows.parquet row 7`."""
    return f"{file}:{number}" if unit == "line" else f"{file} row {number}"


_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://")


def is_remote(path: str) -> bool:
    """Whether a path is an address, such as s3://bucket/rows.jsonl, not a file of a computer."""
    return _ADDRESS.match(path) is not None


_ON_HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*):(?!//)(~?/.+)", re.DOTALL)


def on_host(path: str) -> tuple[str, str]:
    """(host, path there) of `pc1:/data/rows.jsonl`; ("", path) of a file of this computer, or of an address."""
    found = _ON_HOST.fullmatch(path)
    return (found[1], found[2]) if found else ("", path)


def compression(path: str) -> str:
    """The ending that names the compression of a file, such as `.gz`; "" for none."""
    return next((ending for ending in OPENERS if path.lower().endswith(ending)), "")


def file_kind(path: str) -> FileKind:
    """What a file holds, by its name."""
    name = path.lower().removesuffix(compression(path))
    return next((kind for ending, kind in KINDS.items() if name.endswith(ending)), "text")


def read_rows(
    file: str, *, shown: str | None = None, passages: bool = False, base: int = 0, position: ReadPosition | None = None
) -> Iterator[SourceRow | BadRow]:
    """The rows of a file of JSON, csv or text, in order. Raises DataError for a file that cannot be read to its end.

    shown: the name of the file in messages, if not its path.
    passages: cut a text into documents of about `PASSAGE_CHARS`.
    base, position: bytes of the files before this one, and where to say how far the reader is.
    """
    name = shown or file
    with _opened(file, name) as (stream, raw):
        source = _Source(name, stream, raw, base, position or ReadPosition())
        yield from _READERS[file_kind(file)](source, passages, file)


# Files as streams of bytes, whatever they are compressed with.


@dataclass(frozen=True, slots=True)
class _Source:
    name: str
    stream: io.BufferedReader
    raw: IO[bytes]
    """The file itself, whose position tells the progress."""
    base: int
    position: ReadPosition

    def tell(self) -> None:
        """Say how far the reader is."""
        self.position.done_bytes = self.base + self.raw.tell()


def _zstd(raw: IO[bytes]) -> Any:
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]  # Python 3.14
    except ImportError:
        import pyarrow

        return pyarrow.CompressedInputStream(raw, "zstd")
    return zstd.ZstdFile(raw)


OPENERS: Mapping[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _zstd,
}
"""Ending of a compression -> the stream of what the file really holds."""


@contextmanager
def _opened(file: str, name: str) -> Iterator[tuple[io.BufferedReader, IO[bytes]]]:
    with readable(name), ExitStack() as stack:
        raw = stack.enter_context(Path(file).open("rb"))
        opener = OPENERS.get(compression(file))
        if opener is None:
            yield raw, raw
            return
        try:
            whole = stack.enter_context(opener(raw))
        except ImportError as error:
            raise DataError(
                f"{name}: this Python cannot read zstd",
                seen="expected Python 3.14 or the package pyarrow; neither is here",
                fix="pip install pyarrow, or compress the file with gzip",
            ) from error
        yield io.BufferedReader(whole, 1 << 18), raw


@contextmanager
def _as_text(stream: io.BufferedReader, newline: str | None = "") -> Iterator[io.TextIOWrapper]:
    # surrogateescape: a wrong byte is then found in its row, instead of ending the whole file
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
    try:
        yield text
    finally:
        text.detach()  # the file is closed by what opened it


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Turn the errors of a file, and of what it is compressed with, into a DataError."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _unreadable(name, error) from error
    except Exception as error:
        if type(error).__name__ == "ZstdError":  # of `compression.zstd`, which is not everywhere
            raise _unreadable(name, error) from error
        raise


def _unreadable(name: str, error: Exception) -> DataError:
    return DataError(
        f"{name}: cannot be read",
        seen=f"{type(error).__name__}: {error}",
        fix="look at the file and its permissions; a compressed file that ends early was copied only in part",
    )


# JSON: an object per line, or an array of objects.

_ARRAY = re.compile(rb"\s*\[\s*(\{|\]|$)")
_decode = json.JSONDecoder().raw_decode


def _read_json(source: _Source, _passages: bool, _file: str) -> Iterator[SourceRow | BadRow]:
    head = source.stream.peek(1 << 12)[: 1 << 12].removeprefix(codecs.BOM_UTF8)
    return _read_array(source) if _ARRAY.match(head) else _read_lines(source)


def _read_lines(source: _Source) -> Iterator[SourceRow | BadRow]:
    name, readline = source.name, source.stream.readline
    number, line = 0, b""
    while line := readline(LIMIT_CHARS):
        number += 1
        if number == 1:
            _refuse_object(name, line)
        if not number % 256:
            source.tell()
        try:
            text = line.decode().strip()
            if not text:
                continue
            values, end = _decode(text)
            if type(values) is dict and end == len(text):
                yield SourceRow(name, number, values)
                continue
        except (ValueError, RecursionError):
            pass  # the slow path finds the words
        if len(line) == LIMIT_CHARS:
            raise _endless(name, number)
        found = _slowly(name, number, line)
        if found is not None:
            yield found


def _slowly(name: str, number: int, line: bytes) -> SourceRow | BadRow | None:
    """A line that is no plain object: with a byte order mark, or bad, or of nothing but white space."""
    try:
        text = line.strip().decode("utf-8-sig")
        if not text.strip():
            return None
        values = json.loads(text)
    except UnicodeDecodeError as error:
        return BadRow(file=name, number=number, reason=f"not UTF-8 (byte {error.start} of the line)")
    except (ValueError, RecursionError) as error:
        return BadRow(file=name, number=number, reason=f"not JSON: {error}")
    if isinstance(values, dict):
        return SourceRow(name, number, values)
    return BadRow(file=name, number=number, reason=_no_object(values))


def _no_object(value: Any) -> str:
    return f"a JSON {type(value).__name__}, not an object with fields"


def _refuse_object(name: str, line: bytes) -> None:
    if line.removeprefix(codecs.BOM_UTF8).strip() == b"{":
        stem = Path(name).name.split(".")[0]
        raise DataError(
            f"{name}: one JSON object, neither JSON lines nor an array of rows",
            seen="expected one object per line, or [ ... ]; the first line is a single {",
            fix=f"write one row per line: jq -c '.data[]' {Path(name).name} > {stem}.jsonl, if they are below data",
        )


def _endless(name: str, number: int) -> DataError:
    return DataError(
        f"{name}:{number}: more than {LIMIT_CHARS >> 20} MiB in one row",
        seen="expected rows, each of which fits well into memory",
        fix="write one row per line; a text without rows belongs into a .txt file",
    )


def _read_array(source: _Source) -> Iterator[SourceRow | BadRow]:
    with _as_text(source.stream) as text:
        for number, (value, utf8) in enumerate(_ArrayReader(source.name, text).elements(), start=1):
            if not number % 256:
                source.tell()
            if not isinstance(value, dict):
                yield BadRow(file=source.name, number=number, reason=_no_object(value), unit="row")
            elif not utf8:
                yield BadRow(file=source.name, number=number, reason="not UTF-8", unit="row")
            else:
                yield SourceRow(source.name, number, value, unit="row")


class _ArrayReader:
    """The elements of one JSON array, of which no more than one and a chunk are held."""

    CHUNK_CHARS = 1 << 18
    SPACE = re.compile(r"[ \t\r\n]*")

    def __init__(self, name: str, text: IO[str]) -> None:
        self._name, self._text = name, text
        self._buffer, self._at, self._line, self._number = "", 0, 1, 0
        self._ended = False

    def elements(self) -> Iterator[tuple[Any, bool]]:
        """(element, whether its bytes are UTF-8); raises DataError where the array is broken."""
        self._next()
        self._at += 1  # the bracket
        sign = self._next()
        if sign == "]":
            self._at += 1
        while sign != "]":
            self._number += 1
            yield self._element()
            sign = self._next()
            if sign not in {",", "]"}:
                raise self._broken("expected ',' or ']' after a row", self._at)
            self._at += 1
            self._next()
        if self._next():
            raise self._broken("expected nothing after the array's last bracket", self._at)

    def _element(self) -> tuple[Any, bool]:
        while True:
            try:
                value, end = _decode(self._buffer, self._at)
            except (ValueError, RecursionError) as error:
                if self._fill():
                    continue
                reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                raise self._broken(reason, getattr(error, "pos", self._at)) from error
            if end == len(self._buffer) and not isinstance(value, dict | list) and self._fill():
                continue  # a number may go on
            text = self._buffer[self._at : end]
            self._at = end
            return value, text.isascii() or _is_utf8(text)

    def _next(self) -> str:
        """The next sign that is no white space, which `_at` then points to; "" at the end."""
        while True:
            found = self.SPACE.match(self._buffer, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._fill():
                return ""

    def _fill(self) -> bool:
        """Read on, twice as much each time that an element does not end; False at the end of the file."""
        left = len(self._buffer) - self._at
        if self._ended or left > LIMIT_CHARS:
            return False
        more = self._text.read(max(self.CHUNK_CHARS, left))
        self._ended = not more
        if self._ended:
            return False
        self._line += self._buffer.count("\n", 0, self._at)
        self._buffer, self._at = self._buffer[self._at :] + more, 0
        return True

    def _broken(self, reason: str, at: int) -> DataError:
        line = self._line + self._buffer.count("\n", 0, at)
        if self._ended and at >= len(self._buffer.rstrip()):
            reason = "the file ends within the array"
        return DataError(
            f"{self._name}:{line}: not JSON, in row {max(1, self._number)} of the array",
            seen=f"{reason}; the rows after it cannot be told apart",
            fix="mend the file; JSON lines (one row per line) lose one row by such a mistake, not all",
        )


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# csv and tsv: the first row names the columns.


def _read_csv(source: _Source, _passages: bool, file: str) -> Iterator[SourceRow | BadRow]:
    csv.field_size_limit(LIMIT_CHARS)
    with _as_text(source.stream) as text:
        first = text.readline()
        # in countries with a decimal comma, spreadsheets write semicolons
        delimiter = "\t" if file_kind(file) == "tsv" else ";" if ";" in first and "," not in first else ","
        reader = csv.reader(_lines(first, text), delimiter=delimiter, strict=True)
        header = _header(source.name, reader)
        number = reader.line_num + 1
        cells: list[str] | None = [""]
        while cells is not None:
            try:
                cells = next(reader, None)
                if cells:
                    yield _cells(source.name, number, header, cells)
            except csv.Error as error:
                yield BadRow(file=source.name, number=number, reason=f"not csv: {error}")
            if reader.line_num // 256 != number // 256:
                source.tell()
            number = reader.line_num + 1


def _lines(first: str, rest: IO[str]) -> Iterator[str]:
    if first:
        yield first
    yield from rest


def _header(name: str, reader: Any) -> list[str]:
    try:
        header: list[str] = next(reader, [])
    except csv.Error as error:
        raise _no_header(name, f"not csv: {error}") from error
    twice = sorted({column for column in header if header.count(column) > 1})
    if not header or twice:
        raise _no_header(name, f"{twice[0]!r} is there twice" if twice else "the first line is empty")
    return header


def _no_header(name: str, seen: str) -> DataError:
    return DataError(
        f"{name}:1: no names of columns",
        seen=f"expected a first row with one name for each column; {seen}",
        fix="write the names of the columns into the first row",
    )


def _cells(name: str, number: int, header: list[str], cells: list[str]) -> SourceRow | BadRow:
    if len(cells) != len(header):
        reason = f"{len(cells)} cells, but {len(header)} columns ({', '.join(header[:8])})"
        return BadRow(file=name, number=number, reason=reason)
    if not all(cell.isascii() or _is_utf8(cell) for cell in cells):
        return BadRow(file=name, number=number, reason="not UTF-8")
    return SourceRow(name, number, dict(zip(header, cells, strict=True)))


# Plain text.


def _read_text(source: _Source, passages: bool, _file: str) -> Iterator[SourceRow | BadRow]:
    size = PASSAGE_CHARS if passages else PIECE_CHARS
    rest, line, follows, last = "", 1, False, False
    with _as_text(source.stream, newline=None) as text:
        while not last:
            rest += text.read(size + 1 - len(rest))
            last = len(rest) <= size
            at = cut(rest, size, lines=passages)
            piece, rest = rest[:at], rest[at:]
            source.tell()
            yield from _undecodable(source.name, line, piece)
            if piece:
                values = {"text": _decodable(piece)}
                yield SourceRow(source.name, line, values, follows=follows, continues=not (last or passages))
            follows = not passages
            line += piece.count("\n")


def _undecodable(name: str, line: int, piece: str) -> Iterator[BadRow]:
    if not _is_utf8(piece):
        for number, text in enumerate(piece.split("\n"), start=line):
            if not _is_utf8(text):
                yield BadRow(file=name, number=number, reason="not UTF-8 text", within=True)


def _decodable(piece: str) -> str:
    """The piece without its lines that are not UTF-8."""
    return piece if _is_utf8(piece) else "".join(filter(_is_utf8, piece.splitlines(keepends=True)))


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


_READERS: Mapping[FileKind, Callable[[_Source, bool, str], Iterator[SourceRow | BadRow]]] = {
    "json": _read_json,
    "csv": _read_csv,
    "tsv": _read_csv,
    "text": _read_text,
}
