"""The first cause where every rank with an error only lost or waited for another one: the rank that did not come.

Of the user's own programs. Ranks that were ended have told where they stood (gangline.agent.supervise.stacks). The
tracebacks of those that gave up, and torch's flight recorder, tell in which collective they had waited. A rank that
left well, but early, is one, too. Pure.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath

from gangline.diagnose.rank_ends import ECHOES, Failure, weight
from gangline.diagnose.signatures import last_exception, verdict
from gangline.errors import RunFailed
from gangline.launch.backend import HostStatus, LaunchRequest
from gangline.supervise.hang import ProcessStack, RankState, evidence_of, frames_of, named, waited_for
from gangline.units import listed, shortened

FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)')
"""As a traceback has it, whatever a launcher put before it."""
LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3[^/]*/|^<frozen ")
NOT_CONNECTED = re.compile("DistNetworkError|client socket has (failed to connect|timed out)")
WAITED = re.compile("Timed out waiting|timed out|collective operation timeout")
LOOK_S = 0.05
"""Of ranks whose ends a host agent saw at the same look, none is earlier."""
LOOK = "gangline logs shows what each rank printed"


def who_did_not_come(
    request: LaunchRequest, statuses: Sequence[HostStatus], failures: Sequence[Failure]
) -> RunFailed | None:
    """The error of a rank that the others waited for, or lost; None where nothing tells which one it was.

    failures: of `gather_failures`, none of which is a cause by itself.
    """
    if all(part.program == "worker" for part in request.hosts) or not failures:
        return None
    return (
        _terminated(failures)
        or _by_stacks(failures)
        or _left_early(statuses, failures)
        or _without_meeting(failures)
        or _of_nobody(failures)
    )


def _by_stacks(failures: Sequence[Failure]) -> RunFailed | None:
    gave_up = [_raised(each) for each in failures if _has_raised(each)]
    ended = [_ended(each) for each in failures if not _has_raised(each)]
    waiting = {each.where for each in gave_up if each and each.where}
    states = [each for each in (*gave_up, *(_beside(each, waiting) for each in ended)) if each is not None]
    states.sort(key=lambda each: each.rank)
    accused = waited_for(states) if len(states) > 1 else []
    unlike = _unlike(failures)
    if unlike and _wait(accused):
        fewest = min(unlike.values(), key=len)
        is_most_alike = 2 * len(fewest) < sum(map(len, unlike.values()))
        accused = [each for each in states if each.rank in fewest] if is_most_alike else []
    if not accused:
        return _mismatch(unlike, states) if unlike else None
    others = [each for each in states if each not in accused]
    return RunFailed(
        f"{_accusation(accused)}, and the others waited for {'it' if len(accused) == 1 else 'them'}",
        seen="\n".join([*shortened([_place(each) for each in states]), *_rows(unlike), *frames_of(accused)]),
        fix=_fix(accused[0], are_waiting=_wait(accused)),
        details={
            "host": accused[0].host,
            "rank": accused[0].rank,
            "stacks": [evidence_of(each, each.stack) for each in (*accused, *others) if each.stack],
        },
    )


def _has_raised(failure: Failure) -> bool:
    """Whether it gave up by itself, also where it was ended before it had left."""
    return weight(failure) == ECHOES or failure.get("collective") is not None


def _unlike(failures: Sequence[Failure]) -> dict[str, list[int]]:
    """Collectives of the same group and number that are not the same, with their ranks; {}: none are."""
    found: dict[tuple[str, int], dict[str, list[int]]] = {}
    for each in failures:
        if (said := each.get("collective")) is not None:
            words = f"{said['operation']} of {said['sizes']}" if said["sizes"] else said["operation"]
            row = found.setdefault((said["group"], said["number"]), {})
            row.setdefault(f"collective {said['number']}: {words}", []).append(each["rank"])
    return next((row for row in found.values() if len(row) > 1), {})


def _rows(unlike: dict[str, list[int]]) -> list[str]:
    return [
        f"{words}: {'rank' if len(ranks) == 1 else 'ranks'} {listed([str(each) for each in ranks])}"
        for words, ranks in unlike.items()
    ]


def _mismatch(unlike: dict[str, list[int]], states: Sequence[RankState]) -> RunFailed:
    """Ranks do not call the same, and nothing tells which of them is wrong."""
    return RunFailed(
        f"the ranks do not call the same collective: {'; '.join(_rows(unlike))}",
        seen="\n".join(shortened([_place(each) for each in states])),
        fix=f"every rank must call the same collectives, in the same order and with the same sizes; {LOOK}",
        details={"host": None, "rank": None},
    )


def _wait(accused: Sequence[RankState]) -> bool:
    return all(each.stack is not None and each.stack.waits and not each.stack.is_stopped for each in accused)


def _accusation(accused: Sequence[RankState]) -> str:
    if _wait(accused):
        at = listed(sorted({each.where for each in accused}))
        verb = "calls" if len(accused) == 1 else "call"
        return f"{named(accused)} {verb} another collective than the rest, at {at}"
    return listed([each.stands for each in accused])


def _fix(accused: RankState, *, are_waiting: bool) -> str:
    if are_waiting:
        return f"every rank must call the same collectives, in the same order: look at {accused.where}; {LOOK}"
    if accused.stack is not None and accused.stack.is_stopped:
        return f"find out who stopped the process; {LOOK}"
    if accused.stack is not None and accused.stack.waits_for_disk:
        return f"look at the disk of {accused.host}, or at the file server that it reads from"
    return f"find out what {accused.where} waits for, or why it takes so long; {LOOK}"


def _has_waited(failure: Failure) -> bool:
    """Whether it gave up, and did not lose another rank."""
    return any(WAITED.search(str(line)) for line in failure["log_tail"])


def _place(state: RankState) -> str:
    return state.stands if state.phase != "gave up" else f"{state.name} gave up waiting{state.at}"


def _state(failure: Failure, stack: ProcessStack, *, phase: str = "") -> RankState:
    return RankState(
        host=failure["host"],
        rank=failure["rank"],
        phase=phase,
        step=0,
        collectives=0,
        moved_at=0.0,
        told_at=0.0,
        stack=stack,
    )


def _raised(failure: Failure) -> RankState | None:
    """A rank that gave up: the line of the user's files in its traceback."""
    found = [match for line in failure["log_tail"] for match in FRAME.finditer(str(line))]
    users = [match for match in found if not LIBRARY.search(match[1])] or found
    where = f"{users[-1][3]} ({PurePath(users[-1][1]).name}:{users[-1][2]})" if users else ""
    told = failure.get("stack") or {}
    stack = ProcessStack(
        pid=failure["pid"] or 0,
        state="",
        wchan="",
        where=where or str(told.get("where", "")),
        waits=True,
        frames=(),
        unheard=(),
    )
    return _state(failure, stack, phase="gave up")


def _ended(failure: Failure) -> RankState | None:
    """A rank that was ended: where it stood then."""
    told = failure.get("stack")
    if told is None:
        return None
    stack = ProcessStack(
        pid=told["pid"],
        state=told["state"],
        wchan="",
        where=told["where"],
        waits=told["waits"],
        frames=tuple(told["stack"]),
        unheard=(),
    )
    return _state(failure, stack)


def _beside(state: RankState | None, waiting: set[str]) -> RankState | None:
    """It waited, too, where it stood at a line at which others gave up: a GPU's work is waited for out of sight."""
    if state is None or state.stack is None or state.where not in waiting or state.stack.is_stopped:
        return state
    return replace(state, stack=replace(state.stack, wchan="", waits=True, unheard=()))


def _terminated(failures: Sequence[Failure]) -> RunFailed | None:
    """A rank that a signal from outside ended. torchrun ends ranks so, too, but not the first one on its host."""
    hosts = dict.fromkeys(each["host"] for each in failures)
    firsts = [min((each for each in failures if each["host"] == host), key=lambda each: each["time"]) for host in hosts]
    found = [each for each in firsts if each["exit"] == -signal.SIGTERM and not each["ordered"]]
    if not found or any(map(_has_waited, failures)):
        return None
    first = found[0]
    told = first.get("stack") or {}
    at = f" at {told['where']}" if told.get("where") else ""
    return RunFailed(
        f"rank {first['rank']} on {first['host']} was ended by SIGTERM{at}, which gangline had not sent",
        seen="\n".join(["the others only lost it", *_tail(first)]),
        fix="a person, a job system or a shut-down of its host sends it; then: gangline resume",
        details={name: first[name] for name in ("host", "rank", "log", "log_tail")},
    )


def _left_early(statuses: Sequence[HostStatus], failures: Sequence[Failure]) -> RunFailed | None:
    """Ranks that left well, so that nobody says anything of them, while the others went on."""
    lost = [each for each in failures if weight(each) == ECHOES]
    if not lost:
        return None
    ranks = [(status.host, rank) for status in statuses for rank in status.left_early]
    first_s = {host: min(each["time"] for each in lost if each["host"] == host) for host in {e["host"] for e in lost}}
    ranks += [
        (each["host"], each["rank"])
        for each in failures
        if each["exit"] is None and not each["ordered"] and each.get("stack") is None
        if each["time"] < first_s.get(each["host"], float("-inf")) - LOOK_S
    ]
    if not ranks:
        return None
    who = listed([f"rank {rank} on {host}" for host, rank in ranks])
    log = next((each for each in failures if (each["host"], each["rank"]) == ranks[0]), None)
    return RunFailed(
        f"{who} left before the others, with exit code 0, and they lost {'it' if len(ranks) == 1 else 'them'}",
        seen="\n".join([f"{lost[0]['host']} was still in a collective", *(_tail(log) if log else [])]),
        fix=f"find out why: its data may have ended before those of the others, or the script exits so; {LOOK}",
        details={"host": ranks[0][0], "rank": ranks[0][1]},
    )


def _without_meeting(failures: Sequence[Failure]) -> RunFailed | None:
    """A rank that could not connect to where ranks meet, while others had."""
    words = {each["rank"]: last_exception(each["log_tail"]) or "" for each in failures}
    found = [each for each in failures if NOT_CONNECTED.search(words[each["rank"]])]
    if not found or len(found) >= len(failures):
        return None
    first = found[0]
    return RunFailed(
        f"rank {first['rank']} on {first['host']} did not connect to where the ranks meet: {words[first['rank']]}",
        seen="\n".join(_tail(first)),
        fix="gangline sets MASTER_ADDR and MASTER_PORT: the script and `env` must not change them; "
        "test every pair of hosts: gangline check",
        details={name: first[name] for name in ("host", "rank", "log", "log_tail")},
    )


def _of_nobody(failures: Sequence[Failure]) -> RunFailed | None:
    """Several only lost each other, or waited: none of them is the cause."""
    told = [(each, last_exception(each["log_tail"]) or "") for each in failures if _has_raised(each)]
    if len(told) < 2 or any(verdict(words, host=each["host"]) for each, words in told):
        return None
    return RunFailed(
        f"{len(told)} ranks lost another one, or gave up waiting for it, and nothing tells which one it was",
        seen="\n".join(shortened([f"rank {each['rank']} on {each['host']}: {words}" for each, words in told])),
        fix=f"test every pair of hosts: gangline check; {LOOK}",
        details={"host": None, "rank": None},
    )


def _tail(failure: Failure) -> list[str]:
    return [f"last lines of {failure['log']}:", *map(str, failure["log_tail"])]
