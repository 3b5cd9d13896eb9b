"""The main path: what `train` and `resume` do, as a column of named steps.

load      files and key=value        -> Job, Cluster
locate    every host                 -> the folders meant there
decide    rows, facts, pairs         -> what is wrong with rows; Inventory, Plan, findings; a failure stops here
claim     the folders that are written to, and the slots; the run directory is made, and deleted if no rank runs
equip     code, environment          -> every host
bring     job, model, data           -> every host; tokenised once, on the head
render    Plan                       -> Request (a dry run prints it and ends)
start     a detached supervisor, on the head if it can; the terminal that follows it may close at any time
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.checks.judge import require
from gangline.context import (
    REAL,
    Context,
    Dependencies,
    ResumeOptions,
    StartOptions,
    load,
    load_cluster,
    reached,
    read_cluster,
    starting,
)
from gangline.control.equip import claim, equip, preview, slots_held
from gangline.control.lost_head import last_heard, take_over, without_hosts
from gangline.control.notify import notify_of, require_addresses, settled
from gangline.control.slurm_job import must_submit, script, submit
from gangline.control.start import (
    bring_inputs,
    carry_on,
    choose_checkpoint,
    discarded_unless_begun,
    inputs_before,
    next_state,
    places_of,
    preparing,
    render,
    resumable,
    start_attempt,
    to_hold,
    worker_program,
)
from gangline.control.supervision import RunHandle, open_run
from gangline.control.user_command import (
    CommandRecord,
    command_gang,
    preview_project_of,
    program_of,
    require_resumable,
    start_command,
)
from gangline.decide.inspect import OWN_PROGRAM, InspectOptions, InspectResult, inspect
from gangline.errors import UsageError
from gangline.launch.backend import LaunchRequest
from gangline.launch.config_files import FORMATS, RunForOthers
from gangline.provision.checkpoint_sources import bring, survey_places
from gangline.provision.console import Console
from gangline.provision.trees import create_folder, write_documents
from gangline.report.commands import printed
from gangline.runs.checkpoints import choose
from gangline.runs.cluster import Cluster
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout, new_id
from gangline.runs.record_versions import load_record
from gangline.runs.registry import find_run, run_ids
from gangline.runs.state import ProcessId, RunState
from gangline.supervise.allocation import SlurmRecord
from gangline.supervise.lock import prepare_lock

if TYPE_CHECKING:
    from gangline.decide.decide import Decision
    from gangline.decide.row_report import RowsReport

# --- the verbs that start a run


def train(start: StartOptions, *, console: Console, deps: Dependencies = REAL) -> RunLayout:
    """Start a run and return once its gang has been started; raises GanglineError, and then nothing runs.

    On a Slurm cluster it returns once the run waits in the queue.
    """
    job, cluster = load(start)
    waits = must_submit(cluster, deps.variables)
    early = Context(transports={}, home=start.home, console=console, deps=deps)
    notify = settled(job.notify, early, waits_in_queue=waits, is_trial=start.trial is not None)
    job = replace(job, notify=notify)
    more = {} if start.trial is None else {"trial": dict(start.trial)}
    if start.typed is not None:
        more["typed"] = start.typed.to_json()
    if waits:
        if start.trial is None:
            from gangline.decide.decide import sized

            sized(job, early)  # what is wrong with rows is told before a day in the queue
        return _submitted(job.name, cluster, early, {"job": job.to_json(), **more}, force=start.force)
    with starting(cluster, home=start.home, console=console, deps=deps) as (cluster, context):
        decision = _startable(job, cluster, context, force=start.force, look=start.trial is None)
        claim(cluster, context)
        with (
            _new_run(job.name, cluster, context, decision.documents() | more) as layout,
            contextlib.ExitStack() as slots,
        ):
            gang = decision.plan.gang(layout.run_id, 1)
            wanted = to_hold(decision.inspection, gang, context, worker_program(decision.job))

            def hold() -> None:
                patience_s = 0.0 if start.turn is None else LEAVING_S
                (start.turn or _at_once)()
                slots.enter_context(slots_held(wanted, context, patience_s=patience_s))

            if start.turn is None:
                hold()
            _first_attempt(layout, decision, context, before_start=_at_once if start.turn is None else hold)
    return layout


def _at_once() -> None:
    """Nothing is waited for."""


def _first_attempt(
    layout: RunLayout, decision: Decision, context: Context, *, before_start: Callable[[], None] = _at_once
) -> None:
    ready = equip(decision.inspection, context, job=decision.job)
    plan, ready = bring_inputs(layout, decision, ready, context)
    before_start()
    start_attempt(layout, ready, plan.gang(layout.run_id, 1), context, program=worker_program(decision.job))


LEAVING_S = 30.0
"""How long the run before, which has ended, may take to let go of its slots."""


def _submitted(
    name: str, cluster: Cluster, context: Context, documents: Mapping[str, Any], *, force: bool = False
) -> RunLayout:
    """A new run in the queue of Slurm; its folder goes where Slurm refuses it."""
    claim(cluster, context)
    layout = create_folder(context.home)
    try:
        write_documents(layout, {**documents, "cluster": cluster.to_json()})
        state = RunState(name=name, phase="queued")
        number = submit(layout, cluster, state, force=force, secrets=context.secrets)
    except BaseException:
        shutil.rmtree(layout.folder, ignore_errors=True)
        raise
    context.console.report(f"run {layout.run_id} is job {number} of Slurm")
    _say_what_stays(cluster, context)
    return layout


def _say_what_stays(cluster: Cluster, context: Context) -> None:
    if cluster.slurm is not None and not cluster.slurm.shared_home and context.secrets:
        names = ", ".join(context.secrets)
        context.console.report(
            f"{names} stays on this computer: Slurm stores the batch script, and no other file reaches its nodes"
        )


def begin(layout: RunLayout, console: Console, deps: Dependencies) -> None:
    """Start the next attempt of a submitted run, in the allocation around us; raises GanglineError."""
    state, record = RunState.load(layout), load_record(layout.slurm, SlurmRecord)
    cluster, force = record.cluster, record.force
    if state.attempt > 1 or layout.request(1).exists():
        # what ran before has ended with its allocation, also where the job kept its number
        over = replace(deps, allocation_state=lambda _cluster: "over")
        with prepare_lock(layout), open_run(layout.run_id, home=layout.root, deps=over) as run:
            ended = resumable(run, deps)
            with starting(cluster, home=layout.root, console=console, deps=deps) as (cluster, context):
                _next_attempt(run, ended, cluster, context, force=force)
        return
    state = replace(state, phase="preparing", supervisor=ProcessId.current())
    command = CommandRecord.of(layout)
    with (
        prepare_lock(layout),
        preparing(layout, state),
        starting(cluster, home=layout.root, console=console, deps=deps) as (cluster, context),
    ):
        if command is not None:
            inspection = _inspected(command.on(cluster), context)
            claim(inspection.cluster, context)
            write_documents(layout, {**inspection.documents(), "cluster": inspection.cluster.to_json()})
            start_command(layout, command, equip(inspection, context), 1, context)
            return
        decision = _startable(Job.load(layout.job), cluster, context, force=force)
        claim(cluster, context)
        write_documents(layout, {**decision.documents(), "cluster": cluster.to_json()})
        _first_attempt(layout, decision, context)


def run(
    record: CommandRecord,
    *,
    home: Path,
    cluster_path: Path | Cluster | None,
    trial: Mapping[str, Any] | None = None,
    console: Console,
    deps: Dependencies = REAL,
) -> RunLayout:
    """Start the user's own command on every host; as `train`, without a plan and without data.

    record: as it is before the folder is copied. trial: see `StartOptions.trial`.
    """
    cluster = load_cluster(cluster_path, home)
    waits = must_submit(cluster, deps.variables)
    early = Context(transports={}, home=home, console=console, deps=deps)
    notify = settled(record.notify, early, waits_in_queue=waits, is_trial=trial is not None)
    record = replace(record, notify=notify)
    if waits:
        return _submitted(record.name, cluster, early, {"command": record.to_json()})
    documents = {} if trial is None else {"trial": dict(trial)}
    with starting(cluster, home=home, console=console, deps=deps) as (cluster, context):
        inspection = _inspected(record.on(cluster), context)
        claim(inspection.cluster, context)
        with (
            _new_run(record.name, inspection.cluster, context, inspection.documents() | documents) as layout,
            slots_held(_slots_of(record, layout, inspection, context), context),
        ):
            start_command(layout, record, equip(inspection, context), 1, context)
    return layout


def _slots_of(record: CommandRecord, layout: RunLayout, inspection: InspectResult, context: Context) -> LaunchRequest:
    gang = command_gang(inspection.cluster, layout.run_id, 1)
    return to_hold(inspection, gang, context, program_of(record, gang))


@contextlib.contextmanager
def _new_run(name: str, cluster: Cluster, context: Context, documents: Mapping[str, Any]) -> Iterator[RunLayout]:
    """The folder of a new run, whose state.json stays true while it is prepared in here."""
    layout = create_folder(context.home)
    state = RunState(name=name, supervisor=ProcessId.current())
    with discarded_unless_begun(layout, cluster, context), prepare_lock(layout), preparing(layout, state):
        write_documents(layout, {**documents, "cluster": cluster.to_json()})
        yield layout
    context.console.report(f"run {layout.run_id} started")


def resume(
    prefix: str, asked: ResumeOptions | None = None, *, home: Path, console: Console, deps: Dependencies = REAL
) -> RunLayout:
    """Continue a run from its newest valid checkpoint, on the same hosts or on others.

    Raises UsageError for a run that is alive or finished, CheckpointError where none of its checkpoints can be used,
    DataError or ModelError where what it reads has changed.
    """
    asked = asked or ResumeOptions()
    layout = find_run(home, prefix)
    wanted = read_cluster(layout) if asked.cluster is None else load_cluster(asked.cluster, home)
    if must_submit(wanted, deps.variables):
        _require_own_hosts(asked)
        with prepare_lock(layout), open_run(layout.run_id, home=home, deps=deps) as run:
            ended = resumable(run, deps)
            context = Context(transports={}, home=home, console=console, deps=deps)
            state = replace(ended, phase="queued", supervisor=None, error=None)
            number = submit(layout, wanted, state, force=asked.force, secrets=context.secrets)
        console.report(f"run {layout.run_id} continues as job {number} of Slurm")
        _say_what_stays(wanted, context)
        return layout
    with (
        prepare_lock(layout),
        _ended_run(layout.run_id, asked, home, console, deps) as (run, ended, (cluster, context)),
    ):
        _next_attempt(run, ended, cluster, context, force=asked.force)
    console.report(f"run {layout.run_id} resumed, attempt {ended.attempt + 1}")
    return layout


def _next_attempt(run: RunHandle, ended: RunState, cluster: Cluster, context: Context, *, force: bool) -> None:
    if (record := CommandRecord.of(run.layout)) is not None:
        _resume_command(run, ended, record, cluster, context)
    elif not run.layout.job.exists():
        raise UsageError(
            f"{run.layout.run_id} cannot be resumed from this computer",
            seen="another computer began it, and has the folder of its program",
            fix="resume it there",
        )
    else:
        _resume_job(run, ended, cluster, context, force=force)


def _require_own_hosts(asked: ResumeOptions) -> None:
    """Raise UsageError where hosts are to be left out of what Slurm gives."""
    if asked.without:
        raise UsageError(
            "Slurm chooses the nodes of this run",
            seen=f"--without {asked.without[0]}",
            fix="leave it out: Slurm gives no node that is down; or give it hosts of your own: --cluster FILE",
        )


@contextlib.contextmanager
def _ended_run(
    prefix: str, asked: ResumeOptions, home: Path, console: Console, deps: Dependencies, *, rehearses: bool = False
) -> Iterator[tuple[RunHandle, RunState, tuple[Cluster, Context]]]:
    """A run that has ended, its last state, and the hosts on which it is to continue. rehearses: end nothing."""
    off = asked.without
    with open_run(prefix, home=home, deps=deps) as run:
        cluster = run.cluster if asked.cluster is None else load_cluster(asked.cluster, home)
        if off:
            cluster = without_hosts(cluster, off, before=run.cluster, run_id=run.layout.run_id)
        if run.supervisor.host in off and run.record().silent is not None:
            ended = last_heard(run) if rehearses else take_over(run, off, console=console, deps=deps)
        else:
            ended = resumable(run, deps)
        with starting(cluster, home=home, console=console, deps=deps) as found:
            yield run, ended, found


def _resume_job(run: RunHandle, ended: RunState, cluster: Cluster, context: Context, *, force: bool) -> None:
    layout = run.layout
    require_addresses(notify_of(layout), context.deps.variables)
    decision = _startable(Job.load(layout.job).reopened(), cluster, context, force=force, look=False)
    claim(cluster, context)
    with preparing(layout, next_state(ended), before=ended):
        ready = equip(decision.inspection, context, job=decision.job)
        places = places_of(run, ready, context)
        choice = choose_checkpoint(places, layout.run_id, console=context.console)
        carry_on(run, ready, context)
        plan, ready = bring_inputs(layout, decision, ready, context, before=inputs_before(layout))
        gang = plan.gang(layout.run_id, ended.attempt + 1, resume_step=choice.step)
        targets = gang.hosts if choice.held else [host.name for host in cluster.hosts]
        for label in bring(places, layout.run_id, choice.for_ranks_of(gang), targets=targets):
            context.console.report(f"copied step {choice.step} to {label}")
        write_documents(layout, {**decision.documents(), "plan": plan.to_json()})
        start_attempt(layout, ready, gang, context, program=worker_program(decision.job))


def _resume_command(run: RunHandle, ended: RunState, record: CommandRecord, cluster: Cluster, context: Context) -> None:
    """Start the user's command again, with the flag that makes it resume."""
    require_resumable(run.layout.run_id, record)
    require_addresses(record.notify, context.deps.variables)
    cluster = record.on(cluster)
    inspection = _inspected(cluster, context)
    claim(cluster, context)
    with preparing(run.layout, next_state(ended), before=ended):
        write_documents(run.layout, inspection.documents())
        start_command(run.layout, record, equip(inspection, context), ended.attempt + 1, context)


def _startable(job: Job, cluster: Cluster, context: Context, *, force: bool, look: bool = True) -> Decision:
    """The decision; raises what stops the start: rows, a finding, or a plan that is too slow."""
    from gangline.decide.decide import decide  # not for `run`, which pays no planner: 0.1 s
    from gangline.decide.forecast import require_startable

    decision = decide(job, cluster, context, look=look)
    require(decision.findings)
    decision.needs.require()
    require_startable(decision.job, decision.job_forecast, force=force)
    decision.plan.gang("", 1).require_settings(decision.job)
    return decision


def _inspected(cluster: Cluster, context: Context) -> InspectResult:
    """The hosts of the user's own command; raises the finding that stops the start."""
    inspection = inspect(cluster, OWN_PROGRAM, context)
    require(inspection.findings)
    return inspection


# --- the verbs that change nothing


def rehearse(start: StartOptions, *, console: Console, deps: Dependencies = REAL) -> list[str]:
    """The exact commands that `train` would start, host by host. Starts nothing and leaves nothing."""
    job, cluster = load(start)
    if must_submit(cluster, deps.variables):
        from gangline.decide.decide import sized

        sized(job, Context(transports={}, home=start.home, console=console, deps=deps))
        return _script_lines(cluster, start.home, new_id(run_ids(start.home)), job.name)
    with starting(cluster, home=start.home, console=console, deps=deps) as (cluster, context):
        decision = _startable(job, cluster, context, force=start.force)
        ready = preview(decision.inspection, context, job=decision.job)
        gang = decision.plan.gang(new_id(run_ids(start.home)), 1)
        return printed(render(ready, gang, context, program=worker_program(decision.job)))


def _script_lines(cluster: Cluster, home: Path, run_id: str, name: str) -> list[str]:
    """The batch script that would be handed to Slurm."""
    assert cluster.slurm is not None, "a cluster that is submitted to"
    return script(RunLayout(home, run_id), cluster.slurm, name=name).splitlines()


def rehearse_command(
    record: CommandRecord, *, home: Path, cluster_path: Path | None, console: Console, deps: Dependencies = REAL
) -> list[str]:
    """The exact commands that `run` would start. Starts nothing and leaves nothing."""
    record = preview_project_of(record, console=console)
    cluster = load_cluster(cluster_path, home)
    if must_submit(cluster, deps.variables):
        return _script_lines(cluster, home, new_id(run_ids(home)), record.name)
    with starting(cluster, home=home, console=console, deps=deps) as (cluster, context):
        return _command_lines(record, new_id(run_ids(home)), 1, cluster, context)


def export_config(
    record: CommandRecord,
    kind: str,
    *,
    home: Path,
    cluster_path: Path | None,
    console: Console,
    deps: Dependencies = REAL,
) -> dict[str, str]:
    """The files with which another launcher starts the ranks that `run` would start: name -> text. Starts nothing.

    kind: a row of `launch.config_files.FORMATS`.
    """
    cluster = load_cluster(cluster_path, home)
    if must_submit(cluster, deps.variables):
        raise UsageError(
            "the hosts of this cluster are known once Slurm has given them",
            seen="a cluster file with `slurm`",
            fix="its batch script: gangline run --dry-run -- CMD",
        )
    with starting(cluster, home=home, console=console, deps=deps) as (cluster, context):
        gang = command_gang(record.on(cluster), new_id(run_ids(home)), 1)
        ready = preview(_inspected(record.on(cluster), context), context)
        program = program_of(record, gang)
        request = render(ready, gang, context, program=program)
        return FORMATS[kind](RunForOthers(cluster=ready.cluster, request=request, program=program))


def rehearse_resume(
    prefix: str, asked: ResumeOptions | None = None, *, home: Path, console: Console, deps: Dependencies = REAL
) -> list[str]:
    """The exact commands that `resume` would start. Starts nothing and leaves nothing."""
    asked = asked or ResumeOptions()
    layout = find_run(home, prefix)
    wanted = read_cluster(layout) if asked.cluster is None else load_cluster(asked.cluster, home)
    if must_submit(wanted, deps.variables):
        _require_own_hosts(asked)
        with open_run(layout.run_id, home=home, deps=deps) as opened:
            return _script_lines(wanted, home, layout.run_id, resumable(opened, deps).name)
    found = _ended_run(prefix, asked, home, console, deps, rehearses=True)
    with found as (run, ended, (cluster, context)):
        run_id, attempt = run.layout.run_id, ended.attempt + 1
        if (record := CommandRecord.of(run.layout)) is not None:
            require_resumable(run_id, record)
            return _command_lines(record, run_id, attempt, cluster, context)
        job = Job.load(run.layout.job).reopened()
        decision = _startable(job, cluster, context, force=asked.force, look=False)
        ready = preview(decision.inspection, context, job=decision.job)
        choice = choose(survey_places(places_of(run, ready, context), run_id))
        step = max(choice.adoptable, default=choice.step)
        console.report(f"resuming from {'the beginning' if step is None else f'step {step}'}")
        gang = decision.plan.gang(run_id, attempt, resume_step=step)
        return printed(render(ready, gang, context, program=worker_program(decision.job)))


def _command_lines(record: CommandRecord, run_id: str, attempt: int, cluster: Cluster, context: Context) -> list[str]:
    cluster = record.on(cluster)
    inspection = _inspected(cluster, context)
    gang = command_gang(cluster, run_id, attempt)
    return printed(render(preview(inspection, context), gang, context, program=program_of(record, gang)))


def check_rows(start: StartOptions, *, console: Console, deps: Dependencies = REAL) -> tuple[Job, RowsReport]:
    """Look at the rows of a job, by their shape and their tokens. Changes nothing, and asks no host."""
    job, cluster = load(start)
    from gangline.decide.row_report import look_at_rows, settled_length, with_lengths

    console.progress("reading the rows")
    rows = look_at_rows(job, cluster.hosts, deps)
    if not rows.errors(job):
        job, rows = settled_length(job, with_lengths(rows, job, cluster.hosts, deps), deps.variables)
    return job, rows


def check(
    cluster_path: Path | None, *, home: Path, options: InspectOptions, console: Console, deps: Dependencies = REAL
) -> InspectResult:
    """Look at every host of a cluster and report progress only. Changes nothing."""
    cluster = load_cluster(cluster_path, home)
    with reached(cluster, home=home, console=console, deps=deps) as (cluster, context):
        return inspect(cluster, options, context, silent=True)
