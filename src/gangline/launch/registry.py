"""The table of backends, and the one place where a name becomes a backend."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from gangline.errors import UsageError
from gangline.launch.backend import HostStatus, Leftover, NamedBackend, Networks, Request
from gangline.launch.program import Program
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster
from gangline.runs.gang import Gang

BACKENDS: Mapping[str, str] = {
    "direct": "gangline.launch.direct:DirectBackend",
    "mpirun": "gangline.launch.mpirun:MpirunBackend",
}
"""Name -> module:class. A module is imported once its backend is used."""
GROUP = "gangline.backends"
"""Entry points of other packages: name = module:class, as in the table. gangline's own names come first."""


def backend_names() -> tuple[str, ...]:
    """What `backend:` in a cluster file may be."""
    return tuple(sorted({*BACKENDS, *(point.name for point in importlib.metadata.entry_points(group=GROUP))}))


def backend(name: str) -> NamedBackend:
    """The backend of that name; raises UsageError for one that is not there or cannot be loaded."""
    path = BACKENDS.get(name)
    if path is None:
        found = [point.value for point in importlib.metadata.entry_points(group=GROUP) if point.name == name]
        if not found:
            raise UsageError(
                f"no backend is called {name!r}",
                seen=f"known: {', '.join(backend_names())}",
                fix="write one of them as `backend:` in the cluster file, or install the package that has it",
            )
        path = found[0]
    module, _, attribute = path.partition(":")
    try:
        made: NamedBackend = getattr(importlib.import_module(module), attribute)()
    except Exception as error:
        raise UsageError(
            f"the backend {name!r} cannot be loaded",
            seen=f"{path}: {type(error).__name__}: {error}",
            fix="install its package anew, or write another `backend:` in the cluster file",
        ) from error
    return made


class Backends:
    """All backends behind one face (a `Backend`): each call goes to the one that the cluster or the request names."""

    def __init__(self) -> None:
        self._made: dict[str, NamedBackend] = {}

    def of(self, named: Cluster | Request) -> NamedBackend:
        """The backend that a cluster or a request names; raises UsageError."""
        if named.backend not in self._made:
            self._made[named.backend] = backend(named.backend)
        return self._made[named.backend]

    def hosts(self, cluster: Cluster, variables: Mapping[str, str]) -> Cluster:
        """See `Backend.hosts`."""
        return self.of(cluster).hosts(cluster, variables)

    def render(
        self,
        cluster: Cluster,
        gang: Gang,
        *,
        port: int,
        networks: Networks | None = None,
        program: Program | None = None,
    ) -> Request:
        """See `Backend.render`."""
        return self.of(cluster).render(cluster, gang, port=port, networks=networks, program=program)

    def start(self, request: Request, transports: Mapping[str, Transport], **how: Any) -> None:
        """See `Backend.start`."""
        self.of(request).start(request, transports, **how)

    def poll(self, request: Request, transports: Mapping[str, Transport]) -> list[HostStatus]:
        """See `Backend.poll`."""
        return self.of(request).poll(request, transports)

    def announce(self, request: Request, transports: Mapping[str, Transport], *, epoch: int) -> list[str]:
        """See `Backend.announce`."""
        return self.of(request).announce(request, transports, epoch=epoch)

    def stop(self, request: Request, transports: Mapping[str, Transport], *, now: bool, **how: Any) -> list[str]:
        """See `Backend.stop`."""
        return self.of(request).stop(request, transports, now=now, **how)

    def verify(self, request: Request, transports: Mapping[str, Transport]) -> list[Leftover]:
        """See `Backend.verify`."""
        return self.of(request).verify(request, transports)
