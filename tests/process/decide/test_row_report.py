"""Tables of columns, and the tokens of rows, are looked at by a process that has the packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.row_mistakes import CASES, Case, words_of, write_case

pytest.importorskip("pyarrow")
TABLES = [case for case in CASES if case.name in {"parquet: null", "parquet: cut", "parquet: bytes", "zst: null"}]


@pytest.mark.parametrize("case", TABLES, ids=lambda case: case.name)
def test_a_planted_mistake_in_a_table_is_named_with_its_file_and_row(tmp_path: Path, case: Case) -> None:
    job, place = write_case(case, tmp_path, num_rows=60)
    words = words_of(job)
    assert case.expected in words
    assert place in words
