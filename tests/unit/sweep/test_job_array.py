"""A sweep as a job array: its script, its submission, what tasks and Slurm say of its trials."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gangline.control.slurm_job import SlurmRecord
from gangline.control.user_command import CommandRecord, draft
from gangline.errors import GanglineError, HostUnreachable, UsageError
from gangline.provision.console import SILENT
from gangline.runs.cluster import Cluster, SlurmRequest
from gangline.runs.layout import RunLayout, SweepLayout
from gangline.runs.record_versions import write_record
from gangline.runs.state import RunState
from gangline.supervise import allocation
from gangline.sweep import job_array
from gangline.sweep.job_array import array_script, look_at_queue, ranges, resume_array, stop_array, submit_trials
from gangline.sweep.records import (
    HalvingRecord,
    SweepRecord,
    SweepState,
    TrialRecord,
    create_trial,
    load_trial,
    load_trials,
    save_state,
    save_trial,
)
from gangline.transport.slurm_commands import SlurmJob
from tests.fakes.trial_runs import small_job

CLUSTER = Cluster(
    name="campus", hosts=(), backend="slurm", slurm=SlurmRequest(nodes=1, partition="gpu", setup=("module load x",))
)


class Queue:
    """Commands that Slurm was given, and the jobs that it has."""

    def __init__(self) -> None:
        self.given: list[tuple[str, ...]] = []
        self.jobs: dict[str, SlurmJob] = {}
        self.refuses: GanglineError | None = None
        self.silence: GanglineError | None = None

    def answer(self, *words: str) -> str:
        self.given.append(words)
        if self.refuses is not None:
            raise self.refuses
        return f"{40 + len(self.given)};campus\n"

    def find(self, ids: object) -> dict[str, SlurmJob]:
        if self.silence is not None:
            raise self.silence
        return {job: self.jobs[job] for job in list(ids) if job in self.jobs}  # type: ignore[call-overload]

    def has(self, state: str, *ids: str, reason: str = "") -> None:
        self.jobs |= {job: SlurmJob(id=job, state=state, reason=reason) for job in ids}


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """Slurm, which takes everything until it is told otherwise."""
    queue = Queue()
    monkeypatch.setattr(job_array, "slurm", queue.answer)
    monkeypatch.setattr(job_array, "find_jobs", queue.find)
    monkeypatch.setattr(job_array, "claim", lambda *_words: None)
    monkeypatch.setattr(allocation, "find_job", lambda job: queue.find([job]).get(job))
    return queue


def a_sweep(home: Path, num_trials: int, **more: object) -> SweepLayout:
    layout = SweepLayout(home, "sweep-otter-1")
    layout.folder.mkdir(parents=True)
    request = SweepRecord(name="tiny", job_file="/job.yaml", words=(), cluster=CLUSTER, **more)  # type: ignore[arg-type]
    request.save(layout.request)
    save_state(layout, SweepState())
    for number in range(1, num_trials + 1):
        create_trial(
            layout, TrialRecord(number=number, point={"seed": str(number)}, fits=()), request.template or small_job()
        )
    return layout


def submitted(home: Path, num_trials: int, **more: object) -> SweepLayout:
    layout = a_sweep(home, num_trials, **more)
    submit_trials(layout, layout.numbers(), secrets={}, console=SILENT)
    return layout


def run_of(layout: SweepLayout, number: int) -> RunLayout:
    run = load_trial(layout, number).run
    assert run is not None
    return RunLayout(layout.home, run)


def phases(layout: SweepLayout) -> list[str]:
    return [trial.phase for trial in load_trials(layout)]


def test_numbers_are_written_as_slurm_takes_them() -> None:
    assert ranges([1, 2, 3, 5, 8, 7]) == "1-3,5,7-8"


def test_the_script_is_one_array_with_the_limit_at_once(tmp_path: Path) -> None:
    layout = a_sweep(tmp_path, 8, at_once=2)
    text = array_script(layout, SweepRecord.load(layout.request), layout.numbers())
    assert "#SBATCH --array=1-8%2" in text
    assert f"#SBATCH --output={layout.folder}/trials/%a/slurm-%A_%a.log" in text
    assert "#SBATCH --partition=gpu" in text
    assert text.index("module load x") < text.index("exec ")
    assert text.rstrip().endswith(f"-m gangline.sweep {layout.folder} --trial")


def test_every_trial_is_a_queued_run_with_the_id_of_its_task(tmp_path: Path, queue: Queue) -> None:
    layout = submitted(tmp_path, 3)
    assert [words[0] for words in queue.given] == ["sbatch"]
    assert SweepState.load(layout.state).arrays == ("41",)
    for number in (1, 2, 3):
        run = run_of(layout, number)
        record = SlurmRecord.of(run)
        assert record is not None
        assert record.job == f"41_{number}"
        assert RunState.load(run).phase == "queued"
        assert record.log_path(run) == layout.trial(number) / f"slurm-41_{number}.log"
        assert f"gangline.sweep {layout.folder} --trial {number}" in (run.folder / "slurm.sbatch").read_text()


def test_a_refused_array_leaves_no_run(tmp_path: Path, queue: Queue) -> None:
    layout = a_sweep(tmp_path, 3)
    queue.refuses = GanglineError("sbatch refused", seen="invalid partition specified: gpu")
    with pytest.raises(GanglineError, match=r"sbatch refused"):
        submit_trials(layout, layout.numbers(), secrets={}, console=SILENT)
    assert list((tmp_path / "runs").iterdir()) == []
    assert {trial.run for trial in load_trials(layout)} == {None}


def test_a_second_array_waits_for_the_first_where_a_number_at_once_was_asked(tmp_path: Path, queue: Queue) -> None:
    layout = submitted(tmp_path, 2, at_once=1)
    queue.has("RUNNING", "41_1")
    create_trial(layout, TrialRecord(number=3, point={"seed": "3"}, fits=()), small_job())
    submit_trials(layout, [3], secrets={}, console=SILENT)
    assert "--dependency=afterany:41" in queue.given[-1]


@pytest.mark.parametrize(
    ("run_phase", "job", "phase"),
    [
        ("queued", "PENDING", "waiting"),
        ("running", "RUNNING", "running"),
        ("running", "PENDING", "waiting"),  # requeued
        ("queued", "CANCELLED", "stopped"),
        ("running", "CANCELLED", "stopped"),
        ("running", "NODE_FAIL", "failed"),
        ("running", None, "failed"),
        ("queued", None, "failed"),
        ("stopped", None, "stopped"),
        ("finished", "COMPLETED", "finished"),
        ("failed", "FAILED", "failed"),
    ],
)
def test_a_task_that_wrote_no_end_is_settled_by_its_run_and_by_slurm(
    tmp_path: Path, queue: Queue, run_phase: str, job: str | None, phase: str
) -> None:
    layout = submitted(tmp_path, 1)
    RunState(name="tiny", phase=run_phase).save(run_of(layout, 1))  # type: ignore[arg-type]
    save_trial(layout, dataclasses.replace(load_trial(layout, 1), phase="running"))
    if job is not None:
        queue.has(job, "41_1")
    look_at_queue(layout)
    assert phases(layout) == [phase]


@pytest.mark.parametrize(
    "error", [HostUnreachable("squeue cannot reach Slurm's controller"), UsageError("squeue is not on this computer")]
)
def test_a_silent_slurm_changes_nothing_and_is_told(tmp_path: Path, queue: Queue, error: GanglineError) -> None:
    layout = submitted(tmp_path, 2)
    queue.silence = error
    (line,) = look_at_queue(layout).lines
    assert "Slurm does not answer" in line
    assert phases(layout) == ["waiting", "waiting"]


def test_the_queue_is_told_by_its_reasons(tmp_path: Path, queue: Queue) -> None:
    layout = submitted(tmp_path, 3)
    queue.has("PENDING", "41_1", "41_2", reason="Priority")
    queue.has("RUNNING", "41_3")
    assert look_at_queue(layout).lines == ["2 in the queue of Slurm: Priority"]


def test_the_last_trial_at_a_rung_has_the_best_submitted_as_another_array(tmp_path: Path, queue: Queue) -> None:
    layout = submitted(tmp_path, 4, halving=HalvingRecord(eta=2, rungs=(25, 50, 100)))
    for trial, loss in zip(load_trials(layout), (3.0, 1.0, 2.0, 4.0), strict=True):
        run = RunLayout(tmp_path, str(trial.run))
        RunState(name="tiny", phase="stopped").save(run)
        with_loss = TrialRecord.load(layout.trial_record(trial.number))
        save_trial(layout, _at(with_loss, step=25, loss=loss))
    look_at_queue(layout)
    assert phases(layout) == ["dropped", "waiting", "waiting", "dropped"]
    assert SweepState.load(layout.state).arrays == ("41", "42")
    assert "#SBATCH --array=2-3" in (layout.folder / "slurm.sbatch").read_text()


def _at(trial: TrialRecord, *, step: int, loss: float) -> TrialRecord:
    return dataclasses.replace(trial, step=step, losses={str(step): loss})


def test_a_stopped_sweep_goes_on_as_an_array_of_what_waits(tmp_path: Path, queue: Queue) -> None:
    layout = submitted(tmp_path, 3)
    RunState(name="tiny", phase="finished").save(run_of(layout, 2))
    for number in (1, 3):
        RunState(name="tiny", phase="stopped", attempt=2).save(run_of(layout, number))
    write_record(layout.order, {"order": "stop"})
    look_at_queue(layout)
    assert phases(layout) == ["waiting", "finished", "waiting"]
    layout.order.unlink()
    resume_array(layout, console=SILENT)
    assert "#SBATCH --array=1,3" in (layout.folder / "slurm.sbatch").read_text()
    state = RunState.load(run_of(layout, 1))
    assert (state.phase, state.attempt) == ("queued", 2)


def test_a_stop_cancels_what_waits_in_arrays_that_slurm_still_has(
    tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = submitted(tmp_path, 2)
    for number in (1, 2):
        RunState(name="tiny", phase="stopped").save(run_of(layout, number))
    submit_trials(layout, [2], secrets={}, console=SILENT)
    queue.has("PENDING", "42_2", reason="Priority")

    def leaves(*words: str) -> str:
        queue.given.append(words)
        queue.jobs.clear()
        raise GanglineError(
            "scancel refused", seen="scancel: error: Kill job error on job id 42: Invalid job id specified"
        )

    monkeypatch.setattr(job_array, "slurm", leaves)
    assert stop_array(layout, now=False, console=SILENT)
    assert queue.given[-1] == ("scancel", "--state=PENDING", "42")
    assert SweepState.load(layout.state).phase == "stopped"
    assert RunState.load(run_of(layout, 2)).phase == "stopped"


def test_a_command_without_a_flag_to_resume_begins_again_as_another_run(tmp_path: Path, queue: Queue) -> None:
    template = draft(("train.py", "{seed}"), folder=tmp_path)
    layout = submitted(tmp_path, 1, template=template)
    first = run_of(layout, 1)
    assert CommandRecord.of(first) == template
    RunState(name="train", phase="stopped").save(first)
    submit_trials(layout, [1], secrets={}, console=SILENT)
    assert run_of(layout, 1) == first  # it never began
    first.attempt(1).mkdir(parents=True)
    write_record(first.request(1), {})
    submit_trials(layout, [1], secrets={}, console=SILENT)
    assert run_of(layout, 1) != first
    assert RunState.load(run_of(layout, 1)).phase == "queued"
