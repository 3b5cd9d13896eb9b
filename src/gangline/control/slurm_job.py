"""A run as a job of Slurm: submitted from the login host, begun by its batch step, requeued as often as it needs.

The batch step (`python -m gangline.batch_step RUN_FOLDER`) does on the first node what `train` and `resume` do
elsewhere, with the nodes of the allocation as hosts. It ends when the run ends. Before the time limit it has the run
save and stop, and puts the job back into the queue. The home of gangline has to be on a folder that login host and
nodes share.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from gangline.context import REAL, Dependencies
from gangline.control.end import stop
from gangline.control.supervision import RunHandle, open_run
from gangline.control.unshared_home import nodes_of, renew
from gangline.errors import GanglineError, HostUnreachable, RunFailed, UsageError
from gangline.provision.console import Console
from gangline.report.follow import Patience
from gangline.runs.cluster import IN_ALLOCATION, Cluster, SlurmRequest
from gangline.runs.files import write_atomic
from gangline.runs.layout import RunLayout, SweepLayout
from gangline.runs.record_versions import load_if_there
from gangline.runs.registry import RunRecord
from gangline.runs.state import RunState, now_iso
from gangline.supervise.allocation import SlurmRecord, goes_on, waits
from gangline.transport.local import our_python
from gangline.transport.slurm_commands import SlurmJob, find_job, in_script, job_name, own_job, place_in_queue, slurm

GONE_S = 90.0
"""How long a job may take to leave the queue after its last process: epilogs, KillWait."""
LEAVING_POLL_S = 5.0
END_POLL_S = 1.0
LOOK_S = 0.5
"""How often the records of a waiting run are read; Slurm is asked less often."""


def must_submit(cluster: Cluster, variables: Mapping[str, str]) -> bool:
    """Whether a run on this cluster waits in a queue: not inside an allocation."""
    return cluster.slurm is not None and IN_ALLOCATION not in variables


# --- the script


def script(layout: RunLayout, asked: SlurmRequest, *, name: str, archive: bytes = b"") -> str:
    """The batch script of a run. archive: what it brings to nodes that do not see gangline's home (`packed`)."""
    options = [f"--job-name={job_name(layout.run_id)}", f"--comment={name}"]
    if asked.shared_home:
        options += [f"--output={layout.folder}/slurm-%j.log", f"--chdir={layout.folder}"]
        return batch_script(asked, [*asked.setup, becomes(_step_of(layout))], options)
    from gangline.control.packed_run import script_lines  # what packs costs 0.1 s, which most verbs do not pay

    # requeued by Slurm, it might get nodes that have nothing of the run
    options += ["--output=/dev/null", "--chdir=/"]
    return batch_script(asked, script_lines(layout, asked, archive), options, requeue=False)


def _step_of(layout: RunLayout) -> list[str]:
    """The batch step of a run; that of a trial tells its sweep how it stands."""
    trial = load_if_there(layout.trial, dict)
    if trial is None:
        return our_python("gangline.batch_step", str(layout.folder))
    sweep = SweepLayout(layout.root, str(trial["sweep"]))
    return our_python("gangline.sweep", str(sweep.folder), "--trial", str(trial["number"]))


def becomes(words: Sequence[str]) -> str:
    """The line of a batch script that becomes this command."""
    return f"exec {' '.join(map(in_script, words))}"


def batch_script(asked: SlurmRequest, body: Sequence[str], options: Sequence[str], *, requeue: bool = True) -> str:
    """A batch script with these lines, and with options of sbatch before those of the cluster file."""
    options = [
        *options,
        "--open-mode=append",
        "--requeue" if requeue else "--no-requeue",
        "--no-kill",
        f"--signal=B:USR1@{asked.notice_s}",
        *asked.directives,
    ]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {in_script(option)}" for option in options), *body, ""])


def submit(layout: RunLayout, cluster: Cluster, state: RunState, *, force: bool, secrets: Mapping[str, str]) -> str:
    """Hand a run to Slurm; the id of its job. Raises GanglineError with Slurm's own words where it refuses."""
    before, state_before = SlurmRecord.of(layout), load_if_there(layout.state, RunState)
    record = SlurmRecord(
        job="",
        submitted=now_iso(),
        cluster=replace(cluster, hosts=()),
        force=force,
        requeues=before.requeues if before else 0,
    )
    state.save(layout)  # the batch step may begin at once
    record.save(layout.slurm)
    try:
        job = _hand_over(layout, record, name=state.name, secrets=secrets)
    except GanglineError:
        if state_before is not None:
            state_before.save(layout)
        if before is not None:
            before.save(layout.slurm)
        else:
            layout.slurm.unlink()
        raise
    replace(SlurmRecord.of(layout) or record, job=job).save(layout.slurm)
    return job


def _hand_over(layout: RunLayout, record: SlurmRecord, *, name: str, secrets: Mapping[str, str]) -> str:
    """Write the batch script and hand it to Slurm; the id of the job."""
    path, archive, options = layout.folder / SCRIPT, b"", []
    if record.asked.shared_home:
        write_atomic(layout.folder / SECRETS, json.dumps(dict(secrets)).encode())
    else:
        from gangline.control.packed_run import packed

        options, archive = nodes_of(layout, record.asked), packed(layout)
    write_atomic(path, script(layout, record.asked, name=name, archive=archive).encode())
    return slurm("sbatch", "--parsable", *options, str(path)).strip().partition(";")[0]


SCRIPT = "slurm.sbatch"
SECRETS = "secrets.json"
"""For this user alone, in the run's folder until the run ends: a requeued job needs them again."""


# --- while it waits, and after it


def job_of(layout: RunLayout) -> SlurmJob | None:
    """The job of a run, while Slurm knows it; raises HostUnreachable where Slurm does not answer."""
    record = SlurmRecord.of(layout)
    return None if record is None else find_job(record.job)


def wait_until_begun(layout: RunLayout, console: Console) -> None:
    """Follow a run through the queue; raises RunFailed where its job ends before the run begins."""
    record = SlurmRecord.of(layout)
    if record is None:
        return
    told, ask_at, doubts = "", 0.0, 0
    while (phase := _phase(layout)) in WAITING:
        if phase == "preparing":
            console.progress(_log_tail(layout, record, lines=1))
        if time.monotonic() >= ask_at:
            ask_at = time.monotonic() + record.poll_s
            try:
                renew(layout)
                record = SlurmRecord.of(layout) or record
                job = find_job(record.job)
            except HostUnreachable as error:
                line = f"Slurm does not answer ({error.what}); job {record.job} stays in its queue"
                job = None
            else:
                doubts = 0 if job is not None and job.active else doubts + 1
                if doubts > 1 and _phase(layout) in WAITING:
                    raise never_began(layout, record, job)
                line = waiting_line(record.job, job, place_in_queue(job) if job is not None and job.waits else None)
            if line != told and phase == "queued":
                console.report(line)
                told = line
        time.sleep(LOOK_S)


def _phase(layout: RunLayout) -> str:
    """Where a run stands, as its records here say: `queued` also between two allocations."""
    state = RunState.load(layout)
    if state.phase == "stopped":
        return "queued" if goes_on(layout, state.attempt) else state.phase
    # its first node is lost, and Slurm starts it again
    return "queued" if state.phase in RUNNING and waits(layout) else state.phase


def waiting_line(number: str, job: SlurmJob | None, place: tuple[int, int] | None = None) -> str:
    """How a job that has not begun stands, in one line. place: among how many that wait in its partition."""
    if job is None or not job.active:
        return f"job {number} is leaving the queue"
    if not job.waits:
        return f"job {number} has its nodes ({', '.join(job.nodes)}); gangline starts there"
    why = f": {job.reason}" if job.reason else ""
    meaning = REASONS.get(job.reason, "")
    start = f"; Slurm expects it to start at {job.starts}" if job.starts else ""
    queue = f"; number {place[0]} of {place[1]} that wait in {job.partition}" if place else ""
    return f"job {number} waits{why}{f' ({meaning})' if meaning else ''}{queue}{start}"


WAITING = ("queued", "preparing")
RUNNING = ("running", "stopping", "restarting")
REASONS = {
    "Resources": "it is next, as soon as nodes are free",
    "Priority": "other jobs come first",
    "Dependency": "another job has to end first",
    "BeginTime": "it may not start yet; a requeued job rests for a while",
    "PartitionTimeLimit": "it asks for more time than the partition gives: shorten `slurm.time`",
    "PartitionNodeLimit": "it asks for more nodes than the partition has",
    "PartitionConfig": "it asks for more than the partition has, and will never start",
    "PartitionDown": "the partition is down",
    "ReqNodeNotAvail": "a node that it needs is down or reserved",
    "QOSMaxJobsPerUserLimit": "you have as many jobs as your qos allows",
    "QOSGrpGRES": "your group has as many GPUs as its qos allows",
    "AssocGrpGRES": "your account has as many GPUs as it may",
    "AssocMaxJobsLimit": "you have as many jobs as your account allows",
    "JobHeldUser": "you hold it: scontrol release",
    "JobHeldAdmin": "the site holds it",
    "launch failed requeued held": "its nodes could not start it; scontrol release tries again",
}
"""Slurm's reasons in plain words."""


def never_began(layout: RunLayout, record: SlurmRecord, job: SlurmJob | None) -> RunFailed:
    """The error of a run whose job has ended in the queue, or in its first moments."""
    how = f"Slurm says {job.state}" if job else "Slurm does not know it any more"
    tail = _log_tail(layout, record)
    log = record.log_path(layout)
    shared = (
        f"do its nodes see {layout.root} and {sys.executable}? If they cannot, write `slurm.shared_home: false`; "
        if record.asked.shared_home
        else ""
    )
    error = RunFailed(
        f"job {record.job} ended before {layout.run_id} began",
        seen=f"{how}; {f'its log ends: {tail}' if tail else f'it wrote nothing into {log}'}",
        fix=f"{'' if tail else shared}sacct -j {record.job} says more, where the site keeps accounts; then: gangline "
        f"resume {layout.run_id}",
    )
    with suppress(OSError):
        replace(RunState.load(layout), phase="failed", error=error.to_json()).save(layout)
    return error


def _log_tail(layout: RunLayout, record: SlurmRecord, *, lines: int = 4) -> str:
    try:
        text = record.log_path(layout).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return " / ".join(text.strip().splitlines()[-lines:])[-600:]


def cancel_waiting(layout: RunLayout) -> bool:
    """End a job whose run has not begun; False where it has."""
    renew(layout)
    record, state = SlurmRecord.of(layout), load_if_there(layout.state, RunState)
    if record is None or state is None or _phase(layout) not in WAITING:
        return False
    slurm("scancel", record.job)
    no_longer_waits(layout)
    return True


def no_longer_waits(layout: RunLayout) -> None:
    """Write down that a run has been taken out of the queue; one that began meanwhile keeps its state."""
    if (record := SlurmRecord.of(layout)) is not None:
        replace(record, leaving=0, noticed=0).save(layout.slurm)
    state = RunState.load(layout)
    if state.phase in WAITING:
        replace(state, phase="stopped", supervisor=None).save(layout)
    (layout.folder / SECRETS).unlink(missing_ok=True)


def require_gone(layout: RunLayout, console: Console) -> None:
    """Wait until the job of an ended run has left Slurm; cancels it where it does not leave by itself."""
    record = SlurmRecord.of(layout)
    if record is None:
        return
    deadline, cancelled = time.monotonic() + GONE_S, False
    while (job := find_job(record.job)) is not None and job.active:
        if time.monotonic() > deadline:
            if cancelled:
                raise RunFailed(
                    f"job {record.job} does not leave Slurm",
                    seen=f"it is {job.state} on {', '.join(job.nodes)}",
                    fix=f"scancel {record.job}; if that does not help, the site has to look at its nodes",
                )
            slurm("scancel", record.job)
            deadline, cancelled = time.monotonic() + GONE_S, True
        console.progress(f"job {record.job} leaves Slurm")
        time.sleep(min(record.poll_s, LEAVING_POLL_S))


# --- the batch step


class Notices:
    """The signals of Slurm to the batch step."""

    def __init__(self) -> None:
        self.limit = False
        """USR1: the time limit is near."""
        self.end = False
        """TERM: cancelled, or the nodes are wanted by another job."""
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "limit", True))
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "end", True))

    def end_within(self, seconds: float) -> bool:
        """Whether TERM has come, or comes in so many seconds."""
        deadline = time.monotonic() + seconds
        while not self.end and time.monotonic() < deadline:
            time.sleep(LOOK_S / 5)
        return self.end


class LogConsole:
    """A console whose lines go to the log of the job."""

    def report(self, line: str) -> None:
        """A line with its time."""
        sys.stdout.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        sys.stdout.flush()

    def progress(self, line: str) -> None:
        """Not in a log."""


NOTICE_S = 2.0
"""How much later than the other steps of a job, whose end looks like a failure, its batch step may hear the reason."""
Begin = Callable[[RunLayout, Console, Dependencies], None]
LET_READ_S = 5.0
"""Where nodes do not see gangline's home, whoever follows reads the end of a run before its job has ended."""
Watch = Callable[[RunHandle, RunRecord], None]
"""Called about once a second while a run runs, and when it has ended."""


def _nothing(_run: RunHandle, _record: RunRecord) -> None:
    """Nobody watches."""


@contextmanager
def _secrets_of(layout: RunLayout) -> Iterator[dict[str, str]]:
    path = layout.folder / SECRETS
    try:
        secrets: dict[str, str] = json.loads(path.read_bytes())
    except FileNotFoundError:
        secrets = {}
    try:
        yield secrets
    finally:
        if RunState.load(layout).phase in {"finished", "failed", "stopped"}:
            path.unlink(missing_ok=True)


def batch(layout: RunLayout, begin: Begin, *, watch: Watch = _nothing, deps: Dependencies = REAL) -> int:
    """Begin or resume a run in the allocation around us, and stay until it has ended; the exit code.

    begin: starts the next attempt, and returns once its gang has been started.
    """
    notices, console = Notices(), LogConsole()
    number = own_job(deps.variables)
    if number is None:
        raise UsageError(
            "this is the batch step of a job of Slurm",
            seen=f"no {IN_ALLOCATION} here",
            fix="gangline train submits the job",
        )
    from gangline.control.packed_run import take_over

    take_over(layout, number)
    with _secrets_of(layout) as secrets:
        deps = replace(deps, variables={**deps.variables, **secrets})
        console.report(f"job {number} begins with {layout.run_id}")
        if (record := SlurmRecord.of(layout)) is not None and not record.job:  # we were faster than who submitted us
            replace(record, job=number).save(layout.slurm)
        try:
            begin(layout, console, deps)
        except GanglineError as error:
            console.report(str(error))
            return _not_begun(layout, error, ended=notices.end_within(NOTICE_S))
        return _stay(layout, number, notices, console, deps, watch)


def _not_begun(layout: RunLayout, error: GanglineError, *, ended: bool) -> int:
    """Write down why an attempt did not begin; the exit code. ended: Slurm ended the job meanwhile."""
    state = RunState.load(layout)
    if ended and state.phase in {*WAITING, "failed"}:
        _mark(layout, noticed=True)
        replace(state, phase="stopped", supervisor=None, error=None).save(layout)
        return 0
    if state.phase in WAITING:
        replace(state, phase="failed", supervisor=None, error=error.to_json()).save(layout)
    return error.exit_code


def _stay(layout: RunLayout, number: str, notices: Notices, console: Console, deps: Dependencies, watch: Watch) -> int:
    told = ordered = False
    with open_run(layout.run_id, home=layout.root, deps=deps) as run:
        patience = Patience(run.view().patience_s, time.monotonic)  # a host agent starts another supervisor
        while not (record := patience.judge(run.record())).ended and record.phase != "queued":
            watch(run, record)
            if notices.end and not told:  # the supervisor has heard of it, too
                console.report(f"Slurm ends the job: {layout.run_id} saves and stops")
                _mark(layout, noticed=True)
                told = True
            elif notices.limit and not ordered:
                if not told:
                    console.report(f"its time limit is near: {layout.run_id} saves and stops")
                    _mark(layout, noticed=False)
                told = True
                with suppress(GanglineError):
                    ordered = stop(run, deps=deps)
            time.sleep(END_POLL_S)
        watch(run, record)
    if record.phase == "queued" and notices.limit:
        return _requeue(layout, number, console)
    _let_read(layout)
    console.report(f"{layout.run_id} {record.phase}")
    return 1 if record.phase in {"failed", "lost"} else 0


def _let_read(layout: RunLayout) -> None:
    record = SlurmRecord.of(layout)
    if record is None or record.asked.shared_home:
        return
    time.sleep(LET_READ_S)


def _mark(layout: RunLayout, *, noticed: bool) -> None:
    """Say that the end of this attempt may not be the end of the run."""
    if (record := SlurmRecord.of(layout)) is None:
        return
    attempt = RunState.load(layout).attempt
    record = replace(record, noticed=attempt) if noticed else replace(record, leaving=attempt)
    record.save(layout.slurm)


@contextmanager
def _deaf() -> Iterator[None]:
    """SIGTERM is ignored, by what is started here, too: Slurm ends a requeued job before `scontrol` has its answer."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _requeue(layout: RunLayout, number: str, console: Console) -> int:
    """Have Slurm start the run again; as another job where it does not requeue this one."""
    record = SlurmRecord.of(layout)
    assert record is not None, "written when it was submitted"
    record = replace(record, requeues=record.requeues + 1)
    record.save(layout.slurm)
    state = RunState.load(layout)
    replace(state, phase="queued", supervisor=None).save(layout)
    options: list[str] = []
    if record.asked.shared_home:
        try:
            with _deaf():
                slurm("scontrol", "requeue", number)
            console.report(f"job {number} goes back into the queue")
            return 0
        except GanglineError as error:
            console.report(f"{error.what}: {error.seen}; another job is submitted")
    else:
        options = nodes_of(layout, record.asked)
        console.report(f"another job is submitted, for the same nodes: {options[0]}")
    try:
        job = slurm("sbatch", "--parsable", *options, str(layout.folder / SCRIPT)).strip().partition(";")[0]
        replace(record, job=job, submitted=now_iso(), log="").save(layout.slurm)
    except GanglineError as error:
        replace(record, leaving=0).save(layout.slurm)
        replace(state, phase="stopped", supervisor=None, error=error.to_json()).save(layout)
        console.report(f"{error}")
        return 1
    return 0
