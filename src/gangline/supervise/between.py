"""The end of a run between two attempts, whose supervisor is gone: nothing of it runs but guards that rest."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace

from gangline.launch.backend import Backend, Request
from gangline.runs.cluster import Cluster
from gangline.runs.events import append_event
from gangline.runs.layout import RunLayout
from gangline.runs.state import RunState
from gangline.runs.versions import load_if_there
from gangline.supervise.clean import clean_rest
from gangline.supervise.earlier import Connect, finish_all
from gangline.supervise.lock import supervisor_lock


def end_between(layout: RunLayout, *, backend: Backend, connect: Connect) -> None:
    """End what rests and what is left, and write down that the run was stopped; raises RunFailed if it has a supervisor
    after all.
    """
    with supervisor_lock(layout):
        state = RunState.load(layout)
        # Higher than that of the supervisor before: should it wake up, it finds that it has nothing to say any more.
        state = replace(state, epoch=state.epoch + 1, supervisor=None)
        state.save(layout)
        for request in _last_parts(layout, state.attempt):
            _end_rest(layout, request, backend=backend, connect=connect, epoch=state.epoch)
        finish_all(layout, backend=backend, connect=connect)
        append_event(layout.events, "stopped", source="supervisor", attempt=state.attempt)
        replace(state, phase="stopped", error=None).save(layout)


def _last_parts(layout: RunLayout, last: int) -> list[Request]:
    """What was started, newest first, with each host only where it took part last: there its guard may rest."""
    found: list[Request] = []
    seen: set[str] = set()
    for number in range(last, 0, -1):
        request = load_if_there(layout.request(number), Request)
        if request is None:
            continue
        part = request.on(set(request.names) - seen)
        seen.update(request.names)
        found += [part] if part.hosts else []
    return found


def _end_rest(layout: RunLayout, request: Request, *, backend: Backend, connect: Connect, epoch: int) -> None:
    transports = connect(Cluster.of_attempt(layout, request.attempt))
    with ExitStack() as stack:
        for transport in transports.values():
            stack.enter_context(closing(transport))
        clean_rest(backend, request, transports, epoch=epoch)
