"""gangline.hooks: what a script tells by it, with and without gangline around it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from gangline.agent.supervise import rank_stacks, rank_start, script_hooks
from gangline.runs.layout import RunLayout

STEPS = """
from gangline import hooks
for step in (1, 2):
    hooks.step(step, steps=9, loss=2.5, tokens=100)
print(hooks.__file__)
"""
STOPS = """
import os, signal
from gangline import hooks
hooks.step(1)
assert not hooks.should_stop()
os.kill(os.getpid(), signal.SIGTERM)
print(hooks.should_stop(), flush=True)
"""


def test_steps_are_told_where_gangline_is_not_installed(tmp_path):
    """Python's own interpreter has no gangline; the host agent has put the files where they are here."""
    files, own = tmp_path / "run/attempts/1", tmp_path / "run/attempts/1/pc1"
    for module, place in (
        (rank_start, ""),
        (rank_stacks, "path/sitecustomize.py"),
        (script_hooks, "hooks/gangline/hooks.py"),
    ):
        path = own / (place or "rank_start.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(module.__file__, path)
    (own / "hooks/gangline/__init__.py").touch()
    words = [sys._base_executable, str(own / "rank_start.py"), str(files), sys._base_executable, "-c", STEPS]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(words, env={**env, "RANK": "0"}, check=True)
    assert (files / "rank-0.log").read_text() == f"{own}/hooks/gangline/hooks.py\n"
    assert (files / "rank-0.step").read_text() == "2\n"
    first, second = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert (first["kind"], first["step"], first["steps"], first["loss"], first["step_s"]) == ("step", 1, 9, 2.5, None)
    assert second["tokens_per_s"] == 100 / second["step_s"]


def test_elsewhere_a_step_leaves_nothing_and_sigterm_asks_to_stop(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != script_hooks.FOLDER}
    done = subprocess.run(
        [sys.executable, "-c", STOPS], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"
    assert list(tmp_path.iterdir()) == []


def test_only_rank_0_writes_figures(tmp_path):
    files = tmp_path / "run/attempts/1"
    files.mkdir(parents=True)
    env = {**os.environ, script_hooks.FOLDER: str(files), "RANK": "1"}
    subprocess.run([sys.executable, "-c", STEPS], env=env, check=True, stdout=subprocess.DEVNULL)
    assert [path.name for path in Path(tmp_path / "run").rglob("*") if path.is_file()] == ["rank-1.step"]


def test_the_signal_is_left_to_a_script_that_does_not_ask():
    text = "import signal\nfrom gangline import hooks\nhooks.step(1)\nprint(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert signal.SIGTERM == 15


def test_a_script_that_counts_from_0_has_done_all_its_steps_also_after_a_resume(tmp_path):
    """The second process is a resumed one: it begins in the middle."""
    for attempt, numbers in ((1, "0, 1"), (2, "2, 3")):
        files = tmp_path / f"run/attempts/{attempt}"
        files.mkdir(parents=True)
        env = {**os.environ, script_hooks.FOLDER: str(files), "RANK": "0"}
        text = f"from gangline import hooks\nfor step in ({numbers}): hooks.step(step, steps=4)"
        subprocess.run([sys.executable, "-c", text], env=env, check=True)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert (files / "rank-0.step").read_text() == "3\n"


def test_a_script_that_counts_from_1_and_begins_in_the_middle_is_taken_at_its_word(tmp_path):
    files = tmp_path / "run/attempts/1"
    files.mkdir(parents=True)
    env = {**os.environ, script_hooks.FOLDER: str(files), "RANK": "0"}
    text = "from gangline import hooks\nfor step in (7, 8): hooks.step(step, steps=9)"
    subprocess.run([sys.executable, "-c", text], env=env, check=True)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [7, 8]


ASKS = """
import pathlib, sys
from gangline import hooks
order = pathlib.Path(sys.argv[1])
said = [hooks.save_now()]
order.write_text("{}")
said += [hooks.save_now(), order.exists(), hooks.save_now(), hooks.should_stop()]
print(said)
"""


def test_an_order_to_save_is_taken_once_by_rank_0_which_has_said_that_it_takes_them(tmp_path):
    """The names are those of the layout, which this file, alone on a host, cannot import."""
    attempt = RunLayout(tmp_path, "run")
    order, mark = attempt.save_order(1), attempt.script_saves(1)
    order.parent.mkdir(parents=True)
    said = {}
    for rank in "01":
        env = {**os.environ, script_hooks.FOLDER: str(order.parent), "RANK": rank}
        words = [sys.executable, "-c", ASKS, str(order)]
        said[rank] = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.strip()
        if rank == "0":
            assert mark.exists()
            mark.unlink()
    assert said == {"0": "[False, True, False, False, False]", "1": "[False, False, True, False, False]"}
    assert not mark.exists()
