"""A sweep on Slurm: a job array, each task of which is the run of one trial. Nothing of it stays on the login host.

Task N is trial N: an ordinary run as a job of Slurm (gangline.control.slurm_job), which saves before its time limit, is
requeued and continues by itself. While it runs, its batch step writes into trial.json where it stands, and obeys the
order of the sweep. At a rung of halving the last trial that arrives judges, and submits an array of those that go on.
A task that ended without writing its end (cancelled in the queue, killed) is settled when somebody looks: its run's
records and Slurm say how.
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gangline.app import begin
from gangline.context import REAL, Context, Dependencies
from gangline.control.end import stop
from gangline.control.equip import claim
from gangline.control.slurm_job import (
    GONE_S,
    LEAVING_POLL_S,
    SCRIPT,
    SECRETS,
    LogConsole,
    batch,
    batch_script,
    becomes,
    never_began,
    no_longer_waits,
    script,
)
from gangline.control.supervision import RunHandle
from gangline.errors import GanglineError, HostUnreachable, RunFailed, UsageError
from gangline.provision.console import Console
from gangline.provision.trees import create_folder, write_documents
from gangline.runs.cluster import SlurmRequest
from gangline.runs.files import write_atomic
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout, SweepLayout
from gangline.runs.record_versions import load_if_there, write_record
from gangline.runs.registry import RunRecord
from gangline.runs.state import RunState, now_iso
from gangline.supervise.allocation import SlurmRecord, goes_on
from gangline.sweep.drive import with_figures
from gangline.sweep.hparams import TrialEvents
from gangline.sweep.records import (
    SweepRecord,
    SweepState,
    TrialRecord,
    anew,
    load_trial,
    load_trial_work,
    load_trials,
    read_order,
    save_state,
    save_trial,
    sweep_lock,
)
from gangline.sweep.schedule import pause_of, promote
from gangline.sweep.trial_runs import RunReader
from gangline.transport.local import our_python
from gangline.transport.slurm_commands import SlurmJob, find_jobs, slurm

NOTE_S = 2.0
"""How often a task writes where its trial stands, at most."""
JUDGE_S = 60.0
"""How long a task waits for another one that judges a rung."""


# --- the script, and the runs that its tasks are


def array_script(layout: SweepLayout, request: SweepRecord, numbers: Sequence[int]) -> str:
    """The batch script of an array of these trials."""
    at_once = f"%{request.at_once}" if request.at_once else ""
    options = [
        f"--job-name=gangline-{layout.sweep_id}",
        f"--array={ranges(numbers)}{at_once}",
        f"--comment={request.name}",
        f"--output={layout.folder}/trials/%a/slurm-%A_%a.log",
        f"--chdir={layout.folder}",
    ]
    asked = _asked(request)
    words = our_python("gangline.sweep", str(layout.folder), "--trial")
    return batch_script(asked, [*asked.setup, becomes(words)], options)


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as Slurm takes them: 1-3,7."""
    found = []
    for _, group in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        values = [number for _, number in group]
        found.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    return ",".join(found)


def _asked(request: SweepRecord) -> SlurmRequest:
    assert request.cluster.slurm is not None, "a sweep that is submitted"
    return request.cluster.slurm


def submit_trials(
    layout: SweepLayout,
    numbers: Sequence[int],
    *,
    secrets: Mapping[str, str] | None = None,
    console: Console,
    deps: Dependencies = REAL,
) -> str:
    """Hand Slurm these trials as one array; its id. Raises GanglineError with Slurm's own words where it refuses, and
    then every run is as before. secrets: tokens for the ranks; None: those of this shell.
    """
    request, state = SweepRecord.load(layout.request), SweepState.load(layout.state)
    context = Context(transports={}, home=layout.home, console=console, deps=deps)
    claim(request.cluster, context)
    secrets = context.secrets if secrets is None else secrets
    before = _Before(layout)
    words = ["sbatch", "--parsable", *_after_others(layout, request)]
    try:
        for number in numbers:
            before.keep(number)
            _make_ready(layout, request, number, secrets)
        write_atomic(layout.folder / SCRIPT, array_script(layout, request, numbers).encode())
        array = slurm(*words, str(layout.folder / SCRIPT)).strip().partition(";")[0]
    except BaseException:
        before.restore()
        raise
    save_state(layout, SweepState.load(layout.state), phase="running", arrays=(*state.arrays, array), error=None)
    for number in numbers:
        run = _run_of(layout, load_trial(layout, number))
        if (record := SlurmRecord.of(run)) is not None:  # a task that has begun already wrote the same
            replace(record, job=f"{array}_{number}").save(run.slurm)
    return array


def _after_others(layout: SweepLayout, request: SweepRecord) -> list[str]:
    """`--at-once K` is for the whole sweep, and %K for one array: another one begins when those before have ended."""
    if not request.at_once:
        return []
    jobs = find_jobs(job_ids(layout, load_trials(layout)).values())
    arrays = _arrays_of(job for job in jobs.values() if job.active)
    return [f"--dependency=afterany:{':'.join(arrays)}"] if arrays else []


def _make_ready(layout: SweepLayout, request: SweepRecord, number: int, secrets: Mapping[str, str]) -> None:
    """Write what the task of a trial reads: its run, which is queued, and where its batch step writes."""
    trial = load_trial(layout, number)
    pause_at = pause_of(trial, request.halving)
    if trial.run is not None and (request.can_continue or not _has_begun(_run_of(layout, trial))):
        run = _run_of(layout, trial)
        if (job := load_if_there(run.job, Job)) is not None:  # not of a command
            replace(job, pause_at=pause_at).save(run.job)
        state = replace(RunState.load(run), phase="queued", supervisor=None, error=None)
    else:
        run, work = create_folder(layout.home), load_trial_work(layout, number)
        work = replace(work, pause_at=pause_at) if isinstance(work, Job) else work
        document = {"job" if isinstance(work, Job) else "command": work.to_json()}
        said = {"sweep": layout.sweep_id, "number": number}
        write_documents(run, {**document, "trial": said, "cluster": request.cluster.to_json()})
        trial = replace(anew(trial), run=run.run_id)
        state = RunState(name=work.name, phase="queued")
    write_atomic(run.folder / SCRIPT, script(run, _asked(request), name=state.name).encode())
    write_atomic(run.folder / SECRETS, json.dumps(dict(secrets)).encode())
    known = SlurmRecord.of(run)
    SlurmRecord(
        job="",
        submitted=now_iso(),
        cluster=replace(request.cluster, hosts=()),
        force=request.force,
        requeues=known.requeues if known else 0,
        log=str(layout.trial(number) / "slurm-{job}.log"),
    ).save(run.slurm)
    state.save(run)
    save_trial(layout, replace(trial, phase="waiting", error=None))


def _has_begun(run: RunLayout) -> bool:
    return run.request(1).exists()


class _Before:
    """The trials as they were, for a submission that Slurm refuses."""

    def __init__(self, layout: SweepLayout) -> None:
        self._layout = layout
        self._trials: list[TrialRecord] = []
        self._states: dict[str, RunState | None] = {}

    def keep(self, number: int) -> None:
        """Remember a trial and its run."""
        trial = load_trial(self._layout, number)
        self._trials.append(trial)
        if trial.run is not None:
            self._states[trial.run] = load_if_there(RunLayout(self._layout.home, trial.run).state, RunState)

    def restore(self) -> None:
        """Write them back; a run that was made since goes."""
        for trial in self._trials:
            made = load_trial(self._layout, trial.number).run
            if made is not None and made != trial.run:
                shutil.rmtree(RunLayout(self._layout.home, made).folder, ignore_errors=True)
            save_trial(self._layout, trial)
        for run_id, state in self._states.items():
            if state is not None:
                state.save(RunLayout(self._layout.home, run_id))


def _run_of(layout: SweepLayout, trial: TrialRecord) -> RunLayout:
    assert trial.run is not None, "a trial that was submitted"
    return RunLayout(layout.home, trial.run)


# --- one task


def run_task(layout: SweepLayout, number: int, *, deps: Dependencies = REAL) -> int:
    """Run one trial in the allocation around us, until its run has ended; the exit code of the task."""
    run = _run_of(layout, load_trial(layout, number))
    secrets = load_if_there(run.folder / SECRETS, dict) or {}
    if read_order(layout) is not None:
        no_longer_waits(run)
        return 0
    task = _Task(layout, number, deps)
    code = batch(run, begin, watch=task.watch, deps=deps)
    task.end(run)
    _judge(layout, secrets=secrets, deps=deps)
    return code


class _Task:
    """What the batch step of a trial writes down of it, and the order of the sweep that it obeys."""

    def __init__(self, layout: SweepLayout, number: int, deps: Dependencies) -> None:
        self._layout, self._number, self._deps = layout, number, deps
        metric = SweepRecord.load(layout.request).metric
        self._reader = RunReader(None if metric is None else metric.name)
        self._ordered = False
        self._next_note = 0.0
        trial = load_trial(layout, number)
        self._events = TrialEvents(layout.tensorboard / str(number), trial.point)
        save_trial(layout, replace(trial, phase="running", starts=trial.starts + 1))

    def watch(self, run: RunHandle, record: RunRecord) -> None:
        """Called about once a second by the batch step, and once more at the end."""
        if (order := read_order(self._layout)) is not None and not self._ordered:
            with suppress(GanglineError):
                self._ordered = stop(run, now=order == "kill", deps=self._deps)
        if time.monotonic() < self._next_note and not record.ended and record.phase != "queued":
            return
        self._next_note = time.monotonic() + NOTE_S
        with suppress(GanglineError, OSError):  # a look that fails ends no run
            self._note(run, record)

    def _note(self, run: RunHandle, record: RunRecord) -> None:
        trial = load_trial(self._layout, self._number)
        names = tuple(host.name for host in run.cluster.hosts)
        places = trial.places if names == trial.hosts else (*trial.places, *names[:1])
        changed = with_figures(replace(trial, hosts=names, places=places), self._reader.look(run, record))
        if changed != trial:
            save_trial(self._layout, changed)
        self._events.losses(changed.losses)

    def end(self, run: RunLayout) -> None:
        """Write how the trial stands now that its task ends."""
        trial, state = load_trial(self._layout, self._number), RunState.load(run)
        request = SweepRecord.load(self._layout.request)
        trial = _settled(trial, state, request, is_ordered=read_order(self._layout) is not None)
        save_trial(self._layout, trial)
        if trial.ended:
            with suppress(OSError):
                self._events.ended(trial.phase)


def _settled(trial: TrialRecord, state: RunState, request: SweepRecord, *, is_ordered: bool) -> TrialRecord:
    """A trial whose task has ended, as the state of its run says. is_ordered: the sweep was stopped."""
    pause = pause_of(trial, request.halving)
    if state.phase == "finished":
        last = len(request.halving.rungs) - 1 if request.halving else 0
        return replace(trial, phase="finished", rung=last, error=None)
    if state.phase == "failed":
        return replace(trial, phase="failed", error=state.error)
    if state.phase == "stopped" and pause is not None and trial.step >= pause:
        return replace(trial, phase="paused", error=None)
    if state.phase == "stopped" and not is_ordered:
        return replace(trial, phase="stopped", error=None)
    return replace(trial, phase="waiting", error=None)


def _judge(layout: SweepLayout, *, secrets: Mapping[str, str] | None, deps: Dependencies) -> None:
    """Have the best trials of a rung go on once all are there; say so where nothing is left to do."""
    with sweep_lock(layout, timeout_s=JUDGE_S):
        request, order = SweepRecord.load(layout.request), read_order(layout)
        going_on = []
        if request.halving is not None and order is None:
            trials = {trial.number: trial for trial in load_trials(layout)}
            for number, phase in promote(list(trials.values()), request.halving).items():
                if phase == "waiting":
                    going_on.append(number)
                    save_trial(layout, replace(trials[number], rung=trials[number].rung + 1, phase="waiting"))
                else:
                    save_trial(layout, replace(trials[number], phase="dropped"))
        if going_on:
            try:
                submit_trials(layout, going_on, secrets=secrets, console=LogConsole(), deps=deps)
            except GanglineError as error:
                save_state(layout, SweepState.load(layout.state), phase="failed", error=error.to_json())
                raise
        elif all(trial.ended for trial in load_trials(layout)):
            save_state(layout, SweepState.load(layout.state), phase="finished")


# --- from the login host


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLook:
    """What Slurm says of the tasks of a sweep."""

    jobs: Mapping[int, SlurmJob] = field(default_factory=dict)
    """Trial -> its job, while Slurm knows it."""
    silent: str | None = None
    """Why this is only what the tasks wrote."""

    @property
    def lines(self) -> list[str]:
        """What the queue does, for the screen."""
        if self.silent:
            return [f"Slurm does not answer ({self.silent}); this is what the trials wrote"]
        reasons: dict[str, int] = {}
        for job in self.jobs.values():
            if job.waits:
                reasons[job.reason or job.state] = reasons.get(job.reason or job.state, 0) + 1
        return [f"{count} in the queue of Slurm: {reason}" for reason, count in reasons.items()]


def job_ids(layout: SweepLayout, trials: Iterable[TrialRecord]) -> dict[int, str]:
    """Trial -> the id of its job, such as 4711_3."""
    found = {}
    for trial in trials:
        record = None if trial.run is None else SlurmRecord.of(RunLayout(layout.home, trial.run))
        if record is not None and record.job:
            found[trial.number] = record.job
    return found


def look_at_queue(layout: SweepLayout, *, deps: Dependencies = REAL) -> QueueLook:
    """Ask Slurm once about all tasks, and settle the trials whose task ended without writing its end."""
    ids = job_ids(layout, (trial for trial in load_trials(layout) if trial.phase in OPEN))
    try:
        jobs = find_jobs(set(ids.values())) if ids else {}
    except (HostUnreachable, UsageError) as error:  # as on a login host without Slurm's module
        return QueueLook(silent=error.what)
    found = {number: jobs[job] for number, job in ids.items() if job in jobs}
    # a task writes its end before Slurm sees it leave: what is read from here on is newer than Slurm's answer
    request, is_ordered = SweepRecord.load(layout.request), read_order(layout) is not None
    for trial in load_trials(layout):
        if trial.number not in ids:
            continue
        job = found.get(trial.number)
        settled = _by_queue(layout, trial, job, request, is_ordered=is_ordered)
        if settled != trial:
            save_trial(layout, settled)
    if SweepState.load(layout.state).phase == "running":
        _judge(layout, secrets=None, deps=deps)
    return QueueLook(jobs={number: job for number, job in found.items() if job.active})


OPEN = ("waiting", "running", "stopped")
"""Phases of trials that Slurm may know more about: one that was preempted stops, and waits again."""


def require_answer(layout: SweepLayout) -> dict[int, SlurmJob]:
    """The tasks of a sweep that Slurm still has, by trial; raises HostUnreachable where it does not say."""
    look = look_at_queue(layout)
    if look.silent:
        raise HostUnreachable(
            f"nobody knows whether {layout.sweep_id} runs", seen=look.silent, fix="try again once Slurm answers"
        )
    return dict(look.jobs)


def resume_array(layout: SweepLayout, *, console: Console, deps: Dependencies = REAL) -> None:
    """Submit the trials that wait, as one array; where none does, judge the rung at which they are paused."""
    numbers = [trial.number for trial in load_trials(layout) if trial.phase == "waiting"]
    if numbers:
        submit_trials(layout, numbers, console=console, deps=deps)
        return
    save_state(layout, SweepState.load(layout.state), phase="running", error=None)
    _judge(layout, secrets=None, deps=deps)


def _by_queue(
    layout: SweepLayout, trial: TrialRecord, job: SlurmJob | None, request: SweepRecord, *, is_ordered: bool
) -> TrialRecord:
    """A trial as it stands, now that Slurm was asked about its job."""
    if job is not None and job.active:
        return replace(trial, phase="waiting") if job.waits else trial
    if trial.phase == "stopped":
        return trial
    run = _run_of(layout, trial)
    state = RunState.load(run)
    if state.phase in {"finished", "failed"} or (state.phase == "stopped" and not goes_on(run, state.attempt)):
        return _settled(trial, state, request, is_ordered=is_ordered)
    if is_ordered or (job is not None and job.state == "CANCELLED"):
        no_longer_waits(run)
        return replace(trial, phase="waiting" if is_ordered else "stopped", error=None)
    return replace(trial, phase="failed", error=_lost(layout, trial, job).to_json())


def _lost(layout: SweepLayout, trial: TrialRecord, job: SlurmJob | None) -> RunFailed:
    """The error of a task that ended while its run said otherwise, which the run has from now on, too."""
    run = _run_of(layout, trial)
    record, state = SlurmRecord.of(run), RunState.load(run)
    assert record is not None, "written when it was submitted"
    if state.phase in {"queued", "preparing"}:
        return never_began(run, record, job)
    error = RunFailed(
        f"job {record.job} ended before {run.run_id} had written its end",
        seen=f"Slurm says {job.state}" if job is not None else "Slurm does not know it any more",
        fix=f"gangline sweep resume {layout.sweep_id} {trial.number} continues from its last checkpoint",
    )
    replace(state, phase="failed", supervisor=None, error=error.to_json()).save(run)
    return error


def stop_array(layout: SweepLayout, *, now: bool, console: Console, deps: Dependencies = REAL) -> bool:
    """End the sweep: tasks in the queue leave it, those that run save (now: do not) and end; returns once Slurm has
    none left. False where it had ended. Raises RunFailed where Slurm does not let go of a job.
    """
    state = SweepState.load(layout.state)
    if state.phase not in {"running", "stopping"}:
        return False
    write_record(layout.order, {"order": "kill" if now else "stop"})
    save_state(layout, state, phase="stopping")
    _cancel(look_at_queue(layout, deps=deps).jobs.values(), "--state=PENDING")
    poll_s = min(_asked(SweepRecord.load(layout.request)).poll_s, LEAVING_POLL_S)
    deadline, cancelled = None, False
    while (look := look_at_queue(layout, deps=deps)).jobs or look.silent:
        busy = [number for number, job in look.jobs.items() if not _has_ended(layout, number)]
        console.progress(f"{len(look.jobs)} tasks of {layout.sweep_id} leave Slurm, {len(busy)} of them save first")
        if busy or look.silent:
            deadline = None
        elif deadline is None:
            deadline = time.monotonic() + GONE_S
        elif time.monotonic() > deadline:
            if cancelled:
                names = ", ".join(job.id for job in look.jobs.values())
                raise RunFailed(
                    f"jobs of {layout.sweep_id} do not leave Slurm",
                    seen=names,
                    fix=f"scancel {' '.join(_arrays_of(look.jobs.values()))}; if that does not help, the site has to "
                    "look at its nodes",
                )
            _cancel(look.jobs.values())
            deadline, cancelled = time.monotonic() + GONE_S, True
        time.sleep(poll_s)
    save_state(layout, SweepState.load(layout.state), phase="stopped")
    return True


def _arrays_of(jobs: Iterable[SlurmJob]) -> list[str]:
    """The arrays that have these tasks."""
    return sorted({job.id.partition("_")[0] for job in jobs})


def _cancel(jobs: Iterable[SlurmJob], *options: str) -> None:
    """Cancel the arrays of these tasks; one that has ended meanwhile needs it no more."""
    if not (arrays := _arrays_of(jobs)):
        return
    try:
        slurm("scancel", *options, *arrays)
    except GanglineError as error:
        if "Invalid job id" not in error.seen:
            raise


def _has_ended(layout: SweepLayout, number: int) -> bool:
    state = load_if_there(_run_of(layout, load_trial(layout, number)).state, RunState)
    return state is not None and state.phase in {"finished", "failed", "stopped"}
