"""`train`: everything is written down before the gang starts; what stops the start leaves nothing running."""

from __future__ import annotations

from typing import Any

import pytest

from gangline import app
from gangline.agent.supervise.leases import Leases, Taken
from gangline.checks import versions
from gangline.context import StartOptions
from gangline.decide import forecast
from gangline.decide.inspect import InspectOptions
from gangline.errors import CheckFailed, DataError, HostUnreachable, RunFailed, SpecError
from gangline.launch.backend import LaunchRequest
from gangline.planner.machines import Placement
from gangline.planner.speed import ComputeModel
from gangline.runs.files import read_json
from gangline.runs.gang import Gang
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_record
from gangline.runs.registry import list_runs
from gangline.runs.state import AttemptOutcome, ProcessId, RunState
from gangline.transport.transport import AGENT
from tests.process.app.world import World


def train(world: World, *overrides: str) -> RunLayout:
    return app.train(world.start(*overrides), console=world, deps=world.deps)


def test_every_host_has_job_inputs_gang_and_data_before_the_gang_starts(world: World) -> None:
    layout = train(world)
    for name in ("a", "b"):
        host = world.host(name, layout.run_id)
        assert Job.load(host.job).batch == 12
        assert read_json(host.inputs)["train"] == world.train_hash
        assert [rank.share for rank in Gang.load(host.gang(1)).ranks] == [4, 2]
        assert (host.token_set(world.train_hash) / "tokens").read_bytes() == b"tokens"
    assert world.spawned == [(layout.folder, 1)]


def test_the_run_directory_says_what_was_asked_seen_and_decided(world: World) -> None:
    layout = train(world, "steps=7")
    assert Job.load(layout.job).steps == 7
    assert read_json(layout.plan)["steps"] == 7
    assert read_json(layout.plan)["data"] == {"num_samples": 100, "num_tokens": 6400}
    assert [host["host"] for host in read_json(layout.inventory)["hosts"]] == ["a", "b"]
    assert read_json(layout.findings)["findings"] == []
    request = load_record(layout.attempt(1) / "request.json", LaunchRequest)
    assert [part.host for part in request.hosts] == ["a", "b"]
    assert [record.id for record in list_runs(world.home)] == [layout.run_id]


def test_the_batch_that_was_chosen_near_the_wish_is_that_of_the_run_and_of_its_resumes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {"a": 1.0, "b": 0.55, "c": 0.45}

    def measured(_self: object, placement: Placement, _training: object) -> ComputeModel:
        return ComputeModel(per_token_s=1 / speeds[placement.host], source="measured", spread=0.03)

    monkeypatch.setattr(forecast.SpeedTable, "of", measured)
    three = "hosts:" + "".join(f"\n  - {{name: {name}, transport: local, workdir: ./places/{name}}}" for name in speeds)
    words = ("batch={about: 32}", "micro_batch=1", "steps=null", "epochs=2")
    layout = app.train(world.start(*words, cluster=three), console=world, deps=world.deps)
    job = Job.load(layout.job)
    assert (job.batch, job.open) == (40, ())
    assert Job.load(world.host("c", layout.run_id).job).batch == 40
    assert [rank.share for rank in Gang.load(world.host("a", layout.run_id).gang(1)).ranks] == [20, 11, 9]
    assert read_json(layout.plan)["steps"] == 6  # 100 samples are 2.5 steps: 3 for each of 2 epochs
    assert any("divides    batch 40, about 32 as the job says" in line for line in world.said)
    world.ended(layout.run_id)
    speeds.update(a=1.0, b=1.0, c=1.0)
    app.resume(layout.run_id, home=world.home, console=world, deps=world.deps)
    assert Job.load(layout.job) == job
    assert [rank.share for rank in Gang.load(world.host("a", layout.run_id).gang(2)).ranks] == [14, 13, 13]


def test_epochs_become_steps_once_the_samples_are_counted(world: World) -> None:
    job = world.start().job
    job.write_text(job.read_text(encoding="utf-8").replace("steps: 60", "epochs: 2"), encoding="utf-8")
    start = StartOptions(home=world.home, job=job)
    layout = app.train(start, console=world, deps=world.deps)
    assert read_json(layout.plan)["steps"] == 18
    assert any("18 steps = 2 epochs over 100 samples" in line for line in world.said)


def test_without_a_cluster_file_this_computer_works_in_the_home(world: World) -> None:
    start = world.start(cluster=None)
    layout = app.train(start, console=world, deps=world.deps)
    assert [rank.share for rank in Gang.load(layout.gang(1)).ranks] == [6]


def test_a_dry_run_prints_the_commands_and_leaves_nothing(world: World) -> None:
    lines = app.rehearse(world.start(), console=world, deps=world.deps)
    assert [line for line in lines if line.startswith("#")] == ["# a", "# b"]
    assert "fake 4711" in "\n".join(lines)
    assert world.spawned == []
    assert not world.home.exists()
    assert not (world.root / "places").exists()


def test_all_mistakes_of_a_file_stop_before_any_host_is_asked(world: World) -> None:
    with pytest.raises(SpecError, match="bacth"):
        train(world, "bacth=3")
    assert world.commands == []


LOCKED = """
hosts:
  - {name: a, transport: local, workdir: ./places/a}
  - {name: b, transport: local, workdir: ./places/b, environment: locked}
"""


def test_a_host_on_which_no_environment_can_be_built_stops_before_anything_is_made(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "why_not", lambda *_python, **_lock: "Python 3.9.1")
    with pytest.raises(CheckFailed, match="E-SW-14"):
        app.train(world.start(cluster=LOCKED), console=world, deps=world.deps)
    assert any(line.startswith("fail E-SW-14  b: ") for line in world.said)
    asked = [(host, words) for host, words in world.commands if words[1:2] == ("environment",)]
    assert asked == [("b", (AGENT, "environment"))]
    assert not (world.root / "places").exists()
    assert not world.home.exists()


def test_nobody_is_asked_how_to_build_where_only_other_checks_are_wanted(world: World) -> None:
    options = InspectOptions(only=("network",))
    cluster = world.start(cluster=LOCKED).cluster
    app.check(cluster, home=world.home, options=options, console=world, deps=world.deps)
    assert [words for _, words in world.commands if words[1:2] == ("environment",)] == []


def test_a_failed_check_stops_before_anything_is_made(world: World) -> None:
    world.packages["torch"] = "2.9.0"
    with pytest.raises(CheckFailed, match="E-SW-02"):
        train(world)
    assert any("CVE-2026-24747" in line for line in world.said)
    assert not world.home.exists()


def test_a_host_that_does_not_answer_has_its_own_exit_code(world: World) -> None:
    world.unreachable.add("b")
    with pytest.raises(HostUnreachable):
        train(world)
    assert world.spawned == []


def nothing_is_left(world: World) -> bool:
    """Neither here nor on a host is anything of a run; what was copied may be."""
    runs = [world.home / "runs", *(world.root / "places" / name / "runs" for name in ("a", "b"))]
    return not any(path for folder in runs if folder.exists() for path in folder.iterdir())


def test_bad_data_is_reported_as_the_worker_said_it_and_no_run_is_left(world: World) -> None:
    world.inputs_end = DataError("a.jsonl row 7", seen="no field text", fix="name the field")
    with pytest.raises(DataError, match=r"a\.jsonl row 7") as caught:
        train(world)
    assert caught.value.fix == "name the field"
    assert "nothing was started" in world.said[-1]
    assert nothing_is_left(world)
    assert world.spawned == []


def test_ctrl_c_while_tokenising_leaves_no_run_and_nothing_started(world: World) -> None:
    world.inputs_end = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        train(world)
    assert nothing_is_left(world)
    assert world.spawned == []


def test_a_gang_that_does_not_start_fails_with_the_words_of_its_supervisor_and_no_run_is_left(world: World) -> None:
    world.spawn_error = RunFailed("b: the gangline agent did not start", fix="install gangline there")
    with pytest.raises(RunFailed, match="the gangline agent did not start"):
        train(world)
    assert nothing_is_left(world)


def test_a_run_that_may_have_left_something_on_a_host_is_kept(world: World) -> None:
    world.spawn_error = RunFailed("b: the gangline agent did not start")

    def left() -> None:
        (folder, attempt) = world.spawned[-1]
        outcome = AttemptOutcome(result="failed", hosts={}, left=("b: process 7",))
        outcome.save(RunLayout.of(folder).outcome(attempt))

    world.while_spawning = left
    with pytest.raises(RunFailed):
        train(world)
    (record,) = list_runs(world.home)
    assert record.phase == "failed"
    assert f"gangline stop {record.id}" in world.said[-1]


def test_a_start_that_was_killed_is_called_so(world: World) -> None:
    layout = train(world)
    RunState(name="job", supervisor=ProcessId(pid=1, start_ticks=0)).save(layout)
    assert [record.phase for record in list_runs(world.home)] == ["never started"]


def slots_of(world: World, name: str, run: str) -> dict[str, Any]:
    """What a host of the world would be asked for by a start."""
    folder = world.root / "places" / name / run
    leases = str(world.root / "places" / name / "leases" / name)
    ask = {"run_id": run, "attempt": 1, "host": name, "folder": str(folder), "leases": leases, "ranks": [0], "slots": 1}
    return {**ask, "env": {"CUDA_VISIBLE_DEVICES": ""}}


def test_slots_that_another_run_has_stop_a_start_before_anything_is_copied_and_the_others_are_free_again(
    world: World,
) -> None:
    world.leases = True
    other = Leases()
    other.claim(slots_of(world, "b", "brave-fox-2"))
    with pytest.raises(RunFailed, match="b: cpu-0 is in use by brave-fox-2") as caught:
        train(world)
    assert "gangline stop brave-fox-2" in caught.value.fix
    assert not any(words[1:4] == ("-m", "gangline.worker", "inputs") for _, words in world.commands)
    assert nothing_is_left(world)
    other.let_go()
    free = Leases()
    free.claim(slots_of(world, "a", "brave-fox-2"))
    assert free.slots == ["cpu-0"]
    free.let_go()


def test_slots_are_held_until_the_host_agents_have_them(world: World) -> None:
    world.leases = True
    held: list[str] = []

    def host_agent_comes() -> None:
        run = world.spawned[-1][0].name
        with pytest.raises(Taken, match=run):
            Leases().claim(slots_of(world, "a", "brave-fox-2"))
        held.append(run)

    world.while_spawning = host_agent_comes
    assert held == [train(world).run_id]


def test_data_that_is_there_already_is_not_brought_again(world: World) -> None:
    train(world)
    assert any(line.startswith("copied tokens from") and "b" in line for line in world.said)
    world.said.clear()
    train(world)
    assert not any(line.startswith("tokens brought") for line in world.said)
