"""The view of an attempt over many polls: which hosts answer, which ranks have joined, and their progress."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from gangline.diagnose.signatures import is_witness, last_exception
from gangline.errors import GanglineError, RunFailed
from gangline.launch.backend import HostRequest, HostStatus, LaunchRequest, RankSilence
from gangline.launch.program import StallWatch
from gangline.runs.cluster import Cluster
from gangline.runs.state import iso
from gangline.supervise.gang_control import PollIntervals
from gangline.supervise.hang import (
    Hang,
    ProcessStack,
    RankState,
    evidence_of,
    frames_of,
    named,
    read_stacks,
    waited_for,
)
from gangline.supervise.liveness import Event, Liveness
from gangline.supervise.startup import StartFollower
from gangline.supervise.trouble import FROZEN_S, HostTroubles
from gangline.transport.ssh_options import NONSENSE
from gangline.transport.transport import AGENT, Transport
from gangline.units import MOST_NAMED, format_duration, listed_ranks, shortened

# The ranks between joining and their first step. Pure.


AGAIN_S = 15.0
"""The first interval between two reports of the same stage; each is twice as long as the one before."""
STAGES = ("load", "evaluate", "compile", "step")
WORDS = {
    "load": ("loads the model", "load the model"),
    "evaluate": ("evaluates the model before the first step", "evaluate the model before the first step"),
    "compile": ("compiles the layers of the model", "compile the layers of the model"),
    "step": ("works on the first step", "work on the first step"),
}
"""For one rank, and for several."""

_Rank = tuple[int, str]
"""Its number, and its host."""


class FirstStep:
    """Follows the ranks of one attempt from the moment they have joined until all work on their first step.

    done: nothing more is reported; true from the beginning for the user's own program, which reports nothing.
    """

    def __init__(self, request: LaunchRequest, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.done = any(part.program != "worker" for part in request.hosts)
        self._clock = clock
        self._reached: dict[_Rank, int] = {}
        """The furthest stage of each."""
        self._stage: int | None = None
        """That of the slowest rank in the last report."""
        self._since = 0.0
        self._again_s = AGAIN_S

    def note(self, statuses: Sequence[HostStatus]) -> Iterator[Event]:
        """Take in the statuses; yields new events with their details."""
        for status in () if self.done else statuses:
            for sign in status.signs.ranks if status.signs else ():
                rank = sign.rank, status.host
                self._reached[rank] = max(_stage(sign.phase), self._reached.get(rank, 0))
        if self.done or not self._reached:
            return
        slowest = min(self._reached.values())
        if slowest != self._stage:
            self._stage, self._since, self._again_s = slowest, self._clock(), AGAIN_S
            yield "beginning", {"stage": STAGES[slowest], "what": self._sentence()}
        elif self._clock() - self._since >= self._again_s:
            passed_s = self._clock() - self._since
            self._again_s *= 2
            what = f"{self._sentence(still=True)} after {format_duration(passed_s)}"
            yield "beginning", {"stage": STAGES[slowest], "what": what}
        self.done = STAGES[slowest] == "step"

    def _sentence(self, *, still: bool = False) -> str:
        slowest = min(self._reached.values())
        behind = sorted(rank for rank, stage in self._reached.items() if stage == slowest)
        verb = WORDS[STAGES[slowest]][len(behind) > 1]
        everybody = "the rank" if len(behind) == 1 else f"all {len(behind)} ranks"
        who = everybody if len(behind) == len(self._reached) else listed_ranks((host, rank) for rank, host in behind)
        return f"{who} {'still ' if still else ''}{verb}"


def _stage(phase: str | None) -> int:
    if phase in {"importing", "joining", "joined", None}:
        return STAGES.index("load")
    return STAGES.index(phase if phase in {"evaluate", "compile"} else "step")


# Stacks of ranks, fetched in the background.


AT_ONCE = 32
TIMEOUT_S = 10.0
STACKS_S = TIMEOUT_S + 2.0
"""The end of a run without output waits so long for stacks: by then every host has answered, or could not."""
TRIES = 3
"""So often hosts are asked where their ranks stand, if one of them does not say it."""


class StackAsking:
    """Stacks of all ranks of an attempt, fetched once per suspicion. Not thread-safe."""

    def __init__(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> None:
        self._request = request
        self._transports = transports
        self._pool = ThreadPoolExecutor(max_workers=AT_ONCE, thread_name_prefix="gangline stacks")
        self._suspicion: int | None = None
        self._asked: dict[str, Future[Any]] = {}

    def about(self, suspicion: int) -> dict[str, Any]:
        """The answers so far, for `Hang.take` and `Stall.take`; a suspicion with another number fetches all anew.

        Of a host that could not be asked it is empty.
        """
        if suspicion != self._suspicion:
            self._suspicion = suspicion
            self._asked = {part.host: self._pool.submit(self._ask, part) for part in self._request.hosts}
        return {host: future.result() for host, future in self._asked.items() if future.done()}

    def _ask(self, part: HostRequest) -> Any:
        """The answer of a host; {} if there is none."""
        request = {"rank_files": part.rank_files, "ranks": part.ranks, "program": part.program}
        stdin = json.dumps({"request": request}).encode()
        try:
            result = self._transports[part.host].run((AGENT, "stacks"), stdin=stdin, timeout_s=TIMEOUT_S)
            return json.loads(result.stdout)
        except (GanglineError, OSError, *NONSENSE):
            return {}


# Whether the user's own program still prints, which is the only sign of its progress. Pure.


FRESH_S = 15.0
"""A host agent reports every second; after so long without a report its data is stale."""
SAME_S = 3.0
"""Two ranks that fell silent within this time did so together: host agents check once a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """The last report of a host agent on the output of its ranks."""

    at: float
    """When, by our clock."""
    beat: int | None
    silence: tuple[RankSilence, ...]
    has_ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """The output of one rank, as its host agent reported it last."""

    host: str
    row: RankSilence
    reported_at: float
    """By our clock."""
    is_known: bool
    """Its host agent still reports. Later output is not known otherwise."""

    @property
    def last(self) -> float:
        """When it printed last, or was first seen, by our clock."""
        return self.reported_at - self.row.silent_s

    @property
    def printed_s(self) -> float:
        """From when it was first seen to its last output."""
        return self.row.age_s - self.row.silent_s


class Stall:
    """The output of one attempt, as its host agents report it.

    Once there is a `suspicion`, the stacks of all ranks are to be fetched and passed to `take` as they arrive.

    watch: None: never stalled. is_told: an earlier supervisor has reported the stall already.
    """

    def __init__(
        self,
        watch: StallWatch | None,
        *,
        run_id: str,
        is_told: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch = watch
        self._run_id = run_id
        self._is_told = is_told
        self._clock = clock
        self._reports: dict[str, _Report] = {}
        self._joined_at: float | None = None
        self._has_looked = False
        self._stalled: _Stalled | None = None
        """The stall, while there is one."""
        self._num_stalls = 0
        self._noticed_at = 0.0
        self._stacks: dict[str, dict[int, ProcessStack]] = {}
        self._says_where = False
        """Where the ranks stand is to be told yet."""
        self._num_tries = 0

    @property
    def suspicion(self) -> int | None:
        """The number of the current stall; stacks that were fetched for another number are old."""
        return None if self._stalled is None else self._num_stalls

    def note(self, statuses: Sequence[HostStatus], *, joined: bool) -> Iterator[Event]:
        """Take in the statuses; yields new events with their details. joined: the ranks have joined."""
        if self._watch is None:
            return
        self._hear(statuses)
        before, self._stalled = self._stalled, None
        if joined and self._joined_at is None:
            self._joined_at = self._clock() if self._has_looked else float("-inf")
        self._has_looked = True
        since = self._silent_since(statuses)
        if since is None:
            return
        silent_s, limit_s = self._known_until() - since, self._watch.after_s
        if silent_s >= limit_s:
            self._stalled = _Stalled(self._logs(), now=self._clock(), since=since)
            if before is None:
                self._num_stalls += 1
                self._noticed_at, self._stacks, self._says_where = self._clock(), {}, not self._is_told
                self._num_tries = 1
            if not self._is_told:
                self._is_told = True
                yield "quiet", self._stalled.to_json()
        elif self._is_told and silent_s < limit_s - SAME_S:  # reports have whole seconds
            self._is_told = False
            yield "printing", {"what": "ranks print again"}

    def take(self, evidence: Mapping[str, Any]) -> Iterator[Event]:
        """Take in the answers so far: host -> answer of `stacks`, unchecked; yields where the ranks stand, once."""
        self._stacks = read_stacks(evidence)
        hosts = self._asked_hosts()
        if self._stalled is None or not self._says_where or not hosts <= self._stacks.keys():
            return
        if self._num_tries < TRIES and not all(self._stacks[host] for host in hosts):
            self._num_tries += 1
            self._num_stalls += 1  # a busy host may have been too slow: all are asked anew
            return
        self._says_where = False
        standing = self._stalled.standing(self._stacks)
        if standing:
            accused = waited_for(standing)
            first = {"host": accused[0].host, "rank": accused[0].rank} if accused else {}
            yield "standing", {"what": _standing(standing, accused), **first}

    def _asked_hosts(self) -> set[str]:
        return {host for host, report in self._reports.items() if not report.has_ended and self._is_fresh(report)}

    def _has_evidence(self) -> bool:
        """Whether the stacks of all hosts are there, or have been waited for."""
        return self._asked_hosts() <= self._stacks.keys() or self._clock() >= self._noticed_at + STACKS_S

    def failure(self) -> RunFailed | None:
        """The error that ends the run; None: it continues."""
        watch = self._watch
        if watch is None or watch.action == "report" or self._stalled is None or not self._has_evidence():
            return None
        standing = self._stalled.standing(self._stacks)
        accused = waited_for(standing) if standing else []
        run_id = self._run_id
        again = f"gangline resume {run_id} starts it again" if watch.can_resume else "start it again: gangline run"
        silent = f"no rank has printed anything for {format_duration(watch.after_s)}"
        raised = None if accused else self._stalled.raised
        host, rank = (accused[0].host, accused[0].rank) if accused else (None, None)
        if raised is not None:
            host, rank = raised.host, raised.row.rank
        what = f"{silent}: {_standing(standing, accused)}" if accused else silent
        return RunFailed(
            what if raised is None else f"{_said(raised)}, and {silent} since",
            seen="\n".join([*self._stalled.evidence(), *_stood(standing, accused)]),
            fix=f"gangline logs {run_id} shows what they printed, {again}; "
            "a script that is silent for longer by intent needs a longer --stall-after",
            details={
                "host": host,
                "rank": rank,
                "stacks": [evidence_of(each, each.stack) for each in standing if each.stack is not None],
            },
        )

    def _hear(self, statuses: Sequence[HostStatus]) -> None:
        for status in statuses:
            before = self._reports.get(status.host)
            if status.phase == "ended":
                last = before or _Report(at=self._clock(), beat=None, silence=())
                self._reports[status.host] = replace(last, has_ended=True)
            elif status.phase == "running" and status.silence and (before is None or status.beat != before.beat):
                self._reports[status.host] = _Report(at=self._clock(), beat=status.beat, silence=status.silence)

    def _silent_since(self, statuses: Sequence[HostStatus]) -> float | None:
        """Since when no rank has printed anything; None where that is unknown.

        It is unknown while the host of the rank that printed last does not answer: that rank may print on.
        """
        logs = self._logs()
        if self._joined_at is None or any(status.host not in self._reports for status in statuses):
            return None
        known = max((log.last for log in logs if log.is_known), default=None)
        if known is None or any(log.last > known + SAME_S for log in logs if not log.is_known):
            return None
        return max(known, self._joined_at)

    def _known_until(self) -> float:
        """The time up to which all output is known: that of the oldest report of a live host agent."""
        times = [each.at for each in self._reports.values() if not each.has_ended and self._is_fresh(each)]
        return min(times, default=self._clock())

    def _is_fresh(self, report: _Report) -> bool:
        return report.has_ended or self._clock() - report.at <= FRESH_S

    def _logs(self) -> list[_Log]:
        return [
            _Log(host=host, row=row, reported_at=report.at, is_known=self._is_fresh(report))
            for host, report in self._reports.items()
            for row in report.silence
        ]


class _Stalled:
    """A run without output. logs: of all its ranks; since: when that began, by our clock."""

    def __init__(self, logs: Sequence[_Log], *, now: float, since: float) -> None:
        self._logs = logs
        self._now = now
        self._since = since
        longest_s = max((log.printed_s for log in logs if log.row.has_printed), default=0.0)
        # A rank that printed only at its start is not the first to fall silent.
        printing = [log for log in logs if log.row.has_printed and log.printed_s >= min(longest_s, log.row.age_s) / 2]
        self._printing = sorted(printing, key=lambda log: (log.last, log.row.rank))

    @property
    def last(self) -> _Log | None:
        """The rank that printed last; None: no rank has printed."""
        return self._printing[-1] if self._printing else None

    @property
    def first(self) -> list[_Log]:
        """The ranks that fell silent first; [] where all did at about the same time."""
        if not self._printing or self._printing[-1].last - self._printing[0].last <= SAME_S:
            return []
        return [log for log in self._printing if log.last <= self._printing[0].last + SAME_S]

    @property
    def raised(self) -> _Log | None:
        """The first rank whose last line is an error of its own: it has ended, and its process has not."""
        found = [log for log in self._printing if _is_end_of_traceback(log.row.line) and not is_witness(log.row.line)]
        return found[0] if found else None

    def to_json(self) -> dict[str, Any]:
        """The details of an event."""
        shown = {"last": [self.last] if self.last else [], "first": self.first[:MOST_NAMED]}
        rows = {name: [{"host": log.host, "rank": log.row.rank} for log in logs] for name, logs in shown.items()}
        what = f"no rank has printed anything for {format_duration(self._now - self._since)}: {self._order()}"
        lines = [logs[0].row.line for logs in self._lines()]
        return {"what": what, "since": self._time(self._since), **rows, "line": lines[0] if lines else ""}

    def evidence(self) -> list[str]:
        """The evidence, line by line."""
        hosts = list(dict.fromkeys(log.host for log in self._logs))
        rows = [self._row(host) for host in hosts[:MOST_NAMED]]
        if len(hosts) > MOST_NAMED:
            rows.append(f"and {len(hosts) - MOST_NAMED} hosts more")
        said = [f"the last line of {_printers(logs)}: {logs[0].row.line}" for logs in self._lines()[:MOST_NAMED]]
        return [self._order(), *rows, *said]

    def standing(self, stacks: Mapping[str, Mapping[int, ProcessStack]]) -> list[RankState]:
        """The ranks whose stacks are known. A program in another language cannot be asked."""
        found = [(log, stacks.get(log.host, {}).get(log.row.rank)) for log in self._logs]
        return [
            RankState(
                host=log.host,
                rank=log.row.rank,
                phase="",
                step=0,
                collectives=0,
                moved_at=log.last,
                told_at=log.reported_at,
                stack=stack,
            )
            for log, stack in sorted(found, key=lambda each: each[0].row.rank)
            if stack is not None and (stack.where or stack.is_stopped or stack.waits_for_disk)
        ]

    def _order(self) -> str:
        """The order in which ranks fell silent, in words."""
        if self.last is None:
            return "the ranks have printed nothing since their start"
        if self.first:
            before = format_duration(self.last.last - self.first[0].last)
            return f"{_printers(self.first)} fell silent first, {before} before {_printers([self.last])}, the last"
        if len(self._printing) == 1:
            return f"the last was {_printers([self.last])}, which alone prints"
        return f"{_printers(self._printing)} fell silent at about the same time"

    def _row(self, host: str) -> str:
        logs = [log for log in self._logs if log.host == host]
        times = [log.last for log in logs if log.row.has_printed]
        unseen = "" if all(log.is_known for log in logs) else ", as far as known; the host does not answer"
        if not times:
            return f"{_printers(logs)}: nothing printed since the start{unseen}"
        first = f"{self._time(min(times))} to " if max(times) - min(times) > SAME_S else ""
        return f"{_printers(logs)}: last output {first}{self._time(max(times))}{unseen}"

    def _lines(self) -> list[list[_Log]]:
        """Possible causes, grouped by their last line; the smallest group first, for it is somewhere else than most."""
        by_line: dict[str, list[_Log]] = {}
        for log in self.first or self._printing:
            by_line.setdefault(log.row.line, []).append(log)
        return sorted((logs for line, logs in by_line.items() if line), key=len)

    def _time(self, moment: float) -> str:
        return iso(time.time() - (self._now - moment))


def _standing(standing: Sequence[RankState], accused: Sequence[RankState]) -> str:
    """Where the ranks stand, in a sentence; those that the others wait for first."""
    rest = [each for each in standing if each not in accused]
    groups: dict[str, list[RankState]] = {}
    for each in rest:
        groups.setdefault(each.where, []).append(each)
    at = [f"{named(ranks)} at {where}" for where, ranks in sorted(groups.items(), key=lambda group: len(group[1]))]
    if not accused:
        return f"the ranks stand: {'; '.join(shortened(at))}"
    said = shortened([each.stands for each in accused])
    return "; ".join(said + [f"the others wait: {'; '.join(shortened(at))}"] * bool(at))


def _stood(standing: Sequence[RankState], accused: Sequence[RankState]) -> list[str]:
    """The same as evidence, with the stacks of the first few."""
    return [_standing(standing, accused), *frames_of(accused or standing)] if standing else []


_BEFORE = re.compile(r"(\[\w+\]:? *)?[\w.]*")
"""Before the name of an exception: the rank, as torch and torchrun write it, and modules."""
_FIGURE = re.compile(r"[-+]?\d*\.\d+(e[-+]?\d+)?")


def _is_end_of_traceback(line: str) -> bool:
    """Whether a line begins with an exception and what it says; a warning that names one does not, nor does a figure
    such as `SquaredError: 0.31`.
    """
    said = last_exception([line])
    if said is None or _FIGURE.fullmatch(said.partition(":")[2].strip()):
        return False
    return _BEFORE.fullmatch(line[: line.index(said)].strip()) is not None


def _said(log: _Log) -> str:
    return f"the last line of {_printers([log])} is an error: {last_exception([log.row.line])}"


def _printers(logs: Sequence[_Log]) -> str:
    return listed_ranks((log.host, log.row.rank) for log in sorted(logs, key=lambda log: log.row.rank))


Statuses = Sequence[HostStatus]


class GangView:
    """The view of one attempt. is_quiet: an earlier supervisor has reported that no rank prints."""

    def __init__(
        self,
        request: LaunchRequest,
        cluster: Cluster,
        transports: Mapping[str, Transport],
        *,
        pace: PollIntervals,
        is_quiet: bool,
    ) -> None:
        self.liveness = Liveness(notice_s=pace.notice_s, stall_s=pace.stall_s)
        self.troubles = HostTroubles(request, transports)
        self.start = StartFollower(request, cluster, transports, limits=pace.start)
        self.step: int | None = None
        """The last completed step that was seen."""
        self._first_step = FirstStep(request)
        self._hang = Hang(request)
        self._stacks = StackAsking(request, transports)
        self._stall = Stall(request.stall, run_id=request.run_id, is_told=is_quiet)

    @property
    def joined(self) -> bool:
        """Whether all ranks have joined."""
        return self.start.done

    def take_for_joined(self) -> None:
        """Skip the start: an earlier supervisor has seen all ranks join."""
        self.start.done = self._first_step.done = True

    def note(self, statuses: Statuses, *, ordered: bool) -> list[Event]:
        """Take in the statuses; new events. ordered: ranks were ordered to exit, so silence is no fault."""
        events = [*self.liveness.note(statuses), *self.start.note(statuses)]
        events += self.troubles.note(statuses, frozen=self.liveness.frozen(statuses, FROZEN_S))
        if ordered:
            return events
        self.step = max(_completed(statuses), default=self.step)
        began = self._first_step.note(statuses) if self.joined else ()
        told = self._stall.note(statuses, joined=self.joined)
        hanging = list(self._hang.note(statuses, joined=self.joined))
        where: Iterator[Event] = iter(())
        if (number := self._hang.suspicion) is not None:
            self._hang.take(self._stacks.about(number))
        elif (number := self._stall.suspicion) is not None:
            where = self._stall.take(self._stacks.about(number))
        return [*events, *began, *hanging, *told, *where]

    def failure(self) -> GanglineError | None:
        """The error that ends the gang though no rank has failed; None: there is none."""
        return self.start.failure() or self._hang.failure() or self._stall.failure()

    @property
    def has_something_to_save(self) -> bool:
        """Whether ranks have state to save: not before all have joined."""
        return self.joined or not (self.start.failure() or self.start.board.is_before_ranks)


def _completed(statuses: Statuses) -> list[int]:
    """The last completed step of each rank."""
    signs = [sign for status in statuses if status.signs for sign in status.signs.ranks]
    return [sign.step - 1 for sign in signs if sign.step]
