"""The main path: what `train` and `resume` do, as a column of named steps.

load      files and key=value        -> Job, Cluster
locate    every host                 -> the folders meant there
decide    facts, pairs               -> Inventory, Plan, findings; a failure stops here
claim     the folders that are written to; then the run directory is made
equip     code, environment          -> every host
bring     job, model, data           -> every host; tokenised once, on the head
render    Plan                       -> Request (a dry run prints it and ends)
start     a detached supervisor, on the head if it can; whoever follows it may leave at any time
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from gangline.checks.judge import require
from gangline.planning.training import STACKS
from gangline.runs.checkpoints import choose
from gangline.runs.cluster import Cluster
from gangline.runs.ids import new_id
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.process import ProcessId
from gangline.runs.registry import find_run, run_ids
from gangline.runs.state import RunState
from gangline.steps import ending, keep, orphan
from gangline.steps.again import carry_on, choose_checkpoint, next_state, places_of, resumable
from gangline.steps.begin import render, start_attempt, worker_program
from gangline.steps.command import (
    Command,
    CommandRecord,
    command_gang,
    draft,
    foresee_project_of,
    program_of,
    require_resumable,
    start_command,
)
from gangline.steps.decide import Decision, decide
from gangline.steps.engine import require_engine
from gangline.steps.equip import claim, equip, foresee
from gangline.steps.forecast import require_startable
from gangline.steps.foretell import Foretold, WhatIf, foretell
from gangline.steps.keep import Opened
from gangline.steps.listing import Listed, all_records
from gangline.steps.look import OWN_PROGRAM, Sight, Wish, look
from gangline.steps.prepare import bring_inputs, inputs_before, preparing, told_if_kept
from gangline.steps.reach import Start, cluster_file, load, load_cluster, reach, reached, starting
from gangline.steps.seams import REAL, Means, Seams, Talk, default_home
from gangline.steps.told import plan_json, plan_lines, require_fit
from gangline.steps.traced import Traced
from gangline.steps.traced import trace as trace_finalists
from gangline.supervise.lock import prepare_lock
from gangline.sync.checkpoints import bring, survey_places
from gangline.sync.trees import create_folder, write_documents
from gangline.watch.commands import printed

__all__ = [
    "REAL",
    "STACKS",
    "Command",
    "Decision",
    "Foretold",
    "Listed",
    "Opened",
    "Seams",
    "Sight",
    "Start",
    "Talk",
    "WhatIf",
    "Wish",
    "check",
    "cluster_file",
    "default_home",
    "load_cluster",
    "look_after",
    "opened",
    "plan",
    "plan_json",
    "plan_lines",
    "reach",
    "records",
    "rehearse",
    "rehearse_command",
    "rehearse_resume",
    "rehearse_stop",
    "require_fit",
    "resume",
    "run",
    "stop",
    "trace",
    "train",
]


# --- the verbs that start or end a run


def train(start: Start, *, talk: Talk, seams: Seams = REAL) -> RunLayout:
    """Start a run and return once its gang has been started; raises GanglineError, and then nothing runs."""
    job, cluster = load(start)
    with starting(cluster, home=start.home, talk=talk, seams=seams) as (cluster, means):
        decision = decide(job, cluster, means)
        require(decision.findings)
        require_startable(decision.job, decision.outlook, force=start.force)
        require_engine(decision.plan, decision.cluster, decision.inventory)
        claim(cluster, means)
        layout = create_folder(start.home)
        state = RunState(name=job.name, supervisor=ProcessId.current())
        with told_if_kept(layout, talk), prepare_lock(layout), preparing(layout, state):
            write_documents(layout, {**decision.documents(), "cluster": cluster.to_json()})
            ready = equip(decision.sight, means, job=decision.job)
            plan, ready = bring_inputs(layout, decision, ready, means)
            gang = plan.gang(layout.run_id, 1)
            start_attempt(layout, ready, gang, means, program=worker_program(decision.job))
    talk.say(f"run {layout.run_id} started")
    return layout


def run(order: Command, *, talk: Talk, seams: Seams = REAL) -> RunLayout:
    """Start the user's own command on every host; as `train`, without a plan and without data."""
    record = draft(order)
    cluster = load_cluster(order.cluster, order.home)
    with starting(cluster, home=order.home, talk=talk, seams=seams) as (cluster, means):
        sight = look(cluster, OWN_PROGRAM, means)
        require(sight.findings)
        claim(cluster, means)
        layout = create_folder(order.home)
        state = RunState(name=order.name, supervisor=ProcessId.current())
        with told_if_kept(layout, talk), prepare_lock(layout), preparing(layout, state):
            write_documents(layout, {**sight.documents(), "cluster": cluster.to_json()})
            start_command(layout, record, equip(sight, means), 1, means)
    talk.say(f"run {layout.run_id} started")
    return layout


def resume(
    prefix: str, *, home: Path, cluster_path: Path | None = None, force: bool = False, talk: Talk, seams: Seams = REAL
) -> RunLayout:
    """Go on with a run from its newest valid checkpoint, on the same hosts or on those of another cluster file.
    force: see `Start.force`.

    Raises UsageError for a run that is alive or finished, CheckpointError where none of its checkpoints can be used,
    DataError or ModelError where what it reads has changed.
    """
    layout = find_run(home, prefix)
    with prepare_lock(layout), opened(layout.run_id, home=home, seams=seams) as run:
        ended = resumable(run, seams)
        cluster = run.cluster if cluster_path is None else load_cluster(cluster_path, home)
        with starting(cluster, home=home, talk=talk, seams=seams) as (cluster, means):
            if (record := CommandRecord.load(layout)) is not None:
                _resume_command(run, ended, record, cluster, means)
            else:
                _resume_job(run, ended, cluster, means, force=force)
    talk.say(f"run {layout.run_id} resumed, attempt {ended.attempt + 1}")
    return layout


def _resume_job(run: Opened, ended: RunState, cluster: Cluster, means: Means, *, force: bool) -> None:
    layout = run.layout
    decision = decide(Job.load(layout.job), cluster, means)
    require(decision.findings)
    require_startable(decision.job, decision.outlook, force=force)
    require_engine(decision.plan, decision.cluster, decision.inventory)
    claim(cluster, means)
    with preparing(layout, next_state(ended), before=ended):
        ready = equip(decision.sight, means, job=decision.job)
        places = places_of(run, ready, means)
        choice = choose_checkpoint(places, layout.run_id, talk=means.talk)
        carry_on(run, ready, means)
        plan, ready = bring_inputs(layout, decision, ready, means, before=inputs_before(layout))
        gang = plan.gang(layout.run_id, ended.attempt + 1, resume_step=choice.step)
        targets = gang.hosts if choice.held else [host.name for host in cluster.hosts]
        for label in bring(places, layout.run_id, choice.for_ranks_of(gang), targets=targets):
            means.talk.say(f"step {choice.step} brought to {label}")
        write_documents(layout, {**decision.documents(), "plan": plan.to_json()})
        start_attempt(layout, ready, gang, means, program=worker_program(decision.job))


def _resume_command(run: Opened, ended: RunState, record: CommandRecord, cluster: Cluster, means: Means) -> None:
    """Start the user's command again, with the words that make it go on."""
    require_resumable(run.layout.run_id, record)
    sight = look(cluster, OWN_PROGRAM, means)
    require(sight.findings)
    claim(cluster, means)
    with preparing(run.layout, next_state(ended), before=ended):
        write_documents(run.layout, sight.documents())
        start_command(run.layout, record, equip(sight, means), ended.attempt + 1, means)


# --- the verbs that change nothing


def rehearse(start: Start, *, talk: Talk, seams: Seams = REAL) -> list[str]:
    """The exact commands that `train` would start, host by host. Starts nothing and leaves nothing."""
    job, cluster = load(start)
    with starting(cluster, home=start.home, talk=talk, seams=seams) as (cluster, means):
        decision = decide(job, cluster, means)
        require(decision.findings)
        require_startable(decision.job, decision.outlook, force=start.force)
        ready = foresee(decision.sight, means, job=decision.job)
        gang = decision.plan.gang(new_id(run_ids(start.home)), 1)
        return printed(render(ready, gang, means, program=worker_program(decision.job)))


def rehearse_command(order: Command, *, talk: Talk, seams: Seams = REAL) -> list[str]:
    """The exact commands that `run` would start. Starts nothing and leaves nothing."""
    record = foresee_project_of(draft(order), talk=talk)
    cluster = load_cluster(order.cluster, order.home)
    with starting(cluster, home=order.home, talk=talk, seams=seams) as (cluster, means):
        sight = look(cluster, OWN_PROGRAM, means)
        require(sight.findings)
        gang = command_gang(cluster, new_id(run_ids(order.home)), 1)
        return printed(render(foresee(sight, means), gang, means, program=program_of(record, gang)))


def rehearse_resume(
    prefix: str, *, home: Path, cluster_path: Path | None = None, force: bool = False, talk: Talk, seams: Seams = REAL
) -> list[str]:
    """The exact commands that `resume` would start. Starts nothing and leaves nothing."""
    with opened(prefix, home=home, seams=seams) as run:
        ended = resumable(run, seams)
        cluster = run.cluster if cluster_path is None else load_cluster(cluster_path, home)
        with starting(cluster, home=home, talk=talk, seams=seams) as (cluster, means):
            if (record := CommandRecord.load(run.layout)) is not None:
                return _rehearse_command_again(run, ended, record, cluster, means)
            decision = decide(Job.load(run.layout.job), cluster, means)
            require(decision.findings)
            require_startable(decision.job, decision.outlook, force=force)
            ready = foresee(decision.sight, means, job=decision.job)
            choice = choose(survey_places(places_of(run, ready, means), run.layout.run_id))
            step = max(choice.adoptable, default=choice.step)
            talk.say(f"resuming from {'the beginning' if step is None else f'step {step}'}")
            gang = decision.plan.gang(run.layout.run_id, ended.attempt + 1, resume_step=step)
            return printed(render(ready, gang, means, program=worker_program(decision.job)))


def _rehearse_command_again(
    run: Opened, ended: RunState, record: CommandRecord, cluster: Cluster, means: Means
) -> list[str]:
    require_resumable(run.layout.run_id, record)
    sight = look(cluster, OWN_PROGRAM, means)
    require(sight.findings)
    gang = command_gang(cluster, run.layout.run_id, ended.attempt + 1)
    return printed(render(foresee(sight, means), gang, means, program=program_of(record, gang)))


def plan(start: Start, what_if: WhatIf, *, talk: Talk, seams: Seams = REAL) -> Foretold:
    """What `train` would decide, or what it would on other machines. Changes nothing."""
    return foretell(start, what_if, talk=talk, seams=seams)


def trace(foretold: Foretold, *, home: Path, talk: Talk, seams: Seams = REAL) -> list[Traced]:
    """The trainer's own code on tensors without data, for what the plan has chosen. Changes nothing."""
    return trace_finalists(foretold, Means(transports={}, home=home, talk=talk, seams=seams))


def check(cluster_path: Path | None, *, home: Path, wish: Wish, talk: Talk, seams: Seams = REAL) -> Sight:
    """Look at every host of a cluster. Changes nothing, and tells nothing but how it gets on."""
    cluster = load_cluster(cluster_path, home)
    with reached(cluster, home=home, talk=talk, seams=seams) as (cluster, means):
        return look(cluster, wish, means, silent=True)


def records(home: Path, *, seams: Seams = REAL) -> list[Listed]:
    """All runs, newest first, with the step that each has reached."""
    return all_records(home, seams)


@contextlib.contextmanager
def opened(prefix: str, *, home: Path, seams: Seams = REAL) -> Iterator[Opened]:
    """A run that exists already, by the beginning of its id, with transports to its hosts; raises UsageError."""
    with keep.opened(prefix, home=home, seams=seams) as run:
        yield run


def look_after(run: Opened, *, talk: Talk, seams: Seams = REAL) -> bool:
    """See to it that a run that goes on has a supervisor; whether one was started on this computer."""
    return orphan.look_after(run, talk=talk, seams=seams)


def stop(run: Opened, *, now: bool = False, hosts: Sequence[str] = (), seams: Seams = REAL) -> bool:
    """Order a run to end and return at once; False where it had ended already. `now`: without saving.

    hosts: only these leave it, and the run goes on without them.
    """
    if not hosts:
        return ending.end(run, now=now, seams=seams)
    ending.leave(run, hosts, seams=seams)
    return True


def rehearse_stop(run: Opened, *, now: bool, hosts: Sequence[str] = (), seams: Seams = REAL) -> list[str]:
    """What `stop` would order, host by host. Orders nothing."""
    return ending.rehearse_leave(run, hosts) if hosts else ending.rehearse_end(run, now=now, seams=seams)
