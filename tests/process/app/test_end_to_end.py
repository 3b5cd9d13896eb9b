"""The whole way with real processes, but for the training itself: command line, supervisor, host agents, files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gangline.cli.main import main
from gangline.context import load_cluster
from gangline.runs.cluster import Cluster
from gangline.runs.files import read_json, write_json
from gangline.runs.layout import RunLayout
from gangline.runs.registry import list_runs, read_record
from gangline.runs.state import ProcessId
from tests.process.app.world import JOB, PACKAGES, World
from tests.waiting import wait_until

PYTHON = """#!{python}
# The Python of the hosts: torchrun and the worker are played, everything else is real.
import json, os, pathlib, signal, sys, time

words = sys.argv[1:]
if words[:1] == ["-c"] and "importlib" in words[1] and "torch" in words:
    print("gangline-packages" + json.dumps({{"python": "3.12.1", "packages": {packages!r}}}))
elif words[:3] == ["-m", "gangline.worker", "inputs"]:
    if {slow}:
        pathlib.Path(words[4], "tokeniser").write_text(str(os.getpid()))
        time.sleep(600)
    folder = pathlib.Path(words[4], "data", "feed")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokens").write_bytes(b"tokens")
    from gangline.runs.files import file_digest, write_json
    write_json(folder / "set.json", {{"files": {{"tokens": {{"blake2b": file_digest(folder / "tokens")}}}}}})
    counts = {{"train": {{"samples": 100, "tokens": 6400, "skipped_rows": 0, "bad_rows": []}}, "evaluation": None}}
    print(json.dumps({{"kind": "result", "train": "feed", "evaluation": None, "model": "cafe", "counts": counts}}))
elif "torch.distributed.run" in words:
    gang = pathlib.Path(words[words.index("train") + 2])
    run = gang.parents[2]
    if words[words.index("--node-rank") + 1] == "0":
        with (run / "metrics.jsonl").open("a") as stream:
            for step in (1, 2, 3):
                record = {{"kind": "step", "step": step, "steps": 3, "loss": 4.0 - step, "step_s": 0.1}}
                stream.write(json.dumps(record) + "\\n")
    if {returncode} == 0 and words[words.index("--node-rank") + 1] == "0":
        gang.with_name("result.json").write_text('{{"result": "finished", "step": 3}}')
    print("torchrun says hello")
    sys.exit({returncode})
else:
    os.execv(sys.executable, [sys.executable, *words])
"""


@pytest.fixture
def words(world: World, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`train` with two hosts whose Python is the played one."""
    monkeypatch.setenv("GANGLINE_HOME", str(world.home))
    return train_words(world, returncode=0)


def train_words(world: World, *, returncode: int, slow: bool = False) -> list[str]:
    text = PYTHON.format(python=sys.executable, packages=PACKAGES, returncode=returncode, slow=slow)
    python = world.file("python", text)
    python.chmod(0o700)
    hosts = [
        {"name": name, "transport": "local", "workdir": str(world.root / "places" / name), "python": str(python)}
        for name in ("a", "b")
    ]
    cluster = world.file("two.yaml", json.dumps({"hosts": hosts}))
    return ["train", str(world.file("job.yaml", JOB)), "--cluster", str(cluster)]


def test_a_run_is_started_followed_and_listed(
    world: World, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    output = capsys.readouterr()
    run_id = output.out.strip()
    assert "step 3/3  loss 1" in output.err
    assert "training loss    3 at step 1 -> 1 at step 3" in output.err
    assert f"gangline logs {run_id}" in output.err
    assert [record.phase for record in list_runs(world.home)] == ["finished"]
    assert read_json(RunLayout(world.home, run_id).attempt(1) / "outcome.json")["result"] == "finished"
    assert main(["logs", run_id[:5], "--console"]) == 0
    assert "a console  torchrun says hello" in capsys.readouterr().out
    assert main(["attach", run_id]) == 0
    assert main(["stop", run_id]) == 0
    assert capsys.readouterr().out.strip() == f"{run_id} finished"


def test_logs_of_an_attempt_are_found_on_the_hosts_that_it_ran_on(
    world: World, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    layout = RunLayout(world.home, list_runs(world.home)[0].id)
    (moved,) = load_cluster(None, world.home).hosts
    write_json(layout.cluster, Cluster(name="elsewhere", hosts=(moved,)).to_json())
    capsys.readouterr()
    assert main(["logs", layout.run_id, "--console", "--attempt", "1"]) == 0
    assert "b console  torchrun says hello" in capsys.readouterr().out


def test_detached_train_prints_the_id_and_returns(
    world: World, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--detach"]) == 0
    run_id = capsys.readouterr().out.strip()
    assert main(["attach", run_id]) == 0
    assert read_record(RunLayout(world.home, run_id)).phase == "finished"


@pytest.mark.usefixtures("words")
def test_a_run_that_fails_ends_with_its_cause_and_exit_code_5(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(train_words(world, returncode=1)) == 5
    text = capsys.readouterr().err
    assert "error: " in text
    assert "gangline resume" in text
    assert "failing" not in text
    assert text.count("torchrun on a ended with exit code 1") == 1
    assert [record.phase for record in list_runs(world.home)] == ["failed"]


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_closing_the_terminal_during_preparation_ends_the_tokeniser_and_leaves_no_run(
    world: World, number: signal.Signals
) -> None:
    words = [sys.executable, "-m", "gangline.cli.main", *train_words(world, returncode=0, slow=True)]
    command = ["env", "--default-signal=HUP,TERM", *words]  # under nohup HUP would be ignored
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    note = world.root / "places" / "a" / "tokeniser"
    wait_until(lambda: note.exists() and note.read_text(encoding="utf-8"), "the tokeniser runs", timeout_s=30)
    process.send_signal(number)
    _output, words = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert ProcessId.of(int(note.read_text(encoding="utf-8"))) is None
    assert list_runs(world.home) == []
    assert "nothing was started" in words


def test_check_and_plan_change_nothing(world: World, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cluster = words[-1]
    before = sorted(world.root.rglob("*"))
    assert main(["check", cluster]) == 0
    assert "ok   a, b" in capsys.readouterr().out
    assert main(["check", cluster, "--json"]) == 0
    assert [host["host"] for host in json.loads(capsys.readouterr().out)["inventory"]["hosts"]] == ["a", "b"]
    assert main(["plan", *words[1:]]) == 0
    assert "12 samples = 6 micro-batches of 2" in capsys.readouterr().out
    assert main(["plan", *words[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["batch"] == 12
    assert sorted(world.root.rglob("*")) == before


def test_plan_of_a_cluster_that_is_not_ready_shows_it_and_exits_3(
    world: World, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    python = Path(world.root / "python")
    python.write_text(python.read_text(encoding="utf-8").replace("2.13.0", "2.9.0"), encoding="utf-8")
    assert main(["plan", *words[1:]]) == 3
    output = capsys.readouterr()
    assert "E-SW-02" in output.out
    assert "error: " in output.err
    assert main(["check", words[-1], "--json"]) == 3
    assert "E-SW-02" in {finding["id"] for finding in json.loads(capsys.readouterr().out)["findings"]}
