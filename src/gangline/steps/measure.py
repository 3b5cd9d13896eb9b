"""What `bench` does: hosts on which ranks can start, then the measurement of their network, or of a job on them."""

from __future__ import annotations

from pathlib import Path

from gangline.bench.calibrate import Speeds, Work, measure_compute
from gangline.bench.network import Hosts, measure_network
from gangline.checks.judge import require
from gangline.errors import ModelError
from gangline.inventory.network import Network
from gangline.planning.architecture import Architecture
from gangline.planning.calibrate import shallow_config
from gangline.planning.config import UnknownArchitecture, read_architecture
from gangline.runs.cluster import Cluster
from gangline.runs.job import Job
from gangline.steps.counted import count_architecture
from gangline.steps.equip import claim, equip
from gangline.steps.forecast import foresee_job, training_of
from gangline.steps.look import Sight, Wish, look
from gangline.steps.machines import world_of
from gangline.steps.reach import Start, load, load_cluster, reached
from gangline.steps.seams import REAL, Means, Seams, Talk

ACCESS = Wish(only=("access",), own_worker=False)
COMPUTE = Wish(only=("access", "versions", "gpus"), anew=False)


def bench_network(cluster_path: Path | None, *, home: Path, seconds: float, talk: Talk, seams: Seams = REAL) -> Network:
    """Measure the network of a cluster and keep it; raises HostUnreachable where a host does not answer."""
    cluster = load_cluster(cluster_path, home)
    with reached(cluster, home=home, talk=talk, seams=seams) as (cluster, means):
        hosts = _hosts(look(cluster, ACCESS, means), cluster, means)
        return measure_network(hosts, home=home, seconds=seconds, tell=talk.tick)


def bench_compute(start: Start, *, seconds: float, talk: Talk, seams: Seams = REAL) -> Speeds:
    """Measure how fast the ranks of a cluster compute a job's model, and keep it.

    Raises HostUnreachable where a host does not answer, ModelError where nothing is known of the model's shape.
    """
    job, cluster = load(start)
    with reached(cluster, home=start.home, talk=talk, seams=seams) as (cluster, means):
        sight = look(cluster, COMPUTE, means)
        work = _work(job, sight, means)
        hosts = _hosts(sight, cluster, means)
        return measure_compute(hosts, work, home=start.home, seconds=seconds, tell=talk.tick)


def _hosts(sight: Sight, cluster: Cluster, means: Means) -> Hosts:
    """Hosts with an environment in which ranks can start; raises where a check fails."""
    require(sight.findings)
    claim(cluster, means)
    ready = equip(sight, means)
    return Hosts(cluster=ready.cluster, inventory=sight.inventory, transports=means.transports, networks=ready.networks)


def _work(job: Job, sight: Sight, means: Means) -> Work:
    """What is measured: the job, with what it leaves open as a plan would decide it now, on two of its layers."""
    world = world_of(sight.cluster, sight.inventory, means.home)
    outlook = foresee_job(job, world, means)
    if outlook.verdict is None or outlook.config is None:
        raise outlook.error or ModelError(
            "nothing can be measured without the shape of the model",
            seen=outlook.unknown,
            fix="put the model's config.json into a folder, and name it: model: FOLDER",
        )
    job = outlook.settled(job)
    config = shallow_config(outlook.config)
    return Work(
        job=job,
        training=training_of(job, world),
        whole=outlook.verdict.question.architecture,
        copy=_shape(config, means),
        copy_config=config,
    )


def _shape(config: dict[str, object], means: Means) -> Architecture:
    try:
        return read_architecture(config)
    except UnknownArchitecture:
        return count_architecture(config, means)
