"""What files and folders hold, by hash, said by the host itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gangline.provision.trees import tree_of
from gangline.runs.files import file_digest


def ask(*folders: Path, **options: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    argv = [sys.executable, "-m", "gangline.agent", "digests"]
    request = json.dumps({"folders": [str(folder) for folder in folders], **options})
    done = subprocess.run(argv, input=request, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    files: dict[str, dict[str, Any]] = {str(folder): {} for folder in folders}
    for line in lines:
        if line["kind"] == "files":
            files[line["folder"]].update(line["files"])
    return lines[-1]["folders"], files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_bytes(b"alpha")
    (folder / "sub" / "b").write_bytes(b"beta")
    return folder


def test_every_file_has_its_hash_and_the_folder_one_over_all(folder: Path) -> None:
    found, files = ask(folder)
    marks = {name: (size, mark) for name, (size, mark) in files[str(folder)].items()}
    assert marks == {"a": (5, file_digest(folder / "a")), "sub/b": (4, file_digest(folder / "sub" / "b"))}
    assert found[str(folder)].pop("free_bytes") > 0
    assert found[str(folder)] == {
        "is": "folder",
        "tree": tree_of(marks).hash,
        "num_files": 2,
        "num_bytes": 9,
        "odd": {},
    }


def test_a_file_is_a_tree_of_itself_and_nothing_is_none(folder: Path) -> None:
    found, files = ask(folder / "a", folder / "none")
    assert found[str(folder / "a")]["is"] == "file"
    assert list(files[str(folder / "a")]) == [""]
    assert found[str(folder / "none")].pop("free_bytes") > 0
    assert found[str(folder / "none")] == {"is": None, "tree": None, "num_files": 0, "num_bytes": 0, "odd": {}}


def test_a_link_counts_as_what_it_leads_to_or_exactly_as_itself(folder: Path) -> None:
    (folder / "link").symlink_to("a")
    (folder / "a").chmod(0o700)
    content = ask(folder)[1][str(folder)]
    assert content["link"] == content["a"]
    exact = ask(folder, exact=True)[1][str(folder)]
    assert exact["link"] == [0, "link:a"]
    assert exact["a"][1] == content["a"][1] + ":x"


def test_what_has_no_content_is_odd_and_nobody_waits_for_it(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "nowhere").symlink_to("gone")
    (folder / "sub" / "up").symlink_to("..")
    found, files = ask(folder)
    assert set(files[str(folder)]) == {"a", "sub/b"}
    odd = found[str(folder)]["odd"]
    assert odd["pipe"] == "neither a file, a folder nor a link"
    assert odd["nowhere"] == "No such file or directory"
    assert "a link that leads to a folder above it" in odd.values()


def test_names_that_are_skipped_and_the_only_ones_that_count(folder: Path) -> None:
    assert set(ask(folder, skip=["sub"])[1][str(folder)]) == {"a"}
    assert set(ask(folder, names=["sub/b", "gone"])[1][str(folder)]) == {"sub/b"}


def test_names_of_any_bytes_are_told(folder: Path) -> None:
    name = os.fsdecode(b"caf\xe9\n\x1b[2J")
    (folder / name).write_bytes(b"x")
    assert name in ask(folder)[1][str(folder)]


def test_many_names_come_in_lines_that_are_not_too_long(tmp_path: Path) -> None:
    for number in range(2500):
        (tmp_path / f"{number:0200d}").touch()
    argv = [sys.executable, "-m", "gangline.agent", "digests"]
    done = subprocess.run(
        argv, input=json.dumps({"folders": [str(tmp_path)]}), capture_output=True, text=True, check=True
    )
    assert max(map(len, done.stdout.splitlines())) < 1 << 20
    assert len(ask(tmp_path)[1][str(tmp_path)]) == 2500


def test_a_remembered_hash_is_used_until_the_file_changes(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hashes.json"
    before = ask(folder, cache=str(cache))[1]
    assert not cache.exists()  # written too recently to be trusted
    old = 1_000_000_000
    os.utime(folder / "a", (old, old))
    status = (folder / "a").stat()
    stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    cache.write_text(json.dumps({str(folder / "a"): [*stamp, "remembered"]}))
    assert ask(folder, cache=str(cache))[1][str(folder)]["a"] == [5, "remembered"]
    (folder / "a").write_bytes(b"gamma")
    os.utime(folder / "a", (old, old))  # the same size and time: what has changed is the time of the change of time
    assert ask(folder, cache=str(cache))[1][str(folder)]["a"] != [5, "remembered"]
    assert before[str(folder)]["a"][1] != "remembered"


def test_a_damaged_memory_is_no_memory(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hashes.json"
    cache.write_text("{torn")
    damaged, none = ask(folder, cache=str(cache))[0], ask(folder)[0]
    assert damaged[str(folder)]["tree"] == none[str(folder)]["tree"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "a").chmod(0)
    argv = [sys.executable, "-m", "gangline.agent", "digests"]
    done = subprocess.run(argv, input=json.dumps({"folders": [str(folder)]}), capture_output=True, text=True)
    assert "a cannot be read" in json.loads(done.stdout.splitlines()[-1])["what"]
