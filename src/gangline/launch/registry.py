"""Every backend, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gangline.errors import UsageError
from gangline.launch.backend import Backend
from gangline.launch.local import LocalBackend

BACKENDS: Mapping[str, Callable[[], Backend]] = {"local": LocalBackend}


def backend(name: str = "local") -> Backend:
    """The backend of that name; raises UsageError."""
    make = BACKENDS.get(name)
    if make is None:
        raise UsageError(f"no backend is called {name!r}", seen=f"known: {', '.join(sorted(BACKENDS))}", fix="")
    return make()
