"""Real trackers: what they hold is what metrics.jsonl has, and one that is gone or silent gets what it missed, or nothing.

`make trackers` puts W&B, MLflow and Trackio into `.trackers`, whose Python runs the processes of trackers here; without
it these tests are skipped. W&B is offline: its file is read back. MLflow is a server of the test with a store in
SQLite. Trackio writes its own SQLite file. The figures are those of a recorded run, with evaluations.
"""

import contextlib
import json
import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.request
from datetime import datetime

import pytest

from gangline import exporters
from gangline.exporters import ExportedRun, Exporters, named_figures
from tests.lab.hosts import ROOT
from tests.recorded import RECORDED
from tests.waiting import wait_until

PYTHON = ROOT / ".trackers" / "bin" / "python"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no .trackers: make trackers"),
    pytest.mark.timeout(900),
]
PROJECT = "of-tests"
RUN = "calm-otter-7"
EVALUATION = {"kind": "evaluation", "loss": 4.5, "perplexity": 90.0171313005218}
PATIENCE_S = 300.0
"""Three libraries and a server with a new store take seconds to come up, and much longer beside other tests."""
READ_WANDB = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2
for path in sys.argv[1:]:
    data, at, record = open(path, "rb").read(), 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:  # a header does not reach into the next block
            at += room
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found = wandb_internal_pb2.Record()
            found.ParseFromString(record)
            record = b""
            if found.WhichOneof("record_type") == "history":
                items = found.history.item
                print(json.dumps({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}))
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class MlflowServer:
    """An MLflow server on the loopback, with its store in a file."""

    def __init__(self, folder):
        self.port = free_port()
        self.store = folder / "mlflow.db"
        self._process = None

    @property
    def uri(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        with (self.store.parent / "mlflow.log").open("ab") as log:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.store}", *where],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.store.parent,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        wait_until(self._answers, "MLflow's server answers", timeout_s=PATIENCE_S)

    def _answers(self):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
            return answer.status == 200
        return False

    def kill(self):
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def ask(self, words):
        with contextlib.closing(sqlite3.connect(self.store, timeout=60)) as store:
            return store.execute(words).fetchall()

    def change(self, words):
        with contextlib.closing(sqlite3.connect(self.store, timeout=60)) as store, store:
            store.execute(words)

    def points(self):
        """(name, step, milliseconds) -> value of all metrics."""
        rows = self.ask("select key, step, timestamp, value, is_nan from metrics")
        return {(name, step, when): math.nan if is_nan else value for name, step, when, value, is_nan in rows}


@pytest.fixture
def mlflow(tmp_path):
    server = MlflowServer(tmp_path)
    yield server
    server.kill()


class Desk:
    """A run's folder on the head, and its figures, line by line."""

    def __init__(self, folder):
        self.folder, self.metrics, self.told, self.attempt = folder, folder / "metrics.jsonl", [], 0
        recorded = next(RECORDED.glob("ddp-stopped/hosts/pc1/runs/*/metrics.jsonl")).read_text().splitlines()
        self.recorded = iter(recorded)
        self.exporters = None

    def begin(self, report):
        self.attempt += 1
        job = {"batch": {"size": 12}, "steps": 60}
        run = ExportedRun(run_id=RUN, attempt=self.attempt, folder=self.folder, job=job, metrics=self.metrics)
        self.exporters = Exporters(
            report,
            run,
            on_failure=lambda name, error: self.told.append(f"{name}: {error}"),
            on_return=lambda name: self.told.append(f"{name} is back"),
        )

    def train(self, count):
        """So many steps, and an evaluation."""
        for _ in range(count):
            line = next(self.recorded)
            self.write(line)
        self.write(json.dumps({**json.loads(line), **EVALUATION}))

    def write(self, line):
        with self.metrics.open("a") as stream:
            stream.write(line + "\n")
        self.exporters.step(1, {})

    def is_told(self, count):
        self.exporters.step(1, {})
        return len(self.told) >= count

    def lines(self):
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]

    def in_mlflow(self):
        """What an MLflow that has all of it holds."""
        return {
            (name, line["step"], milliseconds(line)): value
            for line in self.lines()
            for name, value in named_figures(line).items()
        }


def milliseconds(line):
    return round(datetime.fromisoformat(line["time"].replace("Z", "+00:00")).timestamp() * 1000)


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(PYTHON))
    monkeypatch.setattr(exporters, "CLOSE_S", PATIENCE_S)
    monkeypatch.setattr(exporters, "HASTE_S", PATIENCE_S)
    monkeypatch.setattr(exporters, "SILENT_S", PATIENCE_S)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (tmp_path / "run").mkdir()
    desk = Desk(tmp_path / "run")
    yield desk
    if desk.exporters is not None:
        desk.exporters.close(in_haste=True)


def of_wandb(folder):
    """The rows of history of all files that attempts left, and how many files those are."""
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    done = subprocess.run([PYTHON, "-c", READ_WANDB, *files], capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [(row["step"], {name: value for name, value in row.items() if "/" in name}) for row in rows], len(files)


def of_trackio(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / f"{PROJECT}.db")) as store:
        rows = store.execute("select run_name, step, metrics from metrics order by id").fetchall()
    return [(name, step, json.loads(text)) for name, step, text in rows]


def test_three_trackers_hold_the_same_figures_as_the_run_over_two_attempts(desk, mlflow, tmp_path):
    mlflow.start()
    report = {
        "wandb": {"project": PROJECT},
        "trackio": {"project": PROJECT},
        "mlflow": {"uri": mlflow.uri, "experiment": PROJECT},
    }
    for count in (12, 9):
        desk.begin(report)
        desk.train(count)
        desk.exporters.close()
    assert desk.told == []
    wanted = [(line["step"], named_figures(line)) for line in desk.lines()]
    assert len(wanted) == 23
    assert any("evaluation/loss" in values for _, values in wanted)
    assert any("rank1/compute_s" in values for _, values in wanted)

    assert of_wandb(desk.folder) == (wanted, 2)
    assert of_trackio(tmp_path) == [(RUN, *row) for row in wanted]
    assert mlflow.points() == desk.in_mlflow()
    assert mlflow.ask("select name, status from runs") == [(RUN, "FINISHED")]
    assert ("batch.size", "12") in mlflow.ask("select key, value from params")


def test_mlflow_gets_keys_that_it_lacks_and_is_told_that_an_attempt_has_failed(desk, mlflow):
    mlflow.start()
    for in_haste, status in ((False, "FINISHED"), (True, "FAILED")):
        desk.begin({"mlflow": {"uri": mlflow.uri}})
        desk.train(1)
        wait_until(lambda: mlflow.points() == desk.in_mlflow(), "the server has the figures", timeout_s=PATIENCE_S)
        desk.exporters.close(in_haste=in_haste)
        assert mlflow.ask("select name, status from runs") == [(RUN, status)]
        assert dict(mlflow.ask("select key, value from params")) == {"batch.size": "12", "steps": "60"}
        mlflow.change("delete from params where key = 'steps'")  # as of a server that went away too early
    assert desk.told == []


def test_a_server_that_is_killed_and_comes_back_gets_what_it_has_missed(desk, mlflow):
    mlflow.start()
    desk.begin({"mlflow": {"uri": mlflow.uri}})
    desk.train(5)
    wait_until(lambda: mlflow.points() == desk.in_mlflow(), "the server has the figures", timeout_s=PATIENCE_S)
    mlflow.kill()
    desk.train(5)
    wait_until(lambda: desk.is_told(1), "its loss is told", timeout_s=PATIENCE_S)
    desk.train(5)
    mlflow.start()
    wait_until(lambda: desk.is_told(2), "its return is told", timeout_s=PATIENCE_S)
    desk.exporters.close()
    assert mlflow.points() == desk.in_mlflow()
    assert "Connection" in desk.told[0]
    assert desk.told[1:] == ["mlflow is back"]


def test_a_server_that_never_answers_is_told_once_and_holds_nobody(desk, monkeypatch):
    monkeypatch.setattr(exporters, "SILENT_S", 1.0)
    monkeypatch.setattr(exporters, "HASTE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        desk.begin({"mlflow": {"uri": f"http://127.0.0.1:{silent.getsockname()[1]}"}})
        desk.train(10)
        wait_until(lambda: desk.is_told(1), "its silence is told", timeout_s=PATIENCE_S)
        desk.train(10)
        desk.exporters.close()
    assert "no answer for 1 s" in desk.told[0]
    assert len(desk.told) == 2
    size = desk.metrics.stat().st_size
    assert desk.told[1].startswith(f"mlflow: the last {size} bytes of metrics.jsonl did not reach it")
