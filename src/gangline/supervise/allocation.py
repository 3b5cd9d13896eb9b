"""Runs whose hosts are nodes of a Slurm job: whether that job is over, and with it every process of the run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gangline.errors import GanglineError
from gangline.runs.cluster import Cluster
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_if_there
from gangline.runs.registry import RunRecord
from gangline.runs.state import ProcessId
from gangline.transport.slurm_commands import find_job


def is_over(cluster: Cluster) -> bool:
    """Whether the allocation of a run's hosts has ended, or waits to be given again; False where Slurm does not say."""
    if not cluster.hosts or cluster.head.transport != "srun" or cluster.head.allocation is None:
        return False
    with suppress(GanglineError):
        job = find_job(cluster.head.allocation)
        return job is None or not job.active or job.waits
    return False


def left_here(cluster: Cluster) -> Cluster:
    """The hosts of an allocation that has ended as this computer reads what they left on a shared disk; others stay."""
    hosts = (
        replace(host, transport="local") if host.transport == "srun" and Path(host.workdir).is_dir() else host
        for host in cluster.hosts
    )
    return replace(cluster, hosts=tuple(hosts))


def prepares(layout: RunLayout, process: ProcessId) -> bool:
    """Whether the process lives that prepares an attempt: this computer's, or that of a job of Slurm on its node."""
    record = load_if_there(layout.slurm, dict)
    if record is None:
        return process.is_alive
    with suppress(GanglineError):
        job = find_job(str(record.get("job")))
        return job is not None and job.active
    return True


def between_allocations(layout: RunLayout, record: RunRecord) -> RunRecord:
    """The record of a run, `queued` where it has stopped only until Slurm starts it again."""
    state = record.state
    if state is None or not (
        (record.phase == "stopped" and goes_on(layout, state.attempt)) or (record.phase == "lost" and waits(layout))
    ):
        return record
    return replace(record, state=replace(state, phase="queued"), lost=False)


def goes_on(layout: RunLayout, attempt: int) -> bool:
    """Whether a run that stopped in this attempt goes back into the queue of Slurm, or waits there already."""
    record = load_if_there(layout.slurm, dict) or {}
    if record.get("leaving") == attempt:
        return True
    return record.get("noticed") == attempt and waits(layout)


def waits(layout: RunLayout) -> bool:
    """Whether the job of a run waits in the queue of Slurm, such as after the loss of its first node."""
    record = load_if_there(layout.slurm, dict)
    if record is None:
        return False
    with suppress(GanglineError):
        job = find_job(str(record.get("job")))
        return job is not None and job.waits
    return False
