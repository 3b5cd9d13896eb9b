"""A checkpoint is committed on every host, once every host has its part."""

from pathlib import Path

import pytest

from gangline.launch.backend import HostRequest, LaunchRequest
from gangline.runs.checkpoints import step_folder
from gangline.runs.layout import RunLayout
from gangline.runs.manifest import Commit
from gangline.supervise.gang_control import GangControl
from gangline.supervise.supervisor import Committer
from tests.fakes.backend import FakeBackend
from tests.fakes.transport import FakeTransport
from tests.unit.supervise.runs import RUN_ID, cluster_of, save_part

HOSTS = ("pc1", "pc2", "pc3")
ROOT = Path("/srv")


class Lab:
    def __init__(self, attempt=1):
        self.transports = {name: FakeTransport(name) for name in HOSTS}
        self.cluster = cluster_of(ROOT, *HOSTS)
        self.restart(attempt)

    def restart(self, attempt=1):
        parts = [HostRequest(host=host, folder="/", rank_files="/", argv=(), env={}) for host in HOSTS]
        request = LaunchRequest(run_id=RUN_ID, attempt=attempt, hosts=tuple(parts))
        gang = GangControl(backend=FakeBackend(), request=request, transports=self.transports, epoch=1)
        self.committer = Committer(self.cluster, gang)

    def save(self, step, *hosts, attempt=1):
        for host in hosts or HOSTS:
            save_part(self.transports[host], ROOT / host, step, hosts=HOSTS, attempt=attempt)

    def sweep(self):
        return [commit.step for commit in self.committer.sweep()]

    def path(self, host, step):
        return step_folder(RunLayout(ROOT / host, RUN_ID).checkpoints, step) / "COMMITTED"

    def record(self, host, step):
        return self.transports[host].files.get(self.path(host, step))


@pytest.fixture
def lab():
    return Lab()


def test_nothing_is_committed_where_nothing_is(lab):
    assert lab.sweep() == []


def test_a_step_waits_for_the_last_part(lab):
    lab.save(100, "pc1", "pc3")
    assert lab.sweep() == []
    lab.save(100, "pc2")
    assert lab.sweep() == [100]


def test_every_host_gets_the_same_record(lab):
    lab.save(100)
    lab.sweep()
    records = {lab.record(host, 100) for host in HOSTS}
    assert len(records) == 1
    commit = Commit.from_bytes(records.pop())
    assert (commit.step, sorted(commit.parts)) == (100, list(HOSTS))


def test_steps_are_committed_once_and_in_order(lab):
    lab.save(200)
    lab.save(100)
    assert lab.sweep() == [100, 200]
    assert lab.sweep() == []


def test_a_record_that_retention_has_removed_does_not_come_back(lab):
    lab.save(100)
    lab.sweep()
    for host in HOSTS:
        del lab.transports[host].files[lab.path(host, 100)]
    assert lab.sweep() == []
    assert lab.record("pc1", 100) is None


def test_a_part_that_is_still_written_does_not_count(lab):
    lab.save(100, "pc1", "pc2")
    folder = lab.path("pc3", 100).parent / "part-pc3.tmp"
    lab.transports["pc3"].write(folder / "part.json", b"{}")
    assert lab.sweep() == []


def test_parts_of_different_attempts_make_no_checkpoint(lab):
    lab.save(100)
    lab.save(100, "pc1", attempt=2)
    lab.restart(attempt=2)
    assert lab.sweep() == []
    lab.save(100, "pc2", "pc3", attempt=2)
    assert lab.sweep() == [100]


def test_what_an_earlier_attempt_left_is_not_judged_here(lab):
    lab.save(100, attempt=1)
    lab.restart(attempt=2)
    assert lab.sweep() == []


def test_a_damaged_part_is_not_committed(lab):
    lab.save(100)
    path = lab.path("pc2", 100).parent / "part-pc2" / "part.json"
    lab.transports["pc2"].files[path] = lab.transports["pc2"].files[path].replace(b"replica", b"replicb")
    assert lab.sweep() == []


def test_a_new_supervisor_finishes_what_the_old_one_began_and_tells_of_it_once(lab):
    lab.save(100)
    lab.save(200)
    lab.sweep()
    del lab.transports["pc3"].files[lab.path("pc3", 200)]
    lab.restart()
    assert lab.sweep() == [200]
    assert lab.record("pc3", 200) == lab.record("pc1", 200)
