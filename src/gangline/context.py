"""The dependencies of the main path, which tests replace."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gangline.errors import HostUnreachable, UsageError
from gangline.launch.backend import Backend
from gangline.launch.backends import BACKENDS, backend
from gangline.launch.poll import free_port
from gangline.provision.ask import AskLook, ask_look
from gangline.provision.console import Console
from gangline.runs.cluster import ENGINES, IN_ALLOCATION, Cluster, Host, in_allocation
from gangline.runs.job import Job, NotifyJob
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_record
from gangline.runs.state import ProcessId, StopOrder
from gangline.runs.training_environment import training_python
from gangline.runs.typed_command import TypedCommand
from gangline.supervise.allocation import AllocationState, allocation_state, prepares
from gangline.supervise.detached import (
    cannot_supervise,
    is_alive,
    leave_run,
    spawn,
    spawn_there,
    stop_run,
    unfinished,
)
from gangline.transport.connect import connect_all
from gangline.transport.transport import SECRETS, Transport, below_home

Transports = dict[str, Transport]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The functions that reach hosts or start processes; tests put fakes here."""

    connect: Callable[[Cluster], Transports] = connect_all
    backend: Callable[[str], Backend] = backend
    spawn: Callable[[Path, int, Mapping[str, str]], None] = spawn
    spawn_there: Callable[[Host, Transport, RunLayout, int, Mapping[str, str]], None] = spawn_there
    cannot_supervise: Callable[[Cluster, Transport], list[str]] = cannot_supervise
    is_alive: Callable[[RunLayout, Transport | None], bool] = is_alive
    unfinished: Callable[[RunLayout, Transport | None], tuple[str, ...]] = unfinished
    stop_run: Callable[[RunLayout, StopOrder, Transport | None], None] = stop_run
    leave_run: Callable[[RunLayout, Sequence[str], Transport | None], None] = leave_run
    allocation_state: Callable[[Cluster], AllocationState] = allocation_state
    prepares: Callable[[RunLayout, ProcessId], bool] = prepares
    free_port: Callable[..., int] = free_port
    ask_look: AskLook = ask_look
    variables: Mapping[str, str] = field(default_factory=lambda: os.environ)


REAL = Dependencies()
"""Real hosts, real processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The context of every step of a verb."""

    transports: Transports
    home: Path
    console: Console
    deps: Dependencies

    @property
    def secrets(self) -> dict[str, str]:
        """Tokens of this shell for the ranks, passed through stdin and memory only."""
        variables = self.deps.variables
        return {name: variables[name] for name in SECRETS if variables.get(name)}


def default_home() -> Path:
    """Where the controller keeps its runs: $GANGLINE_HOME, or the user's state folder."""
    if named := os.environ.get("GANGLINE_HOME"):
        return Path(named).expanduser().absolute()
    # imported here: it costs 30 ms
    import platformdirs

    return platformdirs.user_state_path("gangline")


def settings_file(home: Path) -> Path:
    """The user's settings: in the user's configuration folder, or in a home that was named instead of the usual one."""
    import platformdirs

    if home == platformdirs.user_state_path("gangline"):
        return platformdirs.user_config_path("gangline") / "settings.yaml"
    return home / "settings.yaml"


def load_settings(home: Path) -> NotifyJob | None:
    """Who gets messages about a run whose request does not say; raises SpecError."""
    path = settings_file(home)
    if not path.exists():
        return None
    from gangline.config.load import read_settings

    return read_settings(path)


# From files to a cluster with transports to its hosts.


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """The request of `train`, `plan` and `bench`."""

    home: Path
    job: Path | Mapping[str, Any] | Job
    """A file, its keys, or what they mean."""
    overrides: tuple[str, ...] = ()
    cluster: Path | Cluster | None = None
    """None: this computer alone."""
    force: bool = False
    """Start even if the plan calls it too slow."""
    trial: Mapping[str, Any] | None = None
    """The sweep that the run belongs to, which has looked at its rows, and its number there."""
    typed: TypedCommand | None = None
    """The command line that asks for it, kept with the run."""
    turn: Callable[[], None] | None = None
    """Returns once the hosts are free, or raises; until then everything is brought to them. None: they must be free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOptions:
    """The request of `resume`."""

    cluster: Path | Cluster | None = None
    """Hosts to continue on; None: those of before."""
    without: tuple[str, ...] = ()
    """Hosts that are off. Where one of them has the run's supervisor, what is left of the run is ended first."""
    force: bool = False
    """Start even if the plan calls it too slow."""


def load(start: StartOptions) -> tuple[Job, Cluster]:
    """The job and the cluster of the user's files; raises SpecError with every mistake."""
    return load_job(start), load_cluster(start.cluster, start.home)


def load_job(start: StartOptions) -> Job:
    """The job of the user's file; raises SpecError with every mistake."""
    if isinstance(start.job, Job):
        return start.job
    # pydantic costs 0.2 s, which only verbs that read the user's files pay
    from gangline.config.load import load_job as from_file

    return from_file(start.job, start.overrides)


def read_cluster(layout: RunLayout) -> Cluster:
    """The cluster of a run that exists already; raises UsageError where its file is gone or damaged."""
    try:
        return load_record(layout.cluster, Cluster)
    except FileNotFoundError as error:
        raise UsageError(
            f"{layout.run_id} cannot be used",
            seen=f"{layout.cluster}: {error}",
            fix="it was interrupted before it began; start a new run: gangline train",
        ) from error


def cluster_file(named: Path | None) -> Path | None:
    """The file that describes the cluster: the one that was named, else cluster.yaml in the current folder, if any."""
    from gangline.config.load import default_cluster

    return named or default_cluster(Path.cwd())


def load_cluster(path: Path | Cluster | None, home: Path) -> Cluster:
    """The cluster of a file, or one that is read already; None: this computer, or the allocation of Slurm that we are
    in.
    """
    if isinstance(path, Cluster):
        return path
    from gangline.config.load import load_cluster as from_file

    if path is None and IN_ALLOCATION in os.environ:
        return in_allocation(python=training_python(home))
    return from_file(path, home=home, backends=BACKENDS)


@contextlib.contextmanager
def reach(cluster: Cluster, deps: Dependencies) -> Iterator[Transports]:
    """Transports to all hosts, closed at the end."""
    transports = deps.connect(cluster)
    try:
        yield transports
    finally:
        with ThreadPoolExecutor(max_workers=max(1, len(transports))) as pool:
            list(pool.map(lambda transport: transport.close(), transports.values()))


@contextlib.contextmanager
def reached(cluster: Cluster, *, home: Path, console: Console, deps: Dependencies) -> Iterator[tuple[Cluster, Context]]:
    """The cluster with absolute folders on each host, and the context for the steps. Raises UsageError for a Slurm
    cluster outside of an allocation: it has no hosts yet.
    """
    if not cluster.hosts:
        cluster = deps.backend(cluster.backend).hosts(cluster, deps.variables)
    with reach(cluster, deps) as transports:
        context = Context(transports=transports, home=home, console=console, deps=deps)
        if broken := backend(cluster.backend).promises.broken():
            console.report(f"backend    {cluster.backend}: {'; '.join(broken)}")
        yield located(cluster, transports), context


@contextlib.contextmanager
def starting(
    cluster: Cluster, *, home: Path, console: Console, deps: Dependencies
) -> Iterator[tuple[Cluster, Context]]:
    """As `reached`, for verbs that start something: on the hosts that the backend gives. Raises UsageError where it
    cannot start anything.
    """
    cluster = deps.backend(cluster.backend).hosts(cluster, deps.variables)
    with reached(cluster, home=home, console=console, deps=deps) as found:
        yield found


def located(cluster: Cluster, transports: Transports) -> Cluster:
    """The cluster with every `~/` of a host's paths replaced by the home folder of the user there.

    A host that does not answer keeps its `~/`: the checks will report it.
    """
    with ThreadPoolExecutor(max_workers=32) as pool:
        witnesses = [cluster.witness] if cluster.witness is not None else []
        expanded = pool.map(lambda host: _expanded_paths(host, transports[host.name]), witnesses)
        hosts = tuple(pool.map(lambda host: _located(host, transports[host.name]), cluster.hosts))
        return dataclasses.replace(cluster, hosts=hosts, witness=next(expanded, None))


def _located(host: Host, transport: Transport) -> Host:
    """The host with absolute paths; a Python from a lock is chosen later, from the facts of the host."""
    # imported here: it costs 30 ms, which verbs that reach no host need not pay
    from gangline.provision.environment import wrapped

    host = _expanded_paths(host, transport)
    return host if host.environment.kind in {"locked", *ENGINES} else wrapped(host)


def _expanded_paths(host: Host, transport: Transport) -> Host:
    place = host.environment.path or ""
    if not any(path.startswith("~/") for path in (host.workdir, host.python, place)):
        return host
    try:
        home = transport.home()
    except HostUnreachable:
        return host
    environment = host.environment
    if environment.kind not in {"locked", *ENGINES} and place:  # a lock is a file of this computer
        environment = dataclasses.replace(environment, path=below_home(place, home))
    return dataclasses.replace(
        host,
        workdir=below_home(host.workdir, home),
        python=below_home(host.python, home),
        environment=environment,
    )
