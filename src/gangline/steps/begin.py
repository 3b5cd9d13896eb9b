"""The start of an attempt: what will be started is written down, and somebody who looks after it starts it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gangline.errors import GanglineError, HostKeyRefused, HostUnreachable, RunFailed
from gangline.launch.backend import Request
from gangline.launch.program import Again, Program
from gangline.runs.cluster import Cluster
from gangline.runs.files import write_atomic
from gangline.runs.gang import Gang
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.state import RunState
from gangline.runs.versions import load_if_there
from gangline.steps.equip import Ready
from gangline.steps.keep import Keeping, copy_records, hand_over
from gangline.steps.keeper import seen_from_head
from gangline.steps.seams import Means
from gangline.supervise.next_attempt import REST_S
from gangline.sync.trees import host_layout, place_gang, write_documents


def render(ready: Ready, gang: Gang, means: Means, *, program: Program | None = None, claim: bool = False) -> Request:
    """Exactly what would be started; the head says which port is free there. claim: keep it, for it will be used."""
    cluster, seams = ready.cluster, means.seams
    port = seams.free_port(cluster, means.transports[cluster.head.name], claim=claim)
    return seams.backend().render(cluster, gang, port=port, networks=ready.networks, program=program)


def worker_program(job: Job) -> Program:
    """How our own worker is started: where a failure does not end the run, processes stand by for what follows."""
    return Program(rest_s=REST_S if job.failures.restarts else 0.0)


def start_attempt(
    layout: RunLayout,
    ready: Ready,
    gang: Gang,
    means: Means,
    *,
    program: Program | None = None,
    again: Again | None = None,
) -> None:
    """Write down what will be started, and have a detached supervisor start it.

    again: how a program of the user's own follows it by itself; for a job, that is in job.json.
    The hosts are written down with the attempt; they become those of the run once the gang has been started.
    """
    cluster, number = ready.cluster, gang.attempt
    place_gang(cluster, means.transports, gang)
    layout.attempt(number).mkdir(mode=0o700, parents=True, exist_ok=True)
    request = render(ready, gang, means, program=program, claim=True)
    documents = {
        "request": request.to_json(),
        "cluster": cluster.to_json(),
        "gang": gang.to_json(),
        "networks": {host: dict(variables) for host, variables in ready.networks.items()},
    }
    if again is not None:
        documents["again"] = again.to_json()
    write_documents(layout, {f"attempts/{number}/{name}": value for name, value in documents.items()})
    keeping = ready.keeping()
    if keeping.why_not:
        means.talk.say(f"unattended: no, this computer has to look after the run: {'; '.join(keeping.why_not)}")
    elif keeping.unattended:
        means.talk.say(f"unattended: yes, {keeping.host} looks after the run; this computer may be turned off")
    try:
        if keeping.host is None:
            keeping.save(layout)
            with _in_doubt(layout):
                means.seams.spawn(layout.folder, number, secrets=means.secrets)
        else:
            _spawn_there(layout, cluster, number, keeping, means)
    except RunFailed:
        state = RunState.load(layout)
        if state.phase == "failed" and state.error:
            raise GanglineError.from_json(state.error) from None  # its own words say more
        raise


def _spawn_there(layout: RunLayout, cluster: Cluster, number: int, keeping: Keeping, means: Means) -> None:
    """Give the records to the head, as it sees the hosts, and have the supervisor come up there."""
    head = cluster.head
    keeper, there = means.transports[head.name], host_layout(head, layout.run_id)
    seen = seen_from_head(cluster).to_json()
    documents = {layout.cluster: seen, layout.attempt_cluster(number): seen}
    # the plan: not of a command of the user's own
    copied = (layout.gang(number), layout.networks(number), layout.again(number), layout.plan)
    documents |= _documents(copied)
    hand_over(layout, there, keeper, attempt=number, documents={**_earlier(layout, number), **documents})
    with _kept_by(layout, cluster, keeping):
        try:
            with _in_doubt(layout):
                means.seams.spawn_there(head, keeper, there, number, secrets=means.secrets)
        except HostUnreachable:
            raise
        except GanglineError:
            with contextlib.suppress(GanglineError):
                copy_records(layout, there, keeper)  # its own words say more
            raise
    try:
        copy_records(layout, there, keeper)
    except GanglineError:  # it runs, and is asked again by who follows it
        _believe_running(layout)


@contextlib.contextmanager
def _in_doubt(layout: RunLayout) -> Iterator[None]:
    """Around the start of a supervisor. If it is broken off, nobody here knows whether it has come up: from now on it
    counts what the supervisor says, or that there is none. Who shows another key has heard nothing.
    """
    try:
        yield
    except HostKeyRefused:
        raise
    except HostUnreachable as error:
        _believe_running(layout)
        name = layout.run_id
        raise HostUnreachable(
            f"{error.what}: it is not known whether {name} has started",
            seen=error.seen,
            fix=f"{error.fix or 'bring that host back'}; then gangline ps says whether {name} is running: if so, "
            f"gangline attach {name}; if it is lost, gangline resume {name}",
            reason=error.reason,
        ) from error
    except KeyboardInterrupt:
        _believe_running(layout)
        raise


def _believe_running(layout: RunLayout) -> None:
    """Until its supervisor is asked; where there is none, the run counts as lost."""
    state = RunState.load(layout)
    if state.phase == "preparing":
        replace(state, phase="running").save(layout)


@contextlib.contextmanager
def _kept_by(layout: RunLayout, cluster: Cluster, keeping: Keeping) -> Iterator[None]:
    """Write down who keeps the run, and which hosts are meant; if it does not come up there, all is as it was."""
    before = Keeping.load(layout), layout.cluster.read_bytes()
    write_documents(layout, {"cluster": cluster.to_json()})
    keeping.save(layout)
    try:
        yield
    except BaseException as error:
        may_be_up = isinstance(error, HostUnreachable | KeyboardInterrupt) and not isinstance(error, HostKeyRefused)
        if not may_be_up:
            write_atomic(layout.cluster, before[1])
            before[0].save(layout)
        raise


def _documents(paths: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """Records that are there, by path."""
    found = {path: load_if_there(path, dict) for path in paths}
    return {path: value for path, value in found.items() if value is not None}


def _earlier(layout: RunLayout, number: int) -> dict[Path, dict[str, Any]]:
    """What earlier attempts have left unfinished is finished by the host that keeps the run now."""
    found: dict[Path, dict[str, Any]] = {}
    for each in range(1, number):
        cluster = load_if_there(layout.attempt_cluster(each), Cluster)
        if cluster is None or not layout.request(each).exists():
            continue
        found[layout.attempt_cluster(each)] = seen_from_head(cluster).to_json()
        found |= _documents((layout.request(each), layout.outcome(each)))
    return found
