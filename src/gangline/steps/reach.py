"""From files to a cluster whose hosts can be talked with."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gangline.errors import HostUnreachable, UsageError
from gangline.launch.registry import BACKENDS, backend
from gangline.remote.transport import Transport, below_home
from gangline.runs.cluster import Cluster, Host
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.versions import load_record
from gangline.steps.seams import Means, Seams, Talk, Transports
from gangline.sync.environment import wrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the user asked to be started."""

    home: Path
    job: Path
    overrides: tuple[str, ...] = ()
    cluster: Path | None = None
    """None: this computer alone."""
    force: bool = False
    """Whether what the plan calls slow is started all the same."""


def load(start: Start) -> tuple[Job, Cluster]:
    """The user's words as a job and a cluster; raises SpecError with every mistake."""
    # pydantic costs 0.2 s, which only verbs that read the user's files pay
    from gangline.spec.load import load_job

    return load_job(start.job, start.overrides), load_cluster(start.cluster, start.home)


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
    from gangline.spec.load import default_cluster

    return named or default_cluster(Path.cwd())


def load_cluster(path: Path | None, home: Path) -> Cluster:
    """The cluster of a file; None: this computer."""
    from gangline.spec.load import load_cluster as from_file

    return from_file(path, home=home, backends=BACKENDS)


@contextlib.contextmanager
def reach(cluster: Cluster, seams: Seams) -> Iterator[Transports]:
    """Transports to all hosts, closed at the end."""
    transports = seams.connect(cluster)
    try:
        yield transports
    finally:
        with ThreadPoolExecutor(max_workers=max(1, len(transports))) as pool:
            list(pool.map(lambda transport: transport.close(), transports.values()))


@contextlib.contextmanager
def reached(cluster: Cluster, *, home: Path, talk: Talk, seams: Seams) -> Iterator[tuple[Cluster, Means]]:
    """The cluster with the folders that are meant on each host, and what the steps work with."""
    with reach(cluster, seams) as transports:
        means = Means(transports=transports, home=home, talk=talk, seams=seams)
        if broken := backend(cluster.backend).promises.broken():
            talk.say(f"backend    {cluster.backend}: {'; '.join(broken)}")
        yield located(cluster, transports), means


@contextlib.contextmanager
def starting(cluster: Cluster, *, home: Path, talk: Talk, seams: Seams) -> Iterator[tuple[Cluster, Means]]:
    """As `reached`, for verbs that start something: on the hosts that the backend gives. Raises UsageError where it
    cannot start anything.
    """
    cluster = seams.backend().hosts(cluster, seams.variables)
    with reached(cluster, home=home, talk=talk, seams=seams) as found:
        yield found


def located(cluster: Cluster, transports: Transports) -> Cluster:
    """The cluster with every `~/` of a host's paths replaced by the home folder of the user there.

    A host that does not answer keeps its words: the checks will tell.
    """
    with ThreadPoolExecutor(max_workers=32) as pool:
        return dataclasses.replace(
            cluster, hosts=tuple(pool.map(lambda host: _located(host, transports[host.name]), cluster.hosts))
        )


def _located(host: Host, transport: Transport) -> Host:
    """A Python that is there already is known by its words alone; one from a lock is chosen once facts are known."""
    host = _expanded_paths(host, transport)
    return host if host.environment.kind == "locked" else wrapped(host)


def _expanded_paths(host: Host, transport: Transport) -> Host:
    place = host.environment.path or ""
    if not any(path.startswith("~/") for path in (host.workdir, host.python, place)):
        return host
    try:
        home = transport.home()
    except HostUnreachable:
        return host
    environment = host.environment
    if environment.kind != "locked" and place:  # a lock is a file of this computer
        environment = dataclasses.replace(environment, path=below_home(place, home))
    return dataclasses.replace(
        host,
        workdir=below_home(host.workdir, home),
        python=below_home(host.python, home),
        environment=environment,
    )
