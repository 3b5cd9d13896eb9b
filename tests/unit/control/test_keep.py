"""Who keeps a run, and what this computer shows of it when the keeper does not answer."""

import dataclasses
import json
from pathlib import PurePath

import pytest

from gangline.context import Context, Dependencies
from gangline.control.end import stop
from gangline.control.listing import list_runs
from gangline.control.supervision import SupervisorRecord, copy_records, open_run
from gangline.errors import GanglineError, HostUnreachable
from gangline.planner.outcome import spent
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_json
from gangline.runs.gang import Gang, GangRank
from gangline.runs.layout import RunLayout, new_id
from gangline.runs.registry import run_ids
from gangline.runs.state import AttemptOutcome, ProcessId, RunState
from tests.fakes.backend import FakeBackend
from tests.fakes.transport import FakeTransport
from tests.unit.planner.outcomes import line, outcome, plan


def ssh_host(name, **more):
    return Host(name=name, workdir=f"/home/{name}", python="python3", transport="ssh", ssh=name, **more)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


class World:
    """A home, two hosts in memory, and a backend that starts nothing."""

    def __init__(self, home):
        self.home = home
        self.transports = {name: FakeTransport(name) for name in ("pc1", "pc2")}
        self.backend = FakeBackend()
        self.cluster = Cluster(name="lan", hosts=(ssh_host("pc1"), ssh_host("pc2")))
        self.alive = True

    @property
    def deps(self):
        return Dependencies(
            connect=lambda _cluster: dict(self.transports),
            backend=lambda _name: self.backend,
            is_alive=self.is_alive,
            unfinished=lambda _layout, _keeper: (),
            cannot_supervise=lambda _cluster, _head: [],
        )

    def is_alive(self, _layout, keeper):
        keeper.names(PurePath("/"))  # as every question to a host: raises where it does not answer
        return self.alive

    @property
    def context(self):
        return Context(transports=dict(self.transports), home=self.home, console=self, deps=self.deps)

    def run(self, *, phase="running", attempt=1):
        """A run that pc1 keeps, as this computer remembers it."""
        layout = RunLayout(self.home, new_id(run_ids(self.home)))
        layout.attempt(attempt).mkdir(parents=True)
        write_json(layout.cluster, self.cluster.to_json())
        RunState(name="job", phase=phase, attempt=attempt, supervisor=ProcessId(pid=1, start_ticks=1)).save(layout)
        SupervisorRecord(host="pc1").save(layout)
        gang = Gang(
            run_id=layout.run_id, attempt=attempt, ranks=(GangRank(host="pc1", share=1), GangRank(host="pc2", share=1))
        )
        request = self.backend.render(self.cluster, gang, port=29500)
        write_json(layout.attempt(attempt) / "request.json", request.to_json())
        return layout

    def said_there(self, layout, **state):
        """What the keeper has of the run."""
        there = RunLayout(PurePath("/home/pc1"), layout.run_id)
        data = dataclasses.asdict(RunState(name="job", **state))
        self.transports["pc1"].files[PurePath(there.state)] = json.dumps(data).encode()
        return there


def test_what_the_keeper_says_is_copied(world):
    layout = world.run()
    there = world.said_there(layout, phase="finished")
    copy_records(layout, there, world.transports["pc1"])
    assert RunState.load(layout).phase == "finished"


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({"phase": "failed"}, {"phase": "preparing"}),  # it never came up there: the cause stands here
        ({"phase": "preparing", "attempt": 2}, {"phase": "stopped", "attempt": 1}),  # a resume is being prepared
    ],
)
def test_what_this_computer_knows_better_is_not_overwritten(world, here, there):
    layout = world.run(**here)
    copy_records(layout, world.said_there(layout, **there), world.transports["pc1"])
    assert RunState.load(layout).phase == here["phase"]


def test_a_keeper_that_does_not_answer_is_told_and_hides_no_other_run(world):
    lost, other = world.run(), world.run(phase="finished")
    world.transports["pc1"].reachable = False
    listed = {each.record.id: each.record for each in list_runs(world.home, deps=world.deps)}
    assert "does not answer" in listed[lost.run_id].silent
    assert listed[lost.run_id].phase == "running"
    assert (listed[other.run_id].phase, listed[other.run_id].silent) == ("finished", None)


def test_records_that_cannot_be_read_hide_no_other_run(world):
    broken, other = world.run(), world.run(phase="finished")
    (broken.folder / "supervision.json").write_text('{"host": "pc9"}', encoding="utf-8")
    listed = {each.record.id: each.record for each in list_runs(world.home, deps=world.deps)}
    assert "cannot be read" in listed[broken.run_id].silent
    assert listed[other.run_id].phase == "finished"


def test_without_its_keeper_a_run_is_ended_at_once_where_hosts_answer_and_only_then(world):
    layout = world.run()
    world.transports["pc1"].reachable = False
    with open_run(layout.run_id, home=world.home, deps=world.deps) as run:
        with pytest.raises(HostUnreachable):
            stop(run, deps=world.deps)
        assert world.backend.orders == []
        with pytest.raises(HostUnreachable, match="which supervises") as error:
            stop(run, now=True, deps=world.deps)
    assert world.backend.orders == ["kill"]
    assert "ordered to end at once: pc1, pc2" in error.value.seen or "pc2" in error.value.seen


def test_a_leader_that_does_not_answer_is_named_and_the_others_are_ended_in_its_attempt(world):
    """This computer has not heard of it before: it knows attempt 1, under pc1."""
    world.transports["pc3"] = FakeTransport("pc3")
    world.cluster = dataclasses.replace(world.cluster, hosts=(*world.cluster.hosts, ssh_host("pc3")))
    layout = world.run()
    SupervisorRecord(host="pc1", candidates=("pc2", "pc3")).save(layout)
    there = RunLayout(PurePath("/home/pc3"), layout.run_id)
    world.transports["pc3"].files = {
        PurePath(there.lead / "pc3" / "heartbeat-2.json"): b'{"leader": "pc2", "number": 7}',
        PurePath(there.attempt(2) / "gang.json"): b"{}",
    }
    gang = Gang(run_id=layout.run_id, attempt=2, ranks=tuple(GangRank(host=f"pc{n}", share=1) for n in (1, 2)))
    world.backend.start(world.backend.render(world.cluster, gang, port=1), {}, epoch=2_000_001)
    world.transports["pc1"].reachable = world.transports["pc2"].reachable = False
    with (
        open_run(layout.run_id, home=world.home, deps=world.deps) as run,
        pytest.raises(HostUnreachable, match="pc2, which supervises"),
    ):
        stop(run, now=True, deps=world.deps)
    assert world.backend.epochs[-1] == 2_000_002
    assert {status.phase for status in world.backend.statuses.values()} == {"ended"}


DEEP = b"[" * 10**5
STATE = {"name": "job", "phase": "running", "attempt": 1, "created": "", "updated": "", "epoch": 1}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[1]",
        b"7",
        b"null",
        DEEP,
        b"{}",
        json.dumps(STATE | {"attempt": "1"}).encode(),
        json.dumps(STATE | {"attempt": float("inf")}).encode(),
        json.dumps(STATE | {"phase": ["running"]}).encode(),
        json.dumps(STATE | {"supervisor": 7}).encode(),
        json.dumps(STATE | {"supervisor": {"pid": "x", "start_ticks": 1}}).encode(),
        json.dumps(STATE | {"error": "x"}).encode(),
        json.dumps(STATE | {"created": 7}).encode(),
    ],
)
def test_a_state_that_is_none_is_not_written_down_and_names_who_said_it(world, text):
    layout = world.run()
    before = layout.state.read_bytes()
    there = world.said_there(layout, phase="finished")
    world.transports["pc1"].files[PurePath(there.state)] = text
    with pytest.raises(GanglineError, match="what pc1 says cannot be understood"):
        copy_records(layout, there, world.transports["pc1"])
    assert layout.state.read_bytes() == before
    (listed,) = list_runs(world.home, deps=world.deps)
    assert "what pc1 says cannot be understood" in listed.record.silent


BOARD = {
    "done": False,
    "order": ["ssh", "agent"],
    "seconds": 3.0,
    "ranks": 2,
    "joined": 0,
    "sentence": None,
    "hosts": [{"host": "pc1", "ranks": 2, "joined": 0, "stages": {"ssh": 0.1, "agent": None}, "waits_for": []}],
}
OUTCOME = {"result": "failed", "hosts": {"pc1": {"phase": "ended", "returncode": 1}}, "error": None, "ended": "x"}


def with_files(world, layout, **files):
    there = world.said_there(layout, phase="running")
    for name, data in files.items():
        path = PurePath(there.attempt(1)) / f"{name}.json"
        world.transports["pc1"].files[path] = data if isinstance(data, bytes) else json.dumps(data).encode()
    copy_records(layout, there, world.transports["pc1"])


def test_the_board_and_the_outcome_are_copied_and_what_was_started_is_not(world):
    layout = world.run()
    started = (layout.attempt(1) / "request.json").read_bytes()
    with_files(world, layout, board=BOARD, outcome=OUTCOME, request={"hosts": [{"agent_argv": ["rm", "-r", "/"]}]})
    assert json.loads((layout.attempt(1) / "board.json").read_bytes()) == BOARD
    assert AttemptOutcome.load(layout.attempt(1) / "outcome.json").hosts["pc1"].returncode == 1
    assert (layout.attempt(1) / "request.json").read_bytes() == started


def comparison_there(world, layout, text):
    path = RunLayout(PurePath("/home/pc1"), layout.run_id).comparison
    world.transports["pc1"].files[PurePath(path)] = text


FIGURES = [line(step) for step in range(1, 21)]
COMPARISON = json.loads(json.dumps(outcome(plan(), FIGURES).to_json()))
TIMES = json.loads(json.dumps(spent(FIGURES, run_id="calm-otter-7", attempt=1).to_json()))


def test_the_plan_beside_what_came_of_it_is_copied_once_the_run_has_ended(world):
    layout = world.run()
    comparison_there(world, layout, json.dumps(COMPARISON).encode())
    times_there = RunLayout(PurePath("/home/pc1"), layout.run_id).times(1)
    world.transports["pc1"].files[PurePath(times_there)] = json.dumps(TIMES).encode()
    copy_records(layout, world.said_there(layout, phase="running"), world.transports["pc1"])
    assert not layout.comparison.exists()
    copy_records(layout, world.said_there(layout, phase="failed"), world.transports["pc1"])
    assert json.loads(layout.comparison.read_bytes()) == COMPARISON
    assert json.loads(layout.times(1).read_bytes()) == TIMES


@pytest.mark.parametrize("text", [b"", DEEP, b"null", b"[7]", json.dumps(COMPARISON | {"attempt": "../.."}).encode()])
def test_a_comparison_that_is_none_is_not_written_down_and_hides_nothing(world, text):
    layout = world.run()
    comparison_there(world, layout, text)
    copy_records(layout, world.said_there(layout, phase="finished"), world.transports["pc1"])
    assert RunState.load(layout).phase == "finished"
    assert not layout.comparison.exists()


@pytest.mark.parametrize(
    "files",
    [
        {"board": b""},
        {"board": DEEP},
        {"board": [1]},
        {"board": {**BOARD, "seconds": "long"}},
        {"board": {**BOARD, "hosts": [{"host": "pc1"}]}},
        {"board": {**BOARD, "sentence": ["x"]}},
        {"board": {**BOARD, "done": "no"}},
        {"outcome": b"null"},
        {"outcome": {**OUTCOME, "result": "perfect"}},
        {"outcome": {**OUTCOME, "hosts": 7}},
        {"outcome": {**OUTCOME, "left": [7]}},
        {"outcome": {**OUTCOME, "more": 1}},
        {"outcome": {**OUTCOME, "error": "x"}},
    ],
)
def test_a_board_or_an_outcome_that_is_none_is_not_written_down_and_names_who_said_it(world, files):
    layout = world.run()
    with pytest.raises(GanglineError, match="what pc1 says cannot be understood"):
        with_files(world, layout, **files)
    assert not (layout.attempt(1) / f"{next(iter(files))}.json").exists()


def test_a_state_with_all_it_may_have_is_taken_over(world):
    layout = world.run()
    there = world.said_there(layout, phase="failed", error={"what": "x"}, supervisor=ProcessId(pid=1, start_ticks=2))
    copy_records(layout, there, world.transports["pc1"])
    assert RunState.load(layout).error == {"what": "x"}
