"""A run as a job of Slurm: its script, and its way through the queue."""

import signal
from dataclasses import replace

import pytest

from gangline.context import REAL
from gangline.control import slurm_job
from gangline.control.end import stop
from gangline.control.slurm_job import SlurmRecord, cancel_waiting, script, submit, wait_until_begun, waiting_line
from gangline.control.start import resumable
from gangline.control.supervision import open_run
from gangline.errors import GanglineError, HostUnreachable, RunFailed, UsageError
from gangline.runs.cluster import Cluster, Host, SlurmRequest
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import write_record
from gangline.runs.state import ProcessId, RunState
from gangline.supervise import allocation
from gangline.transport.slurm_commands import SlurmJob

ASKED = SlurmRequest(nodes=2, partition="gpu", gpus_per_node="a100:4", time="04:00:00", poll_s=0, notice_s=90)
CLUSTER = Cluster(name="campus", hosts=(), backend="slurm", slurm=ASKED)


class Lines:
    """A console that keeps its lines."""

    def __init__(self):
        self.lines = []

    def report(self, line):
        self.lines.append(line)

    def progress(self, _line):
        """Not kept."""


@pytest.fixture
def layout(tmp_path):
    layout = RunLayout(tmp_path / "a home", "calm-otter-7")
    layout.folder.mkdir(parents=True)
    return layout


@pytest.fixture
def queue(monkeypatch):
    """What Slurm answers about each job, one after the other, and the commands that it was given."""
    jobs, given = {}, []

    def answer(*words, **_more):
        given.append(words)
        return "41;cluster\n" if words[0] == "sbatch" else ""

    def find(number):
        found = jobs[number].pop(0)
        if isinstance(found, Exception):
            raise found
        return found() if callable(found) else found

    monkeypatch.setattr(slurm_job, "slurm", answer)
    monkeypatch.setattr(slurm_job, "find_job", find)
    monkeypatch.setattr(allocation, "find_job", lambda number: SlurmJob(id=number, state="RUNNING"))
    monkeypatch.setattr(slurm_job, "LOOK_S", 0.0)
    return jobs, given


def test_the_script_asks_for_what_the_cluster_file_says(layout):
    text = script(layout, ASKED, name="tiny")
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert {"--partition=gpu", "--nodes=2", "--gpus-per-node=a100:4", "--time=04:00:00"} <= set(options)
    assert {"--requeue", "--no-kill", "--signal=B:USR1@90", "--open-mode=append"} <= set(options)
    assert f"'--chdir={layout.folder}'" in options


def test_gpus_can_be_asked_for_as_gres_and_sites_have_lines_of_their_own(layout):
    asked = SlurmRequest(
        nodes=1, gpus_per_node="4", dialect="gres", options=("--comment=a b",), setup=("module load x",)
    )
    text = script(layout, asked, name="tiny")
    assert "#SBATCH --gres=gpu:4" in text
    assert "#SBATCH '--comment=a b'" in text
    assert text.index("module load x") < text.index("exec ")


def test_a_submitted_run_is_queued_and_its_secrets_are_for_its_user_alone(layout, queue):
    state = RunState(name="tiny", phase="queued")
    assert submit(layout, CLUSTER, state, force=False, secrets={"HF_TOKEN": "hf_canary"}) == "41"
    assert RunState.load(layout).phase == "queued"
    assert SlurmRecord.of(layout).job == "41"
    holders = [path for path in layout.folder.iterdir() if "hf_canary" in path.read_text()]
    assert [(path.name, path.stat().st_mode & 0o777) for path in holders] == [("secrets.json", 0o600)]


def test_a_run_that_slurm_refuses_is_what_it_was(layout, monkeypatch):
    RunState(name="tiny", phase="stopped", attempt=3).save(layout)

    def answer(*_words, **_more):
        raise GanglineError("sbatch refused", seen="invalid partition")

    monkeypatch.setattr(slurm_job, "slurm", answer)
    with pytest.raises(GanglineError, match=r"sbatch refused"):
        submit(layout, CLUSTER, RunState(name="tiny", phase="queued", attempt=3), force=False, secrets={})
    state = RunState.load(layout)
    assert (state.phase, state.attempt, SlurmRecord.of(layout)) == ("stopped", 3, None)


@pytest.mark.parametrize(
    ("before", "ended", "after", "code"),
    [
        ("preparing", False, "failed", 1),
        ("queued", False, "failed", 1),
        ("preparing", True, "stopped", 0),
        ("failed", True, "stopped", 0),
        ("failed", False, "failed", 1),
    ],
)
def test_an_attempt_that_did_not_begin_has_failed_unless_slurm_ended_its_job(layout, before, ended, after, code):
    waiting(layout)
    RunState(name="tiny", phase=before, attempt=2).save(layout)
    error = GanglineError("n0: the step of Slurm's job 41 was lost")
    assert slurm_job._not_begun(layout, error, ended=ended) == code
    assert RunState.load(layout).phase == after
    assert SlurmRecord.of(layout).noticed == (2 if ended else 0)


def test_a_notice_that_comes_after_the_steps_have_ended_is_waited_for(monkeypatch):
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)]
    try:
        notices = slurm_job.Notices()
        assert not notices.end_within(0.0)
        monkeypatch.setattr(slurm_job.time, "sleep", lambda _seconds: signal.raise_signal(signal.SIGTERM))
        assert notices.end_within(60.0)
        assert notices.end_within(0.0)
    finally:
        for number, handler in zip((signal.SIGUSR1, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


def waiting(layout, job="41"):
    RunState(name="tiny", phase="queued").save(layout)
    SlurmRecord(job=job, submitted="", cluster=CLUSTER).save(layout.slurm)


def test_the_way_through_the_queue_is_told_once_per_change(layout, queue):
    waiting(layout)

    def begins():
        RunState(name="tiny", phase="running").save(layout)
        return SlurmJob(id="41", state="RUNNING", nodes=("n0",))

    pending = SlurmJob(id="41", state="PENDING", reason="Priority", starts="2026-11-27T01:02:03")
    silent = HostUnreachable("squeue cannot reach Slurm's controller")
    queue[0]["41"] = [pending, pending, silent, pending, begins]
    console = Lines()
    wait_until_begun(layout, console)
    waits = "job 41 waits: Priority (other jobs come first); Slurm expects it to start at 2026-11-27T01:02:03"
    silence = "Slurm does not answer (squeue cannot reach Slurm's controller); job 41 stays in its queue"
    assert console.lines[:3] == [waits, silence, waits]


def test_a_job_that_ends_in_the_queue_is_an_error_with_the_end_of_its_log(layout, queue):
    waiting(layout)
    (layout.folder / "slurm-41.log").write_text("bash: line 3: module: command not found\n")
    queue[0]["41"] = [SlurmJob(id="41", state="FAILED")] * 2
    with pytest.raises(RunFailed, match=r"ended before calm-otter-7 began") as caught:
        wait_until_begun(layout, Lines())
    assert "module: command not found" in caught.value.seen
    assert RunState.load(layout).phase == "failed"


def test_a_waiting_run_is_taken_out_of_the_queue(layout, queue):
    waiting(layout)
    assert cancel_waiting(layout)
    assert queue[1] == [("scancel", "41")]
    assert RunState.load(layout).phase == "stopped"
    assert not cancel_waiting(layout)


def test_a_run_that_is_no_job_of_slurm_does_not_wait(layout, queue):
    RunState(name="tiny", phase="queued").save(layout)
    wait_until_begun(layout, Lines())
    assert not cancel_waiting(layout)
    assert queue[1] == []


@pytest.mark.parametrize("reason", sorted(slurm_job.REASONS))
def test_reasons_of_slurm_are_told_in_plain_words(reason):
    line = waiting_line("41", SlurmJob(id="41", state="PENDING", reason=reason))
    assert f"{reason} ({slurm_job.REASONS[reason]})" in line


def test_a_job_that_waits_tells_its_place_among_those_of_its_partition():
    job = SlurmJob(id="41", state="PENDING", reason="Priority", partition="gpu", starts="2026-11-27T09:12:00")
    assert waiting_line("41", job, (3, 12)) == (
        "job 41 waits: Priority (other jobs come first); number 3 of 12 that wait in gpu; "
        "Slurm expects it to start at 2026-11-27T09:12:00"
    )
    assert "number" not in waiting_line("41", job)


def test_of_a_suspended_job_the_last_known_state_is_told_at_once(layout, monkeypatch):
    node = Host(name="n0", workdir="/w", python="", transport="srun", allocation="41")
    write_record(layout.cluster, replace(CLUSTER, hosts=(node,)).to_json())
    RunState(name="tiny", phase="running", supervisor=ProcessId(pid=4711, start_ticks=1)).save(layout)
    monkeypatch.setattr(allocation, "find_job", lambda _job: SlurmJob(id="41", state="SUSPENDED"))
    with open_run(layout.run_id, home=layout.root, deps=REAL) as run:
        record = run.record()
        assert (record.phase, record.suspended) == ("running", "41")
        with pytest.raises(HostUnreachable, match=r"Slurm has suspended job 41"):
            run.view().head.names(layout.folder)
        with pytest.raises(HostUnreachable, match=r"cannot be told to stop: Slurm has suspended job 41") as raised:
            stop(run)
        assert "scancel 41" in raised.value.fix
        with pytest.raises(UsageError, match=r"is suspended, not ended"):
            resumable(run, REAL)


def test_a_refused_requeue_becomes_another_job(layout, monkeypatch):
    waiting(layout, job="40")

    def answer(*words, **_more):
        if words[0] == "scontrol":
            raise GanglineError("scontrol refused", seen="Requested operation is presently disabled")
        return "41\n"

    monkeypatch.setattr(slurm_job, "slurm", answer)
    assert slurm_job._requeue(layout, "40", Lines()) == 0
    record = SlurmRecord.of(layout)
    assert (record.job, record.requeues, RunState.load(layout).phase) == ("41", 1, "queued")


def test_a_requeue_is_one_though_slurm_ends_the_step_at_the_same_moment(layout, monkeypatch):
    waiting(layout, job="40")
    asked = []

    def answer(*words, **_more):
        asked.append((words[0], signal.getsignal(signal.SIGTERM)))
        return ""

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(slurm_job, "slurm", answer)
    assert slurm_job._requeue(layout, "40", Lines()) == 0
    assert asked == [("scontrol", signal.SIG_IGN)]
    assert signal.getsignal(signal.SIGTERM) is before
    assert SlurmRecord.of(layout).job == "40"


def test_a_run_that_cannot_be_requeued_is_stopped_and_says_why(layout, monkeypatch):
    waiting(layout, job="40")

    def answer(*_words, **_more):
        raise GanglineError("sbatch refused", seen="maintenance")

    monkeypatch.setattr(slurm_job, "slurm", answer)
    assert slurm_job._requeue(layout, "40", Lines()) == 1
    state = RunState.load(layout)
    assert (state.phase, state.error["seen"], SlurmRecord.of(layout).leaving) == ("stopped", "maintenance", 0)


@pytest.mark.parametrize(("here", "shown"), [("stopped", "stopped"), ("running", "failed")])
def test_an_end_that_is_written_here_is_not_replaced_by_what_a_node_left(tmp_path, here, shown):
    layout, workdir = RunLayout(tmp_path / "home", "calm-otter-7"), tmp_path / "work" / "n0"
    node = Host(name="n0", workdir=str(workdir), python="", transport="srun", allocation="41")
    there = RunLayout(workdir, layout.run_id)
    for each, phase in ((layout, here), (there, "failed")):
        each.folder.mkdir(parents=True)
        RunState(name="tiny", phase=phase).save(each)
    replace(CLUSTER, hosts=(node,)).save(layout.cluster)
    SlurmRecord(job="41", submitted="", cluster=CLUSTER).save(layout.slurm)
    deps = replace(REAL, allocation_state=lambda _cluster: "over")
    with open_run(layout.run_id, home=layout.root, deps=deps) as run:
        assert run.record().phase == shown
    assert RunState.load(layout).phase == shown
