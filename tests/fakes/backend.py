"""A backend that starts nothing: a test says how every host goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gangline.errors import RunFailed
from gangline.launch.backend import HostRequest, HostStatus, LaunchRequest, Leftover, Networks, StartSigns, WarmPool
from gangline.launch.program import WORKER, Program
from gangline.runs.cluster import Cluster
from gangline.runs.gang import Gang
from gangline.transport.transport import Transport

ENDS: dict[str, dict[str, Any]] = {
    "stop": {"reason": "stopped", "returncode": 0},
    "yield": {"reason": "stopped", "returncode": 0},
    "break": {"reason": "broken", "returncode": 0},
    "kill": {"reason": "killed", "returncode": -9},
}
"""How a host ends that does what it was ordered."""


class FakeBackend:
    """Hosts that do what they are told.

    broken: hosts on which nothing can be started.
    stubborn: hosts that leave only when killed, or when the gang is broken.
    """

    def __init__(
        self, *, broken: frozenset[str] = frozenset(), stubborn: frozenset[str] = frozenset(), leases: bool = False
    ) -> None:
        self.leases = leases
        """Whether hosts claim slots."""
        self.broken = broken
        self.stubborn = stubborn
        self.silent: set[str] = set()
        """Hosts that do not answer now."""
        self.signs: dict[str, StartSigns] = {}
        """What hosts tell of their start; by default nothing."""
        self.statuses: dict[str, HostStatus] = {}
        """Of the last attempt that was started on each host."""
        self._attempts: dict[str, int] = {}
        """Which one that is."""
        self._before: dict[tuple[str, int], HostStatus] = {}
        """How those before it ended."""
        self.left: list[Leftover] = []
        self.orders: list[str] = []
        self.num_polls = 0
        self.polled: list[tuple[str, ...]] = []
        """The hosts that each poll asked."""
        self.epochs: list[int] = []
        """Of every start, announcement and order."""
        self.secrets: dict[str, str] = {}

    def hosts(self, cluster: Cluster, variables: Mapping[str, str]) -> Cluster:
        """Those of the cluster file."""
        del variables
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
        """A request that names the hosts, and nothing that could be started."""
        hosts = {host.name: host for host in cluster.hosts}
        rest_s = (program or WORKER).rest_s
        warm_pool = WarmPool(rest_s=rest_s, words=("fake",), world_size=gang.world_size) if rest_s else None
        parts = tuple(
            HostRequest(
                host=name,
                folder=f"{hosts[name].workdir}/{gang.run_id}/{gang.attempt}/{name}",
                rank_files=f"{hosts[name].workdir}/{gang.run_id}/{gang.attempt}",
                argv=("fake", str(port), *(program or WORKER).argv),
                env={**(networks or {}).get(name, {}), **hosts[name].env},
                program=(program or WORKER).kind,
                ranks=tuple(number for number, rank in enumerate(gang.ranks) if rank.host == name),
                agent_argv=("fake-agent",),
                run_id=gang.run_id,
                attempt=gang.attempt,
                slots=hosts[name].slots,
                leases=f"{hosts[name].workdir}/leases/{name}" if self.leases else None,
                alone=(program or WORKER).alone,
                warm_pool=warm_pool,
            )
            for name in gang.hosts
        )
        size, stall = gang.world_size, (program or WORKER).stall
        return LaunchRequest(
            run_id=gang.run_id, attempt=gang.attempt, hosts=parts, world_size=size, stall=stall, backend=cluster.backend
        )

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
        self.secrets = dict(secrets or {})
        self.epochs.append(epoch)
        for part in request.hosts:
            if part.host in self.broken | self.silent:
                self.stop(request, transports, now=True, epoch=epoch)
                raise RunFailed(f"{part.host}: the gangline agent did not start", fix="this is a fake")
            if part.host in self._attempts:
                earlier = replace(self.statuses[part.host], rests=False)
                self._before[part.host, self._attempts[part.host]] = earlier
            self._attempts[part.host] = request.attempt
            signs = self.signs.get(part.host)
            self.statuses[part.host] = HostStatus(host=part.host, phase="running", epoch=epoch, signs=signs)

    def poll(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> list[HostStatus]:
        """See `Backend.poll`."""
        del transports
        self.num_polls += 1
        self.polled.append(request.names)
        return [self._status(part) for part in request.hosts]

    def announce(self, request: LaunchRequest, transports: Mapping[str, Transport], *, epoch: int) -> list[str]:
        """See `Backend.announce`."""
        del transports
        self.epochs.append(epoch)
        for host in set(request.names) & set(self.statuses) - self.silent:
            self.change(host, epoch=max(epoch, self.statuses[host].epoch or 0))
        return [host for host in request.names if host in self.silent]

    def stop(
        self,
        request: LaunchRequest,
        transports: Mapping[str, Transport],
        *,
        now: bool,
        epoch: int = 1,
        resting: bool = False,
    ) -> list[str]:
        """See `Backend.stop`; hosts leave at once, the stubborn ones only `now`. Those that can then rest."""
        order = ("break" if now else "yield") if resting else ("kill" if now else "stop")
        self.orders.append(order)
        self.epochs.append(epoch)
        parts = {part.host: part for part in request.hosts}
        for status in self.poll(request, transports):
            stays = status.host in self.stubborn and not now
            if status.phase == "running" and not stays and epoch >= (status.epoch or 0):
                self.end(status.host, rests=resting and parts[status.host].warm_pool is not None, **ENDS[order])
            elif status.rests and not resting:
                self.change(status.host, rests=False)
        return [host for host in request.names if host in self.silent]

    def verify(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> list[Leftover]:
        """See `Backend.verify`."""
        del transports
        unknown = [Leftover(host=host, kind="unknown", what="does not answer") for host in request.names]
        return [each for each in unknown if each.host in self.silent] + self.left

    def end(self, host: str, **how: Any) -> None:
        """Let a host end, with the fields of a HostStatus."""
        self.statuses[host] = replace(self.statuses[host], phase="ended", **how)

    def change(self, host: str, **how: Any) -> None:
        """Let a host report something."""
        self.statuses[host] = replace(self.statuses[host], **how)

    def _status(self, part: HostRequest) -> HostStatus:
        host, current = part.host, self._attempts.get(part.host, part.attempt)
        if host in self.silent:
            return HostStatus(host=host, phase="unreachable", why="this is a fake", since=0.0)
        if part.attempt < current:
            return self._before.get((host, part.attempt), HostStatus(host=host, phase="starting"))
        known = self.statuses.get(host) if part.attempt == current else None
        return known or HostStatus(host=host, phase="starting")


class StandbyFakeBackend(FakeBackend):
    """The same, where hosts can get ready beside an attempt: a test says when one is (`getting_ready`)."""

    def __init__(self) -> None:
        super().__init__()
        self.getting_ready: list[HostRequest] = []
        """What was asked to stand by, in order."""
        self.cannot: str | None = None
        """The error of a host that is asked to."""

    def stand_by(
        self,
        part: HostRequest,
        transport: Transport,
        *,
        epoch: int = 1,
        secrets: Mapping[str, str] | None = None,
    ) -> HostRequest:
        """See `StandbyBackend.stand_by`."""
        del transport, secrets
        self.epochs.append(epoch)
        self.getting_ready.append(part)
        if self.cannot is not None:
            raise RunFailed(self.cannot, fix="this is a fake")
        return part
