"""Tables of columns, and the tokens of rows, are looked at by a process that has the packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.row_mistakes import CASES, Case, words_of, write_case
from gangline.context import REAL
from gangline.decide.row_report import look_at_rows
from gangline.runs.job import DataJob, Job, ModelJob, SliceJob, SourceJob

pyarrow = pytest.importorskip("pyarrow")
TABLES = [case for case in CASES if case.name in {"parquet: null", "parquet: cut", "parquet: bytes", "zst: null"}]


@pytest.mark.parametrize("case", TABLES, ids=lambda case: case.name)
def test_a_planted_mistake_in_a_table_is_named_with_its_file_and_row(tmp_path: Path, case: Case) -> None:
    job, place = write_case(case, tmp_path, num_rows=60)
    words = words_of(job)
    assert case.expected in words
    assert place in words


@pytest.mark.parametrize("kind", ["parquet", "feather"])
@pytest.mark.parametrize(
    ("source", "taken"),
    [
        ({"rows": SliceJob(start=20, stop=60, percent=True)}, range(2, 6)),
        ({"rows": SliceJob(start=3), "max_samples": 4}, range(3, 7)),
    ],
)
def test_of_tables_the_rows_that_the_job_takes_are_looked_at_and_no_others(
    tmp_path: Path, kind: str, source: dict[str, Any], taken: range
) -> None:
    from pyarrow import feather, parquet

    write = parquet.write_table if kind == "parquet" else feather.write_feather
    answers = ["yes" if number in taken else "" for number in range(10)]
    files = (tmp_path / f"a.{kind}", tmp_path / f"b.{kind}")
    for file, part in zip(files, (answers[:4], answers[4:]), strict=True):
        write(pyarrow.table({"prompt": ["a"] * len(part), "completion": part}), file)
    train = SourceJob(files=tuple(map(str, files)), **source)
    data = DataJob(train=train, format="completion")
    job = Job(name="rows", model=ModelJob(path="/nowhere"), data=data, batch=8, micro_batch=1)
    report = look_at_rows(job, (), REAL)
    report.require(job)
    (look,) = report.sources
    assert (look.num_rows, look.num_bad, look.taken) == (len(taken), 0, (taken.start, taken.stop))
