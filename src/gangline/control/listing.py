"""The list of runs: the state of each, its last step, and its first damaged record."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gangline.context import REAL, Dependencies
from gangline.control.slurm_job import job_of
from gangline.control.supervision import SupervisorRecord, open_run
from gangline.control.unshared_home import renew
from gangline.control.user_command import CommandRecord
from gangline.errors import GanglineError, HostKeyRefused, RecordError, UsageError
from gangline.inventory.facts import Inventory
from gangline.launch.backend import LaunchRequest
from gangline.launch.program import Again
from gangline.planner.outcome import Comparison, TimeReport
from gangline.planner.plan import Plan
from gangline.report.follow import checked_board
from gangline.report.tail import last_step
from gangline.runs.cluster import Cluster
from gangline.runs.gang import Gang
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import damaged, load_if_there, write_record
from gangline.runs.registry import RunRecord, read_record, run_ids
from gangline.runs.state import AttemptOutcome, RunState, now_iso
from gangline.supervise.allocation import SlurmRecord, between_allocations, has_ended
from gangline.transport.slurm_commands import asked_once


@dataclass(frozen=True, slots=True, kw_only=True)
class RunListing:
    """A run as it is listed."""

    record: RunRecord
    last: dict[str, Any] | None
    """The last written step, where it is known."""
    heard: str | None = None
    """When that step was seen, if its host does not answer now."""
    damage: RecordError | None = None
    """The first record of it that cannot be used."""
    waits: str | None = None
    """Why it waits in the queue of Slurm, in Slurm's word."""
    slurm_job: str | None = None
    """The job of Slurm that it is, or was last: 4711, or 4711_3 for a task of an array."""


def list_runs(home: Path, *, deps: Dependencies = REAL) -> list[RunListing]:
    """All runs, newest first. Hosts are asked only about active runs, all at the same time."""
    layouts = [RunLayout(home, run_id) for run_id in run_ids(home)]
    with asked_once(_jobs_of(layouts)), ThreadPoolExecutor(max_workers=16) as pool:
        listed = list(pool.map(lambda layout: replace(_listed(layout, deps), slurm_job=_job_id(layout)), layouts))
    return sorted(listed, key=lambda each: (each.record.created, each.record.id), reverse=True)


def _jobs_of(layouts: Sequence[RunLayout]) -> set[str]:
    """The jobs of Slurm that runs may still be."""
    found = set()
    for layout in layouts:
        with contextlib.suppress(RecordError, OSError):
            record, state = SlurmRecord.of(layout), load_if_there(layout.state, RunState)
            if record is not None and state is not None and not has_ended(state, record):
                found.add(record.job)
    return found


def _listed(layout: RunLayout, deps: Dependencies) -> RunListing:
    unread = _unread(layout)
    here = between_allocations(layout, read_record(layout, is_alive=lambda _process: True))
    damage = first_damage(layout, attempt=here.state.attempt if here.state else None)
    if damage is not None:
        return RunListing(record=here, last=None, damage=damage)
    if here.phase == "queued":
        return RunListing(record=here, last=None, waits=_why_it_waits(layout))
    if unread is not None and not here.ended:
        return RunListing(record=replace(here, silent=unread), last=None)
    known = _remembered(layout, here)
    if known is not None:
        return RunListing(record=here, last=known)
    listing = _asked(layout, here, deps)
    is_unheard = listing.record.silent is not None and listing.last is None
    return _last_heard(layout, listing.record) if is_unheard else listing


def _asked(layout: RunLayout, here: RunRecord, deps: Dependencies) -> RunListing:
    """What its hosts say of it."""
    last: dict[str, Any] | None = None
    record = _in_doubt(layout, here)
    try:
        with open_run(layout.run_id, home=layout.root, deps=deps) as run:
            record = run.record()
            view = run.view()
            last = last_step(view.head, view.head_layout.metrics)
            if last is not None and record.state is not None and record.silent is None:
                seen = {} if record.ended else {"heard": now_iso()}
                write_record(layout.last_step, {"attempt": record.state.attempt, "last": last, **seen})
    except HostKeyRefused as error:  # the other runs are listed all the same
        record = replace(record, silent=error.what, refused=error)
    except UsageError:
        pass  # it has no hosts yet, or none that can be read
    except GanglineError as error:
        record = record if record.ended else replace(record, silent=error.what)
    except (OSError, ValueError, KeyError, TypeError) as error:
        record = record if record.ended else replace(record, silent=f"its records cannot be read: {error}")
    return RunListing(record=record, last=last)


def _last_heard(layout: RunLayout, record: RunRecord) -> RunListing:
    """What `ps` saw last of a run whose supervisor's host does not answer."""
    kept = load_if_there(layout.last_step, dict) or {}
    last, heard = kept.get("last"), kept.get("heard")
    is_of_it = record.state is not None and kept.get("attempt") == record.state.attempt
    if not is_of_it or not isinstance(last, dict) or not isinstance(heard, str):
        return RunListing(record=record, last=None)
    return RunListing(record=record, last=last, heard=heard)


def _unread(layout: RunLayout) -> str | None:
    """Why the records of a run on nodes that do not see gangline's home are not the newest ones; None: they are."""
    try:
        renew(layout, starts_job=False)
    except (GanglineError, OSError) as error:
        return error.what if isinstance(error, GanglineError) else str(error)
    return None


def _job_id(layout: RunLayout) -> str | None:
    """The id of its job; None where it is none, or its record is damaged, which is told elsewhere."""
    try:
        record = SlurmRecord.of(layout)
    except RecordError:
        return None
    return None if record is None else record.job or None


def _why_it_waits(layout: RunLayout) -> str | None:
    try:
        job = job_of(layout)
    except GanglineError as error:
        return error.what
    return None if job is None else job.reason or job.state


def _in_doubt(layout: RunLayout, here: RunRecord) -> RunRecord:
    """The state of a run whose hosts cannot be asked: a supervisor on another host does not count as lost."""
    is_elsewhere = SupervisorRecord.load(layout).host is not None or layout.slurm.exists()
    return here if is_elsewhere else read_record(layout)


def _remembered(layout: RunLayout, here: RunRecord) -> dict[str, Any] | None:
    """The saved last step of a run that has ended."""
    if not here.ended or here.state is None:
        return None
    kept = load_if_there(layout.last_step, dict) or {}
    last = kept.get("last")
    if "heard" in kept:  # while it still ran
        return None
    return last if kept.get("attempt") == here.state.attempt and isinstance(last, dict) else None


OF_RUN: tuple[tuple[Callable[[RunLayout], Path], Any], ...] = (
    (lambda layout: layout.state, RunState),
    (lambda layout: layout.cluster, Cluster),
    (lambda layout: layout.supervisor_record, SupervisorRecord),
    (lambda layout: layout.job, Job),
    (lambda layout: layout.command, CommandRecord),
    (lambda layout: layout.plan, Plan),
    (lambda layout: layout.inputs, dict),
    (lambda layout: layout.inventory, Inventory),
    (lambda layout: layout.findings, dict),
    (lambda layout: layout.chosen_networks, dict),
    (lambda layout: layout.comparison, Comparison),
    (lambda layout: layout.last_step, dict),
    (lambda layout: layout.slurm, SlurmRecord),
    (lambda layout: layout.order, dict),
    (lambda layout: layout.leave, dict),
)
"""The records of a run, most important first, and what each is."""
OF_ATTEMPT: tuple[tuple[Callable[[RunLayout, int], Path], Any], ...] = (
    (RunLayout.request, LaunchRequest),
    (RunLayout.gang, Gang),
    (RunLayout.attempt_cluster, Cluster),
    (RunLayout.networks, dict),
    (RunLayout.base, dict),
    (RunLayout.again, Again),
    (RunLayout.board, checked_board),
    (RunLayout.outcome, AttemptOutcome),
    (RunLayout.times, TimeReport),
)


def first_damage(layout: RunLayout, *, attempt: int | None) -> RecordError | None:
    """The first record of a run, and of its last attempt, that is damaged or too new; None: all can be used."""
    records = [(path(layout), kind) for path, kind in OF_RUN]
    files = [layout.metrics, layout.events]  # of lines, of which a damaged one is skipped
    if attempt is not None:
        records += [(path(layout, attempt), kind) for path, kind in OF_ATTEMPT]
        files.append(layout.supervisor_log(attempt))
    for path, kind in records:
        try:
            load_if_there(path, kind)
        except RecordError as error:
            return error
    return next(filter(None, map(_not_regular, files)), None)


def _not_regular(path: Path) -> RecordError | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return damaged(str(path), str(error.strerror))
    if not stat.S_ISREG(status.st_mode):
        return damaged(str(path), "expected a regular file, found a folder, pipe, socket or device")
    return None if os.access(path, os.R_OK) else damaged(str(path), os.strerror(13))
