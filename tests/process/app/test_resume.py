"""`resume`: from the newest valid checkpoint anywhere, with the same data and model, on any hosts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gangline import app
from gangline.context import ResumeOptions
from gangline.control.end import rehearse_stop, stop
from gangline.control.supervision import open_run
from gangline.decide import decide as decide_module
from gangline.errors import CheckpointError, DataError, ModelError, RunFailed, UsageError
from gangline.runs.checkpoints import find_parts, part_folder
from gangline.runs.files import read_json
from gangline.runs.gang import Gang
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.manifest import COMMIT_FILE, verify_part
from gangline.runs.state import ProcessId, RunState
from tests.process.app.world import THREE, World


@pytest.fixture
def run_id(world: World) -> str:
    """A run that was stopped."""
    layout = app.train(world.start(), console=world, deps=world.deps)
    world.ended(layout.run_id)
    world.said.clear()
    world.spawned.clear()
    return layout.run_id


def resume(world: World, run_id: str, cluster: Path | None = None) -> RunLayout:
    return app.resume(run_id, ResumeOptions(cluster=cluster), home=world.home, console=world, deps=world.deps)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def test_the_next_attempt_goes_on_from_the_newest_checkpoint(world: World, run_id: str) -> None:
    world.save(run_id, 20)
    world.save(run_id, 40)
    layout = resume(world, run_id[:6])
    assert world.spawned == [(layout.folder, 2)]
    gang = Gang.load(world.host("b", run_id).gang(2))
    assert (gang.attempt, gang.resume_step) == (2, 40)


def test_what_the_plan_chose_is_planned_again(world: World, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = RunLayout(world.home, run_id).job
    dataclasses.replace(Job.load(path), chosen=("micro_batch",)).save(path)
    planned = []
    real = decide_module.decide
    monkeypatch.setattr(
        decide_module, "decide", lambda job, *rest, **how: planned.append(job) or real(job, *rest, **how)
    )
    resume(world, run_id)
    assert planned[0].open == ("micro_batch",)
    assert Job.load(path).open == ()


def test_a_run_that_never_saved_begins_again(world: World, run_id: str) -> None:
    resume(world, run_id)
    assert Gang.load(world.host("a", run_id).gang(2)).resume_step is None
    assert any("no checkpoint was saved" in line for line in world.said)


def copied(world: World, host: str) -> bool:
    """Whether it was said that the host got step 40."""
    return any(
        line.startswith("copied step 40") and host in line.partition(" to ")[2].split(", ") for line in world.said
    )


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(world: World, run_id: str) -> None:
    world.save(run_id, 20)
    world.save(run_id, 40)
    for name in ("a", "b"):
        flip(part_folder(world.host(name, run_id).checkpoints, 40, name) / "weights")
    resume(world, run_id)
    assert Gang.load(world.host("a", run_id).gang(2)).resume_step == 20
    assert any("skipped checkpoint: step 40 on a" in line and "weights" in line for line in world.said)


def test_a_host_with_a_damaged_copy_gets_a_whole_one(world: World, run_id: str) -> None:
    world.save(run_id, 40)
    mine = world.host("a", run_id).checkpoints
    flip(part_folder(mine, 40, "a") / "weights")
    resume(world, run_id)
    assert copied(world, "a")
    folder, _digest = find_parts(mine, 40, host="a")[0]
    assert verify_part(folder) == []


def test_a_whole_checkpoint_that_nobody_committed_is_adopted(world: World, run_id: str) -> None:
    world.save(run_id, 20)
    world.save(run_id, 40, commit=False)
    resume(world, run_id)
    assert Gang.load(world.host("a", run_id).gang(2)).resume_step == 40
    for name in ("a", "b"):
        assert (world.host(name, run_id).checkpoints / "step-00000040" / COMMIT_FILE).exists()


def half_written(world: World, run_id: str, host: str) -> None:
    """The save of step 40 on a host ended before its part was whole."""
    part = part_folder(world.host(host, run_id).checkpoints, 40, host)
    part.rename(part.with_name(f"{part.name}.tmp"))


def test_a_half_written_checkpoint_is_never_chosen(world: World, run_id: str) -> None:
    world.save(run_id, 20)
    world.save(run_id, 40, commit=False)
    for name in ("a", "b"):
        half_written(world, run_id, name)
    resume(world, run_id)
    assert Gang.load(world.host("a", run_id).gang(2)).resume_step == 20


def test_what_one_host_alone_has_saved_is_adopted_and_brought_to_the_others(world: World, run_id: str) -> None:
    world.save(run_id, 20)
    world.save(run_id, 40, commit=False)
    half_written(world, run_id, "b")
    resume(world, run_id)
    assert Gang.load(world.host("a", run_id).gang(2)).resume_step == 40
    assert copied(world, "b")
    folder, _digest = find_parts(world.host("b", run_id).checkpoints, 40, host="b")[0]
    assert verify_part(folder) == []


def test_where_no_checkpoint_can_be_used_every_reason_is_told(world: World, run_id: str) -> None:
    world.save(run_id, 20)
    for name in ("a", "b"):
        flip(part_folder(world.host(name, run_id).checkpoints, 20, name) / "weights")
    with pytest.raises(CheckpointError) as caught:
        resume(world, run_id)
    assert "step 20 on a" in caught.value.seen
    assert "step 20 on b" in caught.value.seen
    assert world.spawned == []


def test_of_a_step_in_parts_every_host_gets_what_its_ranks_read(world: World, run_id: str) -> None:
    world.save(run_id, 40, in_parts=True)
    resume(world, run_id)  # two ranks under ddp: each reads all of it
    assert Gang.load(world.host("a", run_id).gang(2)).resume_step == 40
    for name in ("a", "b"):
        assert copied(world, name)
        folders = [folder for folder, _ in find_parts(world.host(name, run_id).checkpoints, 40, host=name)]
        assert [verify_part(folder) for folder in folders] == [[], []]


def test_without_one_part_an_older_step_is_taken_and_without_any_nothing_changes(world: World, run_id: str) -> None:
    world.save(run_id, 40, in_parts=True)
    flip(part_folder(world.host("b", run_id).checkpoints, 40, "b") / "weights")
    with pytest.raises(CheckpointError, match="without b: they lie in parts, one on each host") as caught:
        resume(world, run_id)
    assert caught.value.exit_code == 5
    assert "it held the rows of rank 1 of 2" in caught.value.seen
    assert world.spawned == []
    assert not world.host("a", run_id).attempt(2).exists()
    world.save(run_id, 20)
    resume(world, run_id)
    assert Gang.load(world.host("a", run_id).gang(2)).resume_step == 20
    assert any("skipped checkpoint: step 40 on b: part-b is whole on no host" in line for line in world.said)


def test_other_hosts_get_checkpoint_data_and_history_and_the_batch_stays(world: World, run_id: str) -> None:
    world.save(run_id, 40)
    world.host("a", run_id).metrics.write_text('{"kind": "step"}\n', encoding="utf-8")
    three = THREE.replace(
        "name: a, transport: local, workdir: ./places/a", "name: e, transport: local, workdir: ./places/e"
    )
    resume(world, run_id, world.file("three.yaml", three))
    for name in ("e", "c", "d"):
        host = world.host(name, run_id)
        gang = Gang.load(host.gang(2))
        assert [(rank.host, rank.share) for rank in gang.ranks] == [("e", 2), ("c", 2), ("d", 2)]
        folder, _digest = find_parts(host.checkpoints, 40, host=name)[0]
        assert verify_part(folder) == []
        assert host.token_set(world.train_hash).is_dir()
    assert world.host("e", run_id).metrics.read_text(encoding="utf-8") == '{"kind": "step"}\n'


def test_one_name_for_two_places_is_no_obstacle(world: World, run_id: str) -> None:
    world.save(run_id, 40)
    moved = THREE.replace("./places/a", "./places/moved")
    resume(world, run_id, world.file("three.yaml", moved))
    folder, _digest = find_parts(world.host("moved", run_id).checkpoints, 40, host="a")[0]
    assert verify_part(folder) == []


@pytest.mark.parametrize(("what", "kind"), [("train_hash", DataError), ("model", ModelError)])
def test_changed_data_or_model_is_refused_and_the_run_stays_as_it_was(
    world: World, run_id: str, what: str, kind: type[Exception]
) -> None:
    world.save(run_id, 40)
    setattr(world, what, "beef" * 16)
    with pytest.raises(kind, match="changed since the run began"):
        resume(world, run_id)
    state = RunState.load(RunLayout(world.home, run_id))
    assert (state.phase, state.attempt) == ("stopped", 1)
    assert world.spawned == []


def test_a_running_run_is_refused(world: World, run_id: str) -> None:
    world.alive = True
    with pytest.raises(UsageError, match="is running") as caught:
        resume(world, run_id)
    assert "gangline stop" in caught.value.fix


def test_a_run_that_another_terminal_prepares_is_refused(world: World, run_id: str) -> None:
    RunState(name="job", phase="preparing", supervisor=ProcessId.current()).save(RunLayout(world.home, run_id))
    with pytest.raises(UsageError, match="is running"):
        resume(world, run_id)
    with (
        open_run(run_id, home=world.home, deps=world.deps) as run,
        pytest.raises(UsageError, match="being prepared"),
    ):
        stop(run, deps=world.deps)


def test_of_two_resumes_at_once_one_is_refused_and_harms_nothing(world: World, run_id: str) -> None:
    world.save(run_id, 40)
    errors = []

    def again() -> None:
        world.while_spawning = lambda: None
        RunState(name="job", phase="stopped", attempt=2).save(RunLayout(world.home, run_id))
        with pytest.raises(UsageError) as caught:
            resume(world, run_id)
        errors.append(caught.value)

    world.while_spawning = again
    layout = resume(world, run_id)
    assert world.spawned == [(layout.folder, 2)]
    assert "being resumed" in errors[0].what
    assert errors[0].seen
    assert "gangline attach" in errors[0].fix


def test_the_hosts_of_a_run_change_only_once_its_gang_runs_there(world: World, run_id: str) -> None:
    world.save(run_id, 40)
    layout = RunLayout(world.home, run_id)
    before = read_json(layout.cluster)
    world.spawn_error = RunFailed("e: the gangline agent did not start")
    three = THREE.replace("name: a, transport: local, workdir: ./places/a", "name: e, transport: local, workdir: ./e")
    with pytest.raises(RunFailed):
        resume(world, run_id, world.file("three.yaml", three))
    assert read_json(layout.cluster) == before
    assert read_json(layout.attempt(1) / "cluster.json") == before
    assert [host["name"] for host in read_json(layout.attempt(2) / "cluster.json")["hosts"]] == ["e", "c", "d"]


def test_a_finished_run_is_refused(world: World, run_id: str) -> None:
    world.ended(run_id, "finished")
    with pytest.raises(UsageError, match="has finished"):
        resume(world, run_id)


def test_a_dry_run_finds_the_step_and_places_nothing(world: World, run_id: str) -> None:
    world.save(run_id, 40, commit=False)
    lines = app.rehearse_resume(run_id, home=world.home, console=world, deps=world.deps)
    assert [line for line in lines if line.startswith("#")] == ["# a", "# b"]
    assert "resuming from step 40" in world.said
    assert not (world.host("a", run_id).checkpoints / "step-00000040" / COMMIT_FILE).exists()
    assert not world.host("a", run_id).gang(2).exists()
    assert RunState.load(RunLayout(world.home, run_id)).attempt == 1


@pytest.mark.parametrize("now", [False, True])
def test_stop_orders_the_end_of_a_living_run_only(world: World, run_id: str, now: bool) -> None:
    with open_run(run_id, home=world.home, deps=world.deps) as run:
        assert not stop(run, now=now, deps=world.deps)
        world.alive = True
        assert stop(run, now=now, deps=world.deps)
    assert world.said == ["order kill" if now else "order stop"]


def test_a_rehearsed_stop_orders_nothing(world: World, run_id: str) -> None:
    world.alive = True
    with open_run(run_id, home=world.home, deps=world.deps) as run:
        lines = rehearse_stop(run, now=False, deps=world.deps)
    assert [line.partition(":")[0] for line in lines] == ["a", "b"]
    assert world.said == []
