"""Every backend, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gangline.errors import UsageError
from gangline.launch.backend import Backend
from gangline.launch.direct import DirectBackend

BACKENDS: Mapping[str, Callable[[], Backend]] = {"direct": DirectBackend}


def backend(name: str = "direct") -> Backend:
    """The backend of that name; raises UsageError."""
    make = BACKENDS.get(name)
    if make is None:
        raise UsageError(f"no backend is called {name!r}", seen=f"known: {', '.join(sorted(BACKENDS))}", fix="")
    return make()
