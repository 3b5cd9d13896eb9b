"""The interface between a run and the launcher that starts it: the methods, promises and requests of a backend.

A backend owns five things: the hosts (a list from the cluster file, or an allocation), how the host agent gets to each
of them, the end of the gang, the signs of that end, and the promises that it keeps. It is named in `cluster.yaml`
(`backend:`), and in the request of every attempt. `launch.backends` has the table of backends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from gangline.errors import RunFailed
from gangline.launch.program import Program, StallWatch
from gangline.runs.cluster import Cluster
from gangline.runs.gang import Gang
from gangline.runs.record_versions import Record
from gangline.transport.transport import AGENT, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """The guarantees of a backend to a run, as data for the planner, the checks and the screens."""

    outlives_client: bool = True
    """Once started, the gang needs neither the computer nor the connection that started it."""
    survives_lost_host: bool = True
    """After the loss of a host, the host agents on the others end their ranks in good order."""
    warm_restart: bool = True
    """Processes that have imported torch wait for the next attempt, which starts within seconds."""
    fewer_hosts: bool = True
    """After the loss of a host the next attempt can do without it."""
    resumes_supervisor: bool = True
    """Host agents start the supervisor again where it was killed."""
    leases: bool = True
    """No slot is given to two runs."""
    orderly_queue: bool = True
    """Of several starts at the same moment that want the same slots, one succeeds."""

    def broken(self) -> tuple[str, ...]:
        """The promises that are not kept, in words; () if all are kept."""
        return tuple(words for name, words in NOT_PROMISED.items() if not getattr(self, name))


NOT_PROMISED: Mapping[str, str] = {
    "outlives_client": "the run ends with the connection that started it",
    "survives_lost_host": "the loss of one host ends the ranks on all hosts",
    "warm_restart": "every restart imports torch anew",
    "fewer_hosts": "a restart needs every host",
    "resumes_supervisor": "a killed supervisor is not started again",
    "leases": "another run may take the same slots",
    "orderly_queue": "of two starts at the same moment on the same slots, both may fail",
}

LONGEST_S = 1e9
"""No rank runs for longer: 30 years."""
MOST = 1 << 62
"""Steps and collectives are counted in 64 bits."""
Networks = Mapping[str, Mapping[str, str]]
"""Variables that name the network interfaces of each host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPool:
    """Processes that import torch once, from which the ranks of every attempt are forked.

    torchrun starts them as its ranks; a rank is a child of one of them. When ranks end before the run is complete, the
    host agent and these processes wait for the next attempt.
    """

    rest_s: float
    """How long a host agent and its processes wait before they end by themselves."""
    words: tuple[str, ...]
    """Arguments of the worker in this attempt: `train JOB GANG ROOT`."""
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorCommand:
    """The command with which a host agent restarts the supervisor on its host, or starts a deputy there."""

    argv: tuple[str, ...]
    """Of a deputy without its Python, which is the one that runs the host agent."""
    env: dict[str, str]
    """On top of the host agent's own."""
    folder: str
    """The run's, with its lock and its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRequest:
    """The part of a request for one host."""

    host: str
    folder: str
    """The attempt's folder of this host: agent.json, exit.json and console.log go here."""
    rank_files: str
    """The attempt's folder: rank-<r>.pid and the like."""
    argv: tuple[str, ...]
    env: dict[str, str]
    run_id: str = ""
    attempt: int = 1
    agent_argv: tuple[str, ...] = (AGENT, "host-agent")
    """The command that starts the host agent; it reads this request, and secrets beside it, as JSON from stdin."""
    cwd: str | None = None
    """Where the command runs; None: in `folder`."""
    program: Literal["worker", "command"] = "worker"
    """worker: its ranks write phase files and an exit record. command: the user's own program, which writes neither."""
    grace_s: float = 120.0
    """After an orderly stop: how long ranks may show no progress before they are ended. Signs of progress are phases,
    steps, and growing files of a checkpoint; of a command: growing logs."""
    join_timeout_s: float | None = None
    """Ranks that have not joined by then are ended by their host agent, even without a supervisor."""
    ranks: tuple[int, ...] = ()
    """Global ranks of this host; empty: every one whose files appear in `rank_files`."""
    devices: tuple[int, ...] = ()
    """The GPU of each of these ranks, where the host has any."""
    slots: int = 1
    """CPU slots that the host has; each of its ranks takes one, or the GPU that it uses."""
    leases: str | None = None
    """Folder for the leases of CPU slots; None: no leases."""
    samples: str | None = None
    """The file for what the host does during the run; None: it is not sampled."""
    meet: tuple[str, int] | None = None
    """Rendezvous of the launchers, or of the ranks where each launcher is `alone`: address and port."""
    alone: bool = False
    """The launcher of this host does not meet the others: ranks get their rank and rendezvous from `warm_pool` and
    `meet`."""
    warm_pool: WarmPool | None = None
    """None: all processes end with the attempt."""
    supervisor: SupervisorCommand | None = None
    """None: the supervisor runs on another host."""
    deputy: SupervisorCommand | None = None
    """Asks for the votes of the other hosts once the supervisor is silent; None: this host cannot lead."""
    led: bool = False
    """Its supervisor leads by a vote of the hosts; a host starts nothing for one whose term is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherDialect:
    """The command of a launcher whose program may be of several makes."""

    mark: str
    """Words that `PROGRAM --version` prints if it is of this make."""
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    remote_shell: str | None = None
    """A file, named in `argv`, that is written before the start and runs ssh. The launcher is ended when one ssh has
    failed: it would wait for ever. None: it notices by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherDaemon:
    """A program on one host that the launcher needs there; it is started before, and ended after it."""

    host: str
    folder: str
    """A folder of its own there, for its log and its exit code."""
    argv: tuple[str, ...]
    """`ADDRESS` in its last word is replaced by what the first daemon says, once it runs."""
    env: dict[str, str]
    serves: str
    """It ends with the host agent in that folder, or after the launcher in that folder."""
    scratch: str
    """A folder there that is removed with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLauncher:
    """One command on one host that starts the host agents of all hosts, and runs as long as they do."""

    host: str
    folder: str
    """A folder of its own there, for its log and its exit code."""
    argv: tuple[str, ...]
    dialects: tuple[LauncherDialect, ...] = ()
    """The first one whose mark the program there prints is started in place of `argv`; (): `argv` is started."""
    env: dict[str, str] = field(default_factory=dict)
    """On top of those of the agent on the head. With `GANGLINE_LAUNCHER` among it, whatever has the same value there is
    ended with the launcher: its children have sessions of their own."""
    daemons: tuple[LauncherDaemon, ...] = ()
    """The first one on the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest(Record):
    """Everything that will be started, printable before the start."""

    run_id: str
    attempt: int
    hosts: tuple[HostRequest, ...]
    world_size: int | None = None
    """Ranks of the plan; None: as many as the hosts have."""
    stall: StallWatch | None = None
    """The reaction to ranks without output; None: output is not watched."""
    backend: str = "direct"
    """The backend that rendered it, and that starts, polls and ends it."""
    launcher: JobLauncher | None = None
    """None: every host agent is started by itself."""

    def on(self, names: Collection[str]) -> LaunchRequest:
        """The part of it that is for some hosts."""
        return dataclasses.replace(self, hosts=tuple(part for part in self.hosts if part.host in names))

    @property
    def names(self) -> tuple[str, ...]:
        """Its hosts."""
        return tuple(part.host for part in self.hosts)

    @property
    def port(self) -> int:
        """Where its launchers or ranks meet; 0: any that the kernel gives."""
        return self.hosts[0].meet[1] if self.hosts and self.hosts[0].meet else 0

    def require_whole(self) -> None:
        """Raise RunFailed if its ranks are not those of the plan: another world size would be another run."""
        ranks = sorted(rank for part in self.hosts for rank in part.ranks)
        if self.world_size is not None and ranks != list(range(self.world_size)):
            raise RunFailed(
                f"{self.run_id} does not start: its world size is not what the plan says",
                seen=f"expected ranks 0 to {self.world_size - 1}, found {ranks}",
                fix="start it anew with gangline train; if that says the same, it is a bug",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSigns:
    """The work of a group of processes during a start, as their host agent sees it."""

    idle_s: float
    """For how long they have hardly used a processor, mapped a page or read anything."""
    cpu_s: float
    read_bytes: int

    def __post_init__(self) -> None:
        """Raise ValueError for amounts that cannot be."""
        if not (0 <= self.idle_s <= LONGEST_S and 0 <= self.cpu_s <= LONGEST_S and 0 <= self.read_bytes <= MOST):
            raise ValueError(f"work is out of range: {self.idle_s}, {self.cpu_s}, {self.read_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSigns:
    """The progress of one rank, as its host agent sees it."""

    rank: int
    phase: str | None
    """As its phase file says; None: there is none."""
    has_torch: bool
    """It has imported torch."""
    has_met: bool
    """It is connected to the rendezvous."""
    step: int | None = None
    """1-based, as its phase file says."""
    collectives: int | None = None
    """The number that it has entered, as its phase file says."""
    same_s: float | None = None
    """For how long its phase file has said the same, by the clock of its host agent; a rank may report the same phase
    again."""
    starved_s: float | None = None
    """For how long in all it was ready and had no processor, or waited for pages from a disk; counted once it has
    joined, and only while its phase file says the same for some seconds. None: not reported."""
    work: WorkSigns | None = None
    """Of its processes; None: not reported, as once all ranks have joined."""

    def __post_init__(self) -> None:
        """Raise ValueError for a count that has more than 64 bits, and for a time that no rank runs."""
        if not 0 <= (self.starved_s or 0) <= LONGEST_S:
            raise ValueError(f"rank {self.rank}: {self.starved_s} s are out of range")
        if not all(0 <= each <= MOST for each in (self.step or 0, self.collectives or 0)):
            raise ValueError(f"rank {self.rank}: step {self.step}, collectives {self.collectives} are out of range")
        if not 0 <= (self.same_s or 0) <= LONGEST_S:
            raise ValueError(f"rank {self.rank}: {self.same_s} s are out of range")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSigns:
    """The progress of the start on one host, as its host agent sees it."""

    launcher: bool
    """The launcher has imported its modules."""
    met: bool
    """The launcher is connected to those of the other hosts."""
    ranks: tuple[RankSigns, ...] = ()
    """Ranks whose processes run."""
    waits_for: tuple[str, ...] = ()
    """Addresses and ports that give no answer to the launcher or a rank."""
    knocks: bool = False
    """The launcher has a socket to the place where launchers meet, connected or not."""
    work: WorkSigns | None = None
    """Of the launcher, and of processes that are no ranks yet."""
    load: float | None = None
    """Processes per core that want to run, over the last minute; None: unknown."""

    def __post_init__(self) -> None:
        """Raise ValueError for a load that cannot be."""
        if not 0 <= (self.load or 0) <= LONGEST_S:
            raise ValueError(f"a load of {self.load} per core")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSilence:
    """How long one rank has printed nothing, as its host agent sees it."""

    rank: int
    silent_s: float
    """Since its last output; since it was first seen where there was none."""
    age_s: float
    """Since it was first seen."""
    has_printed: bool
    line: str
    """Its last line; "" until it has been silent for a few seconds."""

    def __post_init__(self) -> None:
        """Raise ValueError for times that cannot be."""
        if not 0 <= self.silent_s <= self.age_s <= LONGEST_S:
            raise ValueError(f"rank {self.rank} was silent for {self.silent_s} of {self.age_s} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTrouble:
    """What is wrong with a file system of a host, as its agent sees it."""

    point: str
    """Where it is mounted."""
    kind: str
    """full, inodes (no more files can be made), or silent."""
    words: str

    @property
    def key(self) -> tuple[str, str]:
        """Two reports with the same one are about the same."""
        return self.point, self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """The status of one host's part of the gang."""

    host: str
    phase: Literal["starting", "running", "ended", "lost", "unreachable"]
    """lost: the host agent died without writing exit.json. unreachable: the host does not answer."""
    returncode: int | None = None
    error: dict[str, Any] | None = None
    """`GanglineError.to_json` of the first rank of this host that failed with one; of an unlaunched host, of its
    launcher."""
    reason: str | None = None
    """Once ended, as the host agent says: finished (well or badly), stopped, killed, signalled, late (did not join),
    broken (the gang had failed elsewhere), unlaunched (the launcher above it, such as mpirun, has ended)."""
    rests: bool = False
    """Ended, and its host agent keeps the host's slots and a warm pool for the next attempt."""
    ready: bool = False
    """It rests, and its warm pool has imported what a rank needs."""
    failures: tuple[dict[str, Any], ...] = ()
    """Ranks that ended badly, in the order seen: rank, pid, time, ordered, error, exit, log, log_tail. While the host
    still runs, only those that left an error."""
    left_early: tuple[int, ...] = ()
    """Ranks of the user's own program that left well and by themselves, once the host has ended well."""
    console_tail: tuple[str, ...] = ()
    """Last lines of console.log, if the host ended badly."""
    beat: int | None = None
    """Heartbeat: counts up while the host agent works."""
    epoch: int | None = None
    """The highest epoch that the host agent has seen."""
    signs: StartSigns | None = None
    """The progress of the start; None: not reported."""
    silence: tuple[RankSilence, ...] = ()
    """Ranks of the user's own program."""
    troubles: tuple[HostTrouble, ...] = ()
    """Of the file systems that it needs."""
    why: str = ""
    """unreachable: the attempt and its error."""
    since: float | None = None
    """unreachable: since when, in seconds after 1970 by our clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Something of a run that is still on a host, or a host that could not be checked."""

    host: str
    kind: Literal["process", "port", "lease", "gpu", "unknown"]
    """unknown: the host does not answer."""
    what: str


class Backend(Protocol):
    """Finds the hosts of a run; renders, starts, watches and stops the gang of each attempt.

    `epoch` numbers the supervisors of a run (see gangline.agent.supervise.part): the order with the highest one counts.
    """

    def hosts(self, cluster: Cluster, variables: Mapping[str, str]) -> Cluster:
        """The cluster with the hosts on which a run starts: those of the cluster file, or of an allocation.

        variables: the user's environment. Raises UsageError where this backend cannot start anything.
        """
        ...

    def render(
        self,
        cluster: Cluster,
        gang: Gang,
        *,
        port: int,
        networks: Networks | None = None,
        program: Program | None = None,
    ) -> LaunchRequest:
        """The request that would be started; program: instead of our worker. Pure."""
        ...

    def start(
        self,
        request: LaunchRequest,
        transports: Mapping[str, Transport],
        *,
        epoch: int = 1,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """Start it on every host, or raise and leave nothing running. `secrets`: more environment, never written to
        disk.

        An idle host agent of the run takes over the part of its host.
        """
        ...

    def poll(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> list[HostStatus]:
        """The status of every host, in the order of the request. A host that does not answer has one, too."""
        ...

    def announce(self, request: LaunchRequest, transports: Mapping[str, Transport], *, epoch: int) -> list[str]:
        """Give every host agent the epoch of the supervisor in charge; the hosts that were not reached."""
        ...

    def stop(
        self,
        request: LaunchRequest,
        transports: Mapping[str, Transport],
        *,
        now: bool,
        epoch: int = 1,
        resting: bool = False,
    ) -> list[str]:
        """Order every host agent to end its ranks; `now`: without waiting for a save. Returns at once.

        resting: host agents wait for the next attempt. With `now`, the gang has failed: ranks that can save the last
        complete step, and exit. Without it, they save at the next step and exit. An idle host agent ends, with its warm
        pool, on any order without `resting`.
        Returns the hosts that were not reached: repeat it for them (`LaunchRequest.on`).
        """
        ...

    def verify(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> list[Leftover]:
        """Leftovers on its hosts, found by looking there. The warm pool of an idle host agent is none."""
        ...


@runtime_checkable
class StandbyBackend(Protocol):
    """A backend that can have a host get ready for a later attempt while the others train."""

    def stand_by(
        self,
        part: HostRequest,
        transport: Transport,
        *,
        epoch: int = 1,
        secrets: Mapping[str, str] | None = None,
    ) -> HostRequest:
        """Have a host agent rest there that can take over a part like this one, and returns at once; the part as it
        rests. `HostStatus.ready` says when its processes have imported what a rank needs. Raises GanglineError.
        """
        ...


class NamedBackend(Backend, Protocol):
    """One backend of the table (`launch.backends`)."""

    @property
    def name(self) -> str:
        """Its name in `backend:` of a cluster file."""
        ...

    @property
    def promises(self) -> Promises:
        """Its guarantees to runs."""
        ...
