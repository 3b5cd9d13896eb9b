"""Look, plan, judge: what was asked, seen and decided before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gangline.checks.rules import Finding
from gangline.context import Context
from gangline.decide.forecast import JobForecast, forecast_job
from gangline.decide.hosts import refit_profiles, world_of
from gangline.decide.inspect import START, InspectResult, inspect
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

    job: Job
    """With everything decided that the user's file left open."""
    cluster: Cluster
    inspection: InspectResult
    plan: Plan
    world: PlannedCluster
    job_forecast: JobForecast

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


def decide(job: Job, cluster: Cluster, context: Context) -> Decision:
    """Look, plan, judge; everything that is found is told.

    Changes nothing but what is known of speeds: runs that ended since the last look teach it.
    """
    inspection = inspect(cluster, START, context, silent=True)
    refit_profiles(context.home, context.console)
    world = world_of(cluster, inspection.inventory, context.home)
    job_forecast = forecast_job(job, world, context)
    job = job_forecast.settled(job)
    gpus = {facts.host: [gpu.name for gpu in facts.gpus] for facts in inspection.inventory.hosts}
    drafted = make_plan(
        job,
        cluster,
        gpus,
        candidate=job_forecast.runnable,
        divides=job_forecast.divides,
        notes=job_forecast.dated(inspection.inventory) if job_forecast.runnable else (),
    )
    for line in (*explain(drafted), *start_lines(inspection.findings, cluster, context.home)):
        context.console.report(line)
    return Decision(
        job=job, cluster=cluster, inspection=inspection, plan=drafted, world=world, job_forecast=job_forecast
    )
