"""`gangline save`: who is told, what counts as an answer, and who cannot be told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gangline.control.save_order import OrderedSave, order_save
from gangline.control.supervision import RunHandle, SupervisorRecord
from gangline.control.user_command import CommandRecord
from gangline.errors import HostUnreachable, RunFailed, UsageError
from gangline.provision.trees import host_layout
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_json
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import write_record
from gangline.runs.state import Phase, ProcessId, RunState
from tests.fakes.transport import FakeTransport

HEAD = Host(name="pc1", workdir="/srv", python="python3", transport="ssh")
GONE = ProcessId(pid=ProcessId.current().pid, start_ticks=1)


class World:
    """A run on one host that this computer supervises."""

    def __init__(self, home: Path) -> None:
        layout = RunLayout(home, "calm-otter-7")
        layout.folder.mkdir(parents=True)
        write_json(layout.cluster, Cluster(name="home", hosts=(HEAD,)).to_json())
        self.head = FakeTransport("pc1")
        self.there = host_layout(HEAD, layout.run_id)
        self.run = RunHandle(
            layout=layout,
            cluster=Cluster(name="home", hosts=(HEAD,)),
            transports={"pc1": self.head},
            supervisor=SupervisorRecord(),
        )
        self.stands("running")

    def stands(self, phase: Phase, attempt: int = 2, supervisor: ProcessId | None = None) -> None:
        state = RunState(name="tiny", phase=phase, attempt=attempt, supervisor=supervisor or ProcessId.current())
        state.save(self.run.layout)

    def told(self, event: str, **more: Any) -> None:
        line = json.dumps({"kind": "event", "event": event, **more}) + "\n"
        self.head.files[self.there.events] = self.head.files.get(self.there.events, b"") + line.encode()

    def look(self, order: OrderedSave) -> str | None:
        return order.look(self.run.record())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_run_has_saved_once_the_step_that_it_saved_in_answer_is_committed(world: World) -> None:
    world.told("saving", step=10, ordered=True)  # of an order before this one
    order = order_save(world.run)
    assert world.there.save_order(2) in world.head.files
    world.told("committed", step=10)
    assert world.look(order) is None
    world.told("saving", step=15)  # by its own schedule
    world.told("committed", step=15)
    assert world.look(order) is None
    world.told("saving", step=17, ordered=True)
    assert world.look(order) is None
    world.told("committed", step=17)
    assert world.look(order) == "saved step 17"


def test_the_commit_of_a_quick_save_may_be_written_before_the_save(world: World) -> None:
    order = order_save(world.run)
    world.told("committed", step=17)
    assert world.look(order) is None
    world.told("saving", step=17, ordered=True)
    assert world.look(order) == "saved step 17"


def test_a_save_that_fails_is_told_with_its_cause(world: World) -> None:
    order = order_save(world.run)
    world.told("saving", step=17, ordered=True)
    world.told("save-failed", step=18, what="rank 0 on pc1: the disk is full")
    with pytest.raises(RunFailed, match="could not save step 17") as caught:
        world.look(order)
    assert caught.value.seen == "rank 0 on pc1: the disk is full"


@pytest.mark.parametrize(
    ("phase", "attempt", "seen"),
    [
        ("finished", 2, "the run is finished"),
        ("running", 3, "attempt 2 has ended"),
        ("restarting", 2, "attempt 2 has ended"),
    ],
)
def test_an_attempt_that_ends_takes_the_order_with_it(world: World, phase: Phase, attempt: int, seen: str) -> None:
    order = order_save(world.run)
    world.stands(phase, attempt)
    with pytest.raises(RunFailed, match="ended before it was seen to save") as caught:
        world.look(order)
    assert caught.value.seen == seen
    assert ("gangline save" in caught.value.fix) == (phase != "finished")


def test_the_last_save_of_a_run_that_finishes_meanwhile_counts(world: World) -> None:
    order = order_save(world.run)
    world.told("saving", step=60, ordered=True)
    world.told("committed", step=60)
    world.stands("finished")
    assert world.look(order) == "saved step 60"


@pytest.mark.parametrize(
    ("phase", "what"),
    [
        ("preparing", "has not begun"),
        ("restarting", "is between two attempts"),
        ("stopping", "is ending"),
        ("finished", "has ended"),
    ],
)
def test_a_run_without_ranks_is_refused_and_nothing_is_written(world: World, phase: Phase, what: str) -> None:
    world.stands(phase)
    with pytest.raises(UsageError, match=what) as caught:
        order_save(world.run)
    assert phase in caught.value.seen
    assert "calm-otter-7" in caught.value.fix
    assert world.head.files == {}


def test_a_run_that_nobody_supervises_would_not_commit_it(world: World) -> None:
    world.stands("running", supervisor=GONE)
    with pytest.raises(RunFailed, match="is lost"):
        order_save(world.run)
    assert world.head.files == {}


def test_a_head_that_does_not_answer_is_no_order(world: World) -> None:
    world.head.reachable = False
    with pytest.raises(HostUnreachable):
        order_save(world.run)


def test_a_script_that_never_asks_is_refused_and_one_that_does_is_told(world: World) -> None:
    record = CommandRecord(words=("train.py",), resume_words=None, folder="/f", project={})
    write_record(world.run.layout.command, record.to_json())
    with pytest.raises(UsageError, match="takes no orders to save") as caught:
        order_save(world.run)
    assert "save_now()" in caught.value.seen
    assert world.head.files == {}
    world.head.files[world.there.script_saves(2)] = b""
    order = order_save(world.run)
    assert world.look(order) is None
    del world.head.files[world.there.save_order(2)]  # rank 0 has taken it
    assert world.look(order) == "was told to save"
