"""Code and environment on every host, and on this computer alone."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from gangline.context import Context
from gangline.control.supervision import SupervisorRecord, choose_in_background, choose_supervisor_host
from gangline.decide.inspect import InspectResult
from gangline.errors import GanglineError, HostUnreachable, RunFailed
from gangline.inventory.gather import gather
from gangline.launch.backend import HostRequest, LaunchRequest
from gangline.launch.backends import BACKENDS
from gangline.plugins import package_version
from gangline.provision.ask import ask_agent
from gangline.provision.code import place_code, preview_code
from gangline.provision.console import Console
from gangline.provision.environment import compare_environments, place_environments, preview_environments, require_equal
from gangline.provision.requirements import load_lock
from gangline.runs.cluster import Cluster, Environment, Host
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.training_environment import FILE, TrainingEnvironment
from gangline.transport.fanout import in_parallel
from gangline.transport.local import LocalTransport
from gangline.transport.transport import Transport

# Our folders on this computer and on the hosts.


TIMEOUT_S = 60.0


def claim(cluster: Cluster, context: Context) -> None:
    """Make gangline's home on this computer and the work folder of every host, for this user alone.

    Raises RunFailed where one of them belongs to another user, or is a link of another user.
    """
    here: Transport = LocalTransport(Host(name="this computer", workdir="", python=""))
    local = [host.workdir for host in cluster.hosts if host.transport == "local"]
    wanted = [(here, [str(context.home), *local])]
    wanted += [(context.transports[host.name], [host.workdir]) for host in cluster.hosts if host.transport != "local"]
    in_parallel(lambda each: ask_agent(each[0], "claim", {"folders": each[1]}, timeout_s=TIMEOUT_S), wanted)


# The slots of every host, held while the start copies and tokenises.


@contextlib.contextmanager
def slots_held(request: LaunchRequest, context: Context, *, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the slots of all hosts until the host agents have them; raises RunFailed where another run has one.

    request: what will be started, as far as it is known before anything is copied. A host agent of the same run and
    attempt shares what is held here. The head comes first: of two starts at once that want the same hosts, one goes on.
    patience_s: how long a run that has one may take to let go of it.
    """
    holds = _held(request, context, deadline=time.monotonic() + patience_s)
    try:
        yield
    finally:
        for hold in holds:
            hold.release()


LOOK_AGAIN_S = 0.2


def _held(request: LaunchRequest, context: Context, *, deadline: float) -> list[_Hold]:
    parts = [part for part in request.hosts if part.leases is not None]
    while True:
        holds = [_Hold(part, context) for part in parts]
        try:
            for some in (holds[:1], holds[1:]):
                _take(some)
        except BaseException as error:
            for hold in holds:
                hold.release()
            taken = isinstance(error, RunFailed) and error.details.get("taken")
            if not taken or time.monotonic() >= deadline:
                raise
        else:
            return holds
        time.sleep(LOOK_AGAIN_S)


def _take(holds: Sequence[_Hold]) -> None:
    for hold in holds:
        hold.start()
    errors = [error for hold in holds if (error := hold.wait()) is not None]
    if errors:
        first, *more = errors
        lines = [line for error in more for line in (error.what, error.seen) if line]
        taken = {"taken": not isinstance(first, HostUnreachable)}
        raise RunFailed(first.what, seen="\n        ".join([first.seen, *lines]), fix=first.fix, details=taken)


class _Hold(threading.Thread):
    """The slots of one host, held by a command of its agent."""

    def __init__(self, part: HostRequest, context: Context) -> None:
        super().__init__(daemon=True, name=f"slots of {part.host}")
        self._released = PurePath(part.leases or "", f".released.{part.run_id}.{part.attempt}")
        self._request = {**dataclasses.asdict(part), "released": str(self._released)}
        self._transport = context.transports[part.host]
        self._begun = threading.Event()
        self._error: GanglineError | None = None

    def run(self) -> None:
        """Hold them until they are released, or the host cannot."""
        try:
            ask_agent(self._transport, "reserve", self._request, on_progress=lambda _record: self._begun.set())
        except GanglineError as error:
            self._error = error
        finally:
            self._begun.set()

    def wait(self) -> GanglineError | None:
        """The error of a host that cannot hold them."""
        if not self._begun.wait(TIMEOUT_S):
            host = self._transport.host
            return HostUnreachable(f"{host} does not respond in time", fix=f"look at the load and the disk of {host}")
        return self._error

    def release(self) -> None:
        """Let go of them. Where the host does not answer, they are free once its connection has ended."""
        if not self.is_alive():
            return
        with contextlib.suppress(GanglineError, OSError):
            self._transport.write(self._released, b"")
            self.join(TIMEOUT_S)


def discard(run: RunLayout, cluster: Cluster, context: Context) -> None:
    """Delete what a run that never ran has left on the hosts and here. A host that does not answer keeps records."""

    def at(host: Host) -> None:
        with contextlib.suppress(GanglineError, OSError):
            folder = str(RunLayout(Path(host.workdir), run.run_id).folder)
            ask_agent(context.transports[host.name], "discard", {"folder": folder}, timeout_s=TIMEOUT_S)

    in_parallel(at, cluster.hosts)
    shutil.rmtree(run.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Hosts on which ranks can be started."""

    cluster: Cluster
    """Every host with its Python and the folder of our code."""
    networks: Mapping[str, Mapping[str, str]]
    """Variables that name each host's network interfaces."""
    supervisor: Callable[[], SupervisorRecord]
    """Waits for the choice of the supervisor's host; raises RunFailed."""


def packages_of(cluster: Cluster, job: Job | None, console: Console) -> tuple[str, ...]:
    """The packages of the plug-ins that a cluster and a job use. Raises PluginError where one is not installed.

    Reports where another version is installed than the run began with.
    """
    versions = job.plugins if job is not None else {}
    for package, version in versions.items():
        now = package_version(package)
        if now != version:
            console.report(f"plug-in    {package} is {now} now; the run began with {version}")
    launcher = BACKENDS.plugin(cluster.backend)
    return tuple({*versions, *([launcher.package] if launcher is not None else [])})


def equip(inspection: InspectResult, context: Context, *, job: Job | None = None) -> Ready:
    """Bring gangline's code, the plug-ins that the job uses, and the environment to every host that lacks them.

    Environments of the user are compared by content; raises CheckFailed where ranks would differ.
    """
    transports, console = context.transports, context.console
    cluster = place_code(
        inspection.cluster, transports, packages=packages_of(inspection.cluster, job, console), console=console
    )
    supervisor = choose_in_background(cluster, context)
    cluster = place_environments(cluster, inspection.inventory, transports, home=context.home, console=console)
    if not cluster.is_one_machine:
        differences = compare_environments(cluster, transports)
        require_equal(differences)
        if differences:
            console.report(
                "environments differ in packages that do not matter: "
                f"{'; '.join(each.line for each in differences[:3])}"
            )
    return Ready(cluster=cluster, networks=inspection.rank_variables, supervisor=supervisor)


def preview(inspection: InspectResult, context: Context, *, job: Job | None = None) -> Ready:
    """The result that `equip` would have; changes nothing."""
    cluster = preview_code(inspection.cluster, packages=packages_of(inspection.cluster, job, context.console))
    cluster = preview_environments(cluster, inspection.inventory, context.transports)
    return Ready(
        cluster=cluster,
        networks=inspection.rank_variables,
        supervisor=lambda: choose_supervisor_host(cluster, context),
    )


# The environment of this computer.


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What `setup_here` built, or would build."""

    environment: TrainingEnvironment
    num_packages: int
    torch: str
    """The version of torch in the lock."""
    has_gpu: bool


def setup_here(*, lock: Path | None, dry_run: bool, home: Path, console: Console) -> Setup:
    """Build the environment that trains on this computer, below `home`, and have later starts use it.

    lock: a requirements file with a version for each package; None: gangline's own. dry_run: change nothing. What is
    there already is verified. Raises CheckFailed, NoWheels, RunFailed or UsageError.
    """
    environment = Environment(kind="locked", path=str(lock.absolute()) if lock else None)
    found = load_lock(environment.path)
    host = Host(name="this computer", workdir=str(home), python="", transport="local", environment=environment)
    transports: Mapping[str, Transport] = {host.name: LocalTransport(host)}
    cluster = Cluster(name="here", hosts=(host,))
    console.progress("looking at this computer")
    inventory = gather(cluster, transports)
    if dry_run:
        placed = preview_environments(cluster, inventory, transports)
    else:
        ask_agent(transports[host.name], "claim", {"folders": [str(home)]}, timeout_s=TIMEOUT_S)
        placed = place_environments(cluster, inventory, transports, home=home, console=console)
    built = TrainingEnvironment(python=placed.head.python, lock=found.hash)
    if not dry_run:
        built.save(home / FILE)
    version = tuple(map(int, platform.python_version_tuple()[:2]))
    pins = found.pins_for(version, platform.machine())
    return Setup(
        environment=built,
        num_packages=len(pins),
        torch=next((pin.version for pin in pins if pin.name == "torch"), "none"),
        has_gpu=any(facts.gpus for facts in inventory.hosts),
    )
