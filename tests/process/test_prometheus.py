"""The figures of a run as Prometheus reads them, over a real port of this computer."""

import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from gangline.exporters import ExportedRun, Exporters

STEP = {
    **{f"train/{name}": 1.5 for name in ("loss", "learning_rate", "grad_norm", "tokens_per_s", "exposed_s")},
    **{
        f"rank{rank}/{name}": 10.0 + rank
        for rank in (0, 11)
        for name in ("micro_batches", "data_s", "compute_s", "wait_s", "wait_others_s", "memory_bytes")
    },
}
"""The names of worker/record.py."""
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


@pytest.fixture
def exported(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    failures = []
    run = ExportedRun(run_id="calm-otter-7", attempt=2, folder=tmp_path, job={})
    exporters = Exporters(
        {"prometheus": {"port": port}}, run, on_failure=lambda name, text: failures.append((name, text))
    )
    yield exporters, port, failures
    exporters.close()


def ask(port, path="/metrics", **headers):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def test_the_last_step_and_the_last_evaluation_are_there(exported):
    exporters, port, failures = exported
    assert ask(port).splitlines()[1:] == ["# TYPE gangline_attempt gauge", 'gangline_attempt{run="calm-otter-7"} 2.0']
    exporters.evaluation(0, {"evaluation/loss": 7.25})
    exporters.step(812, STEP)
    text = ask(port)
    assert 'gangline_step{run="calm-otter-7"} 812.0\n' in text
    assert 'gangline_evaluation_loss{run="calm-otter-7"} 7.25\n' in text
    assert 'gangline_train_tokens_per_second{run="calm-otter-7"} 1.5\n' in text
    rank = (
        "# TYPE gangline_rank_compute_seconds gauge\n"
        'gangline_rank_compute_seconds{run="calm-otter-7",rank="0"} 10.0\n'
        'gangline_rank_compute_seconds{run="calm-otter-7",rank="11"} 21.0\n'
    )
    assert rank in text
    assert failures == []


def test_every_query_of_the_dashboard_finds_a_figure(exported):
    exporters, port, _ = exported
    exporters.evaluation(0, {"evaluation/loss": 7.25})
    exporters.step(1, STEP)
    told = set(re.findall(r"^(gangline_\w+)\{", ask(port), re.MULTILINE))
    asked = set(re.findall(r"gangline_\w+", DASHBOARD.read_text()))
    assert asked <= told
    assert len(asked) >= 8
    assert len({panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]}) == 8


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [("/", "localhost", 404), ("/../etc/passwd", "localhost", 404), ("/metrics", "evil.example:80", 403)],
)
def test_nothing_else_is_answered_and_no_page_under_another_name(exported, path, host, status):
    _, port, _ = exported
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(port, path, Host=host if ":" in host else f"{host}:{port}")
    assert refused.value.code == status
    assert refused.value.read() == b""
    refused.value.close()


def test_a_port_that_is_taken_switches_it_off_and_the_run_goes_on(exported, tmp_path):
    first, port, _ = exported
    failures = []
    run = ExportedRun(run_id="bold-elk-1", attempt=1, folder=tmp_path, job={})
    second = Exporters({"prometheus": {"port": port}}, run, on_failure=lambda *each: failures.append(each))
    second.step(1, STEP)
    second.close()
    assert len(failures) == 1
    assert failures[0][0] == "prometheus"
    assert "Address already in use" in failures[0][1]
    first.step(3, STEP)
    assert 'run="calm-otter-7"} 3.0' in ask(port)


def test_a_later_attempt_has_the_same_port_at_once(exported, tmp_path):
    first, port, _ = exported
    assert ask(port)
    first.close()
    failures = []
    run = ExportedRun(run_id="calm-otter-7", attempt=3, folder=tmp_path, job={})
    later = Exporters({"prometheus": {"port": port}}, run, on_failure=lambda *each: failures.append(each))
    assert 'gangline_attempt{run="calm-otter-7"} 3.0' in ask(port)
    later.close()
    assert failures == []


def test_promtool_finds_nothing_wrong_with_the_text(exported):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here (Debian: prometheus)")
    exporters, port, _ = exported
    exporters.step(1, {**STEP, "train/loss": float("nan"), "train/grad_norm": float("inf")})
    done = subprocess.run([promtool, "check", "metrics"], input=ask(port), capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
