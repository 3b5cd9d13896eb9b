"""Every file of a run folder, damaged in every way, under every verb that reads it: the others are listed all the same."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gangline import app
from gangline.cli import export, main
from gangline.errors import UsageError
from gangline.runs.old_format import LISTS
from gangline.runs.record_versions import LIMIT_BYTES, load_record, write_record
from tests.recorded import RECORDED, install

RUN, OTHER = "amber-vole-1", "fond-lemming-8"
VERBS = (
    ("ps", RUN),
    ("logs", RUN),
    ("explain", RUN),
    ("resume", RUN, "--dry-run"),
    ("stop", RUN),
    ("attach", RUN),
    ("export", RUN, "--dry-run"),
)
NOT_ASKED = "hosts are not asked in this test"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two stopped runs in the format of now. Nothing of them is alive, and no host is looked at for a start."""
    monkeypatch.setattr(os, "fsync", lambda _file: None)  # no power is lost here, and hundreds of files are written
    home = tmp_path / "home"
    install("ddp-stopped", home)
    install("fsdp-stopped", home)
    for run_id in (RUN, OTHER):
        for path in (home / "runs" / run_id).rglob("*.json"):
            write_record(path, load_record(path, dict))
    monkeypatch.setenv("GANGLINE_HOME", str(home))
    monkeypatch.setattr(app, "starting", lambda cluster, **_options: contextlib.nullcontext((cluster, None)))
    monkeypatch.setattr("gangline.decide.decide.decide", _nobody)
    monkeypatch.setattr(export, "find_saved", _nobody)
    return home


def _nobody(*_arguments: object, **_options: object) -> contextlib.AbstractContextManager[None]:
    raise UsageError(NOT_ASKED, seen="a verb that came so far", fix="nothing")


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 3, len(data), max(1, len(data) // 3)):
        data[place] ^= 0x40
    path.write_bytes(data)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def of_another_run(path: Path) -> None:
    other = Path(str(path).replace(RUN, OTHER))
    if other.exists():
        shutil.copy(other, path)


def unreadable(path: Path) -> None:
    path.chmod(0)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def huge(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(LIMIT_BYTES + 1)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "halved": halved,
    "flipped": flipped,
    "a list": lambda path: path.write_bytes(b"[]"),
    "a number": lambda path: path.write_bytes(b"7"),
    "an empty object": lambda path: path.write_bytes(b"{}"),
    "a folder": folder,
    "nested": lambda path: path.write_bytes(b"[" * 100_000),
    "nested objects": lambda path: path.write_bytes(b'{"a":' * 100_000),
    "of another run": of_another_run,
    "no text": lambda path: path.write_bytes(b"\xff\xfe{}"),
    "unreadable": unreadable,
    "loop": loop,
    "pipe": pipe,
    "huge": huge,
}
ALWAYS_DAMAGED = {"emptied", "halved", "a list", "a number", "a folder", "nested", "no text", "loop", "pipe"}


FOR_EVERY_VERB = {"an empty object", "of another run"}
"""The reader of records takes these: each verb meets them on its own. It refuses the others for all verbs alike."""


def files_of_run() -> list[str]:
    """Files in the home, and those that the verbs read on the head, by their path below the home."""
    root = RECORDED / "ddp-stopped"
    here = [path for path in (root / f"runs/{RUN}").rglob("*") if path.is_file()]
    there = [path for path in (root / f"hosts/pc1/runs/{RUN}").rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(root)) for path in [*here, *there])


def typed(*words: str) -> tuple[int, str]:
    """What a command says, and its exit code."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main.main(list(words))
    return code, said.getvalue()


def listed() -> dict[str, dict[str, object]]:
    """What `ps --json` says, by run."""
    code, said = typed("ps", "--json")
    assert code == 0, said
    return {row["id"]: row for row in json.loads(said)["runs"]}


@contextlib.contextmanager
def damaged(path: Path, damage: str) -> Iterator[None]:
    """A file that is damaged, and whole again."""
    data = path.read_bytes()
    DAMAGES[damage](path)
    try:
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
        path.write_bytes(data)


def test_a_whole_home_is_listed_and_read(home: Path) -> None:
    rows = listed()
    assert {run: (row["phase"], row["damage"]) for run, row in rows.items()} == {
        RUN: ("stopped", None),
        OTHER: ("stopped", None),
    }
    for words in VERBS:
        code, said = typed(*words)
        assert code == 0 or NOT_ASKED in said, (words, said)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_hides_no_run_and_is_no_bug(home: Path, damage: str) -> None:
    if damage == "unreadable" and os.geteuid() == 0:
        pytest.skip("root reads every file")
    wrong = []
    for number, name in enumerate(files_of_run(), list(DAMAGES).index(damage)):
        path = home / name
        is_record = name.startswith("runs/") and name.endswith(".json")
        if damage == "huge" and not is_record:
            continue  # logs may be long
        with damaged(path, damage):
            rows = listed()
            assert rows.keys() == {RUN, OTHER}, name
            assert rows[OTHER]["phase"] == "stopped"
            is_old_list = path.name in LISTS and damage == "a list"
            is_named = rows[RUN]["phase"] == "damaged" and path.name in str(rows[RUN]["damage"])
            if is_record and damage in ALWAYS_DAMAGED and not is_old_list and not is_named:
                wrong.append((name, "ps", str(rows[RUN])))
            # every verb meets every damage, and every file
            turn = number % len(VERBS)
            for words in VERBS if damage in FOR_EVERY_VERB else (*VERBS, *VERBS)[turn : turn + 2]:
                code, said = typed(*words)
                if (
                    "bug in gangline" in said
                    or "Traceback" in said
                    or (
                        code not in {0, 5}
                        and NOT_ASKED not in said
                        and ("  seen  " not in said or "  fix   " not in said)
                    )
                ):
                    wrong.append((name, " ".join(words), said))
    assert wrong == [], wrong


def test_a_name_that_is_too_long_is_no_bug(home: Path) -> None:
    for verb in ("explain", "logs", "stop", "attach", "export", "resume", "ps"):
        code, said = typed(verb, "x" * 300)
        assert (code, "  fix   " in said) == (2, True), (verb, said)
    for name in ("x" * 300 + "/y", "/" + "y" * 300):
        code, said = typed("explain", name)
        assert (code, "  fix   " in said) == (2, True), said


def test_a_run_of_a_newer_gangline_is_refused_by_name_and_version_and_hides_no_other(home: Path) -> None:
    for path in (home / "runs" / RUN).rglob("*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": "2.0", "added": {"by": "2.0"}}))
    rows = listed()
    assert rows[OTHER]["phase"] == "stopped"
    assert rows[RUN]["phase"] == "newer gangline"
    assert "newer gangline" in str(rows[RUN]["damage"])
    _, screen = typed("ps")
    assert OTHER in screen
    assert "damaged" not in screen
    assert "expected version 1.x, found 2.0" in screen
    for words in (*VERBS, ("ps",)):
        code, said = typed(*words)
        assert RUN in said, (words, said)
        assert "newer gangline" in said, (words, said)
        assert words == ("ps",) or (code, "found 2.0" in said, "upgrade gangline" in said) == (2, True, True), (
            words,
            said,
        )
