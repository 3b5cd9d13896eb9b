"""Who keeps the records of a run: this computer, or the head that looks after it while this computer is away.

Where the head keeps them, this computer has a copy of what people ask for (state.json and what each attempt said),
renewed whenever the head answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, NoReturn

from gangline.context import REAL, Context, Dependencies, Transports, reach, read_cluster
from gangline.errors import HostKeyRefused, HostUnreachable, RecordError, RunFailed
from gangline.launch.backend import LaunchRequest
from gangline.planner.outcome import Comparison, TimeReport
from gangline.provision.tell import Console
from gangline.provision.trees import host_layout
from gangline.report.follow import View, checked_board
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_atomic
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
from gangline.transport.hostkeys import resolve
from gangline.transport.ssh_options import NONSENSE, understood
from gangline.transport.transport import Transport

REVIVED_S = 75.0
"""After so long the host agent beside a supervisor that is gone has started another one: it looks once a second, and
waits a minute at the most where several have died one after the other (gangline.agent.supervise.detach)."""
ATTEMPT_FILES: tuple[tuple[Callable[[RunLayout, int], Path], Any], ...] = (
    (RunLayout.outcome, AttemptOutcome),
    (RunLayout.board, checked_board),
)
"""What the supervisor writes of an attempt, and people want to see here; and what raises for anything else.

What was started (request.json) this computer wrote itself: `kill_without_keeper` has hosts do what stands there, so
nobody else may say it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """keeper.json: who looks after the run, and why not the head if it is not."""

    host: str | None = None
    """The host whose supervisor looks after the run; None: this computer."""
    why_not: tuple[str, ...] = ()
    """Why the head does not: then nobody looks after the run while this computer is away."""

    @property
    def unattended(self) -> bool:
        """Whether somebody looks after the run while this computer is away."""
        return self.host is not None

    def save(self, layout: RunLayout) -> None:
        """Write keeper.json."""
        write_record(layout.keeper, {"host": self.host, "why_not": list(self.why_not)})

    @staticmethod
    def load(layout: RunLayout) -> Keeping:
        """Read keeper.json; a run without one is kept here."""
        return load_if_there(layout.keeper, Keeping) or Keeping()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHandle:
    """A run that exists already, and the ways to its hosts."""

    layout: RunLayout
    """This computer's records of it."""
    cluster: Cluster
    transports: Transports
    keeping: Keeping

    @property
    def keeper(self) -> Transport | None:
        """The way to the host that keeps the records; None: this computer keeps them."""
        return None if self.keeping.host is None else self.transports[self.keeping.host]

    @property
    def records(self) -> RunLayout:
        """Where the records lie, on the host that keeps them."""
        if self.keeping.host is None:
            return self.layout
        return host_layout(self.cluster.host(self.keeping.host), self.layout.run_id)

    def record(self) -> RunRecord:
        """Where the run stands now; where its keeper does not answer, what was last heard, and that it is old.

        Raises HostKeyRefused where somebody else answers in its place.
        """
        keeper = self.keeper
        if keeper is None or _is_prepared_here(self.layout):
            return read_record(self.layout)
        try:
            copy_records(self.layout, self.records, keeper)
            return read_record(self.layout, is_alive=lambda process: self._runs_there(keeper, process))
        except HostKeyRefused:
            raise
        except HostUnreachable as error:
            last = read_record(self.layout, is_alive=lambda _process: True)
            return last if last.ended else replace(last, silent=f"{self.keeping.host}: {error.what}")

    def _runs_there(self, keeper: Transport, process: ProcessId) -> bool:
        if runs_there(keeper, process):
            return True
        copy_records(self.layout, self.records, keeper)  # it may have written the end and left since we read it
        return False

    def view(self) -> View:
        """Where the run is read, to follow it."""
        head, head_layout = self._head(self.cluster)
        return View(
            layout=self.layout,
            head=head,
            head_layout=head_layout,
            read=self.record,
            head_of=self._head_of,
            patience_s=REVIVED_S if self.keeping.unattended else 0.0,
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
    cluster = read_cluster(layout)
    with reach(cluster, deps) as transports:
        yield RunHandle(layout=layout, cluster=cluster, transports=transports, keeping=Keeping.load(layout))


def kill_without_keeper(run: RunHandle, error: HostUnreachable, deps: Dependencies) -> NoReturn:
    """Order every host agent that answers to end its ranks, though who keeps the run does not answer; then say so."""
    state = RunState.load(run.layout)
    request = _request_here(run.layout, state.attempt)
    # above the epoch of the supervisor there, which is refused from now on if it still lives
    missed = deps.backend(request.backend).stop(request, run.transports, now=True, epoch=state.epoch + 1)
    told = [name for name in request.names if name not in missed]
    raise HostUnreachable(
        f"{run.keeping.host}, which keeps {run.layout.run_id}, does not answer",
        seen=f"{error.what}; ordered to end at once: {', '.join(told) or 'nobody'}; not reached: {', '.join(missed)}",
        fix=f"when the host is back, clean it up: gangline stop {run.layout.run_id}",
    )


def _request_here(layout: RunLayout, attempt: int) -> LaunchRequest:
    """What was started in an attempt. Where the keeper began it by itself, the last that this computer has started, in
    the folders of that attempt.
    """
    numbers = range(attempt, 0, -1)
    own = next((each for each in numbers if layout.request(each).exists()), attempt)
    request = load_record(layout.request(own), LaunchRequest)
    parts = [(part, PurePath(part.rank_files).parent / str(attempt)) for part in request.hosts]
    moved = [
        replace(part, attempt=attempt, rank_files=str(files), folder=str(files / PurePath(part.folder).name))
        for part, files in parts
    ]
    return request if own == attempt else replace(request, attempt=attempt, hosts=tuple(moved))


def copy_records(here: RunLayout, there: RunLayout, keeper: Transport) -> None:
    """Renew this computer's copy; what the keeper does not have is left as it is. Raises HostUnreachable, and
    GanglineError for what is no state of a run, no board and no outcome.
    """
    state = _read(keeper, there.state)
    if state is None:
        return
    with understood(keeper.host, f"where {here.run_id} stands"):
        said = decode_record(state, there.state, RunState, host=keeper.host)
    number = said.attempt
    if said.phase == "preparing" or number < _attempt_here(here):
        return  # what was handed over, or is about to be: this computer knows more
    write_atomic(here.state, state)
    here.attempt(number).mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, kind in ATTEMPT_FILES:
        if (data := _read(keeper, path(there, number))) is not None:
            with understood(keeper.host, f"{path(there, number).name} of {here.run_id}"):
                decode_record(data, path(there, number), kind, host=keeper.host)
            write_atomic(path(here, number), data)
    if said.phase in {"finished", "stopped", "failed"}:
        _copy_if_read(here.comparison, there.comparison, keeper, kind=Comparison)
        _copy_if_read(here.times(number), there.times(number), keeper, kind=TimeReport)


def _copy_if_read(here: Path, there: Path, keeper: Transport, *, kind: type[object]) -> None:
    """What is written just before the run has ended. One that cannot be read, of another version perhaps, hides nothing
    else: then there is none here.
    """
    if (data := _read(keeper, there)) is not None:
        with contextlib.suppress(*NONSENSE):
            decode_record(data, there, kind, host=keeper.host)
            write_atomic(here, data)


def _attempt_here(here: RunLayout) -> int:
    try:
        return RunState.load(here).attempt
    except (FileNotFoundError, RecordError):
        return 0


def hand_over(
    here: RunLayout, there: RunLayout, keeper: Transport, *, attempt: int, documents: Mapping[Path, dict[str, Any]]
) -> None:
    """Give the records of an attempt to the host that will look after it. documents: path on this computer -> keys."""
    for path in (here.state, here.request(attempt)):
        keeper.write(there.folder / path.relative_to(here.folder), read_regular(path))
    for path, value in documents.items():
        target = there.folder / path.relative_to(here.folder)
        keeper.write(target, encode_record(value, target))


def runs_there(keeper: Transport, process: ProcessId) -> bool:
    """Whether that very process runs on the keeper's host."""
    try:
        stat = keeper.read(PurePath(f"/proc/{process.pid}/stat"), limit=4096)
    except FileNotFoundError:
        return False
    with understood(keeper.host, f"whether process {process.pid} runs"):
        return bool(stat) and parse_stat(process.pid, stat) == process


def _is_prepared_here(layout: RunLayout) -> bool:
    """Whether a command on this computer prepares an attempt right now: then this computer knows best."""
    record = read_record(layout)
    return record.phase == "preparing"


def _read(transport: Transport, path: PurePath) -> bytes | None:
    try:
        return transport.read(path)
    except FileNotFoundError:
        return None


# Who looks after a run: its head, if it can go on without this computer, else this computer.


def ask_who_keeps(cluster: Cluster, context: Context) -> Callable[[], Keeping]:
    """Ask while other things are done, for it takes as long as they do; what gives the answer, or raises RunFailed."""
    if cluster.head.transport == "local":
        return Keeping
    pool = ThreadPoolExecutor(max_workers=1)
    answer = pool.submit(who_keeps, cluster, context)
    pool.shutdown(wait=False)
    return answer.result


def who_keeps(cluster: Cluster, context: Context) -> Keeping:
    """The head looks after the run if it can go on without this computer; else this computer does, and says so."""
    head = cluster.head
    if head.transport == "local":
        return Keeping()
    if cluster.supervisor == "here":
        return Keeping(why_not=("the cluster file says `supervisor: here`",))
    reasons = _why_not(cluster, context)
    if reasons and cluster.supervisor == "head":
        raise RunFailed(
            f"{head.name} cannot look after the run",
            seen="; ".join(reasons),
            fix="put that right, or write `supervisor: auto` in the cluster file",
        )
    if reasons:
        return Keeping(why_not=(f"{head.name} says: {'; '.join(reasons)}",))
    return Keeping(host=head.name)


def _why_not(cluster: Cluster, context: Context) -> list[str]:
    if here := [host.name for host in cluster.hosts if host.transport == "local"]:
        return [f"{', '.join(here)} is this computer, which is not reached by ssh"]
    return context.deps.cannot_supervise(seen_from_head(cluster), context.transports[cluster.head.name])


def seen_from_head(cluster: Cluster) -> Cluster:
    """The same cluster as the head reaches it: itself, and the others by user, address and port."""
    head, *others = cluster.hosts
    here = dataclasses.replace(head, transport="local", ssh=None, ssh_port=None)
    return dataclasses.replace(cluster, hosts=(here, *map(_from_elsewhere, others)))


def _from_elsewhere(host: Host) -> Host:
    """Names of this computer's ssh_config mean nothing on another one."""
    if host.transport == "local":
        return host
    found = resolve(host.ssh or host.name, host.ssh_port)
    return dataclasses.replace(host, ssh=f"{found.user}@{host.address}", ssh_port=found.port)


# `gangline attach`: a run that goes on though its supervisor is gone gets another one.


def look_after(run: RunHandle, *, console: Console, deps: Dependencies = REAL) -> bool:
    """Start a supervisor for a run that this computer keeps and nobody looks after; whether one was started.

    It takes the attempt over as it runs, and starts nothing of it again. A run of which nothing runs any more is left
    as it is: to go on with it is for `resume`. Where the head keeps the run, a host agent there starts another one.
    Raises RunFailed where none comes up.
    """
    record = run.record()
    record.require_state()
    if run.keeper is not None or not record.lost or record.state is None or not deps.is_alive(run.layout, None):
        return False
    context = Context(transports=dict(run.transports), home=run.layout.root, console=console, deps=deps)
    try:
        deps.spawn(run.layout.folder, record.state.attempt, context.secrets)
    except RunFailed:
        if run.record().lost:
            raise
        return False  # somebody else's came first
    console.report(f"{run.layout.run_id} had lost its supervisor; a new one supervises it now")
    return True
