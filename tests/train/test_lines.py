"""Figures on a disk that becomes full: nothing is lost, torn or there twice once it has room again."""

import contextlib
import errno
import json

import pytest

from gangline.worker.record import MOST_WAITING, Lines


class Disk:
    """A stream with so much room."""

    def __init__(self, stream, room):
        self.stream, self.room = stream, room

    def write(self, data):
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = data[: self.room]
        self.room -= len(taken)
        return self.stream.write(taken)

    def close(self):
        self.stream.close()


@pytest.fixture
def lines(tmp_path):
    made = Lines(tmp_path / "metrics.jsonl")
    made._stream = Disk(made._stream, room=10**6)
    yield made
    made.close()


def readable(tmp_path):
    found = []
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        try:
            found.append(json.loads(line)["step"])
        except ValueError:
            assert line
    return found


@pytest.mark.parametrize("room", [*range(12), 40, 60, 80, 100, 130])
def test_lines_that_found_no_room_are_written_once_there_is_some(tmp_path, lines, room):
    lines.write("step", step=0)
    lines._stream.room = room
    for step in range(1, 4):
        with contextlib.suppress(OSError):
            lines.write("step", step=step)
    lines._stream.room = 10**6
    lines.write("step", step=4)
    assert readable(tmp_path) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("short", [1, 2, 3])
def test_a_line_that_lacks_its_end_is_not_there_twice(tmp_path, lines, short):
    lines.write("step", step=0)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    lines._stream.room = size - short
    with pytest.raises(OSError, match="No space"):
        lines.write("step", step=1)
    lines._stream.room = 10**6
    lines.flush()
    lines.write("step", step=2)
    assert readable(tmp_path) == [0, 1, 2]


def test_of_very_many_the_last_ones_are_kept(tmp_path, lines):
    lines._stream.room = 0
    for step in range(MOST_WAITING + 3):
        with pytest.raises(OSError, match="No space"):
            lines.write("step", step=step)
    lines._stream.room = 10**9
    lines.flush()
    assert readable(tmp_path) == list(range(3, MOST_WAITING + 3))
