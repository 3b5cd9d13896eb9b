"""Rows of all kinds of files: those of `row_files`, and tables of columns (parquet, arrow), by record batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gangline.errors import DataError
from gangline.row_files import BadRow, ReadPosition, SourceRow, compression, file_kind, read_rows, readable

BATCH_ROWS = 1000


def read_files(
    files: tuple[str, ...], *, columns: frozenset[str], passages: bool, position: ReadPosition
) -> Iterator[SourceRow | BadRow]:
    """The rows of all files, in order; raises DataError for a file that cannot be read at all.

    columns: what the format needs; tables of columns read nothing else.
    passages: cut text files into documents of about `PASSAGE_CHARS`.
    position: goes on from where it is.
    """
    base = position.done_bytes
    for file in files:
        if file_kind(file) in {"parquet", "arrow"}:
            with readable(file):
                yield from _read_table(file, columns, base, position)
        else:
            yield from read_rows(file, passages=passages, base=base, position=position)
        base += Path(file).stat().st_size
        position.done_bytes = base


def count_rows(file: str) -> int:
    """The rows of one file; of a table without reading them. Raises DataError for one that cannot be read."""
    kind = file_kind(file)
    if kind not in {"parquet", "arrow"}:
        return sum(1 for _ in read_rows(file))
    with readable(file), _pyarrow_words(file):
        if kind == "arrow":
            return sum(batch.num_rows for _, batch in _arrow(file, frozenset()))
        from pyarrow import parquet

        return int(parquet.read_metadata(file).num_rows)


def first_filled(file: str, columns: frozenset[str]) -> tuple[int, str] | None:
    """The first row of a table, from 1, that has something in one of these columns, and which; nothing is read on."""
    number = 0
    with readable(file), _pyarrow_words(file):
        for _, batch in (_parquet if file_kind(file) == "parquet" else _arrow)(file, columns):
            if columns.isdisjoint(batch.schema.names):
                return None
            for values in batch.to_pylist():
                number += 1
                if there := next((name for name, value in values.items() if value), None):
                    return number, there
    return None


def _read_table(file: str, columns: frozenset[str], base: int, position: ReadPosition) -> Iterator[SourceRow]:
    size, number = Path(file).stat().st_size, 0
    with _pyarrow_words(file):
        for part, batch in (_parquet if file_kind(file) == "parquet" else _arrow)(file, columns):
            for values in batch.to_pylist():
                number += 1
                yield SourceRow(file, number, without_nulls(values), unit="row")
            position.done_bytes = base + int(size * part)


_NESTED = (dict, list)


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a row of a table, nested ones as they were before they became one.

    In a table every object has the keys of all, null where it had none. A column that is null stays.
    """
    return {name: _given(value) if type(value) in _NESTED else value for name, value in values.items()}


def _given(value: Any) -> Any:
    if type(value) is dict:
        return {key: _given(each) if type(each) in _NESTED else each for key, each in value.items() if each is not None}
    if type(value) is list:
        return [_given(each) if type(each) in _NESTED else each for each in value]
    return value


@contextmanager
def _pyarrow_words(file: str) -> Iterator[None]:
    import pyarrow as pa

    kind = file_kind(file)
    if packed := compression(file):
        raise DataError(
            f"{file}: {kind} inside {packed}",
            seen=f"expected a {kind} file as it is: its columns are compressed already",
            fix=f"unpack it first: {packed.lstrip('.')} -d {Path(file).name}",
        )
    try:
        yield
    except pa.ArrowException as error:
        raise DataError(
            f"{file}: not a readable {kind} file",
            seen=str(error)[:300],
            fix="write the file again, or take it out of data.train.files",
        ) from error


def _parquet(file: str, columns: frozenset[str]) -> Iterator[tuple[float, Any]]:
    """(part of the file that is done, record batch)."""
    from pyarrow import parquet

    table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    wanted = _wanted(table.schema_arrow.names, columns)
    done, total = 0, max(1, table.metadata.num_rows)
    for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
        done += batch.num_rows
        yield done / total, batch


def _arrow(file: str, columns: frozenset[str]) -> Iterator[tuple[float, Any]]:
    """As `_parquet`, of both forms of Arrow's IPC: a file (Feather 2), and a stream, as `datasets` writes it."""
    import pyarrow as pa

    with pa.memory_map(file) as mapped:
        if mapped.size() >= 6 and mapped.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(mapped)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            mapped.seek(0)
            reader = pa.ipc.open_stream(mapped)
            batches = iter(reader)
        wanted = _wanted(reader.schema.names, columns)
        for batch in batches:
            chosen = batch if wanted is None else batch.select(wanted)
            for start in range(0, chosen.num_rows, BATCH_ROWS):
                yield mapped.tell() / max(1, mapped.size()), chosen.slice(start, BATCH_ROWS)


def _wanted(names: list[str], columns: frozenset[str]) -> list[str] | None:
    """The columns to read; None: all, so that rows without any of them show the names that are there."""
    return [name for name in names if name in columns] or None
