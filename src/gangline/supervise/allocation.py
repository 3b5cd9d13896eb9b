"""Runs whose hosts are nodes of a Slurm job: whether that job is over, and with it every process of the run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gangline.errors import GanglineError
from gangline.runs.cluster import Cluster, Host, SlurmRequest
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import Record, load_if_there
from gangline.runs.registry import RunRecord
from gangline.runs.state import ProcessId, RunState
from gangline.transport.slurm_commands import find_job


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRecord(Record):
    """slurm.json of a run: the job that it is, or was last."""

    job: str
    """4711, or 4711_3 for a task of an array; "" until Slurm has it."""
    submitted: str
    cluster: Cluster
    """What it asked for, without hosts."""
    force: bool = False
    requeues: int = 0
    """How often the run was put back into the queue, at its time limit or when its nodes were wanted."""
    leaving: int = 0
    """The attempt that stops because of the time limit: the run goes back into the queue."""
    noticed: int = 0
    """The attempt that Slurm ends, to cancel the job or to start it again later."""
    log: str = ""
    """Where its batch step writes, with {job} for its id; "": into the folder of the run."""
    node: str = ""
    """The first node of the job as it was last seen, where nodes do not see gangline's home."""
    read: str = ""
    """The job of which nothing is to be read from its node any more, where nodes do not see gangline's home."""

    def log_path(self, layout: RunLayout) -> Path:
        """The log of its batch step."""
        return Path((self.log or f"{layout.folder}/slurm-{{job}}.log").replace("{job}", self.job))

    @property
    def asked(self) -> SlurmRequest:
        """The allocation that it asks for."""
        assert self.cluster.slurm is not None, "a cluster that is submitted to"
        return self.cluster.slurm

    @property
    def poll_s(self) -> int:
        """How often Slurm may be asked about it."""
        return self.asked.poll_s

    @staticmethod
    def of(layout: RunLayout) -> SlurmRecord | None:
        """The record of a run; None where it is no job of Slurm."""
        return load_if_there(layout.slurm, SlurmRecord)


AllocationState = Literal["on", "over", "suspended"]


def allocation_state(cluster: Cluster) -> AllocationState:
    """Whether the allocation of a run's hosts has ended, or waits to be given again (`over`), or is suspended; `on` for
    other hosts, and where Slurm does not say.
    """
    if not cluster.hosts or cluster.head.transport != "srun" or cluster.head.allocation is None:
        return "on"
    with suppress(GanglineError):
        job = find_job(cluster.head.allocation)
        if job is None or not job.active or job.waits:
            return "over"
        return "suspended" if job.state == "SUSPENDED" else "on"
    return "on"


def has_ended(state: RunState, record: SlurmRecord | None) -> bool:
    """Whether a run has ended for good, as its own records say; its job may still be leaving Slurm."""
    if state.phase == "stopped" and record is not None:
        return state.attempt not in {record.leaving, record.noticed}
    return state.phase in {"finished", "stopped", "failed"}


def left_here(cluster: Cluster, record: SlurmRecord | None = None) -> Cluster:
    """The hosts of an allocation that has ended as this computer reads what they left on a shared disk.

    record: that of the run. Where its nodes share no disk with this computer, short jobs reach them; others stay.
    """

    def as_left(host: Host) -> Host:
        if host.transport != "srun":
            return host
        if Path(host.workdir).is_dir():
            return replace(host, transport="local")
        return host if record is None or record.asked.shared_home else by_own_job(host, record.asked)

    return replace(cluster, hosts=tuple(map(as_left, cluster.hosts)))


def by_own_job(node: Host, asked: SlurmRequest) -> Host:
    """A node as a short job of its own reaches it, in the partition and for the account that a run asks for."""
    named = {"partition": asked.partition, "account": asked.account, "qos": asked.qos}
    options = (*(f"--{name}={value}" for name, value in named.items() if value is not None), *asked.options)
    return replace(node, allocation=None, job_options=options)


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
