"""Runs whose nodes Slurm gives: what is over, what goes on."""

from dataclasses import replace

import pytest

from gangline.errors import HostUnreachable
from gangline.runs.cluster import Cluster, Host, SlurmRequest
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import write_record
from gangline.runs.registry import RunRecord
from gangline.runs.state import ProcessId, RunState
from gangline.supervise import allocation
from gangline.supervise.allocation import (
    SlurmRecord,
    allocation_state,
    between_allocations,
    by_own_job,
    has_ended,
    left_here,
    prepares,
)
from gangline.transport import slurm_commands
from gangline.transport.slurm_commands import SlurmJob

NODE = Host(name="n0", workdir="/w", python="", transport="srun", allocation="41")
NODES = Cluster(name="campus", hosts=(NODE,), backend="slurm")
SILENT = HostUnreachable("squeue cannot reach Slurm's controller")


@pytest.fixture
def says(monkeypatch):
    """Has Slurm say something of every job."""

    def say(answer):
        def find(_number):
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(allocation, "find_job", find)

    return say


def job(state):
    return SlurmJob(id="41", state=state)


@pytest.mark.parametrize(
    ("answer", "stands"),
    [
        (None, "over"),
        (job("CANCELLED"), "over"),
        (job("TIMEOUT"), "over"),
        (job("PENDING"), "over"),
        (job("RUNNING"), "on"),
        (job("SUSPENDED"), "suspended"),
        (job("COMPLETING"), "on"),
        (SILENT, "on"),
    ],
)
def test_an_allocation_stands_as_slurm_says(says, answer, stands):
    says(answer)
    assert allocation_state(NODES) == stands


def test_hosts_of_our_own_are_never_over(says):
    says(None)
    ours = Cluster(name="lan", hosts=(Host(name="pc1", workdir="/w", python=""),))
    assert allocation_state(ours) == "on"
    assert allocation_state(Cluster(name="campus", hosts=())) == "on"


def test_what_an_allocation_left_on_a_shared_disk_is_read_from_here(tmp_path):
    seen = replace(NODE, workdir=str(tmp_path))
    away = replace(NODE, name="n1", workdir=str(tmp_path / "not here"))
    hosts = left_here(replace(NODES, hosts=(seen, away))).hosts
    assert [(host.name, host.transport) for host in hosts] == [("n0", "local"), ("n1", "srun")]


def test_what_lies_on_the_disks_of_nodes_alone_is_read_by_short_jobs(tmp_path):
    asked = SlurmRequest(nodes=2, partition="gpu", account="physics", shared_home=False, options=("--reservation=x",))
    record = SlurmRecord(job="41", submitted="", cluster=Cluster(name="campus", hosts=(), slurm=asked))
    (away,) = left_here(replace(NODES, hosts=(replace(NODE, workdir=str(tmp_path / "not here")),)), record).hosts
    assert (away.transport, away.allocation) == ("srun", None)
    assert away == by_own_job(replace(NODE, workdir=away.workdir), asked)
    words = slurm_commands.step_argv(away)
    assert words[:2] == ["srun", "--nodelist=n0"]
    assert {"--partition=gpu", "--account=physics", "--reservation=x"} <= set(words)
    assert not any(word.startswith("--jobid") for word in words)


@pytest.mark.parametrize(
    ("phase", "leaving", "noticed", "ended"),
    [
        ("finished", 0, 0, True),
        ("failed", 0, 0, True),
        ("stopped", 1, 1, True),
        ("stopped", 2, 0, False),
        ("stopped", 0, 2, False),
        ("running", 0, 0, False),
        ("queued", 0, 0, False),
    ],
)
def test_a_run_that_goes_on_in_another_allocation_has_not_ended(phase, leaving, noticed, ended):
    record = SlurmRecord(job="41", submitted="", cluster=NODES, leaving=leaving, noticed=noticed)
    assert has_ended(RunState(name="tiny", phase=phase, attempt=2), record) is ended


def run(tmp_path, phase, *, lost=False, **record):
    layout = RunLayout(tmp_path, "calm-otter-7")
    layout.folder.mkdir(parents=True)
    if record:
        write_record(layout.slurm, {"job": "41", **record})
    state = RunState(name="tiny", phase=phase, attempt=2)
    return layout, RunRecord(id="calm-otter-7", state=state, lost=lost)


@pytest.mark.parametrize(
    ("phase", "lost", "record", "answer", "shown"),
    [
        ("stopped", False, {"leaving": 2}, None, "queued"),
        ("stopped", False, {"leaving": 1}, None, "stopped"),
        ("stopped", False, {"noticed": 2}, job("PENDING"), "queued"),
        ("stopped", False, {"noticed": 2}, job("CANCELLED"), "stopped"),
        ("stopped", False, {"noticed": 2}, SILENT, "stopped"),
        ("running", True, {"noticed": 0}, job("PENDING"), "queued"),
        ("running", True, {"noticed": 0}, job("FAILED"), "lost"),
        ("running", True, {}, job("PENDING"), "lost"),
        ("running", False, {"noticed": 0}, job("PENDING"), "running"),
        ("finished", False, {"leaving": 2}, None, "finished"),
    ],
)
def test_a_run_between_two_allocations_is_queued(tmp_path, says, phase, lost, record, answer, shown):
    says(answer)
    layout, found = run(tmp_path, phase, lost=lost, **record)
    assert between_allocations(layout, found).phase == shown


def test_a_batch_step_that_prepares_lives_as_long_as_its_job(tmp_path, says):
    elsewhere = ProcessId(pid=1, start_ticks=1)
    layout, _ = run(tmp_path, "preparing", noticed=0)
    says(job("RUNNING"))
    assert prepares(layout, elsewhere)
    says(None)
    assert not prepares(layout, elsewhere)
    layout.slurm.unlink()
    assert not prepares(layout, elsewhere)
    assert prepares(layout, ProcessId.current())
