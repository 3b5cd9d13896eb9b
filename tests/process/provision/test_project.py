"""The user's own folder on the hosts: the same bytes everywhere, known again before every start."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from gangline.errors import CheckFailed, RunFailed
from gangline.provision.code import (
    Archive,
    Laid,
    Project,
    lay_out,
    place_archive,
    place_project,
    preview_project,
    verify_project,
)
from gangline.provision.trees import Spot
from tests.unit.provision.hosts import Lines, kennel


def git(folder: Path, *words: str) -> str:
    identity = [
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@t",
        "-c",
        "init.defaultBranch=main",
        "-c",
        "commit.gpgsign=false",
    ]
    done = subprocess.run(["git", *identity, "-C", str(folder), *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "my project"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text("import lib.model")
    (folder / "lib" / "model.py").write_text("layers = 2")
    (folder / "start.sh").write_text("#!/bin/sh\n")
    (folder / "start.sh").chmod(0o755)
    (folder / "latest.py").symlink_to("lib/model.py")
    (folder / ".env").write_text("HF_TOKEN=canary-7f3a")
    return folder


def test_every_host_gets_the_same_bytes_links_and_programs(tmp_path: Path, folder: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1", "pc2")
    lines = Lines()
    project = place_project(folder, cluster, transports, console=lines)
    for host in cluster.hosts:
        there = Path(project.folder(host))
        assert there == tmp_path / host.name / "projects" / f"my-project-{project.tree[:16]}"
        assert (there / "lib" / "model.py").read_text() == "layers = 2"
        assert (there / "start.sh").stat().st_mode & 0o777 == 0o700
        assert (there / "train.py").stat().st_mode & 0o777 == 0o600
        assert (there / "latest.py").readlink() == Path("lib/model.py")
        assert not (there / ".env").exists()
    assert lines.said == ["project    my-project: 4 files, 36 B", "  stays on this computer: .env (may hold secrets)"]
    verify_project(project, cluster, transports)


def test_what_is_there_is_not_brought_again(tmp_path: Path, folder: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    first = place_project(folder, cluster, transports)
    transports["pc1"].pushed.clear()
    assert place_project(folder, cluster, transports) == first
    assert transports["pc1"].pushed == []


def test_what_was_brought_is_looked_at_there(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a look of its own on the host that lacked it; the other one was looked at already."""
    cluster, transports = kennel(tmp_path, "pc1", "pc2")
    place_project(folder, dataclasses.replace(cluster, hosts=cluster.hosts[:1]), transports)

    def damaged(archive: Archive, spots: list[Spot]) -> None:
        place_archive(archive, spots)
        (Path(spots[0].path) / "train.py").write_text("import lib.m0del")

    monkeypatch.setattr("gangline.provision.code.place_archive", damaged)
    with pytest.raises(CheckFailed, match=r"pc2: train\.py is not what was brought there"):
        place_project(folder, cluster, transports)


@pytest.mark.parametrize(
    "change",
    [
        lambda there: (there / "lib" / "model.py").write_text("layers = 3"),
        lambda there: (there / "lib" / "model.py").unlink(),
        lambda there: (there / "lib" / "model.py").chmod(0o700),
    ],
    ids=["one byte", "gone", "a program now"],
)
def test_one_change_on_one_host_stops_the_start_and_names_host_and_file(
    tmp_path: Path, folder: Path, change: object
) -> None:
    cluster, transports = kennel(tmp_path, "pc1", "pc2")
    project = place_project(folder, cluster, transports)
    change(Path(project.folder(cluster.hosts[1])))
    for act in (verify_project, lambda *words: place_project(folder, *words[1:])):
        with pytest.raises(CheckFailed, match=r"pc2: lib/model\.py is not what was brought there") as caught:
            act(project, cluster, transports)
        assert f"rm -r {project.folder(cluster.hosts[1])}" in caught.value.fix


def test_a_link_that_leads_elsewhere_now_is_a_change(tmp_path: Path, folder: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    project = place_project(folder, cluster, transports)
    there = Path(project.folder(cluster.head))
    (there / "latest.py").unlink()
    (there / "latest.py").symlink_to("train.py")
    with pytest.raises(CheckFailed, match=r"latest\.py"):
        verify_project(project, cluster, transports)


def test_what_a_program_wrote_beside_its_source_does_not_count(tmp_path: Path, folder: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    project = place_project(folder, cluster, transports)
    (Path(project.folder(cluster.head)) / "checkpoint.pt").write_bytes(b"weights")
    verify_project(project, cluster, transports)
    assert place_project(folder, cluster, transports) == project


def test_a_host_without_the_project_does_not_start(tmp_path: Path, folder: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    project = preview_project(folder)
    assert list((tmp_path / "pc1").glob("*")) == []
    with pytest.raises(CheckFailed, match="pc1"):
        verify_project(project, cluster, transports)


def test_a_git_tree_is_recorded_with_its_uncommitted_changes(tmp_path: Path, folder: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    (folder / ".gitignore").write_text(".env\n")
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    clean = place_project(folder, cluster, transports)
    assert (clean.commit, clean.dirty, clean.diff) == (git(folder, "rev-parse", "HEAD"), (), None)
    (folder / "train.py").write_text("import lib")
    (folder / "new.py").write_text("")
    (folder / "start.sh").unlink()
    lines = Lines()
    dirty = place_project(folder, cluster, transports, console=lines)
    assert (dirty.commit, dirty.dirty) == (clean.commit, ("new.py", "start.sh", "train.py"))
    assert dirty.diff
    assert dirty.tree != clean.tree
    assert f"commit {clean.commit[:12]} and 3 changed files" in lines.said[0]
    (folder / "train.py").write_text("import lib.model")
    assert preview_project(folder).diff != dirty.diff


def test_the_record_knows_the_project_again(tmp_path: Path, folder: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    project = place_project(folder, cluster, transports)
    again = Project.from_json(json.loads(json.dumps(project.to_json())))
    assert again == project
    verify_project(again, cluster, transports)
    assert "canary" not in json.dumps(project.to_json())


# The working folder of a run


def workplace(tmp_path: Path, name: str, run: str = "calm-otter-7") -> Path:
    return tmp_path / name / "runs" / run / "project"


def test_every_run_has_a_folder_of_its_own_on_every_host(tmp_path: Path, folder: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1", "pc2")
    project = place_project(folder, cluster, transports)
    for run in ("calm-otter-7", "bold-lynx-8"):
        assert lay_out(project, run, cluster, transports) == Laid()
    for host in ("pc1", "pc2"):
        first, second = (workplace(tmp_path, host, run) for run in ("calm-otter-7", "bold-lynx-8"))
        (first / "lib" / "model.py").write_text("layers = 3")
        assert (second / "lib" / "model.py").read_text() == "layers = 2"
        assert (second / "latest.py").readlink() == Path("lib/model.py")
        assert (second / "start.sh").stat().st_mode & 0o777 == 0o700
    verify_project(project, cluster, transports)  # a script that rewrites its own files keeps nobody else from starting


def test_on_resume_what_changed_is_laid_over_what_the_script_wrote(tmp_path: Path, folder: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    (folder / "old.py").write_text("")
    (folder / "notes.txt").write_text("mine")
    lay_out(place_project(folder, cluster, transports), "calm-otter-7", cluster, transports)
    there = workplace(tmp_path, "pc1")
    (there / "outputs").mkdir()
    (there / "outputs" / "checkpoint.pt").write_bytes(b"weights")
    (there / "lib" / "model.py").write_text("written by the script")
    (there / "notes.txt").write_text("the script's")
    (folder / "train.py").write_text("import lib")
    (folder / "old.py").unlink()
    (folder / "notes.txt").unlink()
    project = place_project(folder, cluster, transports)
    laid = lay_out(project, "calm-otter-7", cluster, transports)
    assert laid == Laid(changed=("train.py",), removed=("old.py",), kept=("notes.txt",))
    assert laid.lines(1) == [
        "project    train.py changed since attempt 1",
        "project    old.py gone since attempt 1",
        "project    notes.txt gone on this computer, and kept as the run left it since attempt 1",
    ]
    assert (there / "train.py").read_text() == "import lib"
    assert not (there / "old.py").exists()
    assert (there / "outputs" / "checkpoint.pt").read_bytes() == b"weights"
    assert (there / "lib" / "model.py").read_text() == "written by the script"
    assert (there / "notes.txt").read_text() == "the script's"
    assert lay_out(project, "calm-otter-7", cluster, transports) == Laid()


def test_a_host_that_missed_an_attempt_gets_what_changed_before_it(tmp_path: Path, folder: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1", "pc2")
    alone = dataclasses.replace(cluster, hosts=cluster.hosts[:1])
    lay_out(place_project(folder, cluster, transports), "calm-otter-7", cluster, transports)
    (folder / "train.py").write_text("import lib")
    lay_out(place_project(folder, alone, transports), "calm-otter-7", alone, transports)
    lay_out(place_project(folder, cluster, transports), "calm-otter-7", cluster, transports)
    assert (workplace(tmp_path, "pc2") / "train.py").read_text() == "import lib"


def test_what_was_damaged_on_the_host_is_not_laid(tmp_path: Path, folder: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    project = place_project(folder, cluster, transports)
    (Path(project.folder(cluster.head)) / "train.py").write_text("import canary")
    with pytest.raises(RunFailed, match=r"train\.py is not what was brought"):
        lay_out(project, "calm-otter-7", cluster, transports)
    assert list(workplace(tmp_path, "pc1").parent.iterdir()) == []
