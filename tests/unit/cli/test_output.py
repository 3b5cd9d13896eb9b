"""What a person sees while following, and when leaving."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest

from gangline.cli.output import Terminal, follow_to_the_end
from gangline.errors import DataError, RunFailed
from gangline.report.follow import View
from gangline.runs.cluster import Host
from gangline.runs.layout import RunLayout
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


def test_where_nobody_watches_there_are_no_ticks_and_no_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    console = Terminal()
    console.progress("tokenising")
    console.report("done\x1b[31m")
    assert capsys.readouterr().err == "done\n"


def test_a_quiet_terminal_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(quiet=True).report("done")
    assert capsys.readouterr() == ("", "")
