"""A run goes on without its head: what is ended and written first, and when it is refused."""

import json
from dataclasses import replace

import pytest

from gangline.context import Dependencies
from gangline.control.lost_head import EPOCHS_AHEAD, take_over, without_hosts
from gangline.control.supervision import RunHandle, SupervisorRecord
from gangline.errors import HostUnreachable, RunFailed, UsageError
from gangline.launch.backend import LaunchRequest, Leftover
from gangline.provision.trees import host_layout
from gangline.runs.cluster import Cluster, Host
from gangline.runs.gang import Gang, GangRank
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import write_record
from gangline.runs.state import AttemptOutcome, ProcessId, RunState
from gangline.transport.transport import AGENT, CommandResult
from tests.fakes.backend import FakeBackend
from tests.fakes.transport import FakeTransport

NAMES = ("pc1", "pc2", "pc3")
CLUSTER = Cluster(
    name="home",
    hosts=tuple(
        Host(name=name, workdir="/srv", python="python3", transport="ssh", address=f"127.0.9.{number}")
        for number, name in enumerate(NAMES, start=1)
    ),
)

LEFT = Leftover(host="pc2", kind="unknown", what="rank 1, pid 4711")


class Beside(FakeTransport):
    """A host that tells which addresses it reaches."""

    def __init__(self, host, *, reaches=()):
        super().__init__(host)
        self.reaches = reaches

    def run(self, argv, *, stdin=b"", **how):
        if tuple(argv) != (AGENT, "connect"):
            return super().run(argv, stdin=stdin, **how)
        asked = [address for address, _port in json.loads(stdin)["targets"]]
        outcomes = ["open" if address in self.reaches else "timed out" for address in asked]
        return CommandResult(
            host=self.host, argv=argv, returncode=0, stdout=json.dumps({"outcomes": outcomes}), stderr=""
        )


class Off(FakeTransport):
    """A host that does not answer."""

    def names(self, path):
        raise HostUnreachable(f"{self.host} does not answer")


def test_a_witness_that_is_off_can_be_left_out_as_a_host_can():
    two = replace(CLUSTER, hosts=CLUSTER.hosts[:2], witness=CLUSTER.hosts[2])
    rest = without_hosts(two, ["pc3"], before=two, run_id="calm-otter-7")
    assert (rest.hosts, rest.witness) == (two.hosts, None)
    assert without_hosts(two, ["pc1"], before=two, run_id="calm-otter-7").witness == CLUSTER.hosts[2]


class Notes:
    def __init__(self):
        self.said = []

    def report(self, line):
        self.said.append(line)


class Lost:
    """A run of three hosts whose head does not answer, and what its other hosts say."""

    def __init__(self, home):
        self.layout = RunLayout(home, "calm-otter-7")
        self.backend = FakeBackend()
        self.layout.attempt(1).mkdir(parents=True)
        self.begins(1).save(self.layout.request(1))
        write_record(self.layout.cluster, CLUSTER.to_json())
        write_record(self.layout.attempt_cluster(1), CLUSTER.to_json())
        self.state = RunState(name="tiny", phase="running", epoch=1, supervisor=ProcessId(pid=4711, start_ticks=1))
        self.state.save(self.layout)
        SupervisorRecord(host="pc1").save(self.layout)
        self.hosts = {"pc1": Off("pc1"), "pc2": Beside("pc2"), "pc3": Beside("pc3")}
        self.notes = Notes()

    def begins(self, attempt):
        """The request of an attempt that a supervisor of epoch 3 starts."""
        gang = Gang(run_id="calm-otter-7", attempt=attempt, ranks=tuple(GangRank(host=name, share=1) for name in NAMES))
        request = self.backend.render(CLUSTER, gang, port=4711)
        self.backend.start(request, {}, epoch=3)
        return request

    def attempts(self, host, *numbers):
        """Let it have folders of these attempts."""
        there = host_layout(CLUSTER.host(host), "calm-otter-7")
        for number in numbers:
            self.hosts[host].files[there.attempt(number) / "console.log"] = b""

    def take_over(self, *off):
        run = RunHandle(
            layout=self.layout, cluster=CLUSTER, transports=self.hosts, supervisor=SupervisorRecord(host="pc1")
        )
        deps = Dependencies(backend=lambda _name: self.backend)
        return take_over(run, off, console=self.notes, deps=deps)

    def is_unchanged(self):
        state = RunState.load(self.layout)
        return replace(state, updated="") == replace(self.state, updated="") and not self.layout.outcome(1).exists()


@pytest.fixture
def lost(tmp_path):
    return Lost(tmp_path)


def test_what_is_left_is_ended_by_a_higher_epoch_and_the_records_are_here(lost):
    lost.attempts("pc2", 1)
    ended = lost.take_over("pc1")
    assert (ended.phase, ended.attempt, ended.supervisor) == ("failed", 1, None)
    assert ended.epoch == 3 + EPOCHS_AHEAD  # the hosts had seen 3, this computer 1
    assert lost.backend.epochs[-1] == ended.epoch
    assert [lost.backend.statuses[name].phase for name in NAMES] == ["running", "ended", "ended"]
    assert SupervisorRecord.load(lost.layout).host is None
    outcome = AttemptOutcome.load(lost.layout.outcome(1))
    assert outcome.doubtful == ("pc1",)  # `gangline stop` looks there once it is back
    assert outcome.error["what"] == "pc1 was off, and the run was continued without it"


def test_attempts_that_the_head_began_alone_count(lost):
    lost.begins(4)
    lost.attempts("pc2", 1, 2)
    lost.attempts("pc3", 1, 2, 4)
    assert lost.take_over("pc1").attempt == 4
    request = LaunchRequest.load(lost.layout.request(4))
    assert {part.attempt for part in request.hosts} == {4}
    assert Cluster.of_attempt(lost.layout, 4) == CLUSTER


def test_a_head_that_another_host_reaches_is_on(lost):
    lost.hosts["pc3"].reaches = ("127.0.9.1",)
    with pytest.raises(RunFailed, match=r"calm-otter-7 may still run on pc1: it is on") as raised:
        lost.take_over("pc1")
    assert "pc3 reaches it at 127.0.9.1" in raised.value.seen
    assert lost.is_unchanged()
    assert lost.backend.orders == []


def test_another_host_that_does_not_answer_is_named(lost):
    lost.hosts["pc3"] = Off("pc3")
    with pytest.raises(HostUnreachable) as raised:
        lost.take_over("pc1")
    assert "--without pc1 --without pc3" in raised.value.fix
    assert lost.is_unchanged()
    assert lost.take_over("pc1", "pc3").phase == "failed"


def test_nothing_is_taken_over_while_something_of_it_is_left(lost, monkeypatch):
    monkeypatch.setattr(lost.backend, "verify", lambda request, transports: [LEFT])
    with pytest.raises(RunFailed, match=r"something of it is left") as raised:
        lost.take_over("pc1")
    assert raised.value.seen == "pc2: rank 1, pid 4711"
    assert lost.is_unchanged()


def test_a_run_that_had_finished_is_not_continued(lost):
    replace(lost.state, phase="finished").save(lost.layout)
    with pytest.raises(UsageError, match=r"has finished"):
        lost.take_over("pc1")


def test_only_hosts_of_the_run_are_left_out_and_one_stays():
    with pytest.raises(UsageError, match=r"has no host pc9"):
        without_hosts(CLUSTER, ["pc9"], before=CLUSTER, run_id="calm-otter-7")
    with pytest.raises(UsageError, match=r"cannot go on without all of its hosts"):
        without_hosts(CLUSTER, NAMES, before=CLUSTER, run_id="calm-otter-7")
    rest = without_hosts(CLUSTER, ["pc1"], before=CLUSTER, run_id="calm-otter-7")
    assert [host.name for host in rest.hosts] == ["pc2", "pc3"]
