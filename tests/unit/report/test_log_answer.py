"""`explain LOG...`: the cause before echoes, with its lines; several logs at once; nothing in a log steers the terminal."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from gangline.diagnose import log_search
from gangline.diagnose.corpus import known_failures
from gangline.errors import UsageError
from gangline.report.log_answer import (
    LogReport,
    answer_json,
    answer_lines,
    entry_json,
    entry_lines,
    read_log,
    read_logs,
)
from tests.unit.diagnose.lines import LINES


def log(folder: Path, *lines: str, name: str = "train.log") -> Path:
    path = folder / name
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


def answer(*lines: str, folder: Path) -> list[str]:
    return answer_lines([read_log(log(folder, *lines))])


def found(report: LogReport) -> list[tuple[str, int]]:
    return [(each.id, each.number) for each in report.found]


def test_the_cause_comes_before_the_echo_that_stands_above_it(tmp_path: Path) -> None:
    lines = answer("step 1", LINES["reset"], "step 2", LINES["no-space"], folder=tmp_path)
    assert lines[0].endswith("train.log: 4 lines")
    assert lines[1] == "cause    a disk is full"
    assert lines[2].startswith("seen     ")
    assert ".log:4: OSError: [Errno 28]" in lines[2]
    assert lines[3].startswith("fix      make room there")
    assert lines[4] == "more     gangline explain no-space"
    assert lines[5].startswith("echo     another rank or host has gone, or was not there  (")
    assert lines[5].endswith(".log:2; reset)")


def test_a_warning_is_told_after_an_error_that_stands_below_it(tmp_path: Path) -> None:
    path = log(tmp_path, f"2026-11-27 WARNING {LINES['open-files']}", LINES["no-space"])
    assert found(read_log(path)) == [("no-space", 2), ("open-files", 1)]
    again = log(tmp_path, f"2026-11-27 WARNING {LINES['open-files']}", LINES["no-space"], LINES["open-files"])
    report = read_log(again)
    assert found(report) == [("no-space", 2), ("open-files", 3)]
    assert report.found[1].times == 2


def test_a_log_with_echoes_only_sends_to_the_other_logs(tmp_path: Path) -> None:
    lines = answer(LINES["waited"], LINES["waited"], folder=tmp_path)
    assert lines[1].startswith("only echoes")
    assert lines[2].startswith("echo     another rank or host stands still")
    assert ".log:1, 2 times: " in lines[3]


@pytest.mark.parametrize(
    ("line", "raised"),
    [
        ("[rank0]: my.own.StrangeError: seven", "my.own.StrangeError: seven"),
        ("StrangeError: seven", "StrangeError: seven"),
        ("1: StrangeError: seven", "StrangeError: seven"),
        (
            "(TrainWorker pid=4711, ip=10.0.0.1) ray.exceptions.StrangeError: seven",
            "ray.exceptions.StrangeError: seven",
        ),
        ("2026-11-27 10:00:00,000 ERROR root - StrangeError: seven", "StrangeError: seven"),
        ("pc1: [rank1]:[E1127] StrangeError: seven", "StrangeError: seven"),
        ("AssertionError", "AssertionError"),
        ("KeyError: 7", "KeyError: 7"),
        ("SystemExit: 2", "SystemExit: 2"),
    ],
)
def test_of_an_unknown_failure_the_last_errors_are_told_with_their_class(
    tmp_path: Path, line: str, raised: str
) -> None:
    path = log(tmp_path, "Traceback (most recent call last):", line, "bye")
    report = read_log(path)
    assert [(each.text, each.number) for each in report.raised] == [(raised, 2)]
    told = answer_lines([report])
    assert any(line.startswith(("error    ", "echo     ")) and line.endswith(raised) for line in told)
    assert any(line.startswith(f"seen     {path}:2") for line in told)


def test_a_long_error_is_told_whole(tmp_path: Path) -> None:
    words = " ".join(["words"] * 200)
    lines = answer(f"StrangeError: {words} the end", folder=tmp_path)
    assert [line.endswith("words the end") for line in lines if line.startswith("seen")] == [True]


def test_the_errors_beside_the_first_one_that_nobody_knows_are_told_too(tmp_path: Path) -> None:
    lines = answer("StrangeError: seven", "OddError: eight", "StrangeError: seven", folder=tmp_path)
    assert lines[1].endswith("StrangeError: seven")
    assert [line for line in lines if "eight" in line] == [f"error    {tmp_path / 'train.log'}:2: OddError: eight"]


def test_a_log_without_any_error_says_so(tmp_path: Path) -> None:
    assert answer("step 1", folder=tmp_path)[1].startswith(
        "nothing in it is known to gangline, and it has no exception"
    )


def test_the_last_lines_of_a_program_without_any_error_line_are_told_by_their_class(tmp_path: Path) -> None:
    lines = answer(*["step"] * 80, "launcher: could not open /srv/hosts.txt", "it ends here", folder=tmp_path)
    assert lines[1].startswith("error    a file or folder is not as it was expected: launcher: could not open")
    assert ".log:81" in lines[2]


@pytest.mark.parametrize(
    "line",
    [
        "INFO could not open the cache",
        "could not open the cache, falling back to the network",
        "12 passed, 0 failed",
        "[WARNING] could not open the cache",
        "some optimizations are not available",
    ],
)
def test_words_of_a_program_that_goes_on_are_no_error(line: str, tmp_path: Path) -> None:
    assert found(read_log(log(tmp_path, line))) == []


def test_a_traceback_that_a_logger_wrote_as_information_counts(tmp_path: Path) -> None:
    logged = ["Traceback (most recent call last):", '  File "x.py", line 8', "ValueError: the shapes do not match"]
    assert found(read_log(log(tmp_path, *(f"12:00 - INFO - {each}" for each in logged)))) == [("error-shape", 3)]


def test_after_which_a_program_trains_is_no_error(tmp_path: Path) -> None:
    assert found(read_log(log(tmp_path, "launcher: could not open /srv/hosts.txt", "step 7 loss 2.5"))) == []


def test_a_warning_counts_where_a_traceback_is_cut_off(tmp_path: Path) -> None:
    cut = ("[WARNING] load: unable to open the table", "Traceback (most recent call last):", '  File "x.py", line 8')
    assert found(read_log(log(tmp_path, *cut))) == [("error-file", 1)]


def test_the_verdict_of_torchrun_is_called_harmless_and_hides_no_unknown_error(tmp_path: Path) -> None:
    verdict = ("Root Cause (first observed failure):", "[0]:", "  rank : 0")
    assert answer(LINES["no-module"], *verdict, folder=tmp_path)[-1].startswith(
        'ignore   what torchrun calls the "root cause" is the end that it saw first'
    )
    lines = answer("StrangeError: seven", *verdict, folder=tmp_path)
    assert lines[1] == "error    the program ended with an error of its own: StrangeError: seven"
    assert lines[-1].startswith("ignore   ")


def test_logs_of_several_ranks_are_one_story(tmp_path: Path) -> None:
    first = log(tmp_path, LINES["reset"], name="rank-0.log")
    second = log(tmp_path, "step 1", LINES["gpu-memory"], name="rank-1.log")
    third = log(tmp_path, "step 1", LINES["reset"], LINES["reset"], name="rank-2.log")
    (tmp_path / "model.bin").write_bytes(b"\0" * 100 + LINES["no-space"].encode())
    for names in ([first, second, third], [tmp_path]):
        lines = answer_lines(read_logs([str(name) for name in names], stdin=io.BytesIO()))
        assert lines[0] == "3 logs: 6 lines"
        assert lines[1] == "cause    a GPU had no room for 2.00 GiB more"
        assert f"{second}:2: torch.OutOfMemoryError" in lines[2]
        assert f"({first}:1 and 1 other log, 3 times; reset)" in lines[-1]


def test_of_several_logs_the_first_cause_in_time_is_told_first(tmp_path: Path) -> None:
    late = log(tmp_path, "2026-11-27 08:00:09,100 step 1", LINES["gpu-memory"], name="rank-0.log")
    soon = log(tmp_path, "2026-11-27T08:00:07.2 step 1", "step 2", LINES["no-space"], name="rank-1.log")
    lines = answer_lines(read_logs([str(late), str(soon)], stdin=io.BytesIO()))
    assert lines[1] == "cause    a disk is full"
    assert any(line.startswith("also") and "gpu-memory" in line for line in lines)
    undated = log(tmp_path, "step 1", LINES["gpu-memory"], name="rank-0.log")
    lines = answer_lines(read_logs([str(undated), str(soon)], stdin=io.BytesIO()))
    assert lines[1] == "cause    a GPU had no room for 2.00 GiB more"


def test_standard_input_is_a_log(tmp_path: Path) -> None:
    (report,) = read_logs(["-"], stdin=io.BytesIO(f"\n{LINES['quota']}".encode()))
    assert (report.name, report.lines, found(report)) == ("standard input", 2, [("quota", 2)])


def test_a_log_of_a_windows_shell_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(f"step 1\r\n{LINES['quota']}\r\n", encoding="utf-16")
    assert found(read_log(path)) == [("quota", 2)]


def test_a_folder_without_logs_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no logs"):
        read_logs([str(tmp_path)], stdin=io.BytesIO())


def test_colours_and_titles_do_not_hide_words_and_do_not_reach_the_terminal(tmp_path: Path) -> None:
    lines = answer("\x1b]0;owned\x07\x1b[31mNo space \x1b[0mleft on device\x1b[2J", folder=tmp_path)
    assert lines[1] == "cause    a disk is full"
    assert all(line.isprintable() for line in lines)


def test_a_sequence_without_end_hides_no_other_line(tmp_path: Path) -> None:
    report = read_log(log(tmp_path, "\x1b]0;a title that never ends", LINES["quota"]))
    assert found(report) == [("quota", 2)]


def test_a_line_of_megabytes_is_read_quickly(tmp_path: Path) -> None:
    path = log(tmp_path, "Aw0" * 1_000_000, "a.b." * 250_000, "\x1b]" * 100_000, "a.bError" * 100_000)
    before = time.process_time()
    assert read_log(path).found == ()
    assert time.process_time() - before < 5


def test_words_far_behind_in_a_long_line_are_shown(tmp_path: Path) -> None:
    report = read_log(log(tmp_path, f"{'x ' * 100_000}{LINES['quota']}{' y' * 1000}"))
    assert found(report) == [("quota", 1)]
    assert "Disk quota exceeded" in report.found[0].line
    assert len(report.found[0].line) <= log_search.LINE_CHARS


def test_a_progress_bar_does_not_move_the_line_numbers(tmp_path: Path) -> None:
    path = log(tmp_path, "loading: 0 %\rloading: 50 %\rloading: 100 %", "windows\r", LINES["quota"])
    report = read_log(path)
    assert (found(report), report.lines) == ([("quota", 3)], 3)


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
def test_a_log_in_pieces_is_the_same_log(size: int) -> None:
    text = "\n".join([f"step {n}" for n in range(50)] + [*LINES.values()] * 2 + ["StrangeError: seven"]).encode()
    whole, pieces = log_search.LogSearch(), log_search.LogSearch()
    whole.feed(text)
    for at in range(0, len(text), size):
        pieces.feed(text[at : at + size])
    assert whole.finish() == pieces.finish()
    assert (whole.lines, list(whole.raised)) == (pieces.lines, list(pieces.raised))
    assert whole.lines == 50 + 2 * len(LINES) + 1


def test_kinds_of_lines_that_are_forgotten_are_learned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_search, "_MOST_SHAPES", 3)
    search = log_search.LogSearch()
    search.feed("\n".join([*LINES.values(), "step"] * 2).encode())
    explained = {each for row in known_failures().values() for each in row.explains}
    assert set(LINES) - {each.id for each in search.finish()} <= explained


def test_an_empty_log_and_one_that_is_no_text(tmp_path: Path) -> None:
    assert answer(folder=tmp_path)[0].endswith("train.log: 0 lines")
    path = tmp_path / "binary"
    path.write_bytes(bytes(range(256)) * 100)
    assert all(line.isprintable() for line in answer_lines([read_log(path)]))


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read"):
        read_log(tmp_path / "none.log")


def test_the_same_as_json(tmp_path: Path) -> None:
    path = log(tmp_path, LINES["gpu-memory"], "StrangeError: seven")
    document = answer_json([read_log(path)])
    row, other = document["found"]
    assert (other["id"], other["level"], other["confidence"]) == ("error-of-program", "error", "low")
    assert (row["id"], row["level"], row["confidence"], row["times"]) == ("gpu-memory", "cause", "high", 1)
    assert row["places"] == [{"file": str(path), "line": 1}]
    assert row["means"] == "a GPU had no room for 2.00 GiB more"
    assert document["unknown_errors"] == [{"file": str(path), "line": 2, "text": "StrangeError: seven"}]
    both = answer_json([read_log(log(tmp_path, LINES["gpu-memory"], LINES["no-space"]))])
    assert {row["confidence"] for row in both["found"]} == {"medium"}


def test_a_known_failure_has_a_page() -> None:
    signature = known_failures()["exit-137"]
    lines = entry_lines("exit-137", signature)
    assert lines[0] == "exit-137  (perhaps; to blame: host)"
    assert lines[1].startswith("means    a process was killed by SIGKILL")
    assert lines[-1].startswith("seen at  https://")
    assert all("{" not in line for name, each in known_failures().items() for line in entry_lines(name, each))
    assert entry_json("exit-137", signature)["level"] == "symptom"
