"""The seam between a run and the launcher that starts it: what a backend does, promises, and is told.

A backend owns five things: the hosts (a list from the cluster file, or an allocation), the way of the host agent to
each of them, the end of the gang, the signs of that end, and the promises that it keeps. It is named in `cluster.yaml`
(`backend:`), and in the request of every attempt. `launch.backends` has the table of backends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gangline.errors import RunFailed
from gangline.launch.program import Program, StallWatch
from gangline.runs.cluster import Cluster
from gangline.runs.gang import Gang
from gangline.runs.record_versions import Record
from gangline.transport.transport import AGENT, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """What a run may count on under a backend. Data: the planner, the checks and the screens read it."""

    outlives_client: bool = True
    """Once started, the gang needs neither the computer nor the connection that started it."""
    survives_lost_host: bool = True
    """Host agents on the other hosts stay when one host is lost: they end their ranks in good order."""
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
        """What a run cannot count on, in words; () if all is kept."""
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
    """Processes that import once and wait: every attempt of a run is forked from them, on hosts that have them.

    They are what torchrun starts as ranks; a rank is a child of one of them. When its ranks have ended, and not because
    all was done, the host agent of a host rests, and they wait for the next attempt.
    """

    rest_s: float
    """How long a host agent and its processes rest, before they end by themselves."""
    words: tuple[str, ...]
    """What the worker is told in this attempt: `train JOB GANG ROOT`."""
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorWords:
    """How the supervisor that lives on a host is started again, by the host agent there."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """On top of the host agent's own."""
    folder: str
    """The run's, with its lock and its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRequest:
    """What is started on one host."""

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
    """worker: its ranks write phase files and say how they left. command: the user's own program, which does not."""
    grace_s: float = 120.0
    """After an orderly stop: how long ranks may show no progress before they are ended. The same for every run, as long
    as a plan does not say how long its steps take. Signs of progress: phases and steps, files of a checkpoint that
    grow; of a command: logs that grow."""
    join_timeout_s: float | None = None
    """Ranks that have not joined by then are ended by their host agent, even if nobody else is left to see it."""
    ranks: tuple[int, ...] = ()
    """Global ranks of this host; empty: every one whose files appear in `rank_files`."""
    devices: tuple[int, ...] = ()
    """The GPU of each of these ranks, where the host has any."""
    slots: int = 1
    """CPU slots that the host has; each of its ranks takes one, or the GPU that it uses."""
    leases: str | None = None
    """Folder for the claims on CPU slots; None: nothing is claimed."""
    meet: tuple[str, int] | None = None
    """Where the launchers of all hosts meet, or, where each is by itself, the ranks: address and port."""
    alone: bool = False
    """The launcher of this host does not meet the others: ranks find their places in `stand_by` and `meet`."""
    stand_by: WarmPool | None = None
    """None: what is started ends with its attempt."""
    supervisor: SupervisorWords | None = None
    """None: the supervisor lives elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLauncher:
    """One command on one host that starts the host agents of all hosts, and runs as long as they do."""

    host: str
    folder: str
    """A folder of its own there, for its log and its exit code."""
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest(Record):
    """Exactly what will be started, printable before anything is."""

    run_id: str
    attempt: int
    hosts: tuple[HostRequest, ...]
    world_size: int | None = None
    """Ranks that the plan says; None: as many as the hosts have."""
    stall: StallWatch | None = None
    """What is done once no rank prints any more; None: nobody looks."""
    backend: str = "direct"
    """The backend that rendered it, and starts, follows and ends it."""
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
        """Raise RunFailed if it would start other ranks than planned: a run of another size would be another run."""
        ranks = sorted(rank for part in self.hosts for rank in part.ranks)
        if self.world_size is not None and ranks != list(range(self.world_size)):
            raise RunFailed(
                f"{self.run_id} does not start: its world size is not what the plan says",
                seen=f"expected ranks 0 to {self.world_size - 1}, found {ranks}",
                fix="start it anew with gangline train; if that says the same, it is a bug",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSigns:
    """How far the start of one rank has come, as its host agent sees it."""

    rank: int
    phase: str | None
    """As its phase file says; None: there is none."""
    has_torch: bool
    """It has imported torch."""
    has_met: bool
    """It is connected to where the ranks meet."""
    step: int | None = None
    """1-based, as its phase file says."""
    collectives: int | None = None
    """How many it has entered, as its phase file says."""
    same_s: float | None = None
    """For how long its phase file has said the same, by the clock of its host agent; a rank may report the same phase
    again."""

    def __post_init__(self) -> None:
        """Raise ValueError for a count that has more than 64 bits, and for a time that no rank runs."""
        if not all(0 <= each <= MOST for each in (self.step or 0, self.collectives or 0)):
            raise ValueError(f"rank {self.rank}: step {self.step}, collectives {self.collectives} are out of range")
        if not 0 <= (self.same_s or 0) <= LONGEST_S:
            raise ValueError(f"rank {self.rank}: {self.same_s} s are out of range")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSigns:
    """How far the start of one host's ranks has come, as its host agent sees it."""

    launcher: bool
    """The launcher has imported what it needs."""
    met: bool
    """The launcher is connected to those of the other hosts."""
    ranks: tuple[RankSigns, ...] = ()
    """Ranks whose processes run."""
    waits_for: tuple[str, ...] = ()
    """Addresses and ports that give no answer to the launcher or a rank."""


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
    """The last that it printed; "" until it has been silent for a few seconds."""

    def __post_init__(self) -> None:
        """Raise ValueError for times that cannot be."""
        if not 0 <= self.silent_s <= self.age_s <= LONGEST_S:
            raise ValueError(f"rank {self.rank} was silent for {self.silent_s} of {self.age_s} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """How one host's part of the gang is doing."""

    host: str
    phase: Literal["starting", "running", "ended", "lost", "unreachable"]
    """lost: the host agent is gone without having written exit.json. unreachable: the host does not answer."""
    returncode: int | None = None
    error: dict[str, Any] | None = None
    """`GanglineError.to_json` of the first rank of this host that failed with one; of an unlaunched host, of its
    launcher."""
    reason: str | None = None
    """Once ended, as the host agent says: finished (well or badly), stopped, killed, signalled, late (did not join),
    broken (the gang had failed elsewhere), unlaunched (the launcher above it, such as mpirun, has ended)."""
    rests: bool = False
    """Ended, and its host agent holds the host's slots and its processes ready for a next attempt."""
    failures: tuple[dict[str, Any], ...] = ()
    """Ranks that ended badly, in the order seen: rank, pid, time, ordered, error, exit, log, log_tail. While the host
    still runs, only those that left an error."""
    console_tail: tuple[str, ...] = ()
    """Last lines of console.log, if the host ended badly."""
    beat: int | None = None
    """Counts up as long as the host agent gets on."""
    epoch: int | None = None
    """The highest epoch that the host agent has seen."""
    signs: StartSigns | None = None
    """How far the start has come; None where nobody says."""
    silence: tuple[RankSilence, ...] = ()
    """Ranks of the user's own program."""
    why: str = ""
    """unreachable: what was tried, and what came of it."""
    since: float | None = None
    """unreachable: since when, in seconds after 1970 by our clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Something of a run that is still on a host, or a host that could not be looked at."""

    host: str
    kind: Literal["process", "port", "lease", "gpu", "unknown"]
    """unknown: the host does not answer."""
    what: str


class Backend(Protocol):
    """Finds the hosts of a run; renders, starts, watches and stops the gang of each attempt.

    `epoch` says who gives an order (see gangline.agent.supervise.part): of two that look after a run, the higher one
    counts.
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
        """Say exactly what would be started; program: in the place of our worker. Pure."""
        ...

    def start(
        self,
        request: LaunchRequest,
        transports: Mapping[str, Transport],
        *,
        epoch: int = 1,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """Start it on every host, or raise and leave nothing running. `secrets`: more environment, written nowhere.

        A host agent of the run that rests on a host takes its part over.
        """
        ...

    def poll(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> list[HostStatus]:
        """How every host is doing, in the order of the request. A host that does not answer has a status, too."""
        ...

    def announce(self, request: LaunchRequest, transports: Mapping[str, Transport], *, epoch: int) -> list[str]:
        """Tell every host agent who is in charge from now on; the hosts that could not be told."""
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

        resting: host agents stay, and rest. With `now`, ranks are told that the gang is broken: those that can save the
        last step they have completed, and leave. Without it, they save at the next step and leave. A host agent that
        rests ends, with what it holds, on any order without `resting`.
        Gives the hosts that could not be told: repeat it for them (`Request.on`).
        """
        ...

    def verify(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> list[Leftover]:
        """What of it is still on its hosts, by looking. What a host agent that rests holds ready is not left."""
        ...


class NamedBackend(Backend, Protocol):
    """One backend of the table (`launch.backends`)."""

    @property
    def name(self) -> str:
        """What `backend:` in a cluster file calls it."""
        ...

    @property
    def promises(self) -> Promises:
        """What runs may count on."""
        ...
