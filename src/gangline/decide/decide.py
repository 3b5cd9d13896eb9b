"""Look, plan, judge: what was asked, seen and decided before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gangline.checks.rules import Finding
from gangline.context import Context
from gangline.decide.forecast import Outlook, foresee_job
from gangline.decide.hosts import refit_profiles, world_of
from gangline.decide.inspect import START, InspectResult, look
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
    sight: InspectResult
    plan: Plan
    world: PlannedCluster
    outlook: Outlook

    @property
    def inventory(self) -> Inventory:
        """What the hosts said of themselves."""
        return self.sight.inventory

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is not as it should be."""
        return self.sight.findings

    def documents(self) -> dict[str, Any]:
        """The files of the run directory that say so, but for the hosts: cluster.json is for who starts the gang."""
        return {"job": self.job.to_json(), "plan": self.plan.to_json(), **self.sight.documents()}


def decide(job: Job, cluster: Cluster, means: Context) -> Decision:
    """Look, plan, judge; everything that is found is told.

    Changes nothing but what is known of speeds: runs that ended since the last look teach it.
    """
    sight = look(cluster, START, means, silent=True)
    refit_profiles(means.home, means.talk)
    world = world_of(cluster, sight.inventory, means.home)
    outlook = foresee_job(job, world, means)
    job = outlook.settled(job)
    gpus = {facts.host: [gpu.name for gpu in facts.gpus] for facts in sight.inventory.hosts}
    drafted = make_plan(
        job,
        cluster,
        gpus,
        option=outlook.runnable,
        divides=outlook.divides,
        notes=outlook.dated(sight.inventory) if outlook.runnable else (),
    )
    for line in (*explain(drafted), *(line for finding in sight.findings for line in finding.lines())):
        means.talk.say(line)
    return Decision(job=job, cluster=cluster, sight=sight, plan=drafted, world=world, outlook=outlook)
