"""`explain FILE`: causes before echoes, with their lines; nothing in a log steers the terminal."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gangline.errors import UsageError
from gangline.report import explanation
from gangline.report.explanation import log_json, log_lines, read_log
from tests.unit.diagnose.lines import LINES


def log(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "train.log"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


def test_the_cause_comes_before_the_echo_that_stands_above_it(tmp_path: Path) -> None:
    report = read_log(log(tmp_path, "step 1", LINES["reset"], "step 2", LINES["no-space"]))
    assert [(each.id, each.number) for each in report.found] == [("no-space", 4), ("reset", 2)]
    lines = log_lines(report)
    assert lines[0].endswith("train.log: 4 lines")
    assert lines[2].startswith("cause  line 4: OSError: [Errno 28]")
    assert lines[3] == "  means  a disk is full"
    assert lines[6].startswith("echo  line 2: ")


def test_a_log_with_echoes_only_sends_to_the_other_logs(tmp_path: Path) -> None:
    lines = log_lines(read_log(log(tmp_path, LINES["waited"], LINES["waited"])))
    assert lines[1].startswith("only echoes")
    assert lines[3].startswith("echo  line 1, 2 times: ")


def test_of_an_unknown_failure_the_last_error_is_told(tmp_path: Path) -> None:
    path = log(tmp_path, "Traceback (most recent call last):", "[rank0]: my.own.StrangeError: seven", "bye")
    report = read_log(path)
    assert report.raised == "my.own.StrangeError: seven"
    assert log_lines(report)[1:] == [
        "nothing in it is known to gangline",
        "the last error in it: my.own.StrangeError: seven",
    ]


def test_the_verdict_of_torchrun_is_warned_of(tmp_path: Path) -> None:
    path = log(tmp_path, LINES["no-module"], "Root Cause (first observed failure):", "[0]:", "  rank : 0")
    assert log_lines(read_log(path))[-1].startswith('note: what torchrun calls the "root cause" is left out')


def test_colours_and_titles_do_not_hide_words_and_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = log(tmp_path, "\x1b]0;owned\x07\x1b[31mNo space \x1b[0mleft on device\x1b[2J")
    lines = log_lines(read_log(path))
    assert "a disk is full" in lines[3]
    assert all(line.isprintable() for line in lines)


def test_a_sequence_without_end_hides_no_other_line(tmp_path: Path) -> None:
    report = read_log(log(tmp_path, "\x1b]0;a title that never ends", LINES["quota"]))
    assert [(each.id, each.number) for each in report.found] == [("quota", 2)]


def test_a_line_of_megabytes_is_read_quickly(tmp_path: Path) -> None:
    path = log(tmp_path, "Aw0" * 1_000_000, "a.b." * 250_000, "\x1b]" * 100_000)
    before = time.process_time()
    assert read_log(path).found == ()
    assert time.process_time() - before < 5


def test_a_progress_bar_does_not_move_the_line_numbers(tmp_path: Path) -> None:
    path = log(tmp_path, "loading: 0 %\rloading: 50 %\rloading: 100 %", "windows\r", LINES["quota"])
    report = read_log(path)
    assert [(each.id, each.number) for each in report.found] == [("quota", 3)]
    assert report.lines == 3


def test_of_a_huge_log_the_end_is_read_and_lines_are_counted_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explanation, "LIMIT_BYTES", 200)
    path = log(tmp_path, *["a step of training"] * 100, LINES["quota"])
    report = read_log(path)
    assert report.lines == 101
    assert 0 < report.skipped_lines < 100
    assert log_json(report)["found"][0]["line"] == 101
    assert f"of which the first {report.skipped_lines} were not read" in log_lines(report)[0]


def test_an_empty_log_and_one_that_is_no_text(tmp_path: Path) -> None:
    assert log_lines(read_log(log(tmp_path)))[0].endswith("train.log: 0 lines")
    path = tmp_path / "binary"
    path.write_bytes(bytes(range(256)) * 100)
    assert all(line.isprintable() for line in log_lines(read_log(path)))


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_log(tmp_path / "none.log")


def test_the_same_as_json(tmp_path: Path) -> None:
    document = log_json(read_log(log(tmp_path, LINES["gpu-memory"])))
    (row,) = document["found"]
    assert (row["id"], row["line"], row["times"], row["is_echo"]) == ("gpu-memory", 1, 1, False)
    assert row["means"] == "a GPU had no room for 2.00 GiB more"
