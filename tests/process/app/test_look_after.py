"""`attach` to a run that goes on though its supervisor is gone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gangline import app
from gangline.control.supervision import SupervisorRecord, open_run, supervise_again
from gangline.errors import RunFailed
from gangline.runs.layout import RunLayout
from gangline.runs.state import ProcessId, RunState
from tests.process.app.world import World


@pytest.fixture
def run_id(world: World) -> str:
    """A run whose ranks go on, and whose supervisor is gone."""
    run_id = app.train(world.start(), console=world, deps=world.deps).run_id
    me = ProcessId.current()
    stands(world, run_id, ProcessId(pid=me.pid, start_ticks=me.start_ticks - 1))
    world.alive = True
    world.spawned.clear()
    world.said.clear()
    return run_id


def stands(world: World, run_id: str, supervisor: ProcessId) -> None:
    state = RunState(name="job", phase="running", attempt=3, supervisor=supervisor)
    state.save(RunLayout(world.home, run_id))


def attached(world: World, run_id: str, *, keeper: str | None = None) -> bool:
    with open_run(run_id, home=world.home, deps=world.deps) as run:
        return supervise_again(
            dataclasses.replace(run, supervisor=SupervisorRecord(host=keeper)), console=world, deps=world.deps
        )


def test_another_one_takes_over_the_attempt_that_runs_and_that_is_said(world: World, run_id: str) -> None:
    assert attached(world, run_id)
    assert world.spawned == [(RunLayout(world.home, run_id).folder, 3)]
    assert world.said == [f"{run_id} had lost its supervisor; a new one supervises it now"]


def test_a_run_that_has_one_is_left_alone(world: World, run_id: str) -> None:
    stands(world, run_id, ProcessId.current())
    assert not attached(world, run_id)
    assert (world.spawned, world.said) == ([], [])


def test_what_does_not_run_any_more_is_not_started_by_looking_at_it(world: World, run_id: str) -> None:
    world.alive = False
    assert not attached(world, run_id)
    assert world.spawned == []


def test_where_the_head_keeps_the_run_a_host_agent_there_does_it(world: World, run_id: str) -> None:
    assert not attached(world, run_id, keeper="a")
    assert world.spawned == []


def test_one_that_came_first_is_as_good(world: World, run_id: str) -> None:
    deps = dataclasses.replace(world.deps, spawn=Refused(lambda: stands(world, run_id, ProcessId.current())))
    with open_run(run_id, home=world.home, deps=deps) as run:
        assert not supervise_again(run, console=world, deps=deps)
    assert world.said == []


def test_one_that_does_not_come_up_is_an_error(world: World, run_id: str) -> None:
    deps = dataclasses.replace(world.deps, spawn=Refused(lambda: None))
    with open_run(run_id, home=world.home, deps=deps) as run, pytest.raises(RunFailed, match="did not start"):
        supervise_again(run, console=world, deps=deps)


class Refused:
    """A supervisor that does not come up; `meanwhile` happens before it says so."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile

    def __call__(self, _folder: Path, _attempt: int, secrets: Mapping[str, str] | None = None) -> None:
        self._meanwhile()
        raise RunFailed("the supervisor did not start", seen=f"secrets {secrets}")
