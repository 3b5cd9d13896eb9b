"""Sweeps on a real Slurm cluster: one job array, whose tasks are ordinary runs, ended and continued in every way."""

import json
import time

import pytest

from tests.lab.user import make_model
from tests.slurm.cluster import SlurmLab
from tests.slurm.user import PATIENCE_S, Account

pytestmark = pytest.mark.timeout(400)
SHORT = """
name: tiny
model: ./model
method: {kind: lora, rank: 4}
data: {train: ./fox.txt, eval: ./wolf.txt, sequence_length: 64}
batch: 4
micro_batch: 2
steps: 8
evaluation: {max_samples: 8}
checkpoint: {every_steps: 20}
"""
ENDLESS = SHORT.replace("steps: 8", "steps: 100000")
SCRIPT = """
import json, sys, time
lr, steps = float(sys.argv[1]), int(sys.argv[2])
if lr > 1:
    raise SystemExit("the loss is not a number")
for step in range(steps):
    print(json.dumps({"step": step, "eval_loss": abs(lr - 0.3) + 1 / (step + 1), "words": sys.argv[3:]}), flush=True)
    time.sleep(0.1)
"""
"""A user's own script, whose ranks do nothing, so that a test is quick."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one_cluster():
    with SlurmLab(3, ttl_s=2400) as lab:
        yield lab


@pytest.fixture
def sweeper(one_cluster):
    yield Sweeper(one_cluster)
    one_cluster.cancel_all()
    assert one_cluster.left() == []


class Sweeper(Account):
    """Somebody who sweeps from the login host."""

    def sweeps(self, model, *words: str, job: str = SHORT, **keys: object) -> str:
        """A sweep of a training job in the background; its id."""
        self.brings(model, job=job)
        self.desk.write("wolf.txt", "wolf number 7 walks around the lazy dog and out of the snow\n\n" * 40)
        self.describes(**{"nodes": 1, "cpus_per_node": 1, **keys})
        return self.types("sweep", "job.yaml", *words, "--detach").stdout.split()[-1]

    def tries(self, *words: str, steps: int = 10, options: tuple[str, ...] = (), **keys: object) -> str:
        """A sweep of the user's own script in the background; its id."""
        self.desk.write("project/loop.py", SCRIPT)
        self.describes(**{"nodes": 1, "cpus_per_node": 1, **keys})
        command = ("loop.py", "{lr}", str(steps))
        return self.types(
            "sweep", "run", "--detach", "--dir", "project", *options, *words, "--", *command
        ).stdout.split()[-1]

    def shown(self, sweep: str) -> dict:
        """What `sweep show` says."""
        return json.loads(self.types("sweep", "show", sweep, "--json").stdout)

    def phases(self, sweep: str) -> list[str]:
        """The phases of the trials, by number."""
        trials = sorted(self.shown(sweep)["trials"], key=lambda trial: trial["number"])
        return [trial["phase"] for trial in trials]

    def awaits_trials(self, sweep: str, condition, what: str, *, patience_s: float = PATIENCE_S) -> dict:
        """Look at `sweep show` until something is true of its trials, by number."""
        deadline = time.monotonic() + patience_s
        while not condition(trials := {trial["number"]: trial for trial in self.shown(sweep)["trials"]}):
            assert time.monotonic() < deadline, f"waited in vain: {what}\n{trials}\n{self.logs_of(sweep)}"
            time.sleep(1.0)
        return trials

    def awaits_end(self, sweep: str, *, patience_s: float = 300.0) -> dict:
        """Wait until the sweep has ended; its trials then."""
        self.awaits_trials(
            sweep, lambda _trials: self.shown(sweep)["phase"] != "running", "the end", patience_s=patience_s
        )
        return self.awaits_trials(sweep, lambda _trials: True, "its trials")

    def logs_of(self, sweep: str) -> str:
        """What the batch steps wrote."""
        return self.desk.run(["sh", "-c", f"tail -n 20 .gangline/sweeps/{sweep}/trials/*/slurm-*.log"]).stdout[-4000:]


RATES = "lr=0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8"


def test_a_dry_run_prints_the_script_of_one_array_and_submits_nothing(sweeper):
    sweeper.desk.write("project/loop.py", SCRIPT)
    sweeper.describes(nodes=1)
    said = sweeper.types(
        "sweep", "run", "--dry-run", "--at-once", "2", "--dir", "project", RATES, "--", "loop.py", "{lr}"
    )
    assert "#SBATCH --array=1-8%2" in said.stdout
    assert "-- loop.py 0.8  # 8: a task of the array" in said.stdout
    assert sweeper.lab.jobs() == []
    assert sweeper.desk.run(["ls", ".gangline/sweeps", ".gangline/runs"]).stdout == ""


def test_an_array_that_slurm_refuses_leaves_nothing(sweeper):
    sweeper.desk.write("project/loop.py", SCRIPT)
    sweeper.describes(nodes=1, gpus_per_node=4, gpus_by="gres", partition="main")
    done = sweeper.types("sweep", "run", "--detach", "--dir", "project", RATES, "--", "loop.py", "{lr}", code=None)
    assert done.returncode != 0
    assert "partition main has too few nodes" in done.stderr
    sweeper.describes(nodes=1, constraint="no-such")
    done = sweeper.types("sweep", "run", "--detach", "--dir", "project", RATES, "--", "loop.py", "{lr}", code=None)
    assert done.returncode != 0
    assert "Invalid feature" in done.stderr
    sweeper.describes(nodes=1, options=["--array=9"])
    done = sweeper.types("sweep", "run", "--detach", "--dir", "project", RATES, "--", "loop.py", "{lr}", code=None)
    assert "slurm.options: a sweep has an array of its own" in done.stderr
    assert sweeper.desk.run(["find", ".gangline/sweeps", ".gangline/runs", "-mindepth", "1"]).stdout == ""


def test_a_sweep_that_waits_says_why_and_leaves_the_queue_at_once(sweeper):
    blocker = sweeper.lab.submit("sleep 600", "--nodes=3", "--exclusive")
    sweeper.lab.wait_state(blocker, "RUNNING")
    sweep = sweeper.tries(RATES)
    assert "8 in the queue of Slurm: " in sweeper.types("sweep", "show", sweep).stdout
    with sweeper.lab.broken("squeue", "fails"):
        assert "Slurm does not answer" in sweeper.types("sweep", "show", sweep).stdout
    with sweeper.lab.broken("squeue", "missing"):
        assert "squeue is not on this computer" in sweeper.types("sweep", "show", sweep).stdout
    assert sweeper.types("sweep", "stop", sweep).stdout.split() == [sweep, "stopped"]
    assert sweeper.phases(sweep) == ["waiting"] * 8
    assert [job.id for job in sweeper.lab.jobs()] == [blocker]
    rows = json.loads(sweeper.types("ps", "--json").stdout)["runs"]
    assert {row["phase"] for row in rows} == {"stopped"}


@pytest.mark.slow
def test_an_array_of_eight_runs_two_at_a_time_and_is_ranked(sweeper):
    sweep = sweeper.tries(RATES, options=("--at-once", "2"))
    (array,) = sweeper.shown(sweep)["arrays"]
    most = 0
    while sweeper.shown(sweep)["phase"] == "running":
        most = max(most, sum(job.state == "RUNNING" for job in sweeper.lab.jobs()))
        time.sleep(1.0)
    found = sweeper.shown(sweep)
    assert [trial["phase"] for trial in found["trials"]] == ["finished"] * 8, sweeper.logs_of(sweep)
    assert found["phase"] == "finished"
    assert most == 2
    assert [trial["number"] for trial in found["trials"]] == [3, 2, 4, 1, 5, 6, 7, 8]
    assert {trial["number"]: trial["job"] for trial in found["trials"]} == {n: f"{array}_{n}" for n in range(1, 9)}
    best = found["trials"][0]
    assert best["losses"]["9"] == pytest.approx(0.1)
    table = sweeper.types("sweep", "show", sweep).stdout
    assert f"{array}_8" in table
    assert best["run"] in table
    assert f"{array}_3" in sweeper.types("ps").stdout
    assert f"job {array}_3 begins with {best['run']}" in sweeper.logs_of(sweep)
    sweeper.leaves_nothing()


@pytest.mark.slow
def test_tasks_that_fail_or_are_cancelled_leave_the_others_alone(sweeper):
    sweep = sweeper.tries("lr=0.1,5,0.3", steps=300)
    (array,) = sweeper.shown(sweep)["arrays"]
    trials = sweeper.awaits_trials(
        sweep, lambda trials: trials[1]["step"] and trials[2]["phase"] == "failed", "a failure"
    )
    assert trials[2]["error"]["kind"] == "RunFailed"
    sweeper.lab.login.check(["scancel", f"{array}_1"])
    trials = sweeper.awaits_end(sweep)
    assert [trials[number]["phase"] for number in (1, 2, 3)] == ["stopped", "failed", "finished"], sweeper.logs_of(
        sweep
    )
    sweeper.leaves_nothing()
    sweeper.types("sweep", "resume", sweep, "1", "--detach")
    trials = sweeper.awaits_end(sweep)
    assert [trials[number]["phase"] for number in (1, 2, 3)] == ["finished", "failed", "finished"], sweeper.logs_of(
        sweep
    )


@pytest.mark.slow
def test_scancel_of_the_whole_array_stops_every_trial_and_each_can_start_again(sweeper):
    sweep = sweeper.tries("lr=0.1,0.2,0.3", steps=100_000, options=("--at-once", "1"))
    (array,) = sweeper.shown(sweep)["arrays"]
    sweeper.awaits_trials(sweep, lambda trials: trials[1]["step"], "steps of the first")
    sweeper.lab.login.check(["scancel", array])
    sweeper.awaits_end(sweep)
    assert sweeper.phases(sweep) == ["stopped"] * 3, sweeper.logs_of(sweep)
    sweeper.leaves_nothing()
    said = sweeper.types("sweep", "resume", sweep, code=None)
    assert f"gangline sweep resume {sweep} 1 2 3" in said.stderr


@pytest.mark.slow
def test_a_task_at_its_time_limit_goes_back_into_the_queue_and_continues(sweeper):
    options = ("--resume-flag=--again",)
    sweep = sweeper.tries("lr=0.1,0.2", steps=100_000, options=options, time="00:02:00", save_before=50)
    found = sweeper.awaits_trials(
        sweep,
        lambda trials: any(sweeper.lab.shown(trial["job"]).get("Restarts") == "1" for trial in trials.values()),
        "a requeue",
        patience_s=240,
    )
    run = next(t["run"] for t in found.values() if sweeper.lab.shown(t["job"])["Restarts"] == "1")
    sweeper.awaits_output(run, "--again")
    assert sweeper.shown(sweep)["phase"] == "running"
    sweeper.types("sweep", "stop", sweep, "--now")
    sweeper.leaves_nothing()


@pytest.mark.slow
def test_a_training_sweep_is_stopped_with_checkpoints_resumed_and_gets_more_points(sweeper, model):
    sweep = sweeper.sweeps(model, "seed=1,2", job=ENDLESS)
    before = sweeper.awaits_trials(sweep, lambda trials: all(t["step"] > 25 for t in trials.values()), "steps of both")
    assert sweeper.types("sweep", "stop", sweep).stdout.split() == [sweep, "stopped"]
    sweeper.leaves_nothing()
    assert sweeper.phases(sweep) == ["waiting"] * 2
    sweeper.types("sweep", "resume", sweep, "--detach")
    sweeper.types("sweep", "add", sweep, "seed=3")
    sweeper.awaits_trials(
        sweep,
        lambda trials: trials[3]["step"] and all(trials[n]["step"] > before[n]["step"] for n in (1, 2)),
        "steps after those of before",
    )
    assert len(sweeper.shown(sweep)["arrays"]) == 3
    assert {row["attempt"] for row in json.loads(sweeper.types("ps", "--json").stdout)["runs"] if row["step"]} >= {1, 2}
    sweeper.types("sweep", "stop", sweep, "--now")
    sweeper.leaves_nothing()


@pytest.mark.slow
def test_the_last_trial_at_a_rung_submits_the_best_of_them(sweeper, model):
    words = ("optimizer.learning_rate=1e-5,3e-3", "--halving", "--eta", "2")
    sweep = sweeper.sweeps(model, *words)
    trials = sweeper.awaits_end(sweep)
    assert sorted(trial["phase"] for trial in trials.values()) == ["dropped", "finished"], sweeper.logs_of(sweep)
    assert trials[2]["phase"] == "finished"
    assert [trials[number]["step"] for number in (1, 2)] == [4, 8]
    assert len(sweeper.shown(sweep)["arrays"]) == 2
    sweeper.leaves_nothing()
