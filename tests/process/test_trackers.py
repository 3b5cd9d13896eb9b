"""Trackers: a process beside rank 0 delivers the figures, and whatever becomes of it, rank 0 goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gangline import exporters
from gangline.exporter_process import _last_word
from gangline.exporters import ExportedRun, Exporters, named_figures
from gangline.supervise import hang
from tests.packages import installed, make_package
from tests.waiting import wait_until

TRACKER = """
import json, os, time
from pathlib import Path
from gangline.exporters import Exporter

class Planted:
    '''Writes what it gets, unless the file `mode` says what is wrong with it.'''

    def __init__(self, options, run):
        self.folder = run.folder
        self.do("open")

    def do(self, at):
        mode = (self.folder / "mode").read_text().split()
        if at in mode[1:]:
            with (self.folder / "reached").open("a") as stream:
                stream.write(".")
            if mode[0] == "raises":
                raise ConnectionError("no way\\nto it")
            if mode[0] == "exits":
                os._exit(7)
            while (self.folder / "mode").read_text() != "well":
                time.sleep(0.05)

    def send(self, points):
        self.do("send")
        with (self.folder / "got").open("a") as stream:
            for point in points:
                stream.write(json.dumps([point.step, point.time.isoformat(), dict(point.values)]) + "\\n")

    def close(self, *, failed):
        self.do("close")
        (self.folder / "closed").write_text(str(failed))

ROW = Exporter(open=Planted, apart=True)
"""
RANKS = [
    {"rank": rank, "host": "pc1", "micro_batches": 2, "data_s": 0.1, "compute_s": 0.2, "wait_s": 0.0, "memory_bytes": 9}
    for rank in range(2)
]


class Story:
    """A run's folder, its metrics, and the exporter `planted`."""

    def __init__(self, folder):
        self.folder, self.metrics, self.told = folder, folder / "metrics.jsonl", []
        self.attempt, self.steps = 0, 0
        self.says("well")

    def says(self, mode):
        (self.folder / "mode").write_text(mode)

    def begin(self):
        self.attempt += 1
        run = ExportedRun(
            run_id="calm-otter-7", attempt=self.attempt, folder=self.folder, job={"steps": 9}, metrics=self.metrics
        )
        self.exporters = Exporters(
            {"planted": {}},
            run,
            on_failure=lambda name, error: self.told.append(f"{name}: {error}"),
            on_return=lambda name: self.told.append(f"{name} is back"),
        )

    def train(self, count=1):
        """So many steps, which are told to the exporters as rank 0 does."""
        for _ in range(count):
            self.steps += 1
            line = {
                "kind": "step",
                "time": f"2026-11-28T10:00:{self.steps % 60:02}.250Z",
                "step": self.steps,
                "loss": 5 / self.steps,
                "learning_rate": 1e-4,
                "grad_norm": "nan" if self.steps == 2 else 1.5,
                "tokens_per_s": 100.0,
                "exposed_s": 0.01,
                "mfu": None,
                "ranks": RANKS,
            }
            with self.metrics.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
            self.exporters.step(self.steps, {})

    def got(self):
        path = self.folder / "got"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def await_told(self, count):
        """Until so much was told; the run looks at each step, here without a step."""

        def is_so():
            self.exporters.step(self.steps, {})
            return len(self.told) >= count

        wait_until(is_so, f"{count} things are told")

    def reached(self):
        """How often the tracker came to where something is wrong."""
        path = self.folder / "reached"
        return path.stat().st_size if path.exists() else 0


@pytest.fixture
def story(tmp_path, monkeypatch):
    site = make_package(
        tmp_path / "site",
        "planted",
        modules={"planted.py": TRACKER},
        entry_points={"gangline.exporters": {"planted": "planted:ROW"}},
    )
    monkeypatch.setenv("PYTHONPATH", str(site))
    folder = tmp_path / "run"
    folder.mkdir()
    with installed(site):
        story = Story(folder)
        yield story
        story.says("well")
        story.exporters.close(in_haste=True)


def test_every_figure_arrives_once_over_all_attempts(story):
    story.begin()
    story.train(40)
    with story.metrics.open("a") as stream:
        stream.write(
            '{"kind": "evaluation", "time": "2026-11-28T10:00:41Z", "step": 40, "loss": 4.5, "perplexity": 90}\n'
        )
        stream.write('{"kind": "step", "torn\n')
    story.exporters.close()
    assert story.told == []
    assert (story.folder / "closed").read_text() == "False"
    story.begin()
    story.train(3)
    story.exporters.close(in_haste=True)
    assert (story.folder / "closed").read_text() == "True", "that attempt has failed"
    lines = story.metrics.read_text().splitlines()
    whole = [json.loads(line) for line in lines if not line.endswith("torn")]
    assert len(whole) == 44
    got = story.got()
    assert [(step, when) for step, when, _ in got] == [
        (each["step"], each["time"].replace("Z", "+00:00").replace(".250+", ".250000+")) for each in whole
    ]
    for (_, _, values), line in zip(got, whole, strict=True):
        assert repr(values) == repr(named_figures(line))
    assert got[0][2]["train/loss"] == 5.0
    assert got[0][2]["rank1/compute_s"] == 0.2
    assert "train/mfu" not in got[0][2]
    assert got[40][2] == {"evaluation/loss": 4.5, "evaluation/perplexity": 90.0}
    assert story.told == []


@pytest.mark.parametrize("at", ["open", "send"])
def test_a_service_that_fails_is_told_once_and_gets_what_it_missed_when_it_is_back(story, at):
    story.says(f"raises {at}")
    story.begin()
    story.train(5)
    story.await_told(1)
    story.train(5)
    wait_until(lambda: story.reached() >= 3, "it is tried again")
    story.train(1)
    assert story.told == ["planted: ConnectionError: no way to it"]
    story.says("well")
    story.await_told(2)
    assert story.told[1:] == ["planted is back"]
    story.exporters.close()
    assert [step for step, _, _ in story.got()] == list(range(1, 12))
    assert len(story.told) == 2


@pytest.mark.parametrize("at", ["open", "send"])
def test_a_service_that_never_answers_is_told_and_holds_nobody(story, at, monkeypatch):
    monkeypatch.setattr(exporters, "SILENT_S", 0.5)
    monkeypatch.setattr(exporters, "HASTE_S", 0.5)
    story.says(f"hangs {at}")
    story.begin()
    story.train(5)
    story.await_told(1)
    story.train(2000)  # none of them waits
    began = time.monotonic()
    story.exporters.close()
    assert time.monotonic() - began < exporters.CLOSE_S, "it is in trouble, so it gets less time"
    assert len(story.told) == 2
    assert "no answer for 0 s; it gets what it has missed" in story.told[0]
    assert "bytes of metrics.jsonl did not reach it" in story.told[1]
    assert story.got() == []
    story.says("well")
    story.begin()
    story.exporters.close()
    assert [step for step, _, _ in story.got()] == list(range(1, 2006)), "the next attempt sends it"


def test_a_process_that_dies_is_told_and_another_one_goes_on(story, monkeypatch):
    monkeypatch.setattr(exporters, "RESTART_S", 0.2)
    story.says("exits send")
    story.begin()
    story.train(5)
    story.await_told(1)
    assert "planted: its process has ended with 7; it is started again" in story.told[0]
    story.says("well")
    story.train(5)

    def has_all():
        story.exporters.step(10, {})
        return len(story.got()) == 10

    wait_until(has_all, "another process delivers")
    story.exporters.close()
    assert len(story.told) == 1


def test_a_process_that_always_dies_is_left_alone_in_the_end(story, monkeypatch):
    monkeypatch.setattr(exporters, "RESTART_S", 0.01)
    story.says("exits open")
    story.begin()
    story.train(2)
    story.await_told(1 + exporters.RESTARTS)
    assert ["stays away" in each for each in story.told] == [False] * exporters.RESTARTS + [True]
    for _ in range(50):
        story.train(1)
    assert len(story.told) == 1 + exporters.RESTARTS


def test_it_ends_with_a_rank_that_is_killed(story, tmp_path):
    words = """
import sys, time
from pathlib import Path
from gangline.exporters import ExportedRun, Exporters
folder = Path(sys.argv[1])
run = ExportedRun(run_id="a", attempt=1, folder=folder, job={}, metrics=folder / "metrics.jsonl")
each = Exporters({"planted": {}}, run, on_failure=print)
print(each._open["planted"]._process.pid, flush=True)
time.sleep(600)
"""
    story.begin()  # for the fixture
    story.exporters.close()
    (story.folder / "closed").unlink()
    story.says("hangs send")
    rank = subprocess.Popen(
        [sys.executable, "-c", words, str(story.folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], *filter(None, sys.path)])},
    )
    pid = int(rank.stdout.readline())
    story.train(1)
    wait_until(story.reached, "the tracker has something to do")
    os.kill(pid, signal.SIGTERM)  # as a stop sends it to all of the rank's processes
    story.says("well")
    wait_until(story.got, "it goes on")
    rank.kill()
    rank.communicate()
    wait_until((story.folder / "closed").exists, "it closes its tracker")
    wait_until(lambda: (story.folder / "closed").read_text() == "True", "as of an attempt that has failed")
    wait_until(lambda: not _is_alive(pid), "it ends")


def test_the_word_of_a_rank_that_is_gone_is_not_waited_for_where_a_child_of_it_holds_the_pipe():
    source, target = os.pipe()
    try:
        assert _last_word(source) == (exporters.HASTE_S, True)
        os.write(target, b'{"close_s": 20.0, "failed": false}\n')
        assert _last_word(source) == (20.0, False)
    finally:
        os.close(source)
        os.close(target)


def test_a_tracker_that_never_ends_is_no_hang():
    assert exporters.CLOSE_S + 2 + 5 < hang.STEP_S, "rank 0 waits 2 s more, and has more to close"


def _is_alive(pid):
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
