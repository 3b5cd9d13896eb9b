"""What a person sees while following, and when leaving."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path, PurePath

import pytest

from gangline.cli.output import Terminal, follow_to_the_end, print_answer, print_data, process_age_s
from gangline.control.user_command import CommandRecord
from gangline.errors import DataError, RunFailed
from gangline.report.follow import View
from gangline.runs.cluster import Host
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import write_record
from gangline.runs.state import Phase, ProcessId, RunState
from gangline.transport.local import LocalTransport

HOST = Host(name="here", workdir="/", python="python")


class Impatient(LocalTransport):
    """Somebody presses Ctrl-C while files are read."""

    def read(self, path: PurePath, *, offset: int = 0, limit: int = 1 << 22) -> bytes:
        raise KeyboardInterrupt


def view(root: Path, phase: Phase, *, transport: LocalTransport | None = None, **state: object) -> View:
    layout = RunLayout(root, "calm-otter-7")
    layout.folder.mkdir(parents=True)
    RunState(name="tiny", phase=phase, **state).save(layout)  # type: ignore[arg-type]
    return View(layout=layout, head=transport or LocalTransport(HOST), head_layout=layout)


def test_ctrl_c_leaves_and_says_that_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        follow_to_the_end(view(tmp_path, "running", transport=Impatient(HOST)))
    assert caught.value.code == 130
    text = capsys.readouterr().err
    assert "it continues" in text
    assert "gangline attach calm-otter-7" in text
    assert "gangline stop calm-otter-7" in text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_answer_is_broken_between_words_on_a_terminal_only(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    line = "  fix   let only these addresses in, and ssh"
    print_answer({}, [line], as_json=False)
    broken = "  fix   let only these\n        addresses in, and ssh\n"
    assert capsys.readouterr().out == (broken if is_terminal else f"{line}\n")


@pytest.mark.parametrize("phase", ["finished", "stopped"])
def test_a_run_that_ended_well_is_no_error(tmp_path: Path, phase: Phase) -> None:
    follow_to_the_end(view(tmp_path, phase))


def test_a_failed_run_raises_its_own_error(tmp_path: Path) -> None:
    error = {**DataError("row 7", seen="empty").to_json(), "host": "pc1", "log_tail": []}
    with pytest.raises(DataError, match="row 7"):
        follow_to_the_end(view(tmp_path, "failed", error=error))


def test_a_lost_run_says_how_to_end_what_is_left(tmp_path: Path) -> None:
    me = ProcessId.current()
    gone = ProcessId(pid=me.pid, start_ticks=me.start_ticks - 1)
    with pytest.raises(RunFailed, match="is lost") as caught:
        follow_to_the_end(view(tmp_path, "running", supervisor=gone))
    assert "gangline stop calm-otter-7" in caught.value.fix


def own_program(view_: View, printed: str) -> None:
    record = CommandRecord(words=("train.py",), resume_words=None, folder="/project", project={})
    write_record(view_.layout.command, record.to_json())
    log = view_.layout.attempt(1) / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text(printed)


def test_the_output_of_a_program_of_the_users_own_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = view(tmp_path, "finished", attempt=1)
    own_program(shown, "epoch 1 loss 2.5\n10%\r50%\r100%\nred \x1b[31m\n")
    follow_to_the_end(shown)
    assert capsys.readouterr().out == "epoch 1 loss 2.5\n100%\nred \n"
    follow_to_the_end(shown, from_start=False)  # who comes back is not shown all of it again
    assert capsys.readouterr().out == ""


def test_an_answer_does_not_run_into_a_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr(said, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr", said)
    monkeypatch.setattr("sys.stdout", said)
    monkeypatch.setenv("TERM", "xterm")
    Terminal().progress("starting TensorBoard")
    print_data(["http://127.0.0.1:6006"])
    assert said.getvalue() == "\r\x1b[Kstarting TensorBoard\r\x1b[Khttp://127.0.0.1:6006\n"


def test_the_seconds_on_the_screen_are_those_that_have_passed() -> None:
    age_s = process_age_s()
    assert age_s is not None
    assert age_s >= time.process_time() / os.cpu_count()  # type: ignore[operator]
    assert age_s < 3600


def test_where_nobody_watches_there_are_no_ticks_and_no_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    console = Terminal()
    console.progress("tokenising")
    console.report("done\x1b[31m")
    assert capsys.readouterr().err == "done\n"


def test_a_quiet_terminal_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(quiet=True).report("done")
    assert capsys.readouterr() == ("", "")
