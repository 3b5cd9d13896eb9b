"""What `bench` does: hosts on which ranks can start, then the measurement of their network, or of a job on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gangline.bench.cluster_network import measure_network
from gangline.bench.compute import MeasuredSpeeds, Work, measure_compute, weights_by_module
from gangline.bench.scaling import Scaling, Task, measure_scaling
from gangline.bench.torchrun import BenchHosts
from gangline.checks.judge import require
from gangline.context import REAL, Context, Dependencies, StartOptions, load, load_cluster, reached
from gangline.control.equip import claim, equip
from gangline.decide.forecast import JobForecast, count_architecture, forecast_job, require_startable, training_of
from gangline.decide.hosts import world_of
from gangline.decide.inspect import InspectOptions, InspectResult, inspect
from gangline.errors import ModelError, UsageError
from gangline.inventory.measured import Network
from gangline.planner.architecture import Architecture
from gangline.planner.calibration import shallow_config
from gangline.planner.config import UnknownArchitecture, read_architecture
from gangline.planner.machines import PlannedCluster
from gangline.planner.plan import make_plan
from gangline.provision.console import Console
from gangline.runs.cluster import Cluster
from gangline.runs.job import Job
from gangline.strategies.table import plan_half

ACCESS = InspectOptions(only=("access",), own_worker=False)
COMPUTE = InspectOptions(only=("access", "versions", "gpus"), anew=False)


def bench_network(
    cluster_path: Path | None, *, home: Path, seconds: float, console: Console, deps: Dependencies = REAL
) -> Network:
    """Measure the network of a cluster and keep it; raises HostUnreachable where a host does not answer."""
    cluster = load_cluster(cluster_path, home)
    with reached(cluster, home=home, console=console, deps=deps) as (cluster, context):
        hosts = _hosts(inspect(cluster, ACCESS, context), cluster, context)
        return measure_network(hosts, home=home, seconds=seconds, report=console.progress)


def bench_compute(
    start: StartOptions, *, seconds: float, console: Console, deps: Dependencies = REAL
) -> MeasuredSpeeds:
    """Measure how fast the ranks of a cluster compute a job's model, and keep it.

    Raises HostUnreachable where a host does not answer, ModelError where nothing is known of the model's shape.
    """
    job, cluster = load(start)
    with reached(cluster, home=start.home, console=console, deps=deps) as (cluster, context):
        inspection = inspect(cluster, COMPUTE, context)
        work = _work(job, inspection, context)
        hosts = _hosts(inspection, cluster, context, job=job)
        return measure_compute(hosts, work, home=start.home, seconds=seconds, report=console.progress)


def bench_scaling(start: StartOptions, *, seconds: float, console: Console, deps: Dependencies = REAL) -> Scaling:
    """Measure how fast the hosts of a cluster train a job alone, and together; nothing is kept.

    Raises HostUnreachable where a host does not answer, DoesNotFit where the job has no room, UsageError where there is
    nothing to compare, or not enough work for every rank.
    """
    job, cluster = load(start)
    _require_several(cluster)
    with reached(cluster, home=start.home, console=console, deps=deps) as (cluster, context):
        inspection = inspect(cluster, COMPUTE, context)
        task = _task(job, inspection, context)
        hosts = _hosts(inspection, cluster, context, job=job)
        return measure_scaling(hosts, task, seconds=seconds, report=console.progress)


def _require_several(cluster: Cluster) -> None:
    if len(cluster.hosts) < 2:
        raise UsageError(
            "bench scaling compares several hosts with each alone",
            seen=f"{cluster.name} has one host, {cluster.head.name}",
            fix="name a cluster of several: gangline bench scaling JOB --cluster cluster.yaml; "
            "for the speed of one: gangline bench compute JOB",
        )


def _task(job: Job, inspection: InspectResult, context: Context) -> Task:
    """The job with the ranks and shares that a run would have."""
    job_forecast, _ = _forecast(job, inspection, context)
    if job_forecast.runnable is None:
        require_startable(job, job_forecast)
    job = job_forecast.settled(job)
    _require_work(job, inspection.cluster)
    gpus = {facts.host: [gpu.name for gpu in facts.gpus] for facts in inspection.inventory.hosts}
    plan = make_plan(job, inspection.cluster, gpus, candidate=job_forecast.runnable)
    _require_whole(plan.strategy)
    assert job_forecast.config is not None
    gang = plan.gang("bench-scaling", 1)
    gang.require_settings(job)
    unit = job if gang.micro_batch is None else replace(job, micro_batch=gang.micro_batch)
    return Task(job=unit, config=job_forecast.config, ranks=gang)


def _require_whole(strategy: str) -> None:
    """Each host is measured alone, so each has to hold the model."""
    why = plan_half(strategy).not_alone
    if not why:
        return
    raise UsageError(
        "bench scaling measures hosts that hold the model and exchange gradients in every step",
        seen=f"strategy: {strategy}, {why}",
        fix="write strategy: ddp to see what that would reach on this network, if the model fits",
    )


def _require_work(job: Job, cluster: Cluster) -> None:
    count, num_ranks = job.batch // job.micro_batch, sum(host.slots for host in cluster.hosts)
    if count < num_ranks:
        raise UsageError(
            f"a step of this job has too little work for {num_ranks} ranks",
            seen=f"batch {job.batch} = {count} micro-batches of {job.micro_batch}",
            fix=f"gangline bench scaling JOB batch={num_ranks * 4 * job.micro_batch}, or a smaller micro_batch",
        )


def _hosts(inspection: InspectResult, cluster: Cluster, context: Context, *, job: Job | None = None) -> BenchHosts:
    """Hosts with an environment in which ranks can start; raises where a check fails."""
    require(inspection.findings)
    claim(cluster, context)
    ready = equip(inspection, context, job=job)
    return BenchHosts(
        cluster=ready.cluster, inventory=inspection.inventory, transports=context.transports, networks=ready.networks
    )


def _work(job: Job, inspection: InspectResult, context: Context) -> Work:
    """What is measured: the job, with what it leaves open as a plan would decide it now, on two of its layers."""
    job_forecast, world = _forecast(job, inspection, context)
    assert job_forecast.choice is not None
    assert job_forecast.config is not None
    job = job_forecast.settled(job)
    config = shallow_config(job_forecast.config)
    runnable = job_forecast.runnable
    strategy = job.strategy.kind if runnable is None else runnable.strategy.kind
    return Work(
        job=job,
        training=training_of(job, world),
        whole=job_forecast.choice.query.architecture,
        copy=_shape(config, context),
        copy_config=config,
        by_module=weights_by_module(strategy, num_ranks=len(world.placements)),
    )


def _forecast(job: Job, inspection: InspectResult, context: Context) -> tuple[JobForecast, PlannedCluster]:
    """What a plan would decide, which needs the shape of the model; raises ModelError where that is not known."""
    world = world_of(inspection.cluster, inspection.inventory, context.home)
    job_forecast = forecast_job(job, world, context)
    if job_forecast.choice is None or job_forecast.config is None:
        raise job_forecast.error or ModelError(
            "nothing can be measured without the shape of the model",
            seen=job_forecast.unknown,
            fix="put the model's config.json into a folder, and name it: model: FOLDER",
        )
    return job_forecast, world


def _shape(config: dict[str, object], context: Context) -> Architecture:
    try:
        return read_architecture(config)
    except UnknownArchitecture:
        return count_architecture(config, context)
