"""What earlier attempts of a run have left on hosts: ended before the next one, or when the user says stop again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from gangline.errors import RunFailed
from gangline.launch.backend import Backend, Request
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster
from gangline.runs.layout import RunLayout
from gangline.runs.state import Outcome, RunState
from gangline.runs.versions import load_if_there, load_record
from gangline.supervise.clean import clean

Connect = Callable[[Cluster], Mapping[str, Transport]]


def end_earlier(
    layout: RunLayout, attempt: int, *, hosts: Collection[str], backend: Backend, connect: Connect, epoch: int
) -> None:
    """End what the attempts before have left on hosts of this one; raises RunFailed if one of them still runs without
    having an outcome.

    Hosts that do not answer are left to themselves: if they are of the new attempt, it does not start anyway.
    """
    for number in range(1, attempt):
        request = load_if_there(layout.request(number), Request)
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
                    seen=f"attempt {number} has guards that run",
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
    request = load_record(layout.request(number), Request).on(hosts)
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


def _outcome(layout: RunLayout, number: int) -> Outcome | None:
    try:
        return Outcome.load(layout.outcome(number))
    except FileNotFoundError:
        return None


def _close(transports: Mapping[str, Transport]) -> None:
    for transport in transports.values():
        transport.close()
