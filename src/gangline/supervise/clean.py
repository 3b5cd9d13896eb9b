"""After the end: look at what is left on the hosts, end it, and look again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace

from gangline.errors import RunFailed
from gangline.launch.backend import Backend, LaunchRequest, Leftover
from gangline.runs.cluster import Cluster
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_if_there, load_record
from gangline.runs.state import AttemptOutcome, RunState, append_event
from gangline.supervise.lock import supervisor_lock
from gangline.transport.transport import Transport

VERIFY_S = 15.0
PAUSE_S = 0.3


def clean(
    backend: Backend,
    request: LaunchRequest,
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
        time.sleep(PAUSE_S)  # a host agent that has just written its last words is about to leave
        backend.stop(request.on(hosts), transports, now=True, epoch=epoch)
        left = backend.verify(request, transports)
    return left


def clean_rest(
    backend: Backend,
    request: LaunchRequest,
    transports: Mapping[str, Transport],
    *,
    epoch: int,
    verify_s: float = VERIFY_S,
    beat: Callable[[], None] = lambda: None,
) -> None:
    """End host agents that rest, and wait until they have gone, `verify_s` at the most."""
    deadline = time.monotonic() + verify_s
    while time.monotonic() < deadline:
        resting = [status.host for status in backend.poll(request, transports) if status.rests]
        if not resting:
            return
        backend.stop(request.on(resting), transports, now=True, epoch=epoch)
        beat()
        time.sleep(PAUSE_S)


# What earlier attempts of a run have left on hosts: ended before the next one, or when the user says stop again.


Connect = Callable[[Cluster], Mapping[str, Transport]]


def end_earlier(
    layout: RunLayout, attempt: int, *, hosts: Collection[str], backend: Backend, connect: Connect, epoch: int
) -> None:
    """End what the attempts before have left on hosts of this one; raises RunFailed if one of them still runs without
    having an outcome.

    Hosts that do not answer are left to themselves: if they are of the new attempt, it does not start anyway.
    """
    for number in range(1, attempt):
        request = load_if_there(layout.request(number), LaunchRequest)
        if request is None:
            continue
        if layout.outcome(number).exists():
            finish(layout, number, hosts=hosts, backend=backend, connect=connect, epoch=epoch)
            continue
        transports = connect(Cluster.of_attempt(layout, number))
        try:
            if any(status.phase == "running" for status in backend.poll(request, transports)):
                raise RunFailed(
                    f"{layout.run_id} is running already",
                    seen=f"attempt {number} has gangline agents that still run",
                    fix=f"gangline stop {layout.run_id}",
                )
            backend.stop(request, transports, now=True, epoch=epoch)
        finally:
            _close(transports)


def unfinished(layout: RunLayout) -> tuple[str, ...]:
    """Hosts on which something of an ended attempt may be left."""
    found: dict[str, None] = {}
    for number in range(1, _last_attempt(layout) + 1):
        outcome = _outcome(layout, number)
        hosts = [] if outcome is None else [*outcome.unverified, *(each.partition(":")[0] for each in outcome.left)]
        found.update(dict.fromkeys(hosts))
    return tuple(found)


def finish_all(layout: RunLayout, *, backend: Backend, connect: Connect) -> tuple[str, ...]:
    """End what is left of ended attempts; the hosts that still do not answer, or on which something is left."""
    epoch = RunState.load(layout).epoch
    for number in range(1, _last_attempt(layout) + 1):
        finish(layout, number, hosts=None, backend=backend, connect=connect, epoch=epoch)
    return unfinished(layout)


def finish(
    layout: RunLayout, number: int, *, hosts: Collection[str] | None, backend: Backend, connect: Connect, epoch: int
) -> None:
    """End what is left of one ended attempt on hosts that did not answer at its end, and write that down.

    hosts: where; None: everywhere.
    """
    outcome = _outcome(layout, number)
    if outcome is None:
        return
    doubtful = {*outcome.unverified, *(each.partition(":")[0] for each in outcome.left)}
    hosts = doubtful if hosts is None else doubtful & set(hosts)
    if not hosts:
        return
    request = load_record(layout.request(number), LaunchRequest).on(hosts)
    transports = connect(Cluster.of_attempt(layout, number))
    try:
        backend.stop(request, transports, now=True, epoch=epoch)
        left = clean(backend, request, transports, epoch=epoch)
    finally:
        _close(transports)
    renewed = replace(
        outcome,
        left=(
            *(each for each in outcome.left if each.partition(":")[0] not in hosts),
            *(f"{each.host}: {each.what}" for each in left if each.kind != "unknown"),
        ),
        unverified=tuple(
            sorted({each.host for each in left if each.kind == "unknown"} | (set(outcome.unverified) - hosts))
        ),
    )
    renewed.save(layout.outcome(number))


def _last_attempt(layout: RunLayout) -> int:
    try:
        return RunState.load(layout).attempt
    except FileNotFoundError:
        return 0


def _outcome(layout: RunLayout, number: int) -> AttemptOutcome | None:
    try:
        return AttemptOutcome.load(layout.outcome(number))
    except FileNotFoundError:
        return None


def _close(transports: Mapping[str, Transport]) -> None:
    for transport in transports.values():
        transport.close()


# The end of a run between two attempts, whose supervisor is gone: nothing of it runs but host agents that rest.


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


def _last_parts(layout: RunLayout, last: int) -> list[LaunchRequest]:
    """What was started, newest first, with each host only where it took part last: there its host agent may rest."""
    found: list[LaunchRequest] = []
    seen: set[str] = set()
    for number in range(last, 0, -1):
        request = load_if_there(layout.request(number), LaunchRequest)
        if request is None:
            continue
        part = request.on(set(request.names) - seen)
        seen.update(request.names)
        found += [part] if part.hosts else []
    return found


def _end_rest(layout: RunLayout, request: LaunchRequest, *, backend: Backend, connect: Connect, epoch: int) -> None:
    transports = connect(Cluster.of_attempt(layout, request.attempt))
    with ExitStack() as stack:
        for transport in transports.values():
            stack.enter_context(closing(transport))
        clean_rest(backend, request, transports, epoch=epoch)
