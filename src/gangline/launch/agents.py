"""Host agents: one per host, each owns the ranks there. The base of all backends that use them.

A backend adds how the agents are started (`AgentBackend.start_agents`). From then on polls and orders are files that
the transports carry, however the agents were started.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import Any, ClassVar, TypeVar

from gangline.errors import GanglineError, HostUnreachable, RunFailed, UsageError
from gangline.launch.backend import HostRequest, HostStatus, JobLauncher, LaunchRequest, Leftover, Networks, Promises
from gangline.launch.poll import HostPoller, look
from gangline.launch.program import WORKER, Program
from gangline.launch.render import render
from gangline.runs.cluster import IN_ALLOCATION, Cluster
from gangline.runs.gang import Gang
from gangline.runs.record_versions import encode_record
from gangline.transport.fanout import HostResult, fan_out
from gangline.transport.ssh_options import NONSENSE, understood
from gangline.transport.transport import AGENT, Transport

# Allocations of a batch system: only its own backend starts anything inside one.


def require_no_allocation(variables: Mapping[str, str], *, backend: str) -> None:
    """Raise UsageError inside an allocation: the batch system could not end what this backend starts.

    variables: the user's environment.
    """
    if job := variables.get(IN_ALLOCATION):
        raise UsageError(
            f"the backend `{backend}` starts nothing inside an allocation of Slurm",
            seen=f"{IN_ALLOCATION}={job}; Slurm knows nothing of what `{backend}` starts: it would run on after "
            "the allocation has ended",
            fix="leave the cluster file out: the nodes of the allocation are the hosts then; or start from a shell "
            "outside of the allocation",
        )


START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0
VERIFY_TIMEOUT_S = 30.0
MARGIN_S = 30.0
"""Added to the time limit of a command before its host counts as silent: connecting takes time, too."""
PAUSE_S = 0.05
UNUSABLE = (GanglineError, OSError, *NONSENSE)
"""Errors of a host that does not answer, or answers nonsense."""

ORDERS = {(False, False): "stop", (True, False): "kill", (False, True): "yield", (True, True): "break"}
"""(now, resting) -> the order to host agents (gangline.agent.supervise.part)."""

UNSAID = {
    "what": "the gangline agent did not start",
    "seen": "expected a running agent that holds the host's slots",
    "fix": "put that right on this host, then start again; gangline check looks at its disk and its slots",
}
"""Defaults for the parts of a host agent's error."""

Value = TypeVar("Value")


@dataclass(slots=True)
class Started:
    """The progress of a start."""

    hosts: list[str] = field(default_factory=list)
    """Hosts on which something may have been started."""
    silent: set[str] = field(default_factory=set)
    """Hosts among them that did not answer in time."""


class AgentBackend:
    """The base of backends with one host agent per host.

    num_cpus: cores of this computer, divided among the ranks if all hosts are on it.
    """

    name: ClassVar[str]
    promises: ClassVar[Promises]

    def __init__(self, *, num_cpus: int | None = None) -> None:
        self._num_cpus = num_cpus if num_cpus is not None else os.cpu_count()
        self._poller = HostPoller()

    def hosts(self, cluster: Cluster, variables: Mapping[str, str]) -> Cluster:
        """See `Backend.hosts`: those of the cluster file."""
        require_no_allocation(variables, backend=self.name)
        return cluster

    def render(
        self,
        cluster: Cluster,
        gang: Gang,
        *,
        port: int,
        networks: Networks | None = None,
        program: Program | None = None,
    ) -> LaunchRequest:
        """See `Backend.render`; `port` is free on the head."""
        program = program or WORKER
        if not self.promises.warm_restart:
            program = replace(program, rest_s=0.0, alone=False)
        request = render(cluster, gang, port=port, networks=networks or {}, program=program, num_cpus=self._num_cpus)
        return replace(request, backend=self.name, launcher=self.launcher(cluster, request))

    def launcher(self, cluster: Cluster, request: LaunchRequest) -> JobLauncher | None:
        """The one command that starts the host agents of a request; None: each is started by itself."""
        del cluster, request
        return None

    def start(
        self,
        request: LaunchRequest,
        transports: Mapping[str, Transport],
        *,
        epoch: int = 1,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """See `Backend.start`."""
        request.require_whole()
        asked = {"epoch": epoch, "secrets": dict(secrets or {})}
        begun = Started()
        try:
            self.start_agents(request, transports, asked, begun)
        except BaseException as error:  # all or nothing
            self.withdraw(request, transports)
            left = self._end(request.on(begun.hosts), transports, epoch=epoch, silent=begun.silent)
            if left and isinstance(error, GanglineError):
                error.seen = _lines(error.seen, *(f"left on {each.host}: {each.what}" for each in left))
            raise

    def start_agents(
        self, request: LaunchRequest, transports: Mapping[str, Transport], asked: Mapping[str, Any], begun: Started
    ) -> None:
        """Start every host's agent, or raise. asked: what each reads from stdin beside its part. Writes into `begun`
        the hosts where something was started.
        """
        raise NotImplementedError

    def withdraw(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> None:
        """After a failed start: prevent further agents from starting."""

    def start_all(self, request: LaunchRequest, begun: Started, start: Callable[[HostRequest], None]) -> None:
        """Start the agents of these hosts, all at once; raises all problems as one error."""
        begun.hosts += request.names
        if problems := _problems(on_each(request, start, START_TIMEOUT_S)):
            begun.silent |= {host for host, problem in problems.items() if _is_silence(problem)}
            for part in request.on(begun.silent).hosts:
                self._poller.lost(part)
            raise _as_one(problems)

    def poll(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> list[HostStatus]:
        """See `Backend.poll`. Costs a few small reads per host, all hosts at once."""
        return self._poller.at(request, transports)

    def announce(self, request: LaunchRequest, transports: Mapping[str, Transport], *, epoch: int) -> list[str]:
        """See `Backend.announce`."""
        return _send_orders(request, transports, {"epoch": epoch, "order": None})

    def stop(
        self,
        request: LaunchRequest,
        transports: Mapping[str, Transport],
        *,
        now: bool,
        epoch: int = 1,
        resting: bool = False,
    ) -> list[str]:
        """See `Backend.stop`. Where the host agent is dead, its ranks are ended at once."""
        return _send_orders(request, transports, {"epoch": epoch, "order": ORDERS[now, resting]})

    def verify(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> list[Leftover]:
        """See `Backend.verify`."""
        outcomes = on_each(request, lambda part: _left(part, transports[part.host]), VERIFY_TIMEOUT_S)
        found: list[Leftover] = []
        for host, outcome in outcomes.items():
            if isinstance(outcome.error, UNUSABLE):
                what = next(iter(str(outcome.error).splitlines()), type(outcome.error).__name__)
                found.append(Leftover(host=host, kind="unknown", what=what))
            else:
                found += outcome.get()
        return found

    def _end(
        self, request: LaunchRequest, transports: Mapping[str, Transport], *, epoch: int, silent: Collection[str]
    ) -> list[Leftover]:
        """Kill what was started and wait until it is gone; the leftovers. silent: hosts that are not asked again."""
        deadline = time.monotonic() + END_TIMEOUT_S
        request = request.on(set(request.names) - set(silent))
        missed = self.stop(request, transports, now=True, epoch=epoch)
        told = request.on(set(request.names) - set(missed))
        while time.monotonic() < deadline:
            if all(status.phase != "running" for status in self.poll(told, transports)):
                break
            time.sleep(PAUSE_S)
        self.stop(told, transports, now=True, epoch=epoch)  # ends what a dead host agent has left
        unknown = [Leftover(host=host, kind="unknown", what=f"{host} does not answer") for host in sorted(silent)]
        return [*self.verify(request, transports), *unknown]


def on_each(
    request: LaunchRequest, work: Callable[[HostRequest], Value], timeout_s: float
) -> dict[str, HostResult[Value]]:
    """The result or error of `work` for each part, all at once. The transport's own time limit comes first."""
    return fan_out(work, {part.host: part for part in request.hosts}, timeout_s=timeout_s + MARGIN_S)


def _is_silence(problem: Exception) -> bool:
    """Whether a host did not answer at all; a slow command does not count."""
    return isinstance(problem, HostUnreachable) and not isinstance(problem.__cause__, TimeoutError)


def _problems(outcomes: Mapping[str, HostResult[Value]]) -> dict[str, Exception]:
    return {host: outcome.error for host, outcome in outcomes.items() if outcome.error is not None}


def start_agent(
    part: HostRequest, transport: Transport, asked: Mapping[str, Any], *, argv: tuple[str, ...] | None = None
) -> None:
    """Run the command that starts a host's agent, until the agent runs; raises RunFailed, HostUnreachable.

    argv: the command; None: the one that starts it.
    """
    log = f"its log, if there is one: {part.folder}/agent.log"
    run_starter(transport, argv or part.agent_argv, {"request": asdict(part), **asked}, UNSAID, log, START_TIMEOUT_S)


def stand_by(part: HostRequest, transport: Transport, asked: Mapping[str, Any]) -> HostRequest:
    """Have a host agent rest on a host that can take over a part like this one later, and import what its ranks need.

    Returns at once; the part as it rests, whose `HostStatus.ready` says when it could begin. Raises RunFailed,
    HostUnreachable.
    """
    log = f"its log, if there is one: {part.folder}/agent.log"
    words = {"request": asdict(part), **asked}
    result = run_starter(transport, (*part.agent_argv, "standby"), words, UNSAID, log, START_TIMEOUT_S)
    with understood(part.host, "where its gangline agent waits"):
        return replace(part, folder=str(json.loads(result.strip().splitlines()[-1])["folder"]))


def run_starter(
    transport: Transport,
    argv: Sequence[str],
    asked: Mapping[str, Any],
    unsaid: Mapping[str, str],
    log: str,
    limit_s: float,
) -> str:
    """Run a command that returns once it has started something; what it prints. Raises RunFailed, HostUnreachable.

    unsaid: defaults of "what", "seen" and "fix" of its error. log: the fix where its answer is no error record.
    """
    host = transport.host
    try:
        result = transport.run(argv, stdin=json.dumps(asked).encode(), timeout_s=limit_s)
    except TimeoutError as error:
        fix = "look at the load of that host, try again"
        raise HostUnreachable(f"{host}: {unsaid['what']}", seen=str(error), fix=fix) from error
    if result.returncode == 0:
        return result.stdout
    try:
        record = json.loads(result.stdout.strip().splitlines()[-1])
        words = {name: str(record[name]) or default for name, default in unsaid.items()}
    except NONSENSE:
        tail = "\n".join(result.stderr.splitlines()[-40:])
        words = {"what": unsaid["what"], "seen": f"{' '.join(argv)} ended with {result.returncode}: {tail}", "fix": log}
    raise RunFailed(f"{host}: {words['what']}", seen=words["seen"], fix=words["fix"])


def _as_one(problems: Mapping[str, Exception]) -> Exception:
    """The first error, with the first lines of the others."""
    first, *others = [
        HostUnreachable(
            f"{host}: the gangline agent did not start", seen=str(problem), fix="look at that host, try again"
        )
        if isinstance(problem, OSError)
        else problem
        for host, problem in problems.items()
    ]
    if others and isinstance(first, GanglineError):
        first.seen = _lines(first.seen, *(str(other).splitlines()[0] for other in others))
    return first


def _lines(*texts: str) -> str:
    return "\n".join(filter(None, texts))


def _send_orders(request: LaunchRequest, transports: Mapping[str, Transport], order: Mapping[str, Any]) -> list[str]:
    """Send an order to every host agent; the hosts that were not reached."""
    outcomes = on_each(request, lambda part: _send_order(part, transports[part.host], order), END_TIMEOUT_S)
    problems = _problems(outcomes)
    for problem in problems.values():
        if not isinstance(problem, UNUSABLE):
            raise problem
    return list(problems)


def _send_order(part: HostRequest, transport: Transport, order: Mapping[str, Any]) -> None:
    status = look(part, transport)
    if status.phase in {"starting", "running"} or status.rests:
        path = PurePath(part.folder) / f"order-{order['epoch']}.json"
        transport.write(path, encode_record(dict(order), path))
    elif order["order"] is not None and (status.phase == "lost" or order["order"] in {"kill", "break"}):
        stdin = json.dumps({"request": asdict(part)}).encode()
        transport.run((*part.agent_argv, "reap"), stdin=stdin, timeout_s=END_TIMEOUT_S)


def _left(part: HostRequest, transport: Transport) -> list[Leftover]:
    # Elsewhere than on the host of rank 0, another program listens at that port.
    asked = {"requests": [asdict(part)], "port": part.meet[1] if part.meet and 0 in part.ranks else None}
    result = transport.run((AGENT, "left"), stdin=json.dumps(asked).encode(), timeout_s=VERIFY_TIMEOUT_S)
    try:
        found = json.loads(result.stdout)
    except ValueError:
        raise HostUnreachable(f"{part.host}: cannot look for what is left", seen=result.stderr[-2000:]) from None
    rows = [
        *(("process", f"process {each['pid']} ({each['why']}): {each['command']}") for each in found["processes"]),
        *(("port", f"port {each}") for each in found["ports"]),
        *(("lease", f"slot {each}") for each in found["leases"]),
        *(("gpu", f"{each['memory_mib']} MiB on a GPU, process {each['pid']}") for each in found["gpus"]),
    ]
    return [Leftover(host=part.host, kind=kind, what=what) for kind, what in rows]  # type: ignore[arg-type]
