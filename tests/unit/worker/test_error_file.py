"""Last words find room on a disk that others fill."""

import errno
import json

import pytest

from gangline.errors import RunFailed
from gangline.worker import rank_files as last_words
from gangline.worker.rank_files import ErrorFile

ERROR = RunFailed("the disk is full", seen="no room", fix="make room")


@pytest.fixture
def full(monkeypatch):
    """No new file finds room from now on."""

    def begin():
        def write_json(path, value):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        monkeypatch.setattr(last_words, "write_json", write_json)

    return begin


def test_they_are_written_where_room_was_kept_and_that_is_never_free(tmp_path, full, monkeypatch):
    path = tmp_path / "rank-0.error.json"
    words = ErrorFile(path)
    words.reserve()
    (kept,) = tmp_path.iterdir()
    blocks, number = kept.stat().st_blocks, kept.stat().st_ino
    assert blocks * 512 >= 16 << 10
    full()
    monkeypatch.setattr(type(path), "unlink", lambda *_words, **_options: pytest.fail("the room was given away"))
    assert words.say(ERROR) == RunFailed.exit_code
    assert json.loads(path.read_text()) == ERROR.to_json()
    assert path.stat().st_ino == number
    assert list(tmp_path.iterdir()) == [path]


def test_the_first_error_counts(tmp_path):
    words = ErrorFile(tmp_path / "rank-0.error.json")
    words.reserve()
    words.say(ERROR)
    words.say(RunFailed("what came of it", seen="more", fix="none"))
    assert json.loads((tmp_path / "rank-0.error.json").read_text())["what"] == "the disk is full"


def test_where_no_room_could_be_kept_they_are_written_as_any_file(tmp_path):
    words = ErrorFile(tmp_path / "rank-0.error.json")
    words.say(ERROR)
    assert json.loads((tmp_path / "rank-0.error.json").read_text()) == ERROR.to_json()


def test_who_leaves_well_gives_the_room_back(tmp_path):
    words = ErrorFile(tmp_path / "rank-0.error.json")
    words.reserve()
    words.unneeded()
    assert list(tmp_path.iterdir()) == []
