"""`gangline profile`: whose steps cannot be recorded, and nothing is ordered then."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.control.profile_run import record_steps
from gangline.control.user_command import CommandRecord
from gangline.errors import UsageError
from gangline.runs.record_versions import write_record
from tests.unit.control.test_save_order import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def refused(world: World) -> str:
    with pytest.raises(UsageError) as error:
        record_steps(world.run, 3, progress=lambda _words: None)
    assert world.head.files == {}
    return str(error.value)


def test_a_script_of_the_users_own_is_refused(world: World) -> None:
    record = CommandRecord(words=("train.py",), resume_words=None, folder="/f", project={})
    write_record(world.run.layout.command, record.to_json())
    assert "runs your own command, whose steps gangline cannot record" in refused(world)


@pytest.mark.parametrize("phase", ["restarting", "stopped", "finished", "stopping"])
def test_a_run_that_does_not_train_is_refused(world: World, phase: str) -> None:
    world.stands(phase)
    assert f"it is {phase}" in refused(world)
