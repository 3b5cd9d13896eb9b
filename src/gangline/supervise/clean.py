"""Leftovers of ended attempts on hosts: ended before the next attempt, or by another `gangline stop`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from gangline.errors import RunFailed
from gangline.launch.backend import LaunchRequest
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_if_there, load_record
from gangline.runs.state import AttemptOutcome, RunState, append_event
from gangline.supervise.gang_control import SupervisedRun, with_leftovers
from gangline.supervise.lock import supervisor_lock


def end_earlier(run: SupervisedRun, attempt: int, *, hosts: Collection[str], epoch: int) -> None:
    """End the leftovers of earlier attempts on these hosts; raises RunFailed if one of those attempts still runs.

    Hosts that do not answer are skipped: an attempt that needs one of them does not start anyway.
    """
    for number in range(1, attempt):
        request = load_if_there(run.layout.request(number), LaunchRequest)
        if request is None:
            continue
        if run.layout.outcome(number).exists():
            _finish(run, number, hosts=hosts, epoch=epoch)
            continue
        with run.attempt(request, epoch=epoch) as gang:
            if any(status.phase == "running" for status in gang.poll()):
                raise RunFailed(
                    f"{run.layout.run_id} is running already",
                    seen=f"attempt {number} has gangline agents that still run",
                    fix=f"gangline stop {run.layout.run_id}",
                )
            gang.stop()


def unfinished(layout: RunLayout) -> tuple[str, ...]:
    """Hosts with possible leftovers of ended attempts."""
    outcomes = [load_if_there(layout.outcome(number), AttemptOutcome) for number in _attempts(layout)]
    return tuple(dict.fromkeys(host for outcome in outcomes if outcome for host in outcome.doubtful))


def finish_all(run: SupervisedRun) -> tuple[str, ...]:
    """End the leftovers of ended attempts; the hosts that still do not answer, or still have some."""
    epoch = RunState.load(run.layout).epoch
    for number in _attempts(run.layout):
        _finish(run, number, hosts=None, epoch=epoch)
    return unfinished(run.layout)


def _finish(run: SupervisedRun, number: int, *, hosts: Collection[str] | None, epoch: int) -> None:
    """End the leftovers of one ended attempt on hosts that did not answer at its end, and update its outcome.

    hosts: where; None: everywhere.
    """
    outcome = load_if_there(run.layout.outcome(number), AttemptOutcome)
    doubtful = set(outcome.doubtful) if outcome is not None else set()
    hosts = doubtful if hosts is None else doubtful & set(hosts)
    if outcome is None or not hosts:
        return
    request = load_record(run.layout.request(number), LaunchRequest).on(hosts)
    with run.attempt(request, epoch=epoch) as gang:
        gang.stop()
        left = gang.clean()
    others = replace(
        outcome,
        left=tuple(each for each in outcome.left if each.partition(":")[0] not in hosts),
        unverified=tuple(host for host in outcome.unverified if host not in hosts),
    )
    with_leftovers(others, left).save(run.layout.outcome(number))


def _attempts(layout: RunLayout) -> range:
    """All attempts of a run."""
    state = load_if_there(layout.state, RunState)
    return range(1, state.attempt + 1) if state else range(0)


def end_without_supervisor(run: SupervisedRun) -> None:
    """End a run without a supervisor between two attempts: its idle host agents and its leftovers. The run is `stopped`
    then. Raises RunFailed if it has a supervisor after all.
    """
    layout = run.layout
    with supervisor_lock(layout):
        state = RunState.load(layout)
        # Higher than that of the supervisor before: should that one wake up, it sees that another one is in charge.
        state = replace(state, epoch=state.epoch + 1, supervisor=None)
        state.save(layout)
        for request in _last_parts(layout, state.attempt):
            with run.attempt(request, epoch=state.epoch) as gang:
                gang.end_resting()
        finish_all(run)
        append_event(layout.events, "stopped", source="supervisor", attempt=state.attempt)
        replace(state, phase="stopped", error=None).save(layout)


def _last_parts(layout: RunLayout, last: int) -> list[LaunchRequest]:
    """The requests, newest first, with each host only where it was last: there its host agent may be idle."""
    found: list[LaunchRequest] = []
    seen: set[str] = set()
    for number in range(last, 0, -1):
        for path in (layout.standby(number), layout.request(number)):
            request = load_if_there(path, LaunchRequest)
            if request is None:
                continue
            part = request.on(set(request.names) - seen)
            seen.update(request.names)
            found += [part] if part.hosts else []
    return found
