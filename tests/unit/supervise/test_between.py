"""A run whose supervisor died between two attempts: nothing of it runs but host agents that rest."""

import pytest

from gangline.errors import RunFailed
from gangline.launch.backend import HostRequest, HostStatus, LaunchRequest
from gangline.runs.files import write_json
from gangline.runs.state import AttemptOutcome, HostOutcome, RunState
from gangline.supervise.clean import end_without_supervisor
from gangline.supervise.gang_control import SupervisedRun
from gangline.supervise.lock import supervisor_lock
from tests.fakes.backend import FakeBackend
from tests.fakes.transport import FakeTransport
from tests.saved import read_events
from tests.unit.supervise.runs import cluster_of, create_run


class Resting(FakeBackend):
    """Hosts whose host agents rest, each in the folder of the attempt in which it took part last."""

    def __init__(self, resting):
        super().__init__()
        self.resting = dict(resting)
        self.told = []

    def poll(self, request, transports):
        return [
            HostStatus(host=name, phase="ended", returncode=0, rests=self.resting.get(name) == request.attempt)
            for name in request.names
        ]

    def stop(self, request, transports, *, now, epoch=1, resting=False):
        assert not resting
        for name in request.names:
            if self.resting.get(name) == request.attempt:
                del self.resting[name]
            self.told.append((name, request.attempt, epoch))
        return []

    def verify(self, request, transports):
        return []


def request(attempt, *names):
    parts = tuple(
        HostRequest(host=name, folder=f"/{attempt}/{name}", rank_files=f"/{attempt}", argv=("python",), env={})
        for name in names
    )
    return LaunchRequest(run_id="calm-otter-7", attempt=attempt, hosts=parts)


@pytest.fixture
def layout(tmp_path):
    """Three hosts began; two of them went on, and that attempt has failed, too."""
    cluster = cluster_of(tmp_path, "pc1", "pc2", "pc3")
    layout = create_run(tmp_path, cluster, request(1, "pc1", "pc2", "pc3"))
    layout.attempt(2).mkdir()
    write_json(layout.attempt(2) / "request.json", request(2, "pc1", "pc2").to_json())
    for number in (1, 2):
        hosts = {"pc1": HostOutcome(phase="ended", returncode=1)}
        AttemptOutcome(result="failed", hosts=hosts, error={"what": "a row"}).save(
            layout.attempt(number) / "outcome.json"
        )
    RunState(name="tiny", phase="restarting", attempt=2, epoch=4).save(layout)
    return layout


def connect(cluster):
    return {host.name: FakeTransport(host.name) for host in cluster.hosts}


def test_every_host_agent_is_ended_where_it_rests_and_the_run_is_stopped(layout):
    backend = Resting({"pc1": 2, "pc2": 2, "pc3": 1})
    end_without_supervisor(SupervisedRun(layout=layout, backend=lambda _name: backend, connect=connect))
    assert backend.resting == {}
    assert sorted(backend.told) == [("pc1", 2, 5), ("pc2", 2, 5), ("pc3", 1, 5)]
    state = RunState.load(layout)
    assert (state.phase, state.attempt, state.epoch, state.supervisor, state.error) == ("stopped", 2, 5, None, None)
    assert [(event["event"], event["attempt"]) for event in read_events(layout.events)] == [("stopped", 2)]


def test_how_the_attempt_ended_stays_written_down(layout):
    before = (layout.attempt(2) / "outcome.json").read_bytes()
    end_without_supervisor(SupervisedRun(layout=layout, backend=lambda _name: Resting({}), connect=connect))
    assert (layout.attempt(2) / "outcome.json").read_bytes() == before


def test_a_run_that_somebody_looks_after_is_left_to_them(layout):
    backend = Resting({"pc1": 2})
    with supervisor_lock(layout), pytest.raises(RunFailed, match="is running already"):
        end_without_supervisor(SupervisedRun(layout=layout, backend=lambda _name: backend, connect=connect))
    assert backend.told == []
    assert RunState.load(layout).phase == "restarting"
