"""Rows out of files by the standard library alone: every kind gives the same rows, and every mistake its place."""

from __future__ import annotations

import ast
import bz2
import csv
import gzip
import io
import json
import lzma
import sys
import tracemalloc
from pathlib import Path

import pytest

from gangline import row_files
from gangline.errors import DataError
from gangline.row_files import SHOWN_BAD_ROWS, BadRow, BadRows, ReadPosition, SourceRow, file_kind, read_rows

ROWS = [
    {"question": "how many dogs?", "answer": "six"},
    {"question": 'a "quoted" word, a comma\nand a line break', "answer": "ünïcode \U0001f415"},
    {"question": "; and \t and \r\n", "answer": ""},
]


def lines_of(rows=ROWS) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def table_of(rows=ROWS, delimiter=",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def zstd(data: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


FILES = {
    "rows.jsonl": lines_of,
    "rows.ndjson": lambda: b"\xef\xbb\xbf" + lines_of().replace(b"\n", b"\r\n"),
    "lines.json": lambda: lines_of() + b"\n \n",
    "array.json": lambda: json.dumps(ROWS, indent=2).encode(),
    "minified.json": lambda: json.dumps(ROWS, separators=(",", ":")).encode(),
    "array.jsonl": lambda: b"\xef\xbb\xbf\n [" + lines_of().strip().replace(b"\n", b" ,\n") + b"]\n",
    "rows.csv": table_of,
    "rows.CSV": lambda: b"\xef\xbb\xbf" + table_of(),
    "semicolons.csv": lambda: table_of(delimiter=";"),
    "rows.tsv": lambda: table_of(delimiter="\t"),
    "rows.jsonl.gz": lambda: gzip.compress(lines_of()),
    "array.json.bz2": lambda: bz2.compress(json.dumps(ROWS).encode()),
    "rows.csv.xz": lambda: lzma.compress(table_of()),
    "rows.jsonl.zst": lambda: zstd(lines_of()),
}


def read(tmp_path: Path, name: str, data: bytes) -> list[SourceRow | BadRow]:
    (tmp_path / name).write_bytes(data)
    return list(read_rows(str(tmp_path / name), shown=name))


def refused(tmp_path: Path, name: str, data: bytes) -> str:
    with pytest.raises(DataError) as caught:
        read(tmp_path, name, data)
    assert caught.value.seen
    assert caught.value.fix
    return str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    assert [dict(row.values) for row in read(tmp_path, name, FILES[name]())] == ROWS


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_an_array_is_the_same_wherever_its_chunks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(row_files._ArrayReader, "CHUNK_CHARS", chunk)
    rows = [{"n": 12.5e-3, "s": '\\ " ü', "list": [1, {"a": None}]}, {}, {"b": True}]
    assert [row.values for row in read(tmp_path, "a.json", json.dumps(rows, indent=1).encode())] == rows
    assert [str(row) for row in read(tmp_path, "b.json", b'[{"a": 1}, 1234567, "x"]')[1:]] == [
        "b.json row 2: a JSON int, not an object with fields",
        "b.json row 3: a JSON str, not an object with fields",
    ]


def test_an_array_may_be_empty(tmp_path: Path) -> None:
    assert read(tmp_path, "a.json", b" [ ] ") == []


@pytest.mark.parametrize(
    ("name", "data", "places"),
    [
        ("a.jsonl", b'{"a": 1}\n\n{"a": 2}\n', ["a.jsonl:1", "a.jsonl:3"]),
        ("a.json", b'[{"a": 1},\n\n{"a": 2}]', ["a.json row 1", "a.json row 2"]),
        ("a.csv", b'a,b\n"1\n",2\n\n3,4\n', ["a.csv:2", "a.csv:5"]),
        ("a.txt", b"one\ntwo\n", ["a.txt:1"]),
    ],
)
def test_a_row_says_where_it_stands(tmp_path: Path, name: str, data: bytes, places: list[str]) -> None:
    assert [row.place for row in read(tmp_path, name, data)] == places


@pytest.mark.parametrize(
    ("name", "data", "bad"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "a.jsonl:2: not JSON: Expecting value"),
        ("a.jsonl", b'{"a": 1}\n{"a": 1} {"a": 2}\n', "a.jsonl:2: not JSON: Extra data"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "a.jsonl:2: not UTF-8 (byte 7 of the line)"),
        ("a.jsonl", b'{"a": 1}\n[1, 2]\n', "a.jsonl:2: a JSON list, not an object with fields"),
        ("a.json", b'[{"a": 1},\n{"a": "\xff"}]', "a.json row 2: not UTF-8"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", "a.csv:3: 3 cells, but 2 columns (a, b)"),
        ("a.csv", b"a,b\n1,2\n1,\xff\n", "a.csv:3: not UTF-8"),
        ("a.csv", b'a,b\n1,2\n"1" 2,3\n', "a.csv:3: not csv: ',' expected after"),
        ("a.csv", b'a,b\n1,2\n"1,3\n4,5\n', "a.csv:3: not csv: unexpected end of data"),
        ("a.txt", b"one\ntwo \xff\n", "a.txt:2: not UTF-8 text"),
    ],
)
def test_a_row_that_is_off_is_named_and_the_others_are_read(tmp_path: Path, name: str, data: bytes, bad: str) -> None:
    found = read(tmp_path, name, data)
    assert [str(row)[: len(bad)] for row in found if isinstance(row, BadRow)] == [bad]
    assert [row for row in found if isinstance(row, SourceRow)]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.json", b'[{"a": 1},\n{"a": \n}]', "a.json:3: not JSON, in row 2 of the array"),
        ("a.json", b'[{"a": 1}\n{"a": 2}]', "a.json:2: not JSON, in row 1 of the array"),
        ("a.json", b'[{"a": 1},\n{"a": 2},\n', "the file ends within the array"),
        ("a.json", b'[{"a": 1},\n{"a": "open\n', "a.json:2: not JSON, in row 2"),
        ("a.json", b'[{"a": 1}]\n[]', "a.json:2: not JSON"),
        ("a.json", b'{\n  "data": []\n}', "one JSON object, neither JSON lines nor an array"),
        ("a.csv", b"", "no names of columns"),
        ("a.csv", b"a,b,a\n1,2,3\n", "'a' is there twice"),
        ("a.jsonl.gz", b"no gzip at all", "a.jsonl.gz: cannot be read"),
    ],
)
def test_a_file_that_is_off_is_refused(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    assert words in refused(tmp_path, name, data)


@pytest.mark.parametrize(
    ("ending", "compress"), [("gz", gzip.compress), ("xz", lzma.compress), ("bz2", bz2.compress), ("zst", zstd)]
)
def test_a_compressed_file_that_ends_early_is_refused(tmp_path: Path, ending: str, compress) -> None:
    whole = compress("".join(f'{{"a": {number * 7919 % 10007}}}\n' for number in range(50_000)).encode())
    assert f"a.jsonl.{ending}: cannot be read" in refused(tmp_path, f"a.jsonl.{ending}", whole[: len(whole) // 2])


def test_without_a_package_for_zstd_its_name_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compression", "compression.zstd", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "pip install pyarrow" in refused(tmp_path, "a.jsonl.zst", b"")


def test_a_row_without_an_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "LIMIT_CHARS", 1 << 12)
    long = b"x" * (1 << 14)
    assert "a.jsonl:2: more than" in refused(tmp_path, "a.jsonl", b'{"a": 1}\n{"a": "' + long)
    assert "row 2 of the array" in refused(tmp_path, "a.json", b'[{"a": 1}, {"a": "' + long)
    assert [str(row)[:17] for row in read(tmp_path, "a.csv", b'a\n"' + long)] == ["a.csv:2: not csv:"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.json"])
def test_memory_is_that_of_a_row_not_of_the_file(tmp_path: Path, name: str) -> None:
    rows = [{"a": "dogs " * 200, "b": str(number)} for number in range(8000)]
    data = {"rows.jsonl": lines_of, "rows.csv": table_of, "rows.json": lambda rows: json.dumps(rows).encode()}[name]
    (tmp_path / name).write_bytes(data(rows))
    tracemalloc.start()
    assert sum(1 for _ in read_rows(str(tmp_path / name))) == 8000
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < (tmp_path / name).stat().st_size / 2


def test_progress_reaches_the_size_of_the_file(tmp_path: Path) -> None:
    for name, data in (("a.jsonl", lines_of(ROWS * 1000)), ("a.csv", table_of(ROWS * 1000))):
        (tmp_path / name).write_bytes(data)
        position = ReadPosition()
        seen = [position.done_bytes for _ in read_rows(str(tmp_path / name), base=7, position=position)]
        assert seen == sorted(seen)
        assert len(set(seen)) > 3
        assert len(data) * 0.9 < position.done_bytes <= len(data) + 7


@pytest.mark.parametrize(
    ("path", "kind"),
    [("a.JSONL.GZ", "json"), ("a.tsv.zst", "tsv"), ("a.parquet", "parquet"), ("a.feather", "arrow"), ("a.md", "text")],
)
def test_the_name_says_what_a_file_holds(path: str, kind: str) -> None:
    assert file_kind(path) == kind


def test_rows_that_are_bad_for_the_same_reason_share_a_line_and_further_reasons_are_counted() -> None:
    bad = BadRows()
    for number in (2, 5, 6, 7, 9, 10):
        bad.add(BadRow(file="a.jsonl", number=number, reason="'prompt' is null"))
    bad.add(BadRow(file="b.parquet", number=3, reason="'prompt' is null", unit="row"))
    bad.add(BadRow(file="b.parquet", number=4, reason="'prompt' is null", unit="row"))
    bad.add(BadRow(file="a.jsonl", number=8, reason="'prompt' is empty"))
    assert bad.count == 9
    assert bad.examples == [
        "a.jsonl:2: 'prompt' is null; also in lines 5, 6, 7, 9 and 1 more",
        "b.parquet row 3: 'prompt' is null; also in row 4",
        "a.jsonl:8: 'prompt' is empty",
    ]
    for number in range(SHOWN_BAD_ROWS):
        bad.add(BadRow(file="c.jsonl", number=1, reason=f"reason {number}"))
    assert len(bad.examples) == SHOWN_BAD_ROWS + 1
    assert bad.examples[-1] == "and 3 more, for other reasons"


def test_it_imports_nothing_but_the_standard_library() -> None:
    """`gangline plan` reads rows with it, on computers that have no package for training."""
    body = ast.parse(Path(row_files.__file__).read_text(encoding="utf-8")).body
    plain = {each.name for node in body if isinstance(node, ast.Import) for each in node.names}
    named = {str(node.module) for node in body if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in plain | named} - set(sys.stdlib_module_names) == {"gangline"}
    assert {name for name in plain | named if name.startswith("gangline")} == {"gangline.errors"}
