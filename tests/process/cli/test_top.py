"""`gangline top` as it is typed: on real terminals of three widths, and without one."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gangline.report.host_samples import seconds_of
from gangline.runs.state import iso
from tests.recorded import install
from tests.waiting import wait_until

GOLDEN = Path(__file__).parents[2] / "golden"
SIZES = {40: 60, 80: 45, 200: 40}
"""Columns -> rows."""
MOST_S = 30.0


@pytest.fixture
def environment(tmp_path, monkeypatch):
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"GANGLINE_HOME": str(tmp_path / "home"), "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "home"


ENDED_S = 10.5 * 3600
"""How long ago the recorded run ended: its ages have the same width whenever the test runs."""
TIME = re.compile(r'(?<="time": ")[^"]+')


def ended_lately(home, run):
    """Move the figures and events of a recorded run."""
    paths = [path for path in home.parent.rglob("*.jsonl") if run in path.parts]
    read = {path: path.read_text(encoding="utf-8") for path in paths}
    last = max(seconds_of(found) for text in read.values() for found in TIME.findall(text))
    by = time.time() - ENDED_S - last
    for path, text in read.items():
        path.write_text(TIME.sub(lambda found: iso(seconds_of(found[0]) + by), text), encoding="utf-8")


def same_ages(text):
    return re.sub(r"\b10 h 3\d min ago", "10 h 3? min ago", text)


def gangline(*words):
    said = subprocess.run(
        [sys.executable, "-m", "gangline.cli.main", *words], capture_output=True, text=True, timeout=60
    )
    return said.returncode, said.stdout, said.stderr


class Tmux:
    """A terminal of its own."""

    def __init__(self, socket):
        self._argv = ["tmux", "-u", "-S", str(socket), "-f", "/dev/null"]

    def call(self, *words):
        # readline, which pytest may load, puts LINES and COLUMNS where only a copied environment leaves them out
        return subprocess.run(
            [*self._argv, *words], env=dict(os.environ), check=True, capture_output=True, text=True, timeout=20
        ).stdout

    def screen_with(self, wanted):
        """The screen once it has these words."""
        deadline = time.monotonic() + MOST_S
        while wanted not in (shown := self.call("capture-pane", "-p", "-t", "top")):
            assert time.monotonic() < deadline, shown
            time.sleep(0.1)
        return shown


@pytest.fixture
def tmux(tmp_path):
    pytest.importorskip("textual", reason="textual is not installed: pip install 'gangline[top]'")
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    made = Tmux(tmp_path / "tmux")
    yield made
    with contextlib.suppress(subprocess.CalledProcessError):  # a test has ended it
        made.call("kill-server")


@pytest.mark.parametrize("columns", SIZES)
def test_a_run_on_a_real_terminal_is_as_kept_and_q_leaves(environment, tmux, columns):
    run = install("ddp-finished", environment)
    ended_lately(environment, run)
    command = f"{sys.executable} -m gangline.cli.main top {run}; echo left with $?; sleep 60"
    tmux.call("new-session", "-d", "-s", "top", "-x", str(columns), "-y", str(SIZES[columns]), command)
    tmux.screen_with(" quit")
    shown = tmux.screen_with("ago  finished")
    rows = [line.rstrip() for line in same_ages(shown).splitlines()]
    assert "\n".join(rows).strip() + "\n" == (GOLDEN / f"top-{columns}.txt").read_text(encoding="utf-8")
    tmux.call("send-keys", "-t", "top", "q")
    assert "left with 0" in tmux.screen_with("left with")


def test_it_ends_with_its_terminal(environment, tmux):
    run = install("ddp-finished", environment)
    tmux.call(
        "new-session", "-d", "-s", "top", "-x", "80", "-y", "40", f"{sys.executable} -m gangline.cli.main top {run}"
    )
    tmux.screen_with(" quit")
    words = f"gangline.cli.main top {run}"
    assert processes_with(words, environment)
    tmux.call("kill-server")
    wait_until(lambda: not processes_with(words, environment), "it ends", timeout_s=20)


def processes_with(words, home):
    """Processes of this test's home with these words in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            told = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if words in told and str(home).encode() in (folder / "environ").read_bytes():
                found.append(told)
    return found


def test_without_a_terminal_a_run_that_has_ended_is_one_plain_screen(environment):
    run = install("ddp-failed", environment)
    code, shown, said = gangline("top", run)
    assert (code, said) == (0, "")
    assert shown.startswith(f"{run}  failed  attempt 1  step 20/100000")
    assert "\x1b" not in shown


def test_programs_get_json(environment):
    run = install("ddp-finished", environment)
    code, shown, _ = gangline("top", run, "--json")
    told = json.loads(shown)
    assert (code, told["run"], told["phase"], [each["rank"] for each in told["ranks"]]) == (0, run, "finished", [0, 1])


def test_a_cluster_without_a_run_is_this_computer(environment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, shown, _ = gangline("top", "--json")
    (host,) = json.loads(shown)["hosts"]
    assert (code, host["silent"]) == (0, None)
    assert 0 <= host["figures"]["cpu_percent"] <= 100
    assert host["figures"]["memory_bytes"] < host["memory_total_bytes"]


def test_a_damaged_state_is_shown_as_damaged(environment):
    run = install("ddp-finished", environment)
    (environment / "runs" / run / "state.json").write_text("{")
    code, shown, said = gangline("top", run, "--once")
    assert (code, "bug in gangline" in said) == (0, False), said
    assert shown.startswith(f"{run}  unknown")
    assert "state.json" in "".join(shown.split())  # a long path is broken to fit


def test_a_name_that_nothing_has_is_refused(environment):
    code, _, said = gangline("top", "none-such-1", "--once")
    assert (code, "no such run" in said, "  fix   " in said) == (2, True, True)
