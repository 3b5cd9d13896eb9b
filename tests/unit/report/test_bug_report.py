"""The archive of `report-bug`: nothing private is in it, it explains the run as the run itself, and no other file does."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from gangline.errors import UsageError
from gangline.report import bug_report
from gangline.report.bug_report import ArchivedRun, BugReport, gather, is_archive, pack, read_archive
from gangline.report.explanation import explain_lines
from gangline.report.run_history import read_history
from gangline.report.tail import LogFile
from gangline.runs.cluster import Cluster, Host
from tests.unit.report.stories import HERE, STORIES, Past

TOKEN = "hf_" + "AbCdEfGh" * 4
PRIVATE = ("pc1", "pc2", "pc3", "alice", "192.168.7.", "10.77.0.12", "secretlab", TOKEN, "my-very-own-value")
CLUSTER = Cluster(
    name="home",
    hosts=tuple(
        Host(name=f"pc{n}", workdir="/home/alice/gl", python="python3", ssh=f"alice@192.168.7.{n}") for n in (1, 2, 3)
    ),
)


def reported(past: Past, *, lines: int = 5) -> BugReport:
    """What `report-bug` gathers of a story, with private things planted in its records and logs."""
    inventory = {"pc1": {"hostname": "secretlab", "addresses": ["192.168.7.1"]}}
    past.layout.inventory.write_text(json.dumps(inventory), encoding="utf-8")
    past.layout.job.write_text('{"name": "tiny", "model": "/home/alice/model"}', encoding="utf-8")
    log = past.layout.folder / "rank-0.log"
    planted = f"HF_TOKEN={TOKEN} on secretlab\nmy-very-own-value of alice@pc1\n"
    log.write_text(planted + "".join(f"step {n}\n" for n in range(lines)), encoding="utf-8")
    history = read_history(past.view, records=past.layout, remote=None)
    return gather(
        past.view,
        ArchivedRun(history=history, is_job=True, can_resume=True),
        CLUSTER,
        [LogFile(name="pc1 rank 0", rank=0, transport=HERE, path=log)],
        private=["my-very-own-value"],
        missing=["pc3 does not answer: its logs are missing"],
    )


def written(report: BugReport, folder: Path) -> Path:
    path = folder / f"bug-{report.run_id}.tar.gz"
    path.write_bytes(pack(report))
    return path


@pytest.mark.parametrize("story", STORIES)
def test_an_archive_explains_the_run_as_the_run_does(tmp_path: Path, story: str) -> None:
    past = Past(tmp_path)
    STORIES[story](past)
    report = reported(past)
    path, folder = written(report, tmp_path), tmp_path / "unpacked"
    assert is_archive(path)
    folder.mkdir()
    run = read_archive(path, folder)
    again = explain_lines(run.history, is_job=run.is_job, can_resume=run.can_resume)
    assert again == report.files["explanation.txt"].decode().splitlines()


@pytest.mark.parametrize("story", STORIES)
def test_nothing_private_is_in_it(tmp_path: Path, story: str) -> None:
    past = Past(tmp_path)
    STORIES[story](past)
    data = gzip.decompress(pack(reported(past))).decode()
    assert [each for each in PRIVATE if each in data] == []
    assert "host-1" in data
    assert "<secret>" in data


def test_what_is_in_it_and_what_is_missing_is_told(tmp_path: Path) -> None:
    past = Past(tmp_path)
    STORIES["killed-rank"](past)
    report = reported(past)
    assert {"about.json", "explanation.txt", "logs/host-1-rank-0.log"} < set(report.files)
    assert {"runs/calm-otter-7/state.json", "runs/calm-otter-7/attempts/1/outcome.json"} < set(report.files)
    assert report.missing == ("pc3 does not answer: its logs are missing",)
    assert report.redacted["secret"] == 2
    about = json.loads(report.files["about.json"])
    assert about["missing"] == ["host-3 does not answer: its logs are missing"]
    assert about["redacted"] == dict(report.redacted)


def test_of_a_long_log_the_beginning_and_the_end_are_kept(tmp_path: Path) -> None:
    past = Past(tmp_path)
    STORIES["killed-rank"](past)
    lines = reported(past, lines=5_000).files["logs/host-1-rank-0.log"].decode().splitlines()
    assert len(lines) == bug_report.FIRST_LINES + 1 + bug_report.LAST_LINES
    assert lines[bug_report.FIRST_LINES] == "... 2,802 lines ..."
    assert (lines[2], lines[-1]) == ("step 0", "step 4999")


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    past = Past(tmp_path)
    STORIES["killed-rank"](past)
    assert gzip.decompress(pack(reported(past))) == gzip.decompress(pack(reported(past)))


def archive_of(path: Path, *members: tarfile.TarInfo, about: object = None) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
        if about is not None:
            data = json.dumps(about).encode()
            member = tarfile.TarInfo("bug-x/about.json")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 1) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, "/etc/passwd"
    return info


@pytest.mark.parametrize(
    "hostile",
    [
        member("bug-x/../../outside"),
        member("/etc/outside"),
        member("bug-x//etc/outside"),
        member("bug-x/link", tarfile.SYMTYPE, 0),
        member("bug-x/link", tarfile.LNKTYPE, 0),
        member("bug-x/pipe", tarfile.FIFOTYPE, 0),
        member("bug-x/a\nb"),
        member("about.json"),
    ],
    ids=lambda each: repr(each.name + str(each.type)),
)
def test_a_hostile_archive_writes_nothing_outside(tmp_path: Path, hostile: tarfile.TarInfo) -> None:
    path, folder = archive_of(tmp_path / "bug-x.tar.gz", hostile), tmp_path / "a" / "b" / "unpacked"
    folder.mkdir(parents=True)
    with pytest.raises(UsageError, match=r"no archive of gangline report-bug"):
        read_archive(path, folder)
    assert list(tmp_path.rglob("outside")) == []
    assert list(folder.rglob("*")) == []


def test_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bug_report, "MOST_BYTES", 100)
    path = archive_of(tmp_path / "bug-x.tar.gz", member("bug-x/a", size=60), member("bug-x/b", size=60))
    with pytest.raises(UsageError, match=r"no archive"):
        read_archive(path, tmp_path)


@pytest.mark.parametrize(
    "about",
    [[], {}, {"run": 7, "is_job": True, "can_resume": True}, {"run": "../x", "is_job": True, "can_resume": True}],
)
def test_an_archive_of_something_else_is_refused(tmp_path: Path, about: object) -> None:
    with pytest.raises(UsageError, match=r"no archive"):
        read_archive(archive_of(tmp_path / "bug-x.tar.gz", about=about), tmp_path)


def test_a_file_that_is_no_archive_or_cut_is_refused(tmp_path: Path) -> None:
    past = Past(tmp_path)
    STORIES["killed-rank"](past)
    path = tmp_path / "bug-x.tar.gz"
    for data in (b"", b"not an archive", pack(reported(past))[:500]):
        path.write_bytes(data)
        with pytest.raises(UsageError, match=r"no archive"):
            read_archive(path, tmp_path)
