"""After the end: look at what is left on the hosts, end it, and look again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from gangline.launch.backend import Backend, Leftover, Request
from gangline.remote.transport import Transport

VERIFY_S = 15.0
PAUSE_S = 0.3


def clean(
    backend: Backend,
    request: Request,
    transports: Mapping[str, Transport],
    *,
    epoch: int,
    verify_s: float = VERIFY_S,
    beat: Callable[[], None] = lambda: None,
) -> list[Leftover]:
    """What is left once everything was ended that can be, `verify_s` at the most."""
    deadline = time.monotonic() + verify_s
    left = backend.verify(request, transports)
    while any(each.kind != "unknown" for each in left) and time.monotonic() < deadline:
        beat()
        time.sleep(PAUSE_S)  # a guard that has just written its last words is about to leave
        backend.stop(request, transports, now=True, epoch=epoch)
        left = backend.verify(request, transports)
    return left
