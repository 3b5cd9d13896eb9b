"""The host of a run's supervisor: this computer, or the head, which needs no other computer.

The records of a run lie where its supervisor runs. Where that is the head, this computer has a copy of state.json and
of what each attempt wrote, and renews it whenever the head answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, NoReturn

from gangline.context import REAL, Context, Dependencies, Transports, reach, read_cluster
from gangline.control.unshared_home import SUPERVISED, renew
from gangline.errors import GanglineError, HostKeyRefused, HostUnreachable, RecordError, RunFailed, UsageError
from gangline.launch.backend import LaunchRequest
from gangline.provision.console import Console
from gangline.provision.trees import host_layout
from gangline.report.follow import View, checked_board, raise_failure
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import json_object, write_atomic
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import (
    decode_record,
    encode_record,
    load_if_there,
    load_record,
    read_regular,
    write_record,
)
from gangline.runs.registry import RunRecord, find_run, read_record
from gangline.runs.state import AttemptOutcome, ProcessId, RunState, parse_stat
from gangline.supervise.allocation import SlurmRecord, between_allocations, has_ended, left_here
from gangline.supervise.lead import Deposed, seen_from
from gangline.transport.hostkeys import resolve
from gangline.transport.ssh_options import NONSENSE, understood
from gangline.transport.transport import Transport, read_if_there

HEARTBEAT = re.compile(r"heartbeat-\d{1,6}\.json")
MOST_CANDIDATES = 4
"""Each of them is asked at the start whether it reaches all others."""
REVIVED_S = 75.0
"""The host agent beside a dead supervisor has started another one by then: it looks once a second, and waits a minute
at most where several have died one after the other (gangline.agent.supervise.detach)."""
ATTEMPT_FILES: tuple[tuple[Callable[[RunLayout, int], Path], Any], ...] = (
    (RunLayout.outcome, AttemptOutcome),
    (RunLayout.board, checked_board),
)
"""The records of an attempt that the supervisor writes and this computer shows, each with its reader.

request.json is not among them: this computer wrote it, and `kill_without_supervisor` executes it on hosts, so no other
host may replace it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorRecord:
    """supervision.json: the host of the supervisor, and the reasons if that is not the head."""

    host: str | None = None
    """None: this computer."""
    why_not: tuple[str, ...] = ()
    """Why the supervisor is not on the head; then this computer must stay on."""
    candidates: tuple[str, ...] = ()
    """Hosts that may take over from it, in this order; (): none may."""

    @property
    def unattended(self) -> bool:
        """Whether the run is supervised while this computer is off."""
        return self.host is not None

    def save(self, layout: RunLayout) -> None:
        """Write supervision.json."""
        write_record(layout.supervisor_record, dataclasses.asdict(self))

    @staticmethod
    def load(layout: RunLayout) -> SupervisorRecord:
        """Read supervision.json; without one the supervisor is here."""
        return load_if_there(layout.supervisor_record, SupervisorRecord) or SupervisorRecord()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHandle:
    """A run that exists already, with the transports to its hosts."""

    layout: RunLayout
    """This computer's records of it."""
    cluster: Cluster
    transports: Transports
    supervisor: SupervisorRecord
    is_over: bool = False
    """Its allocation has ended, and every process with it."""
    is_suspended: bool = False
    """Slurm has suspended its job: no step starts on its nodes."""
    prepares: Callable[[ProcessId], bool] = lambda process: process.is_alive
    """Whether the process lives that prepares an attempt of it."""

    @property
    def supervisor_host(self) -> Transport | None:
        """The transport to the supervisor's host; None: that is this computer."""
        return None if self.supervisor.host is None else self.transports[self.supervisor.host]

    @property
    def records(self) -> RunLayout:
        """Where the records lie, on the supervisor's host."""
        if self.supervisor.host is None:
            return self.layout
        return host_layout(self.cluster.host(self.supervisor.host), self.layout.run_id)

    def record(self) -> RunRecord:
        """The state of the run now; where the supervisor's host does not answer, the last known one, marked as such.

        Raises HostKeyRefused where another host answers in its place.
        """
        found = self._record()
        is_elsewhere = found.silent_host is not None or _is_deposed(found.state)
        if is_elsewhere and (moved := self._moved()) is not None:
            return moved.record()
        return between_allocations(self.layout, found)

    def _record(self) -> RunRecord:
        if self.is_suspended:
            last, job = read_record(self.layout, is_alive=lambda _process: True), str(self.cluster.head.allocation)
            return last if last.ended else replace(last, silent=f"Slurm has suspended job {job}", suspended=job)
        remote = self.supervisor_host
        phase = read_record(self.layout, is_alive=lambda _process: True).phase
        if remote is None or phase in {"preparing", "queued"}:  # of a run that is prepared here they are the newest
            is_dead = self.is_over and phase != "preparing"
            return read_record(self.layout, is_alive=(lambda _process: False) if is_dead else self.prepares)
        try:
            copy_records(self.layout, self.records, remote)
            return read_record(self.layout, is_alive=lambda process: self._runs_there(remote, process))
        except HostKeyRefused:
            raise
        except HostUnreachable as error:
            last = read_record(self.layout, is_alive=lambda _process: True)
            if last.ended:
                return last
            return replace(last, silent=f"{self.supervisor.host}: {error.what}", silent_host=self.supervisor.host)

    def _moved(self) -> RunHandle | None:
        """The same run as another host leads it now; None: none does."""
        found = follow_leader(self.layout, self.cluster, self.supervisor, self.transports)
        return None if found is None else replace(self, supervisor=found[0], cluster=found[1])

    def _runs_there(self, remote: Transport, process: ProcessId) -> bool:
        if runs_there(remote, process):
            return True
        # the supervisor may have written the end and exited since we read the state
        copy_records(self.layout, self.records, remote)
        return False

    def view(self) -> View:
        """Where the run is read, to follow it; before it has hosts raises UsageError, or what ended it."""
        if not self.cluster.hosts:
            raise_failure(self.record())
            raise UsageError(
                f"{self.layout.run_id} has not begun",
                seen="it waits in the queue of Slurm",
                fix=f"gangline attach {self.layout.run_id} follows it through the queue",
            )
        head, head_layout = self._head(self.cluster)
        return View(
            layout=self.layout,
            head=head,
            head_layout=head_layout,
            read=self.record,
            head_of=self._head_of,
            patience_s=REVIVED_S if self.supervisor.unattended else 0.0,
        )

    def _head(self, cluster: Cluster) -> tuple[Transport, RunLayout]:
        return self.transports[cluster.head.name], host_layout(cluster.head, self.layout.run_id)

    def _head_of(self, attempt: int) -> tuple[Transport, RunLayout]:
        """The head of an attempt, as far as it is known here and can be reached."""
        try:
            return self._head(Cluster.of_attempt(self.layout, attempt))
        except (OSError, *NONSENSE):
            return self._head(self.cluster)


@contextlib.contextmanager
def open_run(prefix: str, *, home: Path, deps: Dependencies = REAL) -> Iterator[RunHandle]:
    """A run that exists already, by the beginning of its id, with transports to its hosts; raises UsageError."""
    layout = find_run(home, prefix)
    renew(layout)
    cluster = read_cluster(layout)
    record = SlurmRecord.of(layout)
    # while its job leaves Slurm, no step starts on its nodes any more
    allocation = deps.allocation_state(cluster)
    is_over = _has_ended(layout, cluster, record) or allocation == "over"
    is_suspended = allocation == "suspended" and not is_over
    cluster = left_here(cluster, record) if is_over else cluster
    supervisor = SupervisorRecord() if is_over else SupervisorRecord.load(layout)
    with _suspended(cluster) if is_suspended else reach(cluster, deps) as transports:
        if supervisor.candidates and (moved := follow_leader(layout, cluster, supervisor, transports)) is not None:
            supervisor, cluster = moved
        # an end that is written here counts: Slurm may have ended it while its supervisor saw a failure
        if is_over and cluster.head.transport == "local" and RunState.load(layout).phase in SUPERVISED:
            copy_records(layout, host_layout(cluster.head, layout.run_id), transports[cluster.head.name])
        yield RunHandle(
            layout=layout,
            cluster=cluster,
            transports=transports,
            supervisor=supervisor,
            is_over=is_over,
            is_suspended=is_suspended,
            prepares=lambda process: deps.prepares(layout, process),
        )


def follow_leader(
    layout: RunLayout, cluster: Cluster, supervisor: SupervisorRecord, transports: Transports
) -> tuple[SupervisorRecord, Cluster] | None:
    """The host whose supervisor leads the run now, and the hosts with the current head first, where either has changed;
    both are written down. None: nothing has, or nobody answers.
    """
    if not supervisor.candidates or supervisor.host is None or _has_ended_here(layout):
        return None
    known = _leader_as_of(layout, cluster.host(supervisor.host), transports)
    if known is None or known[1] != supervisor.host:
        others = [host for host in cluster.hosts if host.name != supervisor.host]
        with ThreadPoolExecutor(max_workers=32) as pool:
            found = [each for each in pool.map(lambda host: _leader_as_of(layout, host, transports), others) if each]
        known = max([*found, *([known] if known else [])], default=None)
    if known is None or known[1] not in transports:
        return None
    leader = known[1]
    there = host_layout(cluster.host(leader), layout.run_id)
    names = [host.name for host in cluster.hosts]
    with contextlib.suppress(HostUnreachable):  # then the others have told at least who leads
        data = read_if_there(transports[leader], there.cluster)
        with understood(leader, f"the hosts of {layout.run_id}"):
            names = [host.name for host in decode_record(data, there.cluster, Cluster).hosts] if data else []
    ordered = sorted(cluster.hosts, key=lambda host: names.index(host.name) if host.name in names else len(names))
    if leader == supervisor.host and tuple(ordered) == cluster.hosts:
        return None
    moved = replace(supervisor, host=leader), replace(cluster, hosts=tuple(ordered))
    moved[0].save(layout)
    write_record(layout.cluster, moved[1].to_json())
    return moved


def _has_ended_here(layout: RunLayout) -> bool:
    state = load_if_there(layout.state, RunState)
    return state is None or (state.phase not in SUPERVISED and not _is_deposed(state))


def _is_deposed(state: RunState | None) -> bool:
    """Whether it is what a supervisor wrote last, which then gave up because another host leads the run."""
    return state is not None and (state.error or {}).get("kind") == Deposed.__name__


def _leader_as_of(layout: RunLayout, host: Host, transports: Transports) -> tuple[int, str] | None:
    """The leader that a host has heard of last, and its term; None: it knows of none that still leads, or does not
    answer.
    """
    folder, remote = host_layout(host, layout.run_id).lead / host.name, transports[host.name]
    with contextlib.suppress(GanglineError, OSError, *NONSENSE):
        names = remote.names(folder)
        terms = [int(name[10:-5]) for name in names if HEARTBEAT.fullmatch(name)]
        if terms and f"deposed-{max(terms)}.json" not in names:
            said = json_object(read_if_there(remote, folder / f"heartbeat-{max(terms)}.json") or b"{}") or {}
            return max(terms), str(said.get("leader"))
    return None


@contextlib.contextmanager
def _suspended(cluster: Cluster) -> Iterator[Transports]:
    """Transports to nodes of a job that Slurm has suspended: none of them answers."""
    from gangline.transport.srun import suspended_node  # here, as other runs need not pay for it

    yield {host.name: suspended_node(host) for host in cluster.hosts}


def _has_ended(layout: RunLayout, cluster: Cluster, record: SlurmRecord | None) -> bool:
    if record is not None and cluster.hosts:
        with contextlib.suppress(RecordError):
            state = load_if_there(layout.state, RunState)
            return state is not None and has_ended(state, record)
    return False


def kill_without_supervisor(run: RunHandle, error: HostUnreachable, deps: Dependencies) -> NoReturn:
    """Order every host agent that answers to end its ranks, without the supervisor's host; raises its silence."""
    state = RunState.load(run.layout)
    # What this computer heard last may be old: the hosts know the attempt, and the epoch of its supervisor.
    request = request_here(run.layout, max(state.attempt, _last_attempt(run)))
    backend = deps.backend(request.backend)
    epochs = [status.epoch or 0 for status in backend.poll(request, run.transports)]
    # above the epoch of the supervisor there, which is refused from now on if it still lives
    epoch = max([state.epoch, *epochs]) + 1
    missed = backend.stop(request, run.transports, now=True, epoch=epoch)
    told = [name for name in request.names if name not in missed]
    raise HostUnreachable(
        f"{run.supervisor.host}, which supervises {run.layout.run_id}, does not answer",
        seen=f"{error.what}; ordered to end at once: {', '.join(told) or 'nobody'}; not reached: {', '.join(missed)}",
        fix=f"when the host is back, clean it up: gangline stop {run.layout.run_id}; if it is off, go on without it: "
        f"gangline resume {run.layout.run_id} --without {run.supervisor.host}",
    )


def _last_attempt(run: RunHandle) -> int:
    """The last attempt that a host which answers has a folder of."""

    def last_of(host: Host) -> int:
        with contextlib.suppress(GanglineError, OSError, *NONSENSE):
            names = run.transports[host.name].names(host_layout(host, run.layout.run_id).attempt(1).parent)
            return max((int(each) for each in names if each.isdecimal()), default=0)
        return 0

    hosts = [host for host in run.cluster.hosts if host.name != run.supervisor.host]
    with ThreadPoolExecutor(max_workers=32) as pool:
        return max(pool.map(last_of, hosts), default=0)


def request_here(layout: RunLayout, attempt: int) -> LaunchRequest:
    """The request of an attempt. Where the supervisor began that attempt: the last request that this computer wrote,
    with the folders of that attempt. Raises UsageError where it wrote none: another one began the run.
    """
    numbers = range(attempt, 0, -1)
    own = next((each for each in numbers if layout.request(each).exists()), None)
    if own is None:
        raise UsageError(
            f"this computer cannot give the hosts of {layout.run_id} orders by itself",
            seen="another computer began it, and it is a program of the user's own",
            fix="wait until the host of its supervisor answers, or give the order on the computer that began it",
        )
    request = load_record(layout.request(own), LaunchRequest)
    parts = [(part, PurePath(part.rank_files).parent / str(attempt)) for part in request.hosts]
    moved = [
        replace(part, attempt=attempt, rank_files=str(files), folder=str(files / PurePath(part.folder).name))
        for part, files in parts
    ]
    return request if own == attempt else replace(request, attempt=attempt, hosts=tuple(moved))


def copy_records(here: RunLayout, there: RunLayout, remote: Transport) -> None:
    """Renew this computer's copy; records that the supervisor's host does not have stay as they are.

    Raises HostUnreachable, and GanglineError for a damaged state, board or outcome.
    """
    state = read_if_there(remote, there.state)
    if state is None:
        return
    with understood(remote.host, f"where {here.run_id} stands"):
        said = decode_record(state, there.state, RunState, host=remote.host)
    number = said.attempt
    if said.phase == "preparing" or number < _attempt_here(here):
        return  # it was handed over, or is about to be: the records here are newer
    write_atomic(here.state, state)
    here.attempt(number).mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, kind in ATTEMPT_FILES:
        if (data := read_if_there(remote, path(there, number))) is not None:
            with understood(remote.host, f"{path(there, number).name} of {here.run_id}"):
                decode_record(data, path(there, number), kind, host=remote.host)
            write_atomic(path(here, number), data)
    if said.phase in {"finished", "stopped", "failed"}:
        from gangline.planner.outcome import Comparison, TimeReport  # here, as only the end of a run needs the planner

        _copy_if_read(here.comparison, there.comparison, remote, kind=Comparison)
        _copy_if_read(here.times(number), there.times(number), remote, kind=TimeReport)


def _copy_if_read(here: Path, there: Path, remote: Transport, *, kind: type[object]) -> None:
    """Copy a record that is written just before the run ends. One of another version, say, is left out."""
    if (data := read_if_there(remote, there)) is not None:
        with contextlib.suppress(*NONSENSE):
            decode_record(data, there, kind, host=remote.host)
            write_atomic(here, data)


def _attempt_here(here: RunLayout) -> int:
    try:
        return RunState.load(here).attempt
    except (FileNotFoundError, RecordError):
        return 0


def hand_over(
    here: RunLayout, there: RunLayout, remote: Transport, *, attempt: int, documents: Mapping[Path, dict[str, Any]]
) -> None:
    """Copy the records of an attempt to the host of its supervisor. documents: path on this computer -> keys."""
    for path in (here.state, here.request(attempt)):
        remote.write(there.folder / path.relative_to(here.folder), read_regular(path))
    for path, value in documents.items():
        target = there.folder / path.relative_to(here.folder)
        remote.write(target, encode_record(value, target))


def runs_there(remote: Transport, process: ProcessId) -> bool:
    """Whether that very process runs on the supervisor's host."""
    stat = read_if_there(remote, PurePath(f"/proc/{process.pid}/stat"), limit=4096)
    with understood(remote.host, f"whether process {process.pid} runs"):
        return bool(stat and parse_stat(process.pid, stat) == process)


# The host of the supervisor: the head, if it can continue without this computer, otherwise this computer.


def choose_in_background(cluster: Cluster, context: Context) -> Callable[[], SupervisorRecord]:
    """Ask in the background; returns a function that waits for the answer, or raises RunFailed."""
    if cluster.head.transport == "local":
        return SupervisorRecord
    pool = ThreadPoolExecutor(max_workers=1)
    answer = pool.submit(choose_supervisor_host, cluster, context)
    pool.shutdown(wait=False)
    return answer.result


def choose_supervisor_host(cluster: Cluster, context: Context) -> SupervisorRecord:
    """The head if it can continue without this computer; otherwise this computer, with the reasons."""
    head = cluster.head
    if head.transport == "local":
        return SupervisorRecord()
    if cluster.supervisor == "here":
        return SupervisorRecord(why_not=("the cluster file says `supervisor: here`",))
    reasons = _why_not(cluster, context)
    if reasons and cluster.takeover == "votes" and cluster.voters:
        _refuse_votes(f"{head.name} says: {'; '.join(reasons)}")
    if reasons and cluster.supervisor == "head":
        raise RunFailed(
            f"{head.name} cannot supervise the run",
            seen="; ".join(reasons),
            fix="put that right, or write `supervisor: auto` in the cluster file",
        )
    if reasons:
        return SupervisorRecord(why_not=(f"{head.name} says: {'; '.join(reasons)}",))
    return SupervisorRecord(host=head.name, candidates=_candidates(cluster, context))


def _candidates(cluster: Cluster, context: Context) -> tuple[str, ...]:
    """Hosts that could take over from the supervisor on the head; () where that is not asked for, and of two hosts, as
    neither is elected without the other. Raises RunFailed where one could not.
    """
    if cluster.takeover == "none" or not cluster.voters:
        return ()

    anywhere = seen_from_anywhere(cluster)

    def reasons_of(host: Host) -> list[str]:
        first = sorted(anywhere.voters, key=lambda each: each.name != host.name)
        seen = seen_from(replace(anywhere, hosts=tuple(first), witness=None), host.name)
        try:
            return context.deps.cannot_supervise(seen, context.transports[host.name])
        except (GanglineError, OSError) as error:
            return [str(error).splitlines()[0]]

    others = cluster.hosts[1:][:MOST_CANDIDATES]
    with ThreadPoolExecutor(max_workers=MOST_CANDIDATES) as pool:
        found = dict(zip([host.name for host in others], pool.map(reasons_of, others), strict=True))
    if any(found.values()):
        _refuse_votes("; ".join(f"{name} says: {reasons[0]}" for name, reasons in found.items() if reasons))
    return tuple(found)


def _refuse_votes(seen: str) -> NoReturn:
    raise RunFailed(
        "the hosts cannot take over from each other, as `takeover: votes` asks",
        seen=seen,
        fix="let every host log in to all others: gangline prepare --between-hosts; or delete the line `takeover`; "
        "one that is off, a witness, too, is left out of a run that is resumed: --without NAME",
    )


def seen_from_anywhere(cluster: Cluster) -> Cluster:
    """The same cluster as every one of its hosts reaches the others: by user, address and port."""
    hosts = tuple(map(_from_elsewhere, cluster.hosts))
    return dataclasses.replace(cluster, hosts=hosts, witness=cluster.witness and _from_elsewhere(cluster.witness))


def _why_not(cluster: Cluster, context: Context) -> list[str]:
    if here := [host.name for host in cluster.hosts if host.transport == "local"]:
        return [f"{', '.join(here)} is this computer, which is not reached by ssh"]
    seen = seen_from_head(cluster)
    if cluster.takeover == "votes" and cluster.voters:
        seen = dataclasses.replace(seen, hosts=seen.voters, witness=None)
    return context.deps.cannot_supervise(seen, context.transports[cluster.head.name])


def seen_from_head(cluster: Cluster) -> Cluster:
    """The same cluster as the head reaches it: itself, and the others by user, address and port."""
    head, *others = cluster.hosts
    here = dataclasses.replace(head, transport="local", ssh=None, ssh_port=None)
    return seen_from_anywhere(dataclasses.replace(cluster, hosts=(here, *others)))


def _from_elsewhere(host: Host) -> Host:
    """Names of this computer's ssh_config mean nothing on another one."""
    if host.transport != "ssh":
        return host
    found = resolve(host.ssh or host.name, host.ssh_port)
    return dataclasses.replace(host, ssh=f"{found.user}@{host.address}", ssh_port=found.port)


# `gangline attach`: a run whose supervisor died gets a new one.


def supervise_again(run: RunHandle, *, console: Console, deps: Dependencies = REAL) -> bool:
    """Start a supervisor for a run of this computer that has lost its own; whether one was started.

    It takes over the attempt that runs and starts no rank. A run without processes is left to `resume`. Where the head
    supervises the run, a host agent there starts the new supervisor. Raises RunFailed where none comes up.
    """
    record = run.record()
    record.require_state()
    if (
        run.is_over
        or run.supervisor_host is not None
        or not record.lost
        or record.state is None
        or not deps.is_alive(run.layout, None)
    ):
        return False
    context = Context(transports=dict(run.transports), home=run.layout.root, console=console, deps=deps)
    try:
        deps.spawn(run.layout.folder, record.state.attempt, context.secrets)
    except RunFailed:
        if run.record().lost:
            raise
        return False  # another command was first
    console.report(f"{run.layout.run_id} had lost its supervisor; a new one supervises it now")
    return True
