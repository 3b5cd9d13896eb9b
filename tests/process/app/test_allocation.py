"""Inside an allocation of Slurm other backends start nothing, and everything that only reads works."""

import dataclasses

import pytest

from gangline import app
from gangline.control.listing import list_runs
from gangline.control.user_command import draft
from gangline.decide.what_if import WhatIf, predict
from gangline.errors import UsageError
from gangline.launch.backends import backend


@pytest.fixture
def deps(world):
    return dataclasses.replace(world.deps, backend=backend, variables={"SLURM_JOB_ID": "4711"})


def test_a_start_is_refused_and_nothing_is_written(world, deps):
    start = world.start()
    record = draft(("train.py",), folder=world.root)
    for begin in (
        lambda: app.train(start, console=world, deps=deps),
        lambda: app.rehearse(start, console=world, deps=deps),
        lambda: app.run(record, home=world.home, cluster_path=start.cluster, console=world, deps=deps),
    ):
        with pytest.raises(UsageError, match=r"starts nothing inside an allocation of Slurm") as caught:
            begin()
        assert "SLURM_JOB_ID=4711" in caught.value.seen
        assert "from a shell outside of the allocation" in caught.value.fix
    assert (world.spawned, world.commands) == ([], [])
    assert not world.home.exists()


def test_a_resume_is_refused_and_the_run_stays_as_it_was(world, deps):
    layout = app.train(world.start(), console=world, deps=world.deps)
    world.ended(layout.run_id)
    before = layout.state.read_bytes()
    with pytest.raises(UsageError, match=r"starts nothing inside an allocation of Slurm"):
        app.resume(layout.run_id, home=world.home, console=world, deps=deps)
    assert layout.state.read_bytes() == before
    assert len(world.spawned) == 1


def test_runs_are_listed_and_plans_are_made(world, deps):
    layout = app.train(world.start(), console=world, deps=world.deps)
    world.ended(layout.run_id)
    assert [each.record.id for each in list_runs(world.home, deps=deps)] == [layout.run_id]
    assert predict(world.start(), WhatIf(), console=world, deps=deps).decision is not None


def test_what_a_backend_does_not_promise_is_said(world):
    cluster = (world.start().cluster).read_text() + "backend: mpirun\n"
    predict(world.start(cluster=cluster), WhatIf(), console=world, deps=world.deps)
    (line,) = [line for line in world.said if line.startswith("backend ")]
    assert "mpirun: the loss of one host ends the ranks on all hosts; every restart imports torch anew" in line
