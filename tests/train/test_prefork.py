"""Promise: a second attempt pays for no imports."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from gangline.runs.files import write_json
from tests.train.attempts import START_S, Run, free_port
from tests.waiting import wait_until

STEPS = 12
ROOT_ENV = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.fixture
def run(zygote, tmp_path):
    return Run(zygote, tmp_path / "run", steps=STEPS)


@pytest.fixture
def warm_pool(run):
    """warm_pool() starts the process for attempt 1, as torchrun would."""
    started = []

    def _warm_pool():
        control = run.layout.attempt(1) / "prefork"
        control.mkdir()
        words = ["train", run.layout.job, run.layout.gang(1), run.folder]
        argv = [sys.executable, "-m", "gangline.worker", "prefork", control, *words]
        # more threads than one are what numpy would start when it is imported
        environment = {
            **os.environ,
            "GANGLINE_SIMULATED_SLOWDOWN": "10",
            **ROOT_ENV,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "2",
            "OMP_WAIT_POLICY": "passive",
        }
        started.append(subprocess.Popen(list(map(str, argv)), env=environment))
        return started[0], control

    yield _warm_pool
    for process in started:
        process.kill()
        process.wait()


def told(run, attempt, name):
    """What a file of rank 0 says, once it is there."""
    path = run.layout.attempt(attempt) / f"rank-0.{name}"
    wait_until(path.exists, f"{name} of attempt {attempt} is there", timeout_s=START_S)
    return json.loads(path.read_text())


def give_position(run, control, attempt):
    """As the host agent does for the next attempt."""
    position = {"words": ["train", str(run.layout.job), str(run.layout.gang(attempt)), str(run.folder)]}
    position |= {
        "ranks": [0],
        "world_size": 1,
        "meet": ["127.0.0.1", free_port()],
        "files": str(run.layout.attempt(attempt)),
    }
    write_json(control / f"position-{attempt}.json", position)


@pytest.mark.gpu
def test_a_forked_rank_computes_on_the_gpu(run, warm_pool):
    run.write_gang(1, ["pc1"], [10])
    process, _ = warm_pool()
    assert process.wait(START_S) == 0
    log = run.log(1, 0)
    assert "joined: rank 0 of 1 on pc1, cuda" in log
    assert "no prefork process" not in log
    assert told(run, 1, "exit.json")["pid"] != process.pid
    assert list(run.steps(1)) == list(range(1, STEPS + 1))


def test_attempts_of_one_process_and_only_the_first_imports(run, warm_pool):
    run.write_gang(1, ["pc1"], [10])
    started_s = time.monotonic()
    process, control = warm_pool()
    assert told(run, 1, "pid")["pid"] == process.pid, "it is there before it has imported anything"
    wait_until(lambda: run.steps(1), "a first step is done", timeout_s=START_S)
    first_s = time.monotonic() - started_s
    rank = told(run, 1, "pid")["pid"]
    os.kill(rank, signal.SIGKILL)
    ended = told(run, 1, "exit.json")
    assert (ended["pid"], ended["code"]) == (rank, -signal.SIGKILL)
    assert rank != process.pid

    run.write_gang(2, ["pc1", "pc2"], [5, 5])
    began_s = time.monotonic()
    give_position(run, control, 2)
    assert told(run, 2, "exit.json")["code"] == 5, "a rank that cannot be told what to do ends as it would alone"
    assert "another number of processes" in run.error(2, 0)["what"]

    run.write_gang(3, ["pc1"], [10])
    give_position(run, control, 3)
    wait_until(lambda: run.steps(3), "a first step is done again", timeout_s=START_S)
    assert time.monotonic() - began_s < first_s / 2
    assert process.wait(START_S) == 0
    end = told(run, 3, "exit.json")
    assert (end["code"], end["pid"] in {rank, process.pid}) == (0, False)
    assert list(run.steps(3)) == list(range(1, STEPS + 1))
