"""Runs that another computer has started on the hosts of a cluster: this computer gets their records, and can then
follow, stop and export them as that one does.

The records of a run lie on the host of its supervisor, where that is one of the hosts. How hosts are reached is taken
from the cluster file here, and what is sent to them is made here: of a record, only what a run is.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gangline.context import REAL, Context, Dependencies, Transports, load_cluster, reached
from gangline.control.start import worker_program
from gangline.control.supervision import SupervisorRecord, copy_records
from gangline.errors import GanglineError, HostUnreachable, UsageError
from gangline.planner.plan import Plan
from gangline.provision.console import Console
from gangline.provision.trees import host_layout
from gangline.runs.cluster import Cluster, Host
from gangline.runs.gang import Gang
from gangline.runs.job import Job
from gangline.runs.layout import PATTERN, RunLayout
from gangline.runs.record_versions import decode_record, load_if_there, write_record
from gangline.runs.registry import read_record, run_ids
from gangline.runs.state import AttemptOutcome, RunState
from gangline.supervise.lead import Deputies
from gangline.transport.ssh_options import NONSENSE, understood
from gangline.transport.transport import Transport, read_if_there
from gangline.units import counted, listed

RECORDS: tuple[tuple[Callable[[RunLayout], Path], Any], ...] = (
    (lambda layout: layout.job, Job),
    (lambda layout: layout.plan, Plan),
    (lambda layout: layout.inputs, dict),
)
"""What is copied of a run, each with its reader; where a host has it."""
RECORDS_OF_ATTEMPT: tuple[tuple[Callable[[RunLayout, int], Path], Any], ...] = (
    (RunLayout.gang, Gang),
    (RunLayout.networks, dict),
    (RunLayout.base, dict),
    (RunLayout.outcome, AttemptOutcome),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The records of a run on one host."""

    run_id: str
    host: Host
    state: RunState | None
    """None: its supervisor was on no host, or `damage`."""
    damage: str = ""
    """Why its state there cannot be read."""


def take_in_runs(path: Path | None, *, home: Path, console: Console, deps: Dependencies = REAL) -> list[str]:
    """Get the records of all runs on the hosts of a cluster file that this computer does not know, and of those that
    have ended here and were resumed elsewhere; their ids.

    A run whose records cannot be used is told, and left out. Raises SpecError for the file, UsageError for a cluster of
    Slurm, HostUnreachable where no host answers.
    """
    cluster = load_cluster(path, home)
    if cluster.slurm is not None:
        raise UsageError(
            "runs of other computers are found on hosts over SSH",
            seen="`slurm` in the cluster file",
            fix="on a login host that shares gangline's home, gangline ps lists all of your runs",
        )
    with reached(cluster, home=home, console=console, deps=deps) as (located, context):
        taken, known = [], run_ids(home)
        found = _look(located, context.transports, console=console)
        for each in found:
            try:
                if not _is_news(each, RunLayout(home, each.run_id), context):
                    continue
                with _as_a_whole(RunLayout(home, each.run_id)) as layout:
                    _take_in(each, layout, located, context)
            except (GanglineError, OSError) as error:
                console.report(f"{each.run_id} on {each.host.name} is left out: {_why(error)}")
                continue
            done = "resumed" if each.run_id in known else "begun"
            console.report(f"{each.run_id}: {done} by another computer, found on {each.host.name}")
            taken.append(each.run_id)
        unknown = [each for each in found if each.state is None and each.run_id not in known]
        for each in (each for each in unknown if each.damage):
            console.report(f"{each.run_id} on {each.host.name} is left out: {each.damage}")
        if unseen := [each.run_id for each in unknown if not each.damage]:
            which = f"{counted(len(unseen), 'run')} left out"
            console.report(f"{which}, as the records lie on the computer that began it: {listed(unseen)}")
        return taken


def _why(error: Exception) -> str:
    return f"{error.what}: {error.seen}" if isinstance(error, GanglineError) else str(error)


@contextlib.contextmanager
def _as_a_whole(layout: RunLayout) -> Iterator[RunLayout]:
    """Where to write the records of a run: those of one that is not known here take their place when all are there."""
    if layout.folder.exists():
        yield layout
        return
    runs = layout.folder.parent
    runs.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs, prefix=".taken-in-") as folder:
        begun = RunLayout(Path(folder), layout.run_id)
        yield begun
        begun.folder.rename(layout.folder)


def _is_news(found: _Found, layout: RunLayout, context: Context) -> bool:
    """Whether the records on a host are of a run that this computer does not know, or of an attempt that another
    computer began since. What is under way is asked for anyway, and its supervisor begins attempts by itself.
    """
    if found.state is None or found.state.phase == "preparing":
        return False
    if not layout.folder.exists():
        return True
    here = read_record(layout)
    if here.state is None or not here.ended or found.state.epoch < here.state.epoch:
        return False  # a supervisor that was cut off may have begun attempts that count no more
    base = host_layout(found.host, found.run_id).base(found.state.attempt)
    ordered = (_read_if_there(context.transports[found.host.name], base, dict) or {}).get("attempt")
    return (ordered if type(ordered) is int else found.state.attempt) > here.state.attempt


def _look(cluster: Cluster, transports: Transports, *, console: Console) -> list[_Found]:
    """The newest records of each run; raises HostUnreachable where no host answers."""

    def look(host: Host) -> list[_Found] | HostUnreachable:
        try:
            return _on_host(host, transports[host.name])
        except HostUnreachable as error:
            return error

    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = list(pool.map(look, cluster.hosts))
    silent = [answer for answer in answers if isinstance(answer, HostUnreachable)]
    if len(silent) == len(answers):
        raise silent[0]
    for error in silent:
        console.report(f"not asked: {error.what}")
    newest: dict[str, _Found] = {}
    for each in (found for answer in answers if not isinstance(answer, HostUnreachable) for found in answer):
        if each.run_id not in newest or _epoch(each) > _epoch(newest[each.run_id]):
            newest[each.run_id] = each
    return list(newest.values())


def _epoch(found: _Found) -> int:
    return -1 if found.state is None else found.state.epoch


def _on_host(host: Host, transport: Transport) -> list[_Found]:
    """The runs in its work folder. Raises HostUnreachable, also where that folder cannot be read."""
    folder = Path(host.workdir) / "runs"
    try:
        names = transport.names(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise HostUnreachable(
            f"the runs on {host.name} cannot be listed: {error}",
            fix=f"on {host.name}: ls -ld {folder}",
        ) from error
    found = []
    for run_id in filter(PATTERN.fullmatch, names):
        layout = host_layout(host, run_id)
        state, damage = None, ""
        try:
            if (data := read_if_there(transport, layout.state)) is not None:
                state = decode_record(data, layout.state, RunState, host=host.name)
        except (GanglineError, OSError, *NONSENSE) as error:
            if isinstance(error, HostUnreachable):
                raise
            damage = _why(error)
        found.append(_Found(run_id=run_id, host=host, state=state, damage=damage))
    return found


def _take_in(found: _Found, layout: RunLayout, own: Cluster, context: Context) -> None:
    """Write the records of a run here; raises GanglineError where they cannot be used, and OSError."""
    remote, there = context.transports[found.host.name], host_layout(found.host, found.run_id)
    state = found.state
    assert state is not None
    cluster = _as_reached(_read(remote, there.cluster, Cluster), own)
    if cluster.slurm is not None:
        raise UsageError("it is a run of Slurm", seen="its hosts are reached by the steps of its job alone")
    head = _match(found.host, cluster.hosts)
    if head is None:
        raise UsageError(f"{found.host.name} is none of its hosts", seen=listed([each.name for each in cluster.hosts]))
    deputies = _read_if_there(remote, there.deputies, Deputies)
    others = {each.name for each in cluster.hosts} - {head.name}
    candidates = () if deputies is None else tuple(name for name in deputies.candidates if name in others)
    layout.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, kind in RECORDS:
        if not path(layout).exists():  # the job of a run that was begun here names files of this computer
            _copy(remote, path(there), path(layout), kind)
    for number in range(1, state.attempt + 1):
        layout.attempt(number).mkdir(mode=0o700, parents=True, exist_ok=True)
        for of_attempt, kind in RECORDS_OF_ATTEMPT:
            _copy(remote, of_attempt(there, number), of_attempt(layout, number), kind)
        theirs = _read_if_there(remote, there.attempt_cluster(number), Cluster)
        if theirs is not None:
            write_record(layout.attempt_cluster(number), _as_reached(theirs, own).to_json())
    _write_request(layout, state.attempt, context)
    write_record(layout.cluster, cluster.to_json())
    SupervisorRecord(host=head.name, candidates=candidates).save(layout)
    copy_records(layout, there, remote)


def _write_request(layout: RunLayout, number: int, context: Context) -> None:
    """What the hosts were told to start in an attempt of a job, made anew: orders to them follow from it."""
    job, cluster = load_if_there(layout.job, Job), load_if_there(layout.attempt_cluster(number), Cluster)
    gang = load_if_there(layout.gang(number), Gang)
    if job is None or cluster is None or gang is None:
        return
    networks = load_if_there(layout.networks(number), dict) or {}
    backend = context.deps.backend(cluster.backend)
    request = backend.render(cluster, gang, port=0, networks=networks, program=worker_program(job))
    write_record(layout.request(number), request.to_json())


def _as_reached(theirs: Cluster, own: Cluster) -> Cluster:
    """The hosts of a run as the cluster file here reaches them; raises UsageError for one that is not in it."""

    def reached_host(host: Host) -> Host:
        way = _match(host, own.hosts)
        if way is None:
            raise UsageError(
                f"its host {host.name} is not in the cluster file",
                seen=f"{host.address}; the file has {listed([each.name for each in own.hosts])}",
                fix="add it: gangline init --add HOST",
            )
        ssh = (way.ssh or way.name) if way.transport == "ssh" else way.ssh
        return replace(host, transport=way.transport, ssh=ssh, ssh_port=way.ssh_port, host_key=way.host_key)

    witness = own.witness if theirs.witness is not None else None
    return replace(theirs, hosts=tuple(map(reached_host, theirs.hosts)), witness=witness)


def _match(wanted: Host, hosts: Sequence[Host]) -> Host | None:
    """The same machine among hosts that somebody else has described: by its address, or by its name where several have
    that address, or none.
    """
    at_address = [host for host in hosts if host.address == wanted.address]
    if len(at_address) == 1:
        return at_address[0]
    return next((host for host in at_address or hosts if host.name == wanted.name), None)


def _read(remote: Transport, path: Path, kind: Any) -> Any:
    found = _read_if_there(remote, path, kind)
    if found is None:
        raise UsageError(f"{path.name} is not there", seen=str(path))
    return found


def _read_if_there(remote: Transport, path: Path, kind: Any) -> Any:
    data = read_if_there(remote, path, limit=1 << 24)
    if data is None:
        return None
    with understood(remote.host, path.name):
        return decode_record(data, path, kind, host=remote.host)


def _copy(remote: Transport, there: Path, here: Path, kind: Any) -> None:
    """Copy a record that can be read, field by field."""
    found = _read_if_there(remote, there, kind)
    if found is not None:
        write_record(here, found if isinstance(found, dict) else found.to_json())
