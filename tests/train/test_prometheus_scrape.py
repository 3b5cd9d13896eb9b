"""A real Prometheus scrapes a real run: every query of the dashboard in docs/ finds figures there."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from tests.train.story import JOB, copy_world, make_user, write_cluster, write_job

PROGRAM = shutil.which("prometheus")
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(PROGRAM is None, reason="prometheus is not installed: apt-get install prometheus"),
]
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
EVALUATED = {"data": {**JOB["data"], "eval": 0.2}, "evaluation": {"every_steps": 5}}
CONFIGURATION = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: gangline
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def port():
    """Where the run shows its figures."""
    return free_port()


@pytest.fixture
def user(world, quick_python, tmp_path, port):
    """Somebody with a run of two ranks, one of which is slow."""
    user = make_user(tmp_path / "user", python=quick_python)
    copy_world(world, user)
    write_job(user, steps=4000, report={"prometheus": port}, **EVALUATED)
    write_cluster(user, "two", pc1={"share": 2}, pc2={"share": 1, "env": {"GANGLINE_SIMULATED_SLOWDOWN": 10}})
    yield user
    user.end_runs()


class Server:
    """A Prometheus of this test, on the loopback alone."""

    def __init__(self, folder, *, scrapes):
        self._port = free_port()
        (folder / "prometheus.yml").write_text(CONFIGURATION.format(port=scrapes))
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def query(self, words):
        """The series that a query finds now; [] while the server comes up."""
        asked = urllib.parse.urlencode({"query": words})
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/query?{asked}", timeout=10) as answer:
                return json.load(answer)["data"]["result"]
        except OSError:
            return []

    def close(self):
        self._process.terminate()
        self._process.wait(20)
        self._log.close()


def test_every_query_of_the_dashboard_finds_figures_of_a_run_that_trains(user, port, tmp_path):
    run = user.gangline("train", "job.yaml", "--cluster", "two.yaml", "--detach").out.strip()
    user.wait_for_step(run, 10)
    queries = [
        target["expr"].replace("$run", run)
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel.get("targets", [])
    ]
    assert len(queries) >= 9
    server = Server(tmp_path, scrapes=port)
    try:
        deadline, found = time.monotonic() + 60, {}
        while len(found) < len(queries):
            assert time.monotonic() < deadline, f"nothing for {set(queries) - found.keys()}"
            found |= {words: series for words in queries if (series := server.query(words))}
            time.sleep(0.5)
        before = float(server.query(f'gangline_step{{run="{run}"}}')[0]["value"][1])
        while float(server.query(f'gangline_step{{run="{run}"}}')[0]["value"][1]) <= before:
            assert time.monotonic() < deadline, "the step stands still"
            time.sleep(0.5)
    finally:
        server.close()
    ranks = {series["metric"].get("rank") for words in queries if "_rank_" in words for series in found[words]}
    assert ranks == {"0", "1"}
    user.gangline("stop", run)
    loss = float(found[f'gangline_train_loss{{run=~"{run}"}}'][0]["value"][1])
    written = [line["loss"] for line in user.metrics("pc1", run)]
    assert min(abs(loss - each) for each in written) < 1e-6
