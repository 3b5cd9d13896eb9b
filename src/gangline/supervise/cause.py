"""Which failure came first, and which are only its echoes. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gangline.errors import RunFailed
from gangline.launch.backend import HostStatus, Request
from gangline.runs.events import iso

ECHO = re.compile(
    r"Connection (reset by peer|closed by peer|refused)|Broken pipe|Timed out waiting \d+ms for (send|recv)"
    r"|The client socket has timed out|DistStoreError|DistNetworkError"
)
"""What a rank says when another one has gone: it is a witness, not the cause."""

NO_MESH = re.compile(r"connectFullMesh failed.{0,2000}?remote=\[([0-9A-Fa-f.:]+)\]", re.DOTALL)
"""What gloo says when a rank cannot reach another at the address that the other one gave."""

PORT_TAKEN = re.compile(r"failed to listen on any local network address\. port: (\d+).{0,200}EADDRINUSE")
"""What torch says when somebody else listens where launchers or ranks are to meet."""

NO_INTERFACE = re.compile(r"Unable to find address for: ([^\s:]{1,32})")
"""What gloo says of an interface that is not there, or has no address."""

ECHOES = 2
"""Weight from which a failure is no cause any more."""

Failure = Mapping[str, Any]


def gather_failures(statuses: Sequence[HostStatus]) -> list[dict[str, Any]]:
    """Ranks that ended badly over all hosts, each with its host, the likeliest cause first."""
    found = [{**failure, "host": status.host} for status in statuses for failure in status.failures]
    return sorted(found, key=lambda failure: (weight(failure), failure["time"]))


def weight(failure: Failure) -> int:
    """How far a failure is from being the cause; time decides among equals.

    0: an error of its own, or a signal from outside. 1: an exit that nobody explained. 2: an echo of another's end.
    3: torchrun or an order ended it.
    """
    code = failure["exit"]
    if failure["error"] is not None:
        return ECHOES if is_echo(failure["error"]) else 0
    if failure["ordered"] or code == -signal.SIGTERM or code is None:
        return 3
    return 0 if code < 0 else 1


def is_echo(error: Mapping[str, Any]) -> bool:
    """Whether an error only tells that another rank has gone."""
    return ECHO.search(f"{error.get('what', '')}\n{error.get('seen', '')}") is not None


def first_cause(request: Request, statuses: Sequence[HostStatus], *, ordered: bool = False) -> dict[str, Any] | None:
    """The error of an attempt, as `Outcome.error`; None if nothing ended badly.

    ordered: the user told it to end. Then a rank that lost the others had not heard of it yet, and has not failed.
    """
    statuses = [_without_echoes(status) for status in statuses] if ordered else statuses
    failures = gather_failures(statuses)
    gone = [status for status in statuses if status.phase in {"lost", "starting"}]
    silent = [status for status in statuses if status.phase == "unreachable"]
    bad = [status for status in statuses if status.phase == "ended" and status.returncode and not _left_as_told(status)]
    signalled = [status for status in bad if status.reason == "signalled"]
    if failures and weight(failures[0]) < ECHOES:
        return _of_rank(failures[0])
    if gone:
        return _of_lost(request, gone[0])
    if silent and (failures or bad):
        return _of_silent(silent[0])
    if failures and weight(failures[0]) == ECHOES and not signalled:
        return _of_rank(failures[0])
    # A launcher that was told to leave says less than one that failed by itself.
    bad.sort(key=lambda status: (status.reason != "signalled", status.reason in {"killed", "stopped"}))
    return _of_host(request, bad[0]) if bad else None


def _without_echoes(status: HostStatus) -> HostStatus:
    """The same, but ranks that only lost others left in order."""
    if not status.failures or any(weight(failure) < ECHOES for failure in status.failures):
        return status
    return replace(status, failures=(), error=None, returncode=0 if status.reason == "finished" else status.returncode)


def _left_as_told(status: HostStatus) -> bool:
    """Whether its ranks did no more than to leave when they were ordered to; a program may die of SIGTERM."""
    return status.reason == "stopped" and all(
        failure["error"] is None and failure["exit"] in {None, 0, -signal.SIGTERM, 128 + signal.SIGTERM}
        for failure in status.failures
    )


def _of_rank(failure: Failure) -> dict[str, Any]:
    place = f"rank {failure['rank']} on {failure['host']}"
    error = failure["error"] or _death(place, failure).to_json()
    if told := _told_by_torch(f"{error['what']}\n{error['seen']}", error["seen"], host=failure["host"]):
        error = told.to_json()
    if place not in error["what"]:
        error = {**error, "what": f"{place}: {error['what']}"}
    evidence = {name: failure[name] for name in ("host", "rank", "log", "log_tail")}
    return {**error, **evidence}


def _death(place: str, failure: Failure) -> RunFailed:
    code = failure["exit"]
    last = "\n".join(failure["log_tail"]) or "nothing"
    seen = f"the last it wrote to {failure['log']}:\n{last}"
    if code is not None and code < 0:
        name = _signal_name(-code)
        fix = "if its host ran out of memory (see its kernel log), lower micro_batch or sequence_length"
        hint = fix if -code == signal.SIGKILL else "the log may tell more"
        return RunFailed(f"{place} was killed by {name}", seen=seen, fix=f"{hint}; then: gangline resume")
    how = f"with exit code {code}" if code is not None else "without a word"
    return RunFailed(f"{place} ended {how}", seen=seen, fix="the log may tell more")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _of_lost(request: Request, status: HostStatus) -> dict[str, Any]:
    folder = _folder(request, status.host)
    error = RunFailed(
        f"the guard on {status.host} is gone without a word",
        seen=f"no {folder}/exit.json; its log is {folder}/guard.log",
        fix="was it killed, or did the machine restart? what it had started was ended; then: gangline resume",
    )
    return {**error.to_json(), "host": status.host}


def _of_silent(status: HostStatus) -> dict[str, Any]:
    since = "" if status.since is None else f" since {iso(status.since)}"
    error = RunFailed(
        f"{status.host} does not answer{since}, and the ranks on other hosts have failed",
        seen=status.why,
        fix=f"is {status.host} on, and on the network? then: gangline resume",
    )
    return {**error.to_json(), "host": status.host}


def _told_by_torch(text: str, seen: str, *, host: str) -> RunFailed | None:
    """What its words mean, where we know."""
    if match := NO_MESH.search(text):
        return _no_mesh(match.group(1), seen)
    if match := PORT_TAKEN.search(text):
        return RunFailed(
            f"another program took port {match.group(1)} of {host}, where the ranks were to meet",
            seen=seen,
            fix=f"start again: a port that is free is chosen then; on {host}, ss -ltnp shows who listens",
        )
    if match := NO_INTERFACE.search(text):
        return RunFailed(
            f"{host} has no network interface {match.group(1)} with an address",
            seen=seen,
            fix="take GLOO_SOCKET_IFNAME out of the script and out of `env`: gangline sets the right one",
        )
    return None


def _no_mesh(address: str, seen: str) -> RunFailed:
    if address.startswith("127.") or address == "::1":
        return RunFailed(
            f"another rank gave {address} as its address, at which nobody else can reach it",
            seen=seen,
            fix="gangline sets GLOO_SOCKET_IFNAME: the script and `env` must not set or remove it; "
            "`interface` of a host in cluster.yaml names another one",
        )
    return RunFailed(
        f"no connection to another rank at {address}",
        seen=seen,
        fix="let the hosts of the cluster reach each other on all TCP ports; gangline check tries every pair",
    )


def _of_host(request: Request, status: HostStatus) -> dict[str, Any]:
    log = f"{_folder(request, status.host)}/console.log"
    tail = "\n".join(status.console_tail)
    code = status.returncode or 0
    if status.reason == "killed":
        grace_s = next(part.grace_s for part in request.hosts if part.host == status.host)
        error = RunFailed(
            f"the ranks on {status.host} did not leave in time and were killed",
            seen=f"expected them to save and leave, and saw nothing move for {grace_s:g} s; the last of {log}:\n{tail}",
            fix="gangline resume goes on from the last checkpoint",
        )
        return {**error.to_json(), "host": status.host, "log": log, "log_tail": list(status.console_tail)}
    if status.reason == "late":
        error = RunFailed(
            f"the ranks on {status.host} did not join in time and were ended by their guard",
            seen=f"the last of {log}:\n{tail}",
            fix="gangline check tries every host and pair; then: gangline resume",
        )
        return {**error.to_json(), "host": status.host, "log": log, "log_tail": list(status.console_tail)}
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    seen = f"the last of {log}:\n{tail}"
    error = _told_by_torch(tail, seen, host=status.host) or RunFailed(
        f"torchrun on {status.host} {how}, and no rank says why",
        seen=seen,
        fix=f"the rest is in {log} on {status.host}",
    )
    return {**error.to_json(), "host": status.host, "log": log, "log_tail": list(status.console_tail)}


def _folder(request: Request, host: str) -> str:
    return next(part.folder for part in request.hosts if part.host == host)
