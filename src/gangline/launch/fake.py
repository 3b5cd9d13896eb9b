"""A backend that starts nothing: a test says how every host goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gangline.errors import RunFailed
from gangline.launch.backend import HostRequest, HostStatus, Request
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster
from gangline.runs.gang import Gang


class FakeBackend:
    """Hosts that do what they are told.

    broken: hosts on which nothing can be started.
    stubborn: hosts that leave only when killed.
    """

    def __init__(self, *, broken: frozenset[str] = frozenset(), stubborn: frozenset[str] = frozenset()) -> None:
        self.broken = broken
        self.stubborn = stubborn
        self.statuses: dict[str, HostStatus] = {}
        self.orders: list[str] = []

    def render(self, cluster: Cluster, gang: Gang, *, port: int) -> Request:
        """A request that names the hosts, and nothing that could be started."""
        hosts = {host.name: host for host in cluster.hosts}
        parts = tuple(
            HostRequest(
                host=name,
                folder=f"{hosts[name].workdir}/{gang.run_id}/{gang.attempt}/{name}",
                rank_files=f"{hosts[name].workdir}/{gang.run_id}/{gang.attempt}",
                argv=("fake", str(port)),
                env=hosts[name].env,
                guard_argv=("fake-guard",),
            )
            for name in gang.hosts
        )
        return Request(run_id=gang.run_id, attempt=gang.attempt, hosts=parts)

    def start(self, request: Request, transports: Mapping[str, Transport]) -> None:
        """See `Backend.start`."""
        for part in request.hosts:
            if part.host in self.broken:
                self.stop(request, transports, now=True)
                raise RunFailed(f"{part.host}: the guard did not start", fix="this is a fake")
            self.statuses[part.host] = HostStatus(host=part.host, phase="running")

    def poll(self, request: Request, transports: Mapping[str, Transport]) -> list[HostStatus]:
        """See `Backend.poll`."""
        del transports
        return [self.statuses.get(part.host, HostStatus(host=part.host, phase="starting")) for part in request.hosts]

    def stop(self, request: Request, transports: Mapping[str, Transport], *, now: bool) -> None:
        """See `Backend.stop`; hosts leave at once, the stubborn ones when killed."""
        self.orders.append("kill" if now else "stop")
        for status in self.poll(request, transports):
            if status.phase != "running" or (status.host in self.stubborn and not now):
                continue
            self.end(status.host, returncode=-9 if now else 0, reason="killed" if now else "stopped")

    def end(self, host: str, **how: Any) -> None:
        """Let a host end, with the fields of a HostStatus."""
        self.statuses[host] = replace(self.statuses[host], phase="ended", **how)

    def change(self, host: str, **how: Any) -> None:
        """Let a host report something."""
        self.statuses[host] = replace(self.statuses[host], **how)
