"""`gangline stop`: end a run, or have some hosts leave it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from gangline.context import REAL, Dependencies
from gangline.control.supervision import RunHandle, kill_without_supervisor
from gangline.control.user_command import CommandRecord
from gangline.errors import HostKeyRefused, HostUnreachable, UsageError
from gangline.launch.backend import LaunchRequest
from gangline.report.commands import leave_orders, orders
from gangline.runs.record_versions import decode_record, load_if_there
from gangline.runs.registry import RunRecord
from gangline.transport.ssh_options import understood
from gangline.transport.transport import read_if_there


def stop(run: RunHandle, *, now: bool = False, hosts: Sequence[str] = (), deps: Dependencies = REAL) -> bool:
    """Order a run to end and return at once; False if it had ended already. `now`: without saving.

    hosts: only these leave the run, and it continues without them; raises UsageError if it cannot.
    """
    _require_awake(run)
    if hosts:
        require_leavable(run, hosts)
        deps.leave_run(run.records, hosts, run.supervisor_host)
        return True
    record = run.record()
    _require_started(run, record)
    try:
        is_over = not _may_run(run, record, deps) and not deps.unfinished(run.records, run.supervisor_host)
        if is_over and (record.phase != "lost" or run.is_over):
            return False  # of a lost run, nobody has written down the end yet
        deps.stop_run(run.records, "kill" if now else "stop", run.supervisor_host)
    except HostKeyRefused:
        raise
    except HostUnreachable as error:
        if run.supervisor_host is None or run.layout.slurm.exists():
            raise
        if not now:
            name, host = run.layout.run_id, run.supervisor.host
            raise HostUnreachable(
                f"{host}, which supervises {name}, does not answer, so nothing was stopped",
                seen=error.seen or error.what,
                fix=f"bring {host} back; if it is off, go on without it: gangline resume {name} --without {host}, or "
                f"end the ranks on the other hosts: gangline stop {name} --now",
                reason=error.reason,
            ) from error
        kill_without_supervisor(run, error, deps)
    return True


def rehearse_stop(run: RunHandle, *, now: bool, hosts: Sequence[str] = (), deps: Dependencies = REAL) -> list[str]:
    """The orders of `stop`, host by host. Sends nothing."""
    if hosts:
        return leave_orders(require_leavable(run, hosts), hosts)
    record = run.record()
    _require_started(run, record)
    if not _may_run(run, record, deps):
        return [f"nothing to do: {run.layout.run_id} has ended"]
    return orders(started_request(run, record), now=now)


def _require_awake(run: RunHandle) -> None:
    """Raise HostUnreachable for a run that Slurm has suspended: it can neither save nor end by itself."""
    if run.is_suspended and not (record := run.record()).ended:
        raise HostUnreachable(
            f"{run.layout.run_id} cannot be told to stop: {record.silent}",
            seen=f"squeue -j {record.suspended}: SUSPENDED",
            fix=f"once it goes on (scontrol resume {record.suspended}): gangline stop {run.layout.run_id}; or end it "
            f"without a save: scancel {record.suspended}",
        )


def _may_run(run: RunHandle, record: RunRecord, deps: Dependencies) -> bool:
    """Whether anything of the run is alive, or the run is between two attempts."""
    is_between = record.state is not None and record.state.phase == "restarting"
    return is_between or deps.is_alive(run.records, run.supervisor_host)


def require_leavable(run: RunHandle, hosts: Sequence[str]) -> LaunchRequest:
    """The current request; raises UsageError where the run cannot continue without these hosts."""
    name, record = run.layout.run_id, run.record()
    _require_started(run, record)
    if record.silent is not None:
        raise HostUnreachable(
            f"{name} cannot be reached: its supervisor does not respond",
            seen=record.silent,
            fix="bring the host back",
        )
    if record.phase == "lost":
        raise UsageError(
            f"{name} has no supervisor, so it cannot continue without {', '.join(hosts)}",
            seen="its supervisor died",
            fix=f"save and end its ranks: gangline stop {name}; then: gangline resume {name} --cluster FILE",
        )
    if record.phase not in {"running", "restarting"}:
        word = "is ending" if record.phase == "stopping" else "has ended"
        raise UsageError(
            f"{name} {word}",
            seen=f"expected an active run, found one that is {record.phase}",
            fix=f"list the other hosts in a new FILE and continue with it: gangline resume {name} --cluster FILE",
        )
    _require_ours(run)
    request = started_request(run, record)
    _require_known(name, hosts, request.names)
    _require_others(run, hosts, request.names)
    return request


def started_request(run: RunHandle, record: RunRecord) -> LaunchRequest:
    """The last request. A supervisor on another host begins attempts of which this computer has no copy."""
    last = record.state.attempt if record.state else 1
    for number in range(last, 0, -1):
        request = load_if_there(run.layout.request(number), LaunchRequest)
        if request is not None:
            return request
        if run.supervisor_host is None:
            continue
        path = run.records.request(number)
        with understood(run.supervisor_host.host, f"what it has started of {run.layout.run_id}"):
            if (data := read_if_there(run.supervisor_host, path)) is not None:
                return decode_record(data, path, LaunchRequest, host=run.supervisor_host.host)
    raise UsageError(
        f"nothing of {run.layout.run_id} was started",
        seen=f"no {run.layout.request(last).name} in {run.layout.folder}",
        fix="it was interrupted before it began, or damaged; start a new run: gangline train",
    )


def _require_started(run: RunHandle, record: RunRecord) -> None:
    record.require_state()
    if record.phase == "preparing":
        raise UsageError(
            f"{run.layout.run_id} is being prepared",
            seen="only the command that prepares it is running",
            fix="press Ctrl-C in the terminal that started it",
        )


def _require_ours(run: RunHandle) -> None:
    if (own := CommandRecord.of(run.layout)) is None:
        return
    name, can_resume = run.layout.run_id, own.resume_words is not None
    again = f"gangline resume {name} --cluster FILE" if can_resume else "gangline run --cluster FILE -- CMD"
    raise UsageError(
        f"{name} runs your own command, and only that command knows whether it can continue with fewer ranks",
        seen="gangline does not save the state of your own command",
        fix=f"gangline stop {name}, then start it with the other hosts in FILE: {again}",
    )


def _require_known(name: str, hosts: Sequence[str], known: Sequence[str]) -> None:
    for host in hosts:
        if host in known:
            continue
        near = difflib.get_close_matches(host, known, n=1)
        raise UsageError(
            f"{host!r} is not part of {name}",
            seen=f"it runs on {', '.join(known)}",
            fix=f"did you mean {near[0]}?" if near else "choose one of these hosts",
        )


def _require_others(run: RunHandle, hosts: Sequence[str], known: Sequence[str]) -> None:
    name = run.layout.run_id
    if set(known) <= set(hosts):
        raise UsageError(
            f"{name} runs on {', '.join(known)} only",
            seen="no host would remain",
            fix=f"to end it: gangline stop {name}",
        )
    if run.supervisor.host in hosts:
        raise UsageError(
            f"{run.supervisor.host} runs the supervisor of {name} and cannot leave the run",
            seen=f"the supervisor of {name} runs there",
            fix=f"gangline stop {name}, then continue with the other hosts in FILE: gangline resume {name} "
            "--cluster FILE",
        )
