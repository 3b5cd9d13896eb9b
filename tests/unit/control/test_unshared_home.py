"""Records of a run that lie on its first node."""

import pytest

from gangline.control import unshared_home
from gangline.control.unshared_home import CONTROLLER, nodes_of, renew
from gangline.errors import HostUnreachable, UsageError
from gangline.runs.cluster import Cluster, Host, SlurmRequest
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import write_record
from gangline.runs.state import RunState
from gangline.supervise.allocation import SlurmRecord
from gangline.transport.local import LocalTransport
from gangline.transport.slurm_commands import SlurmJob

NODES = tuple(
    Host(name=name, workdir=f"/w/{name}", python="", transport="srun", allocation="41") for name in ("n0", "n1")
)


class Site:
    """Slurm as it answers, and a node that is this computer."""

    def __init__(self, monkeypatch):
        self.jobs, self.named, self.reached = {}, None, []
        monkeypatch.setattr(unshared_home, "find_job", self.jobs.get)
        monkeypatch.setattr(unshared_home, "find_named", lambda _name: self.named)
        monkeypatch.setattr(unshared_home, "connect", self._connect)

    def _connect(self, host):
        self.reached.append((host.name, host.allocation, host.job_options))
        return LocalTransport(host)

    def has(self, job, state):
        self.jobs[job] = SlurmJob(id=job, state=state, nodes=() if state == "PENDING" else ("n0", "n1"))


@pytest.fixture
def site(monkeypatch):
    return Site(monkeypatch)


@pytest.fixture
def here(tmp_path):
    layout = RunLayout(tmp_path / "home", "calm-otter-7")
    layout.folder.mkdir(parents=True)
    asked = SlurmRequest(nodes=2, partition="gpu", shared_home=False, workdir=str(tmp_path / "work"))
    cluster = Cluster(name="campus", hosts=(), backend="slurm", slurm=asked)
    RunState(name="tiny", phase="queued").save(layout)
    SlurmRecord(job="41", submitted="", cluster=cluster).save(layout.slurm)
    write_record(layout.cluster, cluster.to_json())
    return layout


@pytest.fixture
def there(tmp_path, here):
    """What the batch step has written on the node."""
    layout = RunLayout(tmp_path / "work" / CONTROLLER, here.run_id)
    layout.folder.mkdir(parents=True)
    RunState(name="tiny", phase="running", attempt=2).save(layout)
    record = SlurmRecord.of(here)
    SlurmRecord(job="41", submitted="", cluster=record.cluster, leaving=2, requeues=1).save(layout.slurm)
    write_record(layout.cluster, Cluster(name="campus", hosts=NODES, slurm=record.asked).to_json())
    layout.attempt(2).mkdir(parents=True)
    write_record(layout.networks(2), {"n0": {}})
    (layout.folder / "slurm-41.log").write_text("begins\n")
    return layout


def test_while_the_job_runs_the_records_come_by_a_step_of_it(site, here, there):
    site.has("41", "RUNNING")
    renew(here)
    assert site.reached == [("n0", "41", ())]
    assert (RunState.load(here).phase, RunState.load(here).attempt) == ("running", 2)
    assert [host.name for host in Cluster.load(here.cluster).hosts] == ["n0", "n1"]
    assert here.networks(2).exists()
    record = SlurmRecord.of(here)
    assert (record.leaving, record.requeues, record.node, record.read) == (2, 1, "n0", "")
    assert (here.folder / "slurm-41.log").read_text() == "begins\n"


def test_a_job_that_waits_has_nothing_to_read(site, here):
    site.has("41", "PENDING")
    renew(here)
    assert site.reached == []
    assert RunState.load(here).phase == "queued"


def test_after_the_job_has_ended_a_short_job_reads_them_once(site, here, there):
    site.has("41", "COMPLETED")
    RunState(name="tiny", phase="finished", attempt=2).save(there)
    with pytest.raises(HostUnreachable, match=r"job 41 has ended, and n0 has the records"):
        renew(here, starts_job=False)
    renew(here)
    renew(here)
    assert site.reached == [("n0", None, ("--partition=gpu",))]
    assert RunState.load(here).phase == "finished"


def test_an_end_that_was_seen_while_the_job_ran_is_not_read_again(site, here, there):
    site.has("41", "COMPLETED")
    RunState(name="tiny", phase="stopped").save(here)
    renew(here)
    assert site.reached == []
    assert SlurmRecord.of(here).read == "41"


def test_the_job_that_a_run_submits_at_its_time_limit_is_found_by_its_name(site, here, there):
    site.has("41", "COMPLETED")
    site.has("42", "RUNNING")
    site.named = site.jobs["42"]
    renew(here)
    assert SlurmRecord.of(here).job == "42"
    assert site.reached == [("n0", "42", ())]


def test_a_run_on_a_shared_home_is_left_alone(site, here):
    record = SlurmRecord.of(here)
    shared = SlurmRequest(nodes=2)
    SlurmRecord(job="41", submitted="", cluster=Cluster(name="campus", hosts=(), slurm=shared)).save(here.slurm)
    renew(here)
    assert site.reached == []
    assert record.asked.shared_home is False


def test_a_run_goes_on_where_its_checkpoints_lie(site, here, there):
    asked = SlurmRecord.of(here).asked
    assert nodes_of(here, asked) == []  # nothing was started yet
    there.request(1).parent.mkdir(parents=True, exist_ok=True)
    there.request(1).write_text("{}")
    assert nodes_of(there, asked) == ["--nodelist=n0,n1"]
    with pytest.raises(UsageError, match=r"cannot continue on fewer nodes") as caught:
        nodes_of(there, SlurmRequest(nodes=1, shared_home=False))
    assert "n0, n1" in caught.value.seen
