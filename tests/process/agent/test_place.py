"""What was brought takes its place only if it is what it should be; a hostile archive writes nothing elsewhere."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def agent(verb: str, request: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    argv = [sys.executable, "-m", "gangline.agent", verb]
    done = subprocess.run(argv, input=json.dumps(request), capture_output=True, text=True)
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()], done.returncode


def tree(folder: Path, **options: Any) -> str:
    lines, _ = agent("digests", {"folders": [str(folder)], **options})
    return lines[-1]["folders"][str(folder)]["tree"]


def file(name: str, data: bytes = b"x", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    return entry, data


def special(name: str, kind: bytes, leads_to: str = "") -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, leads_to
    return entry, b""


def link(name: str, leads_to: str) -> tuple[tarfile.TarInfo, bytes]:
    return special(name, tarfile.SYMTYPE, leads_to)


def pack(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for entry, data in members:
            tar.addfile(entry, io.BytesIO(data))
    return path


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


HOSTILE: dict[str, Callable[[Path], list[tuple[tarfile.TarInfo, bytes]]]] = {
    "absolute": lambda out: [file(str(out / "evil"))],
    "climbs": lambda out: [file("../out/evil")],
    "climbs within": lambda out: [file("a/../../out/evil")],
    "is the folder above": lambda out: [file("..")],
    "has no name": lambda out: [file(".")],
    "absolute link": lambda out: [link("a", str(out))],
    "link that climbs": lambda out: [link("a", "../out")],
    "link that climbs from below": lambda out: [link("b/a", "../../out")],
    "link by way of a link": lambda out: [link("b/up", ".."), link("a", "b/up/../out")],
    "link in a circle": lambda out: [link("a", "b"), link("b", "a")],
    "file through a link": lambda out: [link("a", str(out)), file("a/evil")],
    "file through a link inside": lambda out: [file("d/x"), link("a", "d"), file("a/evil")],
    "link onto a file": lambda out: [file("a"), link("a", "b")],
    "file below a file": lambda out: [file("a"), file("a/evil")],
    "the same name twice": lambda out: [file("a", b"one"), file("a", b"two")],
    "hard link": lambda out: [special("a", tarfile.LNKTYPE, str(out / "precious"))],
    "device": lambda out: [special("a", tarfile.CHRTYPE)],
    "pipe": lambda out: [special("a", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_nothing_is_left_of_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("the user's")
    (tmp_path / "work").mkdir()
    before = snapshot(tmp_path)
    archive = pack(tmp_path / "a.tar", *HOSTILE[name](tmp_path / "out"))
    request = {"target": str(tmp_path / "work" / "t"), "tree": "0" * 64, "exact": True, "archive": str(archive)}
    lines, code = agent("place", request)
    assert code == 1
    assert lines[-1]["kind"] == "error"
    assert snapshot(tmp_path) == before


def test_an_archive_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    wanted = tmp_path / "wanted"
    (wanted / "d").mkdir(parents=True)
    (wanted / "d" / "run.sh").write_bytes(b"#!/bin/sh\n")
    (wanted / "d" / "run.sh").chmod(0o700)
    (wanted / "link").symlink_to("d/run.sh")
    target = tmp_path / "target"
    (target / "old").mkdir(parents=True)
    archive = pack(tmp_path / "a.tar", file("d/run.sh", b"#!/bin/sh\n", 0o755), link("link", "d/run.sh"))
    request = {"target": str(target), "tree": tree(wanted, exact=True), "exact": True, "archive": str(archive)}
    assert agent("place", request) == ([{"kind": "result", "placed": True}], 0)
    assert snapshot(target) == snapshot(wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "wanted"]


def test_what_is_not_as_it_should_be_does_not_take_the_place(tmp_path: Path) -> None:
    target, folder = tmp_path / "target", tmp_path / ".target.partial"
    for path, text in ((target, "old"), (folder, "new")):
        path.mkdir()
        (path / "file").write_text(text)
    lines, code = agent("place", {"target": str(target), "tree": "0" * 64, "folder": str(folder)})
    assert code == 0
    assert lines[-1] == {"kind": "result", "placed": False}
    assert list(lines[0]["files"]) == ["file"]
    assert (target / "file").read_text() == "old"
    assert not folder.exists()


def test_a_folder_that_is_what_it_should_be_takes_the_place(tmp_path: Path) -> None:
    target, folder = tmp_path / "target", tmp_path / ".target.partial"
    for path, text in ((target, "old"), (folder, "new")):
        path.mkdir()
        (path / "file").write_text(text)
    request = {"target": str(target), "tree": tree(folder), "folder": str(folder)}
    assert agent("place", request) == ([{"kind": "result", "placed": True}], 0)
    assert (target / "file").read_text() == "new"


def test_a_folder_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    lines, code = agent("place", {"target": str(tmp_path / "t"), "tree": "0" * 64, "folder": str(tmp_path / "none")})
    assert (code, lines[-1]["kind"]) == (0, "result")
    assert lines[-1]["placed"] is False
