"""A run goes on without hosts that are off, the host of its supervisor among them: `gangline resume RUN --without`.

The records that count lie on the supervisor's host. Where that is off, this computer knows what it last heard, and the
other hosts know what runs there. Nothing may run twice, so the run is taken over only if every other host answers, none
of them reaches a host that is said to be off, and nothing of the run is left on any of them. A far higher epoch shuts
out an old supervisor of the same attempt, and for one that has begun another the slots of these hosts are in use.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from gangline.context import Dependencies, Transports
from gangline.control.start import require_unfinished
from gangline.control.supervision import RunHandle, SupervisorRecord, request_here
from gangline.errors import GanglineError, HostUnreachable, RunFailed, UsageError
from gangline.launch.backend import LaunchRequest
from gangline.provision.console import Console
from gangline.provision.trees import host_layout
from gangline.runs.cluster import Cluster, Host
from gangline.runs.record_versions import write_record
from gangline.runs.state import AttemptOutcome, HostOutcome, RunState, append_event
from gangline.supervise.gang_control import PAUSE_S, GangControl, with_leftovers
from gangline.transport.hostkeys import resolve
from gangline.transport.ssh_options import NONSENSE
from gangline.transport.transport import AGENT
from gangline.units import listed

END_S = 30.0
"""For ranks that have lost others: they save the last complete step if they can, and end."""
CONNECT_S = 5.0
CONNECT_TIMEOUT_S = 30.0
EPOCHS_AHEAD = 1_000_000
"""An old supervisor that nobody reaches raises its epoch by one with each attempt: it never gets this far."""
REACHED = ("open", "refused")
"""How a connection to a machine goes that is on."""


def without_hosts(cluster: Cluster, off: Sequence[str], *, before: Cluster, run_id: str) -> Cluster:
    """The cluster without the hosts, or the witness, that are off; raises UsageError for those that the run has not
    had, and if no host would be left.

    before: the hosts of the run until now.
    """
    known = [host.name for host in before.reached]
    if unknown := [name for name in off if name not in known]:
        raise UsageError(
            f"{run_id} has no host {listed(unknown)}",
            seen=f"its hosts are {', '.join(known)}",
            fix="name one of these after --without",
        )
    rest = tuple(host for host in cluster.hosts if host.name not in off)
    if not rest:
        raise UsageError(
            f"{run_id} cannot go on without all of its hosts",
            seen=f"without {', '.join(off)} none is left",
            fix="name fewer hosts, or give it others: --cluster FILE",
        )
    witness = cluster.witness if cluster.witness is not None and cluster.witness.name not in off else None
    return replace(cluster, hosts=rest, witness=witness)


def take_over(run: RunHandle, off: Sequence[str], *, console: Console, deps: Dependencies) -> RunState:
    """End what is left of a run whose supervisor's host is off, and make this computer the one that has its records;
    its last state.

    off: hosts that are off. Raises RunFailed where one of them is on, and HostUnreachable where another host does not
    answer, before anything is changed; RunFailed, too, where something of the run could not be ended: what was ended
    stays so, and the records are as before.
    """
    layout, head = run.layout, str(run.supervisor.host)
    off = [host.name for host in run.cluster.hosts if host.name in off]
    rest = [host for host in run.cluster.hosts if host.name not in off]
    state = last_heard(run)
    last = max(state.attempt, *_attempts(run, rest, head=head))
    _require_off(run, rest, [host for host in run.cluster.hosts if host.name in off])

    request = request_here(layout, last)
    present = request.on([host.name for host in rest])
    statuses = deps.backend(request.backend).poll(present, run.transports)
    epoch = max(state.epoch, *(status.epoch or 0 for status in statuses)) + EPOCHS_AHEAD
    console.report(f"{head} is off: ending what is left of attempt {last} on {listed(present.names)}")
    gang = GangControl(backend=deps.backend(request.backend), request=present, transports=run.transports, epoch=epoch)
    _end(gang, run_id=layout.run_id)

    ended = _record_end(run, request, state=replace(state, attempt=last, epoch=epoch), off=off)
    console.report(
        f"nothing of {layout.run_id} runs on {listed(present.names)} any more; this computer has its records"
    )
    return ended


def last_heard(run: RunHandle) -> RunState:
    """The last state that this computer has; raises UsageError for a run that had finished by then."""
    state = RunState.load(run.layout)
    require_unfinished(run.layout.run_id, state)
    return state


def _attempts(run: RunHandle, hosts: Sequence[Host], *, head: str) -> list[int]:
    """The last attempt that each host has a folder of. Raises HostUnreachable for a host that does not answer."""
    name = run.layout.run_id

    def last_of(host: Host) -> int:
        there = host_layout(host, name).attempt(1).parent
        try:
            found = run.transports[host.name].names(there)
        except HostUnreachable as error:
            raise HostUnreachable(
                f"{name} may still run on {host.name}, which does not answer, as {head} does not",
                seen=error.what,
                fix=f"bring {host.name} back; or, if it is off, too: gangline resume {name} --without {head} "
                f"--without {host.name}",
                reason=error.reason,
            ) from error
        return max((int(each) for each in found if each.isdecimal()), default=1)

    with ThreadPoolExecutor(max_workers=max(1, len(hosts))) as pool:
        return list(pool.map(last_of, hosts))


def _require_off(run: RunHandle, hosts: Sequence[Host], off: Sequence[Host]) -> None:
    """Raise RunFailed if one of the other hosts reaches a host that is said to be off."""
    targets = {host.name: _place(host) for host in off}
    with ThreadPoolExecutor(max_workers=max(1, len(hosts))) as pool:
        found = list(pool.map(lambda host: _reached(run.transports, host, targets), hosts))
    for host, reached in zip(hosts, found, strict=True):
        if reached:
            name = run.layout.run_id
            raise RunFailed(
                f"{name} may still run on {reached}: it is on",
                seen=f"{host.name} reaches it at {targets[reached][0]}, although this computer does not",
                fix=f"mend the way from this computer to {reached}; then: gangline attach {name}",
            )


def _place(host: Host) -> tuple[str, int]:
    found = resolve(host.ssh or host.name, host.ssh_port)
    return host.address or found.hostname, found.port


def _reached(transports: Transports, host: Host, targets: Mapping[str, tuple[str, int]]) -> str | None:
    """The first of the targets that a host gets an answer from; None: it gets none."""
    stdin = json.dumps({"targets": list(targets.values()), "timeout_s": CONNECT_S}).encode()
    try:
        said = transports[host.name].run((AGENT, "connect"), stdin=stdin, timeout_s=CONNECT_TIMEOUT_S)
        outcomes = json.loads(said.stdout)["outcomes"]
    except NONSENSE as error:
        raise RunFailed(
            f"{host.name} does not say whether it reaches {listed(list(targets))}",
            seen=str(error),
            fix=f"look at {host.name}: gangline check",
        ) from error
    return next((name for name, how in zip(targets, outcomes, strict=True) if how in REACHED), None)


def _end(gang: GangControl, *, run_id: str) -> None:
    """End ranks and agents; raises RunFailed if some are left."""
    missed = gang.stop()
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline and any(each.phase in {"starting", "running"} for each in gang.poll()):
        time.sleep(PAUSE_S)
    gang.end_resting()
    left = gang.clean()
    if missed or left:
        seen = [f"{name} was not reached" for name in missed] + [f"{each.host}: {each.what}" for each in left]
        raise RunFailed(
            f"{run_id} cannot go on: something of it is left",
            seen="; ".join(seen),
            fix="try again; if it stays, end it on that host by hand",
        )


def _record_end(run: RunHandle, request: LaunchRequest, *, state: RunState, off: Sequence[str]) -> RunState:
    """Write the end of the attempt here; the state after it. Hosts that are off keep what they have, until a later
    attempt or `gangline stop` finds them back.
    """
    layout, attempt = run.layout, state.attempt
    error = GanglineError(
        f"{listed(list(off))} was off, and the run was continued without it",
        seen=f"{run.supervisor.host} supervised the run and did not answer; no other host reached it",
        fix=f"its metrics since {state.updated} are on its disk",
    )
    layout.attempt(attempt).mkdir(mode=0o700, parents=True, exist_ok=True)
    request.save(layout.request(attempt))
    if not layout.attempt_cluster(attempt).exists():
        write_record(layout.attempt_cluster(attempt), run.cluster.to_json())
    hosts = {name: HostOutcome(phase="unreachable" if name in off else "ended") for name in request.names}
    outcome = AttemptOutcome(result="failed", hosts=hosts, error=error.to_json(), unverified=tuple(sorted(off)))
    with_leftovers(outcome, ()).save(layout.outcome(attempt))
    append_event(layout.events, "taken-over", source="supervisor", attempt=attempt, without=list(off))
    ended = replace(state, phase="failed", supervisor=None, error=error.to_json(), quiet_since=None)
    ended.save(layout)
    SupervisorRecord().save(layout)
    return ended
