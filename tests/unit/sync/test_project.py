"""The user's own folder on the hosts: the same bytes everywhere, known again before every start."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gangline.errors import CheckFailed
from gangline.sync.project import Project, foresee_project, place_project, verify_project
from tests.unit.sync.hosts import Lines, kennel


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
    project = place_project(folder, cluster, transports, tell=lines)
    for host in cluster.hosts:
        there = Path(project.folder(host))
        assert there == tmp_path / host.name / "projects" / f"my-project-{project.tree[:16]}"
        assert (there / "lib" / "model.py").read_text() == "layers = 2"
        assert (there / "start.sh").stat().st_mode & 0o777 == 0o700
        assert (there / "train.py").stat().st_mode & 0o777 == 0o600
        assert (there / "latest.py").readlink() == Path("lib/model.py")
        assert not (there / ".env").exists()
    assert lines.said == ["project    my-project: 4 files, 36 B", "  stays here: .env (may hold secrets)"]
    verify_project(project, cluster, transports)


def test_what_is_there_is_not_brought_again(tmp_path: Path, folder: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    first = place_project(folder, cluster, transports)
    transports["pc1"].pushed.clear()
    assert place_project(folder, cluster, transports) == first
    assert transports["pc1"].pushed == []


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
    project = foresee_project(folder)
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
    dirty = place_project(folder, cluster, transports, tell=lines)
    assert (dirty.commit, dirty.dirty) == (clean.commit, ("new.py", "start.sh", "train.py"))
    assert dirty.diff
    assert dirty.tree != clean.tree
    assert f"commit {clean.commit[:12]} and 3 changed files" in lines.said[0]
    (folder / "train.py").write_text("import lib.model")
    assert foresee_project(folder).diff != dirty.diff


def test_the_record_knows_the_project_again(tmp_path: Path, folder: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    project = place_project(folder, cluster, transports)
    again = Project.from_json(json.loads(json.dumps(project.to_json())))
    assert again == project
    verify_project(again, cluster, transports)
    assert "canary" not in json.dumps(project.to_json())
