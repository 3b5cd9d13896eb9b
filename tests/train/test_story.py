"""The whole story through the real command: train on three hosts, stop, go on elsewhere, export, talk."""

import json
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.train.story import (
    Said,
    User,
    copy_world,
    flip_byte,
    make_user,
    write_cluster,
    write_job,
)
from tests.train.tolerances import FP32

pytestmark = pytest.mark.timeout(400)

THREE = {"pc1": {"share": 3}, "pc2": {"share": 2}, "pc3": {"share": 1, "env": {"GANGLINE_SIMULATED_SLOWDOWN": 30}}}
"""The last one is slow, so that there is time to stop the run half-way."""


@pytest.fixture(scope="module")
def user(world, quick_python, tmp_path_factory):
    """Somebody with a corpus and a model; nothing of theirs runs any more when the tests are over."""
    user = make_user(tmp_path_factory.mktemp("story"), python=quick_python)
    copy_world(world, user)
    write_job(user)
    write_cluster(user, "three", **THREE)
    write_cluster(user, "two", pc2={"share": 1}, pc4={"share": 1})
    yield user
    user.end_runs()


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A run of three hosts whose terminal was killed, and that was stopped then."""

    run: str
    saved: Said
    """`save` while it ran."""
    kept: list[bytes]
    """The commit records of that save, host by host."""
    meanwhile: Said
    """`resume` while it ran."""
    listed: dict
    """`ps --json` after the terminal was gone."""
    said: Said
    steps: list[dict]
    step: int
    processes_left: list[str]


@pytest.fixture(scope="module")
def stopped(user):
    watching = user.start("gangline", "train", "job.yaml", "--cluster", "three.yaml")
    run = watching.stdout.readline().strip()
    user.wait_for_step(run, 1)
    watching.send_signal(signal.SIGKILL)
    watching.communicate()
    saved = user.gangline("save", run)
    place = f"checkpoints/step-{int(saved.out.split()[-1]):08d}/COMMITTED"
    kept = [(user.at_host(host, run) / place).read_bytes() for host in THREE]
    (listed,) = user.runs()
    user.wait_for_step(run, listed["step"] + 5)
    meanwhile = user.gangline("resume", run, code=2)
    said = user.gangline("stop", run)
    steps = user.metrics("pc1", run)
    return Stopped(
        run=run,
        saved=saved,
        kept=kept,
        meanwhile=meanwhile,
        listed=listed,
        said=said,
        steps=steps,
        step=steps[-1]["step"],
        processes_left=user.wait_until_quiet(),
    )


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Attempts to go on with other data or another model."""

    data: Said
    weights: Said
    config: Said
    phases: list[str]


@pytest.fixture(scope="module")
def refused(user, stopped):
    phases = []

    def attempt(path: Path, old: bytes, new: bytes) -> Said:
        before = path.read_bytes()
        assert old in before
        path.write_bytes(before.replace(old, new, 1))
        said = user.gangline("resume", stopped.run, code=None)
        path.write_bytes(before)
        phases.append(user.runs()[0]["phase"])
        return said

    weights = user.folder / "model" / "model.safetensors"
    kept = weights.read_bytes()
    return Refused(
        data=attempt(user.folder / "corpus.jsonl", b"sled", b"boat"),
        weights=attempt(weights, kept[-8:], bytes(8)),
        config=attempt(user.folder / "model" / "config.json", b'"attention_dropout": 0.0', b'"attention_dropout": 0.5'),
        phases=phases,
    )


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The run, gone on with on two hosts after its newest checkpoint was damaged everywhere."""

    said: Said
    steps: list[dict]
    phase: str


@pytest.fixture(scope="module")
def resumed(user, stopped, refused):
    for host in THREE:
        (part,) = user.at_host(host, stopped.run).glob(f"checkpoints/step-{stopped.step:08d}/part-*")
        (tensors,) = part.glob("*.distcp")
        flip_byte(tensors)
    said = user.gangline("resume", stopped.run, "--cluster", "two.yaml")
    (row,) = user.runs()
    return Resumed(said=said, steps=user.metrics("pc2", stopped.run), phase=row["phase"])


@pytest.fixture(scope="module")
def uninterrupted(user, tmp_path_factory):
    """The same job by one rank, by somebody else: its steps."""
    other = make_user(tmp_path_factory.mktemp("uninterrupted"), python=user.python)
    copy_world(user.folder, other)
    write_job(other)
    write_cluster(other, "one", pc1={})
    run = other.gangline("train", "job.yaml", "--cluster", "one.yaml", "--detach").out.strip()
    assert other.wait_for_end(run) == "finished"
    return other.metrics("pc1", run)


@pytest.fixture(scope="module")
def exported(user, stopped, resumed):
    """The folder that `export` printed."""
    return Path(user.gangline("export", stopped.run).out.strip())


@pytest.fixture(scope="module")
def tuned(user, exported):
    """A QLoRA on the exported model: the id of its run."""
    write_job(user, "tune", model=str(exported), method={"kind": "qlora", "rank": 4}, steps=4, evaluation={})
    write_cluster(user, "one", pc1={})
    return user.gangline("train", "tune.yaml", "--cluster", "one.yaml").out.strip()


def is_refusal(said: Said, *words: str) -> bool:
    """Whether a command ended with an error of three parts that has these words."""
    _what, seen, fix = said.parts
    return seen.startswith("  seen  ") and fix.startswith("  fix   ") and all(word in said.err for word in words)


# --- looking ahead


def test_a_plan_says_who_does_what(user):
    document = json.loads(user.gangline("plan", "job.yaml", "--cluster", "three.yaml", "--json").out)
    assert document["schema_version"] == 1
    assert [rank["share"] for rank in document["plan"]["ranks"]] == [6, 4, 2]


def test_a_rehearsal_prints_the_commands_and_leaves_nothing(user, tmp_path):
    other = make_user(tmp_path / "other")
    copy_world(user.folder, other)
    write_job(other)
    before = sorted(other.folder.rglob("*"))
    lines = other.gangline("train", "job.yaml", "--dry-run").out.splitlines()
    assert lines[0] == "# local"
    assert "torch.distributed.run" in lines[1]
    assert sorted(other.folder.rglob("*")) == before
    assert other.processes() == []


# --- a run that is stopped


def test_a_run_goes_on_when_its_terminal_is_killed(stopped):
    assert stopped.listed["phase"] == "running"
    assert stopped.step >= stopped.listed["step"] + 5


def test_ps_lists_the_run(stopped):
    assert stopped.listed["id"] == stopped.run
    assert (stopped.listed["job"], stopped.listed["attempt"], stopped.listed["steps"]) == ("job", 1, 60)
    assert stopped.listed["step"] >= 1


def test_a_save_on_request_is_on_every_host_and_the_run_goes_on(stopped):
    run, _saved, _step, step = stopped.saved.out.split()
    assert run == stopped.run
    assert len(stopped.kept) == 3
    assert len(set(stopped.kept)) == 1
    assert int(step) < stopped.step


def test_a_running_run_is_not_resumed(stopped):
    assert is_refusal(stopped.meanwhile, "is running", f"gangline stop {stopped.run}")


def test_a_stopped_run_says_so(stopped):
    assert stopped.said.out.split() == [stopped.run, "stopped"]


def test_a_stop_saves_the_last_step_and_commits_it_on_every_host(user, stopped):
    assert stopped.step < 60
    folders = [user.at_host(host, stopped.run) / f"checkpoints/step-{stopped.step:08d}" for host in THREE]
    assert len({(folder / "COMMITTED").read_bytes() for folder in folders}) == 1
    assert [(folder / f"part-{host}" / "part.json").exists() for folder, host in zip(folders, THREE, strict=True)] == (
        [True] * 3
    )


def test_a_stop_leaves_no_process(stopped):
    assert stopped.processes_left == []


# --- a run that is refused


def test_a_run_whose_data_changed_is_not_resumed(stopped, refused):
    assert refused.data.code == 2
    assert is_refusal(refused.data, f"the training data of {stopped.run} changed", "fingerprint")


@pytest.mark.parametrize("what", ["weights", "config"])
def test_a_run_whose_model_changed_is_not_resumed(stopped, refused, what):
    said = getattr(refused, what)
    assert said.code == 2
    assert is_refusal(said, f"the model of {stopped.run} changed", "fingerprint")


def test_a_refused_run_stays_stopped(refused):
    assert refused.phases == ["stopped"] * 3


# --- a run that goes on


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(stopped, resumed):
    before = (stopped.step - 1) // 5 * 5
    for host in THREE:
        told = [
            line for line in resumed.said.err.splitlines() if line.startswith("skipped checkpoint") and host in line
        ]
        assert any(f"step {stopped.step}" in line and ".distcp" in line for line in told), resumed.said.err
    assert f"from step {before}" in resumed.said.err


def test_it_ends_on_other_hosts(resumed):
    assert resumed.phase == "finished"
    assert {rank["host"] for rank in resumed.steps[-1]["ranks"]} == {"pc2", "pc4"}


def test_every_step_is_there_once_but_for_those_done_again(stopped, resumed):
    first = [record["step"] for record in resumed.steps if record["attempt"] == 1]
    second = [record["step"] for record in resumed.steps if record["attempt"] == 2]
    assert first == list(range(1, stopped.step + 1))
    assert second == list(range((stopped.step - 1) // 5 * 5 + 1, 61))


def test_the_plan_stands_beside_what_came_of_it(user, stopped, resumed):
    comparison = json.loads((user.home / "runs" / stopped.run / "comparison.json").read_text())
    steps = [record for record in resumed.steps if record["attempt"] == 2]
    assert (comparison["run"], comparison["attempt"]) == (stopped.run, 2)
    assert 5 <= comparison["num_steps"] <= len(steps) - 2
    assert min(step["step_s"] for step in steps) <= comparison["step_s"]["measured"] <= max(s["step_s"] for s in steps)
    assert [(rank["host"], rank["gpu"], rank["allocated_bytes"]) for rank in comparison["ranks"]] == [
        ("pc2", None, None),
        ("pc4", None, None),
    ]
    for number, rank in enumerate(comparison["ranks"]):
        assert rank["resident_bytes"] == max(step["ranks"][number]["memory_bytes"] for step in steps[2:])
        assert rank["planned_process_bytes"] > rank["planned_allocated_bytes"] > 0
    (line,) = [line for line in resumed.said.err.splitlines() if line.startswith("measured")]
    assert f"step {comparison['step_s']['measured']:.3g} s" in line
    assert "resident memory pc" in line


def test_losses_are_those_of_a_run_that_nobody_stopped(resumed, uninterrupted):
    last_said = {record["step"]: record["loss"] for record in resumed.steps}
    expected = {record["step"]: record["loss"] for record in uninterrupted}
    assert list(expected) == list(range(1, 61))
    assert last_said == pytest.approx(expected, rel=FP32)


def test_the_logs_of_a_rank_can_be_read(user, stopped, resumed):
    assert "rank 1 of 2 on pc4" in user.gangline("logs", stopped.run, "--rank", "1").out
    assert "rank 1 of 3 on pc2" in user.gangline("logs", stopped.run, "--rank", "1", "--attempt", "1").out


def test_tensorboard_has_both_attempts(user, stopped, resumed):
    assert list((user.at_host("pc1", stopped.run) / "tensorboard").glob("events.out.tfevents.*"))
    assert len(list((user.at_host("pc2", stopped.run) / "tensorboard").glob("events.out.tfevents.*"))) >= 2


def test_a_finished_run_is_not_resumed(user, stopped, resumed):
    assert is_refusal(user.gangline("resume", stopped.run, code=2), "has finished", "gangline export")


# --- a model that is used


def test_the_model_is_exported(exported):
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in exported.iterdir()}


def test_the_model_answers(user, exported):
    assert user.gangline("chat", exported, "--prompt", "the rope", "--max-tokens", "4").out.strip()


def test_an_adapter_is_exported_alone_or_merged(user, tuned):
    said = user.gangline("chat", tuned, "--prompt", "the rope", "--max-tokens", "4")
    assert said.out.strip()
    assert "bitsandbytes" not in said.err  # peft imports it, and it may have something to say
    adapter = Path(user.gangline("export", tuned, "--to", "adapter").out.strip())
    merged = Path(user.gangline("export", tuned, "--merged", "--to", "merged").out.strip())
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in adapter.iterdir()}
    assert {"config.json", "model.safetensors"} <= {path.name for path in merged.iterdir()}
    assert not (merged / "adapter_config.json").exists()


def test_nothing_is_left_when_all_is_over(user, tuned):
    assert user.wait_until_quiet() == []


# --- somebody who is not root

NOBODY = 65534


@pytest.fixture
def nobody():
    """A user who is not root, with a folder that is theirs alone."""
    if os.geteuid() != 0:
        pytest.skip("not root: every test here is this test already")
    # not below pytest's own folders, which only root may enter
    with tempfile.TemporaryDirectory(prefix="gangline-nobody-") as name:
        someone = make_user(Path(name), uid=NOBODY)
        os.chown(name, NOBODY, NOBODY)
        _require_python(someone)
        yield someone


def _require_python(someone: User) -> None:
    try:
        process = someone.start("python", "-c", "import gangline, torch")
    except PermissionError as error:
        pytest.skip(f"another user cannot run this Python: {error}")
    _out, err = process.communicate()
    if process.returncode != 0:
        pytest.skip(f"another user cannot run this Python: {err.strip().splitlines()[-1]}")


def test_an_ordinary_user_can_do_all_of_it(user, nobody):
    copy_world(user.folder, nobody)
    write_job(nobody, steps=20)
    write_cluster(nobody, "one", pc1={"env": {"GANGLINE_SIMULATED_SLOWDOWN": 30}})
    for path in nobody.folder.rglob("*"):
        os.chown(path, NOBODY, NOBODY)
    run = nobody.gangline("train", "job.yaml", "--cluster", "one.yaml", "--detach").out.strip()
    nobody.wait_for_step(run, 2)
    assert nobody.gangline("stop", run).out.split() == [run, "stopped"]
    nobody.gangline("resume", run)
    assert nobody.runs()[0]["phase"] == "finished"
    folder = Path(nobody.gangline("export", run).out.strip())
    assert (folder / "model.safetensors").stat().st_uid == NOBODY
    assert nobody.wait_until_quiet() == []


def test_the_test_of_leftovers_can_fail(tmp_path):
    someone = make_user(tmp_path / "someone")
    process = subprocess.Popen(["sleep", "60"], env={"GANGLINE_HOME": str(someone.home), "PATH": os.environ["PATH"]})
    try:
        assert [line.split()[0] for line in someone.processes()] == [str(process.pid)]
    finally:
        process.kill()
        process.wait()
