"""Which failure came first, and which are only its echoes. Pure."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gangline.diagnose.failures import ECHOES, Failure, weight
from gangline.diagnose.signatures import verdict
from gangline.errors import BadState, RunFailed
from gangline.launch.backend import HostStatus, Request
from gangline.runs.events import iso

GONE = frozenset({"lost", "starting", "unreachable"})
Explain = Callable[[Failure], RunFailed | None]


def gather_failures(statuses: Sequence[HostStatus], *, seen: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Ranks that ended badly over all hosts, each with its host, the likeliest cause first.

    seen: hosts in the order in which they were first seen to fail. It decides among equals: clocks of hosts differ, and
    count only among the ranks of one.
    """
    found = [{**failure, "host": status.host} for status in statuses for failure in status.failures]
    order = list(dict.fromkeys([*seen, *(status.host for status in statuses)]))
    return sorted(found, key=lambda failure: (weight(failure), order.index(failure["host"]), failure["time"]))


def first_cause(
    request: Request,
    statuses: Sequence[HostStatus],
    *,
    ordered: bool = False,
    seen: Sequence[str] = (),
    explain: Explain = lambda _failure: None,
) -> dict[str, Any] | None:
    """The error of an attempt, as `Outcome.error`; None if nothing ended badly.

    ordered: the user told it to end. Then a rank that lost the others had not heard of it yet, and has not failed.
    seen: as for `gather_failures`. explain: what more is known of the end of a rank than its own words.
    """
    statuses = [_without_echoes(status) for status in statuses] if ordered else statuses
    failures = gather_failures(statuses, seen=seen)
    gone = [status for status in statuses if status.phase in {"lost", "starting"}]
    silent = [status for status in statuses if status.phase == "unreachable"]
    bad = [status for status in statuses if status.phase == "ended" and status.returncode and not _left_as_told(status)]
    signalled = [status for status in bad if status.reason == "signalled"]
    if failures and weight(failures[0]) < ECHOES:
        return _of_rank(failures[0], explain)
    if gone:
        return _of_lost(request, gone[0])
    if silent and (failures or bad):
        return _of_silent(silent[0])
    unlaunched = [status for status in bad if status.reason == "unlaunched" and status.error is not None]
    if unlaunched:
        return dict(unlaunched[0].error or {})
    if failures and weight(failures[0]) == ECHOES and not signalled:
        return _of_rank(failures[0], explain)
    # A launcher that was told to leave says less than one that failed by itself.
    bad.sort(key=lambda status: (status.reason != "signalled", status.reason in {"killed", "stopped"}))
    return _of_host(request, bad[0]) if bad else None


def leaves_doubt(statuses: Sequence[HostStatus]) -> bool:
    """Whether nothing that ended by itself explains the end: ranks only lost each other, or waited."""
    if any(weight(failure) < ECHOES for failure in gather_failures(statuses)):
        return False
    return not any(status.phase in GONE or status.reason in {"signalled", "unlaunched"} for status in statuses)


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


def _of_rank(failure: Failure, explain: Explain) -> dict[str, Any]:
    place = f"rank {failure['rank']} on {failure['host']}"
    error = failure["error"] or _death(place, failure).to_json()
    if error["kind"] == BadState.__name__:  # every rank says the same of all of them
        return dict(error)
    if found := explain(failure):
        error = found.to_json()
    elif told := _told_by_torch(f"{error['what']}\n{error['seen']}", error["seen"], host=failure["host"]):
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
    """What its words mean, where they are the whole cause."""
    known = verdict(text, host=host)
    return None if known is None else RunFailed(known[0], seen=seen, fix=known[1])


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
