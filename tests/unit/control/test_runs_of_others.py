"""Runs that another computer began: their records are taken in, with hosts as this computer reaches them."""

import dataclasses
from dataclasses import replace
from pathlib import PurePath

import pytest

from gangline.context import Dependencies
from gangline.control import runs_of_others
from gangline.control.listing import list_runs
from gangline.control.runs_of_others import take_in_runs
from gangline.control.supervision import SupervisorRecord, request_here
from gangline.errors import HostUnreachable, UsageError
from gangline.launch.backend import LaunchRequest
from gangline.runs.cluster import Cluster, Host, SlurmRequest
from gangline.runs.gang import Gang, GangRank
from gangline.runs.job import DataJob, Job, ModelJob, SourceJob
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import encode_record, load_record
from gangline.runs.registry import run_ids
from gangline.runs.state import ProcessId, RunState
from gangline.supervise.lead import Deputies
from tests.fakes.backend import FakeBackend
from tests.fakes.transport import FakeTransport

RUN = "calm-otter-7"
JOB = Job(name="tiny", model=ModelJob(path="model"), data=DataJob(train=SourceJob()), batch=3, micro_batch=1)
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"


def host(number, **words):
    return Host(name=f"pc{number}", workdir="/srv/g", python="/usr/bin/python3", address=f"10.0.0.{number}", **words)


OWN = Cluster(
    name="home",
    hosts=tuple(replace(host(n, transport="ssh", ssh_port=2222, host_key=KEY), name=f"my{n}") for n in (1, 2, 3)),
)
"""How this computer describes the hosts: under names of its own."""


class World:
    """A run of three hosts that pc1 supervises, and what this computer knows of it: nothing."""

    def __init__(self, home):
        self.home = home
        self.said = []
        self.transports = {f"my{n}": FakeTransport(f"my{n}") for n in (1, 2, 3)}
        self.deps = Dependencies(
            connect=lambda _cluster: self.transports, backend=lambda _name: FakeBackend(), variables={}
        )
        theirs = (host(1), host(2, transport="ssh", ssh="bob@10.0.0.2"), host(3, transport="ssh", ssh="bob@10.0.0.3"))
        self.theirs = Cluster(name="lab", hosts=theirs)
        self.gang = Gang(run_id=RUN, attempt=1, ranks=tuple(GangRank(host=f"pc{n}", share=1) for n in (1, 2, 3)))
        self.state = RunState(name="tiny", phase="stopped", epoch=3)
        self.lay(1, "cluster.json", self.theirs.to_json())
        self.lay(1, "state.json", dataclasses.asdict(self.state))
        self.lay(1, "job.json", JOB.to_json())
        self.lay(1, "attempts/1/cluster.json", self.theirs.to_json())
        self.lay(1, "attempts/1/gang.json", self.gang.to_json())
        self.lay(1, "attempts/1/request.json", {"what": "another host says"})

    def lay(self, number, name, value):
        path = PurePath(f"/srv/g/runs/{RUN}/{name}")
        self.transports[f"my{number}"].files[path] = encode_record(value, path)

    def take_in(self):
        return take_in_runs(None, home=self.home, console=self, deps=self.deps)

    def report(self, line):
        self.said.append(line)

    progress = report


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_of_others, "load_cluster", lambda _path, _home: OWN)
    return World(tmp_path)


def test_it_is_taken_in_with_hosts_as_they_are_reached_from_here(world):
    assert world.take_in() == [RUN]
    layout = RunLayout(world.home, RUN)
    hosts = load_record(layout.cluster, Cluster).hosts
    assert [(each.name, each.transport, each.ssh, each.ssh_port, each.host_key) for each in hosts] == [
        (f"pc{n}", "ssh", f"my{n}", 2222, KEY) for n in (1, 2, 3)
    ]
    assert SupervisorRecord.load(layout).host == "pc1"
    assert load_record(layout.attempt_cluster(1), Cluster).hosts == hosts
    assert [each.record.phase for each in list_runs(world.home, deps=world.deps)] == ["stopped"]
    assert world.said == [f"{RUN}: begun by another computer, found on my1"]


def test_what_is_sent_to_hosts_is_made_here_and_not_copied_from_one(world):
    world.take_in()
    request = load_record(RunLayout(world.home, RUN).request(1), LaunchRequest)
    assert list(request.names) == ["pc1", "pc2", "pc3"]


def test_of_a_program_of_the_users_own_no_order_is_made_up(world):
    del world.transports["my1"].files[PurePath(f"/srv/g/runs/{RUN}/job.json")]
    world.take_in()
    with pytest.raises(UsageError, match=r"cannot give the hosts of calm-otter-7 orders by itself"):
        request_here(RunLayout(world.home, RUN), 1)


def test_of_two_that_supervised_it_the_later_one_counts(world):
    seen_there = replace(world.theirs, hosts=(world.theirs.hosts[1], *world.theirs.hosts[::2]))
    world.lay(2, "cluster.json", seen_there.to_json())
    world.lay(2, "state.json", dataclasses.asdict(replace(world.state, epoch=1_000_002)))
    world.lay(2, "deputies.json", Deputies(cluster=seen_there, candidates=("pc1", "pc2"), attempt=1).to_json())
    assert world.take_in() == [RUN]
    record = SupervisorRecord.load(RunLayout(world.home, RUN))
    assert (record.host, record.candidates) == ("pc2", ("pc1",))


def test_one_that_is_known_stays_as_it_is(world):
    layout = RunLayout(world.home, RUN)
    layout.folder.mkdir(parents=True)
    assert world.take_in() == []
    assert list(layout.folder.iterdir()) == []


def test_one_that_ended_here_and_was_resumed_elsewhere_is_renewed(world):
    world.take_in()
    assert world.take_in() == []
    own = replace(JOB, model=ModelJob(path="/home/me/model"))
    own.save(RunLayout(world.home, RUN).job)
    world.lay(1, "state.json", dataclasses.asdict(replace(world.state, attempt=2, epoch=4, phase="failed")))
    world.lay(1, "attempts/2/gang.json", replace(world.gang, attempt=2).to_json())
    world.lay(1, "attempts/2/cluster.json", world.theirs.to_json())
    assert world.take_in() == [RUN]
    assert world.said[-1] == f"{RUN}: resumed by another computer, found on my1"
    assert [each.record.phase for each in list_runs(world.home, deps=world.deps)] == ["failed"]
    assert Job.load(RunLayout(world.home, RUN).job) == own  # its files are here


def test_what_its_supervisor_begins_by_itself_is_no_news_and_what_another_computer_begins_is(world):
    alive = replace(world.state, phase="running", supervisor=ProcessId(pid=2**30, start_ticks=1))
    world.lay(1, "state.json", dataclasses.asdict(alive))
    assert world.take_in() == [RUN]
    for number, ordered, taken in ((2, 1, []), (3, None, [RUN]), (4, 3, []), (6, 5, [RUN])):
        world.lay(1, "state.json", dataclasses.asdict(replace(alive, attempt=number, epoch=2 + number)))
        world.lay(1, f"attempts/{number}/cluster.json", world.theirs.to_json())
        if ordered is not None:
            world.lay(1, f"attempts/{number}/base.json", {"attempt": ordered})
        assert world.take_in() == taken


def test_one_that_was_resumed_on_another_host_is_renewed_but_not_by_one_that_was_cut_off(world):
    alive = replace(world.state, phase="running", supervisor=ProcessId(pid=2**30, start_ticks=1))
    world.lay(1, "state.json", dataclasses.asdict(alive))
    assert world.take_in() == [RUN]
    world.transports["my1"].reachable = False
    seen_there = replace(world.theirs, hosts=world.theirs.hosts[1:])
    world.lay(2, "cluster.json", seen_there.to_json())
    world.lay(2, "attempts/2/cluster.json", seen_there.to_json())
    for epoch, taken in ((2, []), (1_000_004, [RUN])):
        world.lay(2, "state.json", dataclasses.asdict(replace(alive, attempt=2, epoch=epoch)))
        assert world.take_in() == taken
    assert SupervisorRecord.load(RunLayout(world.home, RUN)).host == "pc2"


def test_one_that_is_interrupted_is_taken_in_the_next_time(world, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runs_of_others, "copy_records", interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.take_in()
    assert list((world.home / "runs").iterdir()) == []
    assert world.take_in() == [RUN]


def test_a_candidate_that_is_no_host_of_the_run_is_left_out(world):
    deputies = Deputies(cluster=world.theirs, candidates=("pc1", "pc7", "pc3"), attempt=1)
    world.lay(1, "deputies.json", deputies.to_json())
    world.take_in()
    assert SupervisorRecord.load(RunLayout(world.home, RUN)).candidates == ("pc3",)


def test_a_run_of_slurm_is_left_out(world):
    world.lay(1, "cluster.json", replace(world.theirs, slurm=SlurmRequest(nodes=3)).to_json())
    assert world.take_in() == []
    assert "it is a run of Slurm" in world.said[0]


def test_a_state_that_cannot_be_read_is_told_as_that(world):
    world.transports["my1"].files[PurePath(f"/srv/g/runs/{RUN}/state.json")] = b"{"
    assert world.take_in() == []
    assert [line for line in world.said if "left out" in line and "state.json" in line] == world.said
    assert world.said


def test_a_folder_that_cannot_be_listed_is_told_and_the_other_hosts_are_asked(world, monkeypatch):
    def refused(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(world.transports["my3"], "names", refused)
    assert world.take_in() == [RUN]
    assert "the runs on my3 cannot be listed" in world.said[0]


def test_one_whose_hosts_are_not_all_in_the_file_is_left_out_and_leaves_nothing(world):
    far = replace(world.theirs, hosts=(*world.theirs.hosts, host(9, transport="ssh")))
    world.lay(1, "cluster.json", far.to_json())
    assert world.take_in() == []
    assert world.said == [
        f"{RUN} on my1 is left out: its host pc9 is not in the cluster file: 10.0.0.9; the file has my1, my2 and my3"
    ]
    assert run_ids(world.home) == []


def test_one_with_damaged_records_is_left_out_and_leaves_nothing(world):
    world.transports["my1"].files[PurePath(f"/srv/g/runs/{RUN}/attempts/1/gang.json")] = b"{"
    assert world.take_in() == []
    assert "gang.json" in world.said[0]
    assert run_ids(world.home) == []


def test_one_that_was_supervised_from_a_computer_is_named(world):
    del world.transports["my1"].files[PurePath(f"/srv/g/runs/{RUN}/state.json")]
    assert world.take_in() == []
    assert world.said == [f"1 run left out, as the records lie on the computer that began it: {RUN}"]


def test_hosts_that_do_not_answer_are_told_and_it_fails_where_none_does(world):
    world.transports["my3"].reachable = False
    assert world.take_in() == [RUN]
    assert "my3" in world.said[0]
    for transport in world.transports.values():
        transport.reachable = False
    with pytest.raises(HostUnreachable):
        world.take_in()
