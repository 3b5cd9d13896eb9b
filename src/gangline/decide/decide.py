"""Look, plan, judge: what was asked, seen and decided before anything is changed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gangline.checks.rules import Finding
from gangline.context import Context
from gangline.decide.forecast import JobForecast, forecast_job
from gangline.decide.hosts import refit_profiles, world_of
from gangline.decide.inspect import START, InspectResult, inspect
from gangline.decide.needs import Needs, find_needs, with_packages
from gangline.decide.row_report import RowsReport, look_at_rows, settled_length, with_lengths
from gangline.decide.rows_there import looker_there, with_files_there
from gangline.decide.told_before import start_lines
from gangline.inventory.facts import Inventory
from gangline.planner.machines import PlannedCluster
from gangline.planner.plan import Plan, make_plan
from gangline.planner.report import explain
from gangline.runs.cluster import Cluster
from gangline.runs.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was asked, seen and decided before anything is changed."""

    asked: Job
    """As the user's file says, with the length of its samples."""
    job: Job
    """With everything decided that the user's file left open."""
    rows: RowsReport
    cluster: Cluster
    inspection: InspectResult
    plan: Plan
    world: PlannedCluster
    job_forecast: JobForecast
    needs: Needs

    @property
    def inventory(self) -> Inventory:
        """What the hosts said of themselves."""
        return self.inspection.inventory

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is not as it should be."""
        return self.inspection.findings

    def documents(self) -> dict[str, Any]:
        """The files of the run directory that say so, but for the hosts: cluster.json is for who starts the gang."""
        return {"job": self.job.to_json(), "plan": self.plan.to_json(), **self.inspection.documents()}


def decide(
    job: Job, cluster: Cluster, context: Context, *, look: bool = True, inspection: InspectResult | None = None
) -> Decision:
    """Look, plan, judge; everything that is found is told. Raises DataError for rows that cannot be used, before any
    host is asked where their shape says it, unless they lie on one.

    look: read the rows; a run that goes on has read them. inspection: of these hosts, if they were looked at already.
    Changes nothing but what is known of speeds: runs that ended since the last look teach it.
    """
    job, rows = _rows(job, cluster, context) if look else (job, RowsReport())
    cluster = with_packages(cluster, job)
    with ThreadPoolExecutor(max_workers=1) as pool:
        tokens = pool.submit(with_lengths, rows, job, cluster.hosts, context.deps) if rows.sources else None
        inspection = inspection or inspect(cluster, START, context, silent=True)
        rows = tokens.result() if tokens is not None else rows
    job, rows = settled_length(job, rows, context.deps.variables, context.home)
    rows.require(job)
    refit_profiles(context.home, context.console)
    world = world_of(cluster, inspection.inventory, context.home)
    job_forecast = forecast_job(job, world, context)
    asked, job = job, job_forecast.settled(job)
    gpus = {facts.host: [gpu.name for gpu in facts.gpus] for facts in inspection.inventory.hosts}
    drafted = make_plan(
        job,
        cluster,
        gpus,
        candidate=job_forecast.runnable,
        divides=job_forecast.divides,
        notes=job_forecast.dated(inspection.inventory) if job_forecast.runnable else (),
    )
    findings = start_lines(inspection.findings, cluster, context.home)
    needs = find_needs(job, drafted.strategy, cluster, inspection.inventory, context)
    for line in (*rows.lines(job), *needs.lines, *explain(drafted), *findings):
        context.console.report(line)
    return Decision(
        asked=asked,
        job=job,
        rows=rows,
        cluster=cluster,
        inspection=inspection,
        plan=drafted,
        world=world,
        job_forecast=job_forecast,
        needs=needs,
    )


def _rows(job: Job, cluster: Cluster, context: Context) -> tuple[Job, RowsReport]:
    context.console.progress("reading the rows")
    job = with_files_there(job, cluster, context.transports)
    there = looker_there(job, cluster, context.transports)
    rows = look_at_rows(job, cluster.hosts, context.deps, there=there)
    rows.require(job)
    return job, rows


def sized(job: Job, context: Context) -> tuple[Job, RowsReport]:
    """The job with the length of its samples, and its rows, for machines that nobody asks; raises as `decide` does."""
    context.console.progress("reading the rows")
    rows = look_at_rows(job, (), context.deps)
    rows.require(job)
    rows = with_lengths(rows, job, (), context.deps)
    job, rows = settled_length(job, rows, context.deps.variables, context.home)
    rows.require(job)
    return job, rows
