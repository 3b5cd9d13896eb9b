"""Which failure came first, and which are only its echoes. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gangline.diagnose.rank_ends import ECHOES, Failure, signal_name, weight
from gangline.diagnose.signatures import is_witness, last_exception, verdict
from gangline.errors import BadState, RunFailed
from gangline.launch.backend import HostStatus, LaunchRequest
from gangline.runs.state import iso
from gangline.supervise.standstill import who_did_not_come
from gangline.units import format_bytes

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
    request: LaunchRequest,
    statuses: Sequence[HostStatus],
    *,
    ordered: bool = False,
    seen: Sequence[str] = (),
    explain: Explain = lambda _failure: None,
) -> dict[str, Any] | None:
    """The error of an attempt, as `Outcome.error`; None if nothing ended badly.

    ordered: the user ordered the end. Then a rank that lost the others had not got the order yet, and has not failed.
    seen: as for `gather_failures`. explain: more about the end of a rank than its own error.
    """
    statuses = [_without_echoes(status) for status in statuses] if ordered else statuses
    failures = gather_failures(statuses, seen=seen)
    gone = [status for status in statuses if status.phase in {"lost", "starting"}]
    silent = [status for status in statuses if status.phase == "unreachable"]
    ended = [status for status in statuses if status.phase == "ended" and status.returncode]
    bad = [status for status in ended if not left_as_ordered(status)]
    signalled = [status for status in bad if status.reason == "signalled"]
    if failures and weight(failures[0]) < ECHOES:
        return _of_rank(failures[0], explain)
    if gone or (silent and (failures or bad)):
        return _of_lost(request, gone[0]) if gone else _of_silent(silent[0])
    unlaunched = [status for status in bad if status.reason == "unlaunched" and status.error is not None]
    if unlaunched:
        return dict(unlaunched[0].error or {})
    if found := who_did_not_come(request, statuses, failures):
        return found.to_json()
    if failures and weight(failures[0]) == ECHOES and not signalled:
        return _of_rank(failures[0], explain)
    # A launcher that was ordered to exit explains less than one that failed by itself.
    bad.sort(key=lambda status: (status.reason != "signalled", status.reason in {"killed", "stopped"}))
    return _of_host(request, bad[0]) if bad else None


def only_terminated(
    request: LaunchRequest, statuses: Sequence[HostStatus], unforced: Sequence[HostStatus] | None = None
) -> bool:
    """Whether something ended badly, and nothing would have, had the end been ordered: ranks were sent SIGTERM.

    unforced: without those that were killed because others had ended; None: all.
    """
    left = statuses if unforced is None else unforced
    return first_cause(request, statuses) is not None and first_cause(request, left, ordered=True) is None


def leaves_doubt(statuses: Sequence[HostStatus]) -> bool:
    """Whether no failure explains the end: ranks only lost each other, or waited."""
    if any(weight(failure) < ECHOES for failure in gather_failures(statuses)):
        return False
    return not any(status.phase in GONE or status.reason in {"signalled", "unlaunched"} for status in statuses)


def _without_echoes(status: HostStatus) -> HostStatus:
    """The same status, with ranks that only lost others counted as stopped; and so is a torchrun before it has ranks.

    A batch system ends torchrun by the same signal as its host agent, which may hear of it a moment later.
    """
    ended = status.returncode == -signal.SIGTERM
    if any(weight(failure) < ECHOES for failure in status.failures):
        return status
    if not status.failures and not ended and not is_witness(last_exception(status.console_tail) or ""):
        return status
    is_over = ended or status.reason == "finished"
    return replace(status, failures=(), error=None, returncode=0 if is_over else status.returncode)


def left_as_ordered(status: HostStatus) -> bool:
    """Whether its ranks only exited as ordered; a program may die of SIGTERM."""
    return status.reason == "stopped" and all(
        failure["error"] is None and failure["exit"] in {None, 0, -signal.SIGTERM, 128 + signal.SIGTERM}
        for failure in status.failures
    )


def _of_rank(failure: Failure, explain: Explain) -> dict[str, Any]:
    place = f"rank {failure['rank']} on {failure['host']}"
    error = failure["error"] or _death(place, failure).to_json()
    if error["kind"] == BadState.__name__:  # every rank reports the same error for all
        return dict(error)
    if found := explain(failure):
        error = found.to_json()
    elif known := verdict(f"{error['what']}\n{error['seen']}", host=failure["host"]):
        error = RunFailed(known[0], seen=error["seen"], fix=known[1]).to_json()
    if place not in error["what"]:
        error = {**error, "what": f"{place}: {error['what']}"}
    evidence = {name: failure[name] for name in ("host", "rank", "log", "log_tail")}
    return {**error, **evidence}


def _death(place: str, failure: Failure) -> RunFailed:
    code = failure["exit"]
    last = "\n".join(failure["log_tail"]) or "nothing"
    seen = f"last lines of {failure['log']}:\n{last}"
    if code is not None and code < 0:
        name = signal_name(-code)
        fix = "if its host ran out of memory (see dmesg there), lower micro_batch or sequence_length"
        hint = fix if -code == signal.SIGKILL else "read the log: gangline logs"
        at = f" in {stack['where']}" if (stack := failure.get("stack")) and stack["where"] else ""
        return RunFailed(f"{place} was killed by {name}{at}", seen=seen, fix=f"{hint}; then: gangline resume")
    if raised := last_exception(failure["log_tail"]):
        return RunFailed(f"{place}: {raised}", seen=seen, fix="read the log: gangline logs")
    how = f"with exit code {code}" if code is not None else "without a word"
    return RunFailed(f"{place} ended {how}", seen=seen, fix="read the log: gangline logs")


def _of_lost(request: LaunchRequest, status: HostStatus) -> dict[str, Any]:
    folder = _folder(request, status.host)
    return RunFailed(
        f"the gangline agent on {status.host} died; its ranks were stopped",
        seen=f"expected {folder}/exit.json, found none; its log is {folder}/agent.log",
        fix="look for a reboot or an out-of-memory kill there: dmesg; then: gangline resume",
        details={"host": status.host},
    ).to_json()


def _of_silent(status: HostStatus) -> dict[str, Any]:
    since = "" if status.since is None else f" since {iso(status.since)}"
    return RunFailed(
        f"{status.host} does not answer{since}, and the ranks on other hosts have failed",
        seen=status.why,
        fix=f"check that {status.host} is switched on and on the network; then: gangline resume",
        details={"host": status.host},
    ).to_json()


def _of_host(request: LaunchRequest, status: HostStatus) -> dict[str, Any]:
    log = f"{_folder(request, status.host)}/console.log"
    tail = "\n".join(status.console_tail)
    code = status.returncode or 0
    seen = f"the last of {log}:\n{tail}"
    if status.reason == "killed":
        grace_s = next(part.grace_s for part in request.hosts if part.host == status.host)
        what = f"the ranks on {status.host} did not exit in time and were killed"
        seen = f"expected them to save and exit; saw no progress for {grace_s:g} s; {seen}"
        fix = "continue from the last checkpoint: gangline resume"
    elif status.reason == "late":
        what = f"the ranks on {status.host} did not join in time; the gangline agent there stopped them"
        fix = "test every host and pair: gangline check; then: gangline resume"
    elif known := verdict(tail, host=status.host):
        what, fix = known
    else:
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        what = f"torchrun on {status.host} {how}, and no rank reported an error"
        fix = f"the full log is {log} on {status.host}"
    details = {"host": status.host, "log": log, "log_tail": list(status.console_tail)}
    return RunFailed(what, seen=seen, fix=fix, details=details).to_json()


def _folder(request: LaunchRequest, host: str) -> str:
    return next(part.folder for part in request.hosts if part.host == host)


# A rank that ran out of memory: its use, its limit, and the change that would make it fit.


LEAST_LENGTH = 256
"""Tokens; shorter samples are not proposed."""
BY_ITSELF = " (with `failures: {smaller_micro_batch: true}` it would have done this automatically)"
ROOM = 0.95
"""Part of the memory that may be planned for."""
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|[KMGT]iB)"
ON_GPU = re.compile(r"\bOutOfMemoryError\b|(?:CUDA|HIP) out of memory|CUDA error: out of memory")
ON_HOST = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes|\bMemoryError\b|std::bad_alloc")
FIGURES = {
    "asked": re.compile(rf"Tried to allocate {_SIZE}"),
    "capacity": re.compile(rf"total capac\w+ of {_SIZE}"),
    "free": re.compile(rf"of which {_SIZE} is free"),
    "used": re.compile(rf"this process has {_SIZE} memory in use"),
    "tensors": re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch"),
    "gaps": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}
"""The figures in torch's message (c10/cuda/CUDACachingAllocator.cpp)."""
RESIDENT = re.compile(r"\b(anon|file|shmem)-rss:(\d+)kB")
"""The memory of a killed process in the kernel's log."""


class OutOfMemory(RunFailed):
    """A rank ran out of memory. Its detail "micro_batch": the largest that may fit; None: it is 1, or unknown. Then
    "activation_checkpointing" says whether the rank can still compute activations again.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The figures of an out-of-memory error, in bytes."""

    device: str
    """"GPU memory" or "memory"."""
    killed: bool = False
    """The kernel killed the process."""
    needed_bytes: int | None = None
    """A lower bound."""
    room_bytes: int | None = None
    """The memory that it had or could get."""
    words: tuple[str, ...] = ()
    """The evidence, in sentences."""


def of_memory(
    failure: Mapping[str, Any], plan: Mapping[str, Any] | None, job: Mapping[str, Any] | None = None
) -> OutOfMemory | None:
    """The out-of-memory error of a rank; None if it ended otherwise.

    failure: of `gather_failures`, with "host"; "oom" in it is what its host agent found out
    (gangline.agent.supervise.memory_kills).
    plan, job: the content of plan.json and job.json, if there are any; the job with this rank's own micro_batch and
    activation_checkpointing.
    """
    shortage = _shortage(failure)
    if shortage is None:
        return None
    plan, job = plan or {}, job or {}
    place, planned = f"rank {failure['rank']} on {failure['host']}", _planned_memory(plan, failure["rank"])
    end = "and was killed by its kernel" if shortage.killed else ""
    seen = [*shortage.words, *_planned_words(planned)]
    smaller = _smaller(shortage, planned, _whole(job.get("micro_batch", plan.get("micro_batch"))) or 1)
    changes = [*([smaller[1]] if smaller else []), *_other_changes(shortage, planned, job)]
    return OutOfMemory(
        f"{place} ran out of {shortage.device} {end}".rstrip(),
        seen="; ".join(seen) or "its memory use is unknown",
        fix=_fix(changes, shortage, failure["host"], by_itself=BY_ITSELF if smaller and not _may_shrink(job) else ""),
        details={
            "micro_batch": smaller[0] if smaller else None,
            "activation_checkpointing": smaller is None and job.get("activation_checkpointing") is False,
        },
    )


def _shortage(failure: Mapping[str, Any]) -> Shortage | None:
    error = failure.get("error") or {}
    text = f"{error.get('what', '')}\n{error.get('seen', '')}"
    if ON_GPU.search(text):
        return _of_gpu(text)
    if (match := ON_HOST.search(text)) is not None:
        words = (f"it asked for {format_bytes(int(match[1]))} more",) if match[1] else ()
        return Shortage(device="memory", words=words)
    oom = failure.get("oom")
    return _of_kernel(oom) if isinstance(oom, Mapping) else None


def _of_gpu(text: str) -> Shortage:
    found = {name: _bytes(match) for name, pattern in FIGURES.items() if (match := pattern.search(text))}
    words = []
    if "asked" in found:
        words.append(f"it asked for {format_bytes(found['asked'])} more")
    if "capacity" in found and "free" in found:
        words.append(f"{format_bytes(found['free'])} of {format_bytes(found['capacity'])} were free")
    if "tensors" in found:
        gaps = f", {format_bytes(found['gaps'])} in gaps between them" if found.get("gaps") else ""
        words.append(f"it held {format_bytes(found['tensors'])} of tensors{gaps}")
    used = found.get("used", found.get("tensors", 0) + found.get("gaps", 0))
    needed = used + found["asked"] if used and "asked" in found else None
    room = used + found["free"] if used and "free" in found else None
    if room is not None and "capacity" in found and found["capacity"] - room > found["capacity"] // 20:
        words.append(f"others, or the driver, held {format_bytes(found['capacity'] - room)}")
    return Shortage(device="GPU memory", needed_bytes=needed, room_bytes=room, words=tuple(words))


def _of_kernel(oom: Mapping[str, Any]) -> Shortage:
    line = str(oom.get("line") or "")
    held = 1024 * sum(int(match[2]) for match in RESIDENT.finditer(line))
    limit, total = _whole(oom.get("limit_bytes")), _whole(oom.get("memory_bytes"))
    words = [f"it held {format_bytes(held)}"] if held else []
    if limit is not None and (total is None or limit < total):
        words.append(f"its control group may have {format_bytes(limit)}")
    elif total is not None:
        words.append(f"the machine has {format_bytes(total)} for all programs")
    if line:
        words.append(f"the kernel's log: {line}")
    elif oom.get("cgroup"):
        words.append(f"its control group {oom['cgroup']} counted a process that was killed for memory")
    # the memory that it held when it was killed was all that it could get
    return Shortage(
        device="memory", killed=True, needed_bytes=held or None, room_bytes=held or None, words=tuple(words)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedMemory:
    """The forecast of the plan for a rank."""

    process_bytes: int
    free_bytes: int | None
    moving: float | None
    """The part that is proportional to the tokens of a micro-batch; None: unknown."""


def _planned_memory(plan: Mapping[str, Any], rank: int) -> _PlannedMemory | None:
    try:
        row = (plan.get("forecast") or {}).get("ranks", ())[rank]
        process, allocated = int(row["process_bytes"]), int(row["allocated_bytes"])
        lasting = _whole(row.get("persistent_bytes"))
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
    moving = None if lasting is None or process <= 0 else min(1.0, max(0, allocated - lasting) / process)
    return _PlannedMemory(process_bytes=process, free_bytes=_whole(row.get("free_bytes")), moving=moving)


def _planned_words(planned: _PlannedMemory | None) -> Iterator[str]:
    if planned is None:
        return
    parts = ""
    if planned.moving is not None:
        moving = int(planned.process_bytes * planned.moving)
        lasting = format_bytes(planned.process_bytes - moving)
        parts = f" ({lasting} that stay, {format_bytes(moving)} of activations)"
    free = "" if planned.free_bytes is None else f", of {format_bytes(planned.free_bytes)} that were free"
    yield f"the plan expected {format_bytes(planned.process_bytes)} for it{parts}{free}"


def _may_shrink(job: Mapping[str, Any]) -> bool:
    failures = job.get("failures")
    return isinstance(failures, Mapping) and failures.get("smaller_micro_batch") is True


def _smaller(shortage: Shortage, planned: _PlannedMemory | None, micro_batch: int) -> tuple[int, str] | None:
    """A smaller micro-batch, and the words for it: the change with the least effect on the run."""
    divisors = [each for each in range(micro_batch - 1, 0, -1) if micro_batch % each == 0]
    return _best(divisors, "micro_batch: {}", micro_batch, shortage, planned) if divisors else None


def _other_changes(shortage: Shortage, planned: _PlannedMemory | None, job: Mapping[str, Any]) -> Iterator[str]:
    """Other changes of the job, that with the least effect first, each with its need of memory where known."""
    data = job.get("data")
    length = _whole(data.get("sequence_length")) if isinstance(data, Mapping) else None
    if job.get("activation_checkpointing") is False:
        yield "activation_checkpointing: true"
    if length is not None and length // 2 >= LEAST_LENGTH:
        shorter = [length >> halvings for halvings in range(1, 8) if length >> halvings >= LEAST_LENGTH]
        yield _best(shorter, "data.sequence_length: {}", length, shortage, planned)[1]
    method = job.get("method")
    if isinstance(method, Mapping) and method.get("kind") == "full":
        yield "method: lora"


def _best(values: list[int], key: str, now: int, shortage: Shortage, planned: _PlannedMemory | None) -> tuple[int, str]:
    """The largest of these values that fits, and the words for it; the first one, without a figure, where unknown."""
    room = shortage.room_bytes or (planned.free_bytes if planned is not None else None)
    if planned is None or planned.moving is None or room is None:
        return values[0], key.format(values[0])
    seen = max(shortage.needed_bytes or 0, planned.process_bytes)
    for value in values:
        needs = int(seen * (1 - planned.moving * (1 - value / now)))
        if needs <= ROOM * room:
            return value, f"{key.format(value)} (about {format_bytes(needs)})"
    return values[-1], f"{key.format(values[-1])}, which is not enough alone"


def _fix(changes: list[str], shortage: Shortage, host: str, *, by_itself: str) -> str:
    look = f"nvidia-smi on {host}" if shortage.device == "GPU memory" else f"top on {host}"
    free = f"if another program uses the memory (see {look}), end it, then: gangline resume"
    if not changes:
        return f"{free}; else give the host fewer `slots`"
    return f"in the job {', or '.join(changes)}, and start a new run, because a run keeps its job{by_itself}; {free}"


def _bytes(match: re.Match[str]) -> int:
    return int(float(match[1]) * UNITS[match[2]])


def _whole(value: object) -> int | None:
    """A number of bytes or tokens; None for anything else."""
    return value if type(value) is int and value >= 0 else None
