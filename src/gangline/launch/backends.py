"""The table of backends, and the one place where a name becomes a backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from gangline.launch.backend import HostStatus, LaunchRequest, Leftover, NamedBackend
from gangline.plugins import Table, shown_type
from gangline.runs.cluster import Cluster
from gangline.runs.gang import Gang
from gangline.transport.transport import Transport

MODULES: Mapping[str, str] = {
    "direct": "gangline.launch.direct:DirectBackend",
    "mpirun": "gangline.launch.mpirun:MpirunBackend",
}
"""Name -> module:class. A module is imported once its backend is used."""


def _later(path: str) -> Callable[[], NamedBackend]:
    """What imports `module:class` and makes one, once it is called."""

    def make() -> NamedBackend:
        module, _, name = path.partition(":")
        made: NamedBackend = getattr(importlib.import_module(module), name)()
        return made

    return make


def _maker(_name: str, found: Any) -> Callable[[], NamedBackend]:
    if not callable(found):
        raise TypeError(f"expected a class of backends, found {shown_type(found)}")
    make: Callable[[], NamedBackend] = found
    return make


BACKENDS: Table[Callable[[], NamedBackend]] = Table(
    "gangline.backends", {name: _later(path) for name, path in MODULES.items()}, read=_maker
)
"""What `backend:` in a cluster file may be, with those of other packages."""


def backend(name: str) -> NamedBackend:
    """The backend of that name; raises UsageError for one that is not there or cannot be used."""
    with BACKENDS.guard(name):
        return BACKENDS[name]()


class Backends:
    """All backends behind one face (a `Backend`): each call goes to the one that the cluster or the request names."""

    def __init__(self) -> None:
        self._made: dict[str, NamedBackend] = {}

    def of(self, named: Cluster | LaunchRequest) -> NamedBackend:
        """The backend that a cluster or a request names; raises UsageError."""
        if named.backend not in self._made:
            self._made[named.backend] = backend(named.backend)
        return self._made[named.backend]

    def hosts(self, cluster: Cluster, variables: Mapping[str, str]) -> Cluster:
        """See `Backend.hosts`."""
        return self.of(cluster).hosts(cluster, variables)

    def render(self, cluster: Cluster, gang: Gang, **what: Any) -> LaunchRequest:
        """See `Backend.render`."""
        return self.of(cluster).render(cluster, gang, **what)

    def start(self, request: LaunchRequest, transports: Mapping[str, Transport], **how: Any) -> None:
        """See `Backend.start`."""
        self.of(request).start(request, transports, **how)

    def poll(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> list[HostStatus]:
        """See `Backend.poll`."""
        return self.of(request).poll(request, transports)

    def announce(self, request: LaunchRequest, transports: Mapping[str, Transport], *, epoch: int) -> list[str]:
        """See `Backend.announce`."""
        return self.of(request).announce(request, transports, epoch=epoch)

    def stop(self, request: LaunchRequest, transports: Mapping[str, Transport], *, now: bool, **how: Any) -> list[str]:
        """See `Backend.stop`."""
        return self.of(request).stop(request, transports, now=now, **how)

    def verify(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> list[Leftover]:
        """See `Backend.verify`."""
        return self.of(request).verify(request, transports)
