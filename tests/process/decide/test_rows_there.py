"""Rows that lie on a host are looked at there, by a Python that has no package, and brought to the head alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gangline.context import REAL
from gangline.decide import rows_there
from gangline.decide.row_report import RowsReport, look_at_rows
from gangline.decide.rows_there import looker_there, with_files_there
from gangline.errors import DataError, RunFailed, UsageError
from gangline.provision.inputs import bring_reads
from gangline.runs.cluster import Cluster
from gangline.runs.job import DataJob, Job, ModelJob, SourceJob
from tests.unit.provision.hosts import HostTransport, kennel

GOOD = {"prompt": "a", "completion": "b"}


def job_of(*files: str, **data: object) -> Job:
    data = DataJob(train=SourceJob(files=files), format="completion", **data)
    return Job(name="rows", model=ModelJob(path="/nowhere"), data=data, batch=8, micro_batch=1)


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def look(job: Job, cluster: Cluster, transports: dict[str, HostTransport]) -> RowsReport:
    return look_at_rows(job, cluster.hosts, REAL, there=looker_there(job, cluster, transports))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Cluster, dict[str, HostTransport]]:
    return kennel(tmp_path, "pc1", "pc2")


def test_a_pattern_stands_for_the_files_of_the_host(tmp_path: Path, pair: tuple) -> None:
    for name in ("b", "a"):
        write(tmp_path / f"rows/{name}.jsonl", GOOD)
    asked = job_of(f"pc2:{tmp_path}/rows/*.jsonl")
    job = with_files_there(asked, *pair)
    assert job.data.train.files == tuple(f"pc2:{tmp_path}/rows/{name}.jsonl" for name in "ab")
    report = look(job, *pair)
    report.require(job)
    assert [(source.num_rows, source.num_bad) for source in report.sources] == [(2, 0)]
    assert report.sources[0].sample[0].row.values == GOOD


def test_a_row_that_cannot_be_used_is_named_with_host_file_and_line(tmp_path: Path, pair: tuple) -> None:
    file = f"pc2:{write(tmp_path / 'rows.jsonl', GOOD, {'prompt': 'a', 'completion': None})}"
    job = job_of(file)
    with pytest.raises(DataError) as caught:
        look(job, *pair).require(job)
    assert f"{file}:2: " in caught.value.what
    assert "1 of 2 rows cannot be used" in caught.value.what


def test_what_a_host_cannot_read_is_said_to_be_unseen_there(tmp_path: Path, pair: tuple) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": ["a"], "completion": ["b"]}), tmp_path / "rows.parquet")
    job = job_of(f"pc2:{tmp_path}/rows.parquet")
    (line,) = look(job, *pair).lines(job)
    assert line.endswith("rows.parquet: no Python of pc2 has the packages for training")
    cluster, transports = kennel(tmp_path, "pc2", python=sys.executable)
    (line,) = look(job, cluster, transports).lines(job)
    assert line == "rows       data.train: 1 looked at, all can be used"


def test_a_host_without_a_python_for_it_stops_nothing(
    tmp_path: Path, pair: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_there, "PYTHONS", ("no-such-python", "true"))
    job = with_files_there(job_of(f"pc2:{write(tmp_path / 'rows.jsonl', GOOD)}"), *pair)
    (line,) = look(job, *pair).lines(job)
    assert "pc2 cannot look at its rows" in line
    with pytest.raises(RunFailed) as caught:
        with_files_there(job_of(f"pc2:{tmp_path}/*.jsonl"), *pair)
    assert "write the full paths" in caught.value.fix


def test_a_file_or_a_host_that_is_not_there_is_named(tmp_path: Path, pair: tuple) -> None:
    with pytest.raises(DataError, match=r"there is no file pc2:.*/none\.jsonl"):
        with_files_there(job_of(f"pc2:{tmp_path}/none.jsonl"), *pair)
    with pytest.raises(UsageError, match=r"files of pc9, which is no host of the cluster"):
        with_files_there(job_of("pc9:/rows.jsonl"), *pair)


def test_the_head_reads_its_own_files_in_place_and_gets_those_of_others(tmp_path: Path, pair: tuple) -> None:
    files = [write(tmp_path / name, {**GOOD, "name": name}) for name in ("own.jsonl", "other.jsonl")]
    own, other = (f"{host}:{file}" for host, file in zip(("pc1", "pc2"), files, strict=True))
    data = DataJob(train=SourceJob(mix=(SourceJob(files=(own,)), SourceJob(files=(other,)))), format="completion")
    job = Job(name="rows", model=ModelJob(path="/nowhere"), data=data, batch=8, micro_batch=1)
    cluster, transports = pair
    reads = bring_reads(job, cluster, transports, home=tmp_path / "home")
    assert reads.data[own] == str(files[0])
    assert Path(reads.data[other]).read_bytes() == files[1].read_bytes()
    assert reads.data[other].startswith(f"{cluster.head.workdir}/inputs/")
    localised = reads.localised(job, cluster.head)
    assert localised.data.train.all_files == (reads.data[own], reads.data[other])
