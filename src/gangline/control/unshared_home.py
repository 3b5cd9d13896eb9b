"""Runs on nodes that do not see gangline's home on the login host, which reads their records from their first node.

While the job runs by a step of it, afterwards by a short job of its own on that node. How a run gets there:
gangline.control.packed_run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gangline.errors import HostUnreachable, UsageError
from gangline.runs.cluster import Cluster, Host, SlurmRequest
from gangline.runs.files import write_atomic
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import decode_record, load_if_there, load_record
from gangline.runs.state import RunState
from gangline.supervise.allocation import SlurmRecord, by_own_job
from gangline.transport.connect import connect
from gangline.transport.slurm_commands import SlurmJob, find_job, find_named, job_name
from gangline.transport.ssh_options import understood
from gangline.transport.transport import Transport, below_home, read_if_there

CONTROLLER = ".controller"
"""The home of gangline on the first node, in the work folder."""


def renew(layout: RunLayout, *, starts_job: bool = True) -> None:
    """Read the records of a run from its first node, where they do not lie here.

    starts_job: also after its job has ended, by a short job of its own on that node. Raises HostUnreachable where the
    node or Slurm does not answer.
    """
    record = SlurmRecord.of(layout)
    if record is None or record.asked.shared_home or record.read == record.job:
        return
    record, job = _newest(layout, record)
    if job is not None and job.waits:
        return
    name = job.nodes[0] if job is not None and job.nodes else record.node
    is_over = job is None or not job.active
    state = load_if_there(layout.state, RunState)
    if is_over and (not name or (state is not None and state.phase in ENDED)):
        replace(record, read=record.job).save(layout.slurm)  # there is nothing more to read
        return
    if not is_over and record.node and state is not None and state.phase in SUPERVISED:
        return  # its supervisor is asked how it stands
    if is_over and not starts_job:
        raise _unread(layout, record, name, job)
    node = Host(name=name, workdir=record.asked.workdir, python="", transport="srun", allocation=record.job)
    with _reached(by_own_job(node, record.asked) if is_over else node) as transport:
        controller = Path(below_home(node.workdir, transport.home())) / CONTROLLER
        _copy(layout, transport, RunLayout(controller, layout.run_id), record)
    record = SlurmRecord.of(layout) or record
    replace(record, node=name, read=record.job if is_over else "").save(layout.slurm)


ENDED = ("finished", "failed", "stopped")
SUPERVISED = ("running", "stopping", "restarting")


def _newest(layout: RunLayout, record: SlurmRecord) -> tuple[SlurmRecord, SlurmJob | None]:
    """The record with the job that the run is now: at its time limit the batch step submits another one."""
    job = find_job(record.job)
    if job is not None and job.active:
        return record, job
    later = find_named(job_name(layout.run_id))
    if later is None or int(later.id) <= int(record.job):
        return record, job
    leaving = RunState.load(layout).attempt
    record = replace(record, job=later.id, node="", leaving=leaving)
    record.save(layout.slurm)
    return record, later


def _unread(layout: RunLayout, record: SlurmRecord, node: str, job: SlurmJob | None) -> HostUnreachable:
    return HostUnreachable(
        f"job {record.job} has ended, and {node} has the records",
        seen=f"Slurm says {job.state if job else 'that it does not know the job any more'}",
        fix=f"gangline attach {layout.run_id} reads them, by a short job on {node}",
    )


@contextmanager
def _reached(node: Host) -> Iterator[Transport]:
    transport = connect(node)
    try:
        yield transport
    finally:
        transport.close()


OF_RUN = ("cluster", "supervisor_record", "plan", "inputs", "inventory", "findings", "chosen_networks", "comparison")
OF_ATTEMPT = ("gang", "request", "attempt_cluster", "networks", "base", "again", "outcome", "board", "times")
LOG_BYTES = 1 << 20


def _copy(here: RunLayout, transport: Transport, there: RunLayout, record: SlurmRecord) -> None:
    """Renew the records here. state.json comes last: it speaks of the others."""

    def renewed(path: Path) -> bytes | None:
        found = read_if_there(transport, there.folder / path.relative_to(here.folder))
        if found is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path, found)
        return found

    renewed(record.log_path(here))
    said = read_if_there(transport, there.state)
    if said is None:
        return
    with understood(transport.host, f"where {here.run_id} stands"):
        state = decode_record(said, there.state, RunState, host=transport.host)
    for name in OF_RUN:
        renewed(getattr(here, name))
    for number in range(1, state.attempt + 1):
        if number == state.attempt or not here.outcome(number).exists():
            for name in OF_ATTEMPT:
                renewed(getattr(here, name)(number))
    if (data := read_if_there(transport, there.slurm)) is not None:
        with understood(transport.host, f"the job of {here.run_id}"):
            its = decode_record(data, there.slurm, SlurmRecord, host=transport.host)
        ours = SlurmRecord.of(here) or record
        replace(ours, requeues=its.requeues, leaving=its.leaving, noticed=its.noticed).save(here.slurm)
    write_atomic(here.state, said)


def nodes_of(layout: RunLayout, asked: SlurmRequest) -> list[str]:
    """The option of sbatch for the nodes on whose disks a run lies; raises UsageError where fewer are asked for."""
    if not layout.request(1).exists():
        return []
    nodes = [host.name for host in load_record(layout.cluster, Cluster).hosts]
    if len(nodes) > asked.nodes:
        raise UsageError(
            f"{layout.run_id} cannot continue on fewer nodes than before",
            seen=f"it lies on the disks of {', '.join(nodes)}, and {asked.nodes} are asked for",
            fix=f"ask for at least {len(nodes)} (`slurm.nodes`): the nodes share no folder for checkpoints",
        )
    return [f"--nodelist={','.join(nodes)}"]
