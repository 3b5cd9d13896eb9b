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
    while (hosts := {each.host for each in left if each.kind != "unknown"}) and time.monotonic() < deadline:
        beat()
        time.sleep(PAUSE_S)  # a guard that has just written its last words is about to leave
        backend.stop(request.on(hosts), transports, now=True, epoch=epoch)
        left = backend.verify(request, transports)
    return left


def clean_rest(
    backend: Backend,
    request: Request,
    transports: Mapping[str, Transport],
    *,
    epoch: int,
    verify_s: float = VERIFY_S,
    beat: Callable[[], None] = lambda: None,
) -> None:
    """End guards that rest, and wait until they have gone, `verify_s` at the most."""
    deadline = time.monotonic() + verify_s
    while time.monotonic() < deadline:
        resting = [status.host for status in backend.poll(request, transports) if status.rests]
        if not resting:
            return
        backend.stop(request.on(resting), transports, now=True, epoch=epoch)
        beat()
        time.sleep(PAUSE_S)
