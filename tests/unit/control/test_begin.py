"""A start that is broken off while its supervisor comes up elsewhere: what is said of it is true, whatever came of it."""

import dataclasses
import json
from pathlib import PurePath

import pytest

from gangline.context import Context, Dependencies
from gangline.control import start
from gangline.control.equip import Ready
from gangline.control.listing import list_runs
from gangline.control.start import discarded_unless_begun, preparing, resumable, start_attempt
from gangline.control.supervision import SupervisorRecord, open_run
from gangline.errors import GanglineError, HostKeyRefused, HostUnreachable, RunFailed, UsageError
from gangline.runs.cluster import Cluster, Host
from gangline.runs.gang import Gang, GangRank
from gangline.runs.job import DataJob, FailureJob, Job, ModelJob, SourceJob
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import write_record
from gangline.runs.state import ProcessId, RunState
from tests.fakes.backend import FakeBackend
from tests.fakes.transport import FakeTransport
from tests.unit.planner.outcomes import plan

ROWS = SourceJob(files=("rows.jsonl",))
JOB = Job(name="tiny", model=ModelJob(path="model"), data=DataJob(train=ROWS), batch=1, micro_batch=1)


def with_failures(**words):
    return dataclasses.replace(JOB, failures=FailureJob(**words))


THERE = ProcessId(pid=4711, start_ticks=99)
LOST = HostUnreachable("pc1 does not answer any more", seen="the connection ended", fix="look at the network")


class World:
    """A run that pc1 is to look after, and what becomes of its start."""

    def __init__(self, home):
        self.home = home
        self.keeper = FakeTransport("pc1")
        self.cluster = Cluster(
            name="lan", hosts=(Host(name="pc1", workdir="/home/pc1", python="python3", transport="ssh", ssh="pc1"),)
        )
        self.layout = RunLayout(home, "calm-otter-7")
        self.layout.folder.mkdir(parents=True)
        self.comes_up = False
        self.error = LOST
        self.said = []
        self.candidates = ()
        self.job = JOB

    def report(self, line):
        self.said.append(line)

    @property
    def there(self):
        return RunLayout(PurePath("/home/pc1"), self.layout.run_id)

    def spawn_there(self, _head, keeper, there, number, secrets):
        assert (keeper, there, number, secrets) == (self.keeper, self.there, 1, {})
        if self.comes_up:
            self.come_up()
        if self.error is not None:
            raise self.error

    def come_up(self):
        state = RunState(name="job", phase="running", supervisor=THERE, epoch=1)
        self.keeper.files[PurePath(self.there.state)] = json.dumps(dataclasses.asdict(state)).encode()
        stat = " ".join(["4711", "(python)", "S", *["0"] * 18, "99", "0"])
        self.keeper.files[PurePath("/proc/4711/stat")] = stat.encode()

    def is_alive(self, _layout, keeper):
        keeper.names(PurePath("/"))  # as every question to a host: raises where it does not answer
        return PurePath("/proc/4711/stat") in self.keeper.files

    @property
    def deps(self):
        return Dependencies(
            connect=lambda _cluster: {"pc1": self.keeper},
            backend=lambda _name: FakeBackend(),
            spawn_there=self.spawn_there,
            is_alive=self.is_alive,
            unfinished=lambda _layout, _keeper: (),
            free_port=lambda _cluster, _head, *, claim: 4711,
            variables={},
        )

    def start(self):
        transports = {host.name: FakeTransport(host.name) for host in self.cluster.hosts} | {"pc1": self.keeper}
        context = Context(transports=transports, home=self.home, console=self, deps=self.deps)
        record = SupervisorRecord(host="pc1", candidates=self.candidates)
        ready = Ready(cluster=self.cluster, networks={}, supervisor=lambda: record)
        gang = Gang(run_id=self.layout.run_id, attempt=1, ranks=(GangRank(host="pc1", share=1),))
        state = RunState(name="job", supervisor=ProcessId(pid=1, start_ticks=0))  # whose process is gone later
        with discarded_unless_begun(self.layout, self.cluster, context), preparing(self.layout, state):
            if self.job is not None:
                self.job.save(self.layout.job)
            write_record(self.layout.cluster, self.cluster.to_json())
            start_attempt(self.layout, ready, gang, context)

    def record(self):
        (listed,) = list_runs(self.home, deps=self.deps)
        return listed.record

    def may_be_resumed(self):
        with open_run(self.layout.run_id, home=self.home, deps=self.deps) as run:
            return resumable(run, self.deps)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def broken_off(world):
    with pytest.raises(HostUnreachable, match="calm-otter-7 may or may not have started") as caught:
        world.start()
    words = " ".join([world.said[-1], caught.value.fix])
    assert "which is" not in world.said[-1]
    assert "calm-otter-7 may be running" in world.said[-1]
    for command in ("gangline ps", "gangline attach calm-otter-7", "gangline resume calm-otter-7"):
        assert command in words
    assert "the connection ended" in caught.value.seen
    assert "look at the network" in caught.value.fix


def test_a_supervisor_that_came_up_though_the_connection_was_lost_is_found_running(world):
    world.comes_up = True
    broken_off(world)
    assert world.record().phase == "running"
    with pytest.raises(UsageError, match="is running"):
        world.may_be_resumed()


@pytest.mark.parametrize("planned", [True, False])  # a command of the user's own has no plan
def test_who_looks_after_a_run_has_its_plan_to_hold_what_comes_against(world, planned):
    world.comes_up, world.error = True, None
    if planned:
        write_record(world.layout.plan, plan().to_json())
    world.start()
    handed_over = world.keeper.files.get(PurePath(world.there.plan))
    assert (handed_over is None) != planned
    assert not planned or json.loads(handed_over)["job"] == "tiny"


def test_records_for_a_successor_are_written_only_where_there_may_be_one(world):
    world.comes_up, world.error = True, None
    world.start()
    assert PurePath(world.there.deputies) not in world.keeper.files
    assert not [line for line in world.said if "is lost" in line]


@pytest.mark.parametrize(
    ("job", "candidates", "why_none"),
    [
        (JOB, ("pc2", "pc3"), ""),
        (JOB, (), "with fewer than three voices nobody is elected; a `witness` gives two hosts a third one"),
        (None, ("pc2", "pc3"), "`takeover` is not for programs of your own"),
        (with_failures(restarts=0), ("pc2", "pc3"), "the job ends it at the first failure"),
        (with_failures(without=False), ("pc2", "pc3"), "the job never goes on without a host"),
    ],
)
def test_a_start_says_what_becomes_of_the_run_if_its_supervisor_is_lost(world, monkeypatch, job, candidates, why_none):
    for name in ("seen_from_anywhere", "seen_from_head"):
        monkeypatch.setattr(start, name, lambda cluster: cluster)  # asks ssh
    world.comes_up, world.error = True, None
    others = [dataclasses.replace(world.cluster.head, name=name) for name in ("pc2", "pc3")]
    world.cluster = dataclasses.replace(world.cluster, takeover="votes", hosts=(*world.cluster.hosts, *others))
    world.job, world.candidates = job, candidates
    world.start()
    (said,) = [line for line in world.said if "is lost" in line]
    waits = f"if pc1 is lost, the run waits for: gangline resume calm-otter-7 --without pc1 ({why_none})"
    takes = "if pc1 is lost, pc2 or pc3 takes the run over, as long as most of its hosts remain"
    assert said == (waits if why_none else takes)
    assert (PurePath(world.there.deputies) in world.keeper.files) == (not why_none)


def test_a_supervisor_that_did_not_come_up_leaves_a_run_that_is_lost_and_can_be_resumed(world):
    broken_off(world)
    assert world.record().phase == "lost"
    assert world.may_be_resumed().attempt == 1


def test_a_supervisor_that_comes_up_later_is_found_running(world):
    broken_off(world)
    world.come_up()
    assert world.record().phase == "running"


def test_as_long_as_the_head_does_not_answer_nobody_says_more(world):
    broken_off(world)
    world.keeper.reachable = False
    record = world.record()
    assert record.phase == "running"
    assert "pc1 does not answer" in record.silent
    with pytest.raises(HostUnreachable, match="may still be running"):
        world.may_be_resumed()


@pytest.mark.parametrize(("comes_up", "phase"), [(True, "running"), (False, "lost")])
def test_ctrl_c_while_the_supervisor_comes_up_is_told_as_it_is(world, comes_up, phase):
    world.comes_up, world.error = comes_up, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        world.start()
    assert "may be running" in world.said[-1]
    assert SupervisorRecord.load(world.layout).host == "pc1"
    assert world.record().phase == phase


@pytest.mark.parametrize(
    "error", [HostKeyRefused("pc1 shows another key"), RunFailed("the supervisor of calm-otter-7 did not start")]
)
def test_a_supervisor_that_surely_did_not_come_up_leaves_no_run(world, error):
    world.error = error
    with pytest.raises(GanglineError) as caught:
        world.start()
    assert caught.value is error
    assert "nothing was started" in world.said[-1]
    assert list_runs(world.home, deps=world.deps) == []


def test_a_start_whose_end_was_not_seen_runs(world):
    """The supervisor came up, and then the head fell silent."""
    world.error = None
    world.comes_up = True
    read = world.keeper.read

    def silent(path, **how):
        if path.name == "state.json" and PurePath("/proc/4711/stat") in world.keeper.files:
            raise LOST
        return read(path, **how)

    world.keeper.read = silent
    world.start()
    assert RunState.load(world.layout).phase == "running"
    world.keeper.read = read
    assert world.record().phase == "running"
