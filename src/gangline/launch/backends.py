"""The table of backends, and the one place where a name becomes a backend."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from gangline.launch.backend import NamedBackend
from gangline.plugins import Table, shown_type

MODULES: Mapping[str, str] = {
    "direct": "gangline.launch.direct:DirectBackend",
    "mpiexec.hydra": "gangline.launch.mpirun:HydraBackend",
    "mpirun": "gangline.launch.mpirun:MpirunBackend",
    "pdsh": "gangline.launch.pdsh:PdshBackend",
    "ray": "gangline.launch.ray:RayBackend",
    "slurm": "gangline.launch.slurm:SlurmBackend",
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


@functools.cache
def backend(name: str) -> NamedBackend:
    """The backend of that name, one per process; raises UsageError for one that is not there or cannot be used."""
    with BACKENDS.guard(name):
        return BACKENDS[name]()
