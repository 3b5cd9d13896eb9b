"""Sweeps through the real command on two hosts that are this computer: the ranking, a stop, a killed supervisor, a bad
point, and a trial that moves to another host between two rungs.
"""

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest

from gangline.config.load import load_cluster, load_job
from gangline.provision.console import SILENT
from gangline.sweep.begin import alone
from gangline.sweep.trial_runs import OwnRuns
from tests.train.story import copy_world, make_user, write_cluster, write_job

pytestmark = pytest.mark.timeout(400)

GRID = ("optimizer.learning_rate=1e-4,3e-3", "seed=1,2", "steps=12")
SLOW = {"env": {"GANGLINE_SIMULATED_SLOWDOWN": 8}}


@pytest.fixture
def user(world, quick_python, tmp_path, monkeypatch):
    """Somebody with a corpus, a model and two hosts."""
    user = make_user(tmp_path / "user", python=quick_python)
    copy_world(world, user)
    write_job(user)
    write_cluster(user, "two", pc1={}, pc2={})
    write_cluster(user, "slow", pc1=SLOW, pc2=SLOW)
    monkeypatch.chdir(user.folder)
    yield user
    for path in (user.home / "sweeps").glob("*"):
        user.gangline("sweep", "stop", path.name, "--now", code=None)
    user.end_runs()


def shown(user, sweep):
    return json.loads(user.gangline("sweep", "show", sweep, "--json").out)


def phases(user, sweep):
    return sorted(trial["phase"] for trial in shown(user, sweep)["trials"])


@pytest.mark.slow
def test_four_points_on_two_hosts_are_ranked_as_runs_one_after_the_other_would_be(user):
    said = user.gangline("sweep", "job.yaml", *GRID, "--cluster", "two.yaml")
    sweep = said.out.splitlines()[0]
    found = shown(user, sweep)
    assert [trial["phase"] for trial in found["trials"]] == ["finished"] * 4
    assert {trial["hosts"][0] for trial in found["trials"]} == {"pc1", "pc2"}
    losses = {trial["number"]: trial["losses"]["12"] for trial in found["trials"]}
    assert [trial["number"] for trial in found["trials"]] == sorted(losses, key=losses.get)
    best = found["trials"][0]
    assert found["best"] == best["number"]
    assert best["point"]["optimizer.learning_rate"] == "3e-3"
    alone_words = [f"{key}={value}" for key, value in best["point"].items()]
    run = user.gangline("train", "job.yaml", *alone_words, "--cluster", "two.yaml", "--detach").out.strip()
    assert user.wait_for_end(run) == "finished"
    by_two = json.loads((user.at_host("pc1", run) / "metrics.jsonl").read_text().splitlines()[-1])
    assert by_two["loss"] == pytest.approx(best["losses"]["12"], rel=1e-5)  # one rank or two: the same training
    assert {row["id"] for row in user.runs()} >= {trial["run"] for trial in found["trials"]}
    exported = user.gangline(*found["export"][1:]).out.strip()
    assert Path(exported).is_dir()
    assert user.wait_until_quiet() == []


def test_a_bad_point_is_named_and_nothing_starts(user):
    said = user.gangline("sweep", "job.yaml", "batch=12,0", "--cluster", "two.yaml", code=2)
    assert said.parts[0].startswith("point 2 (batch=0)")
    assert not (user.home / "runs").exists()
    assert not (user.home / "sweeps").exists()


@pytest.mark.slow
def test_a_sweep_is_stopped_and_continued_also_after_its_supervisor_was_killed(user):
    words = ("job.yaml", "seed=1,2,3", "steps=20", "--cluster", "slow.yaml", "--detach")
    sweep = user.gangline("sweep", *words).out.strip()
    user.wait_until(lambda: any(trial["step"] > 2 for trial in shown(user, sweep)["trials"]))
    assert user.gangline("sweep", "stop", sweep).out.strip() == f"{sweep} stopped"
    assert user.wait_until_quiet() == []
    before = {trial["number"]: trial for trial in shown(user, sweep)["trials"]}
    assert {trial["phase"] for trial in before.values()} == {"waiting"}

    user.gangline("sweep", "resume", sweep, "--detach")
    user.wait_until(lambda: "running" in phases(user, sweep))
    state = json.loads((user.home / "sweeps" / sweep / "state.json").read_text())
    os.kill(state["supervisor"]["pid"], signal.SIGKILL)
    user.wait_until(lambda: shown(user, sweep)["phase"] == "lost")
    user.gangline("sweep", "add", sweep, "seed=4")  # starts a supervisor, too
    user.wait_until(lambda: shown(user, sweep)["phase"] == "finished")
    after = shown(user, sweep)["trials"]
    assert [trial["phase"] for trial in after] == ["finished"] * 4, [trial["error"] for trial in after]
    assert all(
        trial["run"] == before[trial["number"]]["run"] for trial in after if before.get(trial["number"], {}).get("run")
    )
    assert len(user.recorded()) == 4  # nothing was started twice
    assert user.wait_until_quiet() == []


@pytest.mark.slow
def test_a_trial_that_moves_between_rungs_is_equal_to_one_that_stays_to_the_last_bit(user):
    home = user.home
    job = load_job(user.folder / "job.yaml", ["steps=12", "optimizer.learning_rate=1e-3"])
    job = dataclasses.replace(job, pause_at=5)
    cluster = load_cluster(user.folder / "two.yaml", home=home)
    runs = OwnRuns(home, force=False, console=SILENT)
    steps = {}
    for name, second in (("moved", "pc2"), ("stayed", "pc1")):
        run = runs.start(job, alone(cluster, "pc1"), trial={"sweep": "sweep-elk-1", "number": 1})
        assert user.wait_for_end(run) == "stopped"
        assert (sight := runs.look(run)).step == 5
        assert "5" in sight.losses
        runs.resume(run, alone(cluster, second), pause_at=None)
        user.wait_until(lambda run=run: runs.look(run).phase == "finished")
        steps[name] = {each["step"]: each["loss"] for each in user.metrics(second, run)}, runs.look(run).losses
    assert steps["moved"] == steps["stayed"]
    assert sorted(steps["moved"][0]) == list(range(1, 13))


SCRIPT = """
import json, sys, time
rate = float(sys.argv[1])
for step in range(1, 4):
    print(json.dumps({"step": step, "accuracy": 1 - abs(rate - 0.3) - 1 / step}), flush=True)
    time.sleep(0.2)
"""


def ranked(user, sweep):
    return [(trial["rank"], float(trial["point"]["rate"])) for trial in shown(user, sweep)["trials"]]


@pytest.mark.slow
def test_values_are_tried_in_a_script_of_the_users_own_and_ranked_by_what_it_prints(user):
    (user.folder / "mine").mkdir()
    (user.folder / "mine" / "loop.py").write_text(SCRIPT)
    own = ("--dir", "mine", "--metric", "accuracy", "--highest", "--cluster", "two.yaml")
    sweep = user.gangline("sweep", "run", *own, "rate=0.1,0.3,0.9", "--", "loop.py", "{rate}").out.splitlines()[0]
    assert phases(user, sweep) == ["finished"] * 3
    assert ranked(user, sweep) == [(1, 0.3), (2, 0.1), (3, 0.9)]
    best = shown(user, sweep)["trials"][0]
    assert best["losses"]["3"] == pytest.approx(1 - 1 / 3)
    assert shown(user, sweep)["export"] is None
    assert user.wait_until_quiet() == []


@pytest.mark.slow
def test_a_sampler_chooses_points_and_each_is_tried(user):
    pytest.importorskip("optuna", reason="optuna is not installed")
    (user.folder / "mine").mkdir()
    (user.folder / "mine" / "loop.py").write_text(SCRIPT)
    own = ("--dir", "mine", "--metric", "accuracy", "--highest", "--cluster", "two.yaml", "--sampler", "tpe")
    command = ("rate=0.1..0.9", "--trials", "4", "--", "loop.py", "{rate}")
    sweep = user.gangline("sweep", "run", *own, *command).out.splitlines()[0]
    assert phases(user, sweep) == ["finished"] * 4
    distances = [abs(rate - 0.3) for _, rate in ranked(user, sweep)]
    assert distances == sorted(distances)
    assert all(0.1 <= rate <= 0.9 for _, rate in ranked(user, sweep))
    said = user.gangline("sweep", "add", sweep, "rate=0.5", code=2)
    assert said.parts[0] == f"the points of {sweep} are chosen by a sampler"
