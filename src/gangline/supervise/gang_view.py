"""Everything that is followed of an attempt from look to look: who answers, who has joined, what ranks do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from gangline.errors import GanglineError, RunFailed
from gangline.launch.backend import HostRequest, HostStatus, LaunchRequest, RankSilence
from gangline.launch.poll import PATIENCE_S
from gangline.launch.program import StallWatch
from gangline.runs.cluster import Cluster
from gangline.runs.state import iso
from gangline.supervise.clean import VERIFY_S
from gangline.supervise.hang import Hang
from gangline.supervise.startup import StartFollower, StartLimits
from gangline.transport.ssh_options import NONSENSE
from gangline.transport.transport import AGENT, Transport
from gangline.units import format_duration

# What the ranks do once they have joined, until they work on their first step: nobody else tells of it. Pure.


AGAIN_S = 15.0
"""After so long it is said again, then after twice as long, and so on."""
MOST = 8
"""How many ranks are named."""
STAGES = ("load", "evaluate", "step")
WORDS = {
    "load": ("loads the model", "load the model"),
    "evaluate": ("evaluates the model before the first step", "evaluate the model before the first step"),
    "step": ("works on the first step", "work on the first step"),
}
"""For one rank, and for several."""

_Rank = tuple[int, str]
"""Its number, and its host."""


class FirstStep:
    """Follows the ranks of one attempt from the moment they have joined until all work on their first step.

    done: nothing more is told; so from the beginning for the user's own program, which says nothing of itself.
    """

    def __init__(self, request: LaunchRequest, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.done = any(part.program != "worker" for part in request.hosts)
        self._clock = clock
        self._reached: dict[_Rank, int] = {}
        """The furthest stage at which each was seen."""
        self._stage: int | None = None
        """That of the slowest, as it was told."""
        self._since = 0.0
        self._again_s = AGAIN_S

    def note(self, statuses: Sequence[HostStatus]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Take in what the hosts say; what is new, as events with their details."""
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
        return f"{_named(behind, num_ranks=len(self._reached))} {'still ' if still else ''}{verb}"


def _stage(phase: str | None) -> int:
    if phase in {"importing", "joining", "joined", None}:
        return STAGES.index("load")
    return STAGES.index("evaluate" if phase == "evaluate" else "step")


def _named(ranks: Sequence[_Rank], *, num_ranks: int) -> str:
    """Those of many that are behind are named."""
    if len(ranks) == num_ranks:
        return "the rank" if num_ranks == 1 else f"all {num_ranks} ranks"
    names = [f"{rank} on {host}" for rank, host in ranks[:MOST]]
    more = f" and {len(ranks) - MOST} more" if len(ranks) > MOST else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(names)}{more}"


# Which hosts answer, and which host agents get on: a host agent that stands still ends nothing, whatever it is ordered.


NOTICE_S = 5.0
"""A connection that was lost and is back within this time is no news."""


class Presence:
    """The hosts of an attempt, as they come and go."""

    def __init__(self, *, notice_s: float = NOTICE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._notice_s = notice_s
        self._clock = clock
        self._silent: dict[str, float] = {}
        """Since when, by our clock."""
        self._told: set[str] = set()

    def note(self, statuses: Sequence[HostStatus]) -> Iterator[tuple[str, dict[str, Any]]]:
        """What is new, as events with their details."""
        now = self._clock()
        for status in statuses:
            if status.phase == "unreachable":
                since = self._silent.setdefault(status.host, now)
                if now - since >= self._notice_s and status.host not in self._told:
                    self._told.add(status.host)
                    yield (
                        "unreachable",
                        {"host": status.host, "since": iso(time.time() - (now - since)), "why": status.why},
                    )
            elif status.host in self._silent:
                seconds = round(now - self._silent.pop(status.host), 1)
                if status.host in self._told:
                    self._told.remove(status.host)
                    yield "reachable", {"host": status.host, "seconds": seconds}

    def silent(self) -> dict[str, float]:
        """Hosts that do not answer now, and for how many seconds."""
        return {host: self._clock() - since for host, since in self._silent.items()}

    def silence_s(self) -> float:
        """How long all hosts that are silent now have been so; 0 if none is."""
        return self._clock() - max(self._silent.values()) if self._silent else 0.0


STALL_S = 60.0
"""A host agent counts up every second."""


class Heartbeats:
    """The host agents of an attempt, as their beats are seen."""

    def __init__(self, *, stall_s: float = STALL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._last: dict[str, tuple[int, float | None]] = {}
        """Beat, and since when it is the same; None: the host has not answered meanwhile."""
        self._stalled: dict[str, float] = {}
        """Since when, in seconds after 1970."""

    @property
    def stalled(self) -> set[str]:
        """Hosts whose host agent does not get on."""
        return set(self._stalled)

    def note(self, statuses: Sequence[HostStatus]) -> Iterator[tuple[str, dict[str, Any]]]:
        """What is new, as events with their details."""
        now = self._clock()
        for status in statuses:
            beat, since = self._last.get(status.host, (None, None))
            if status.phase == "unreachable" and beat is not None:
                self._last[status.host] = beat, None
            if status.phase != "running" or status.beat is None:
                continue
            if status.beat != beat:
                self._last[status.host] = status.beat, now
                if self._stalled.pop(status.host, None) is not None:
                    yield (
                        "recovered",
                        {"host": status.host, "what": f"the gangline agent on {status.host} responds again"},
                    )
            elif since is None:
                self._last[status.host] = beat, now
            elif now - since >= self._stall_s and status.host not in self._stalled:
                self._stalled[status.host] = time.time() - (now - since)
                yield "stalled", {"host": status.host, "what": f"the gangline agent on {status.host} does not respond"}

    def as_evidence(self, error: Mapping[str, Any]) -> dict[str, Any]:
        """An error, as `GanglineError.to_json`, that tells of host agents which stand still, too."""
        rows = [
            f"the gangline agent on {host} has not responded since {iso(since)}: look for a stopped process or a "
            "full disk there"
            for host, since in self._stalled.items()
        ]
        return {**error, "seen": "\n".join([*([error["seen"]] if error["seen"] else []), *rows])}


# Asking hosts where their ranks stand, beside the supervisor: one that does not answer keeps nobody waiting.


AT_ONCE = 32
TIMEOUT_S = 10.0


class StackAsking:
    """Stacks of all ranks of an attempt, asked for once per suspicion. Not for several threads."""

    def __init__(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> None:
        self._request = request
        self._transports = transports
        self._pool = ThreadPoolExecutor(max_workers=AT_ONCE, thread_name_prefix="gangline stacks")
        self._suspicion: int | None = None
        self._asked: dict[str, Future[Any]] = {}

    def about(self, suspicion: int) -> dict[str, Any]:
        """What hosts have said so far, for `Hang.take`; a suspicion with another number has all of them asked anew."""
        if suspicion != self._suspicion:
            self._suspicion = suspicion
            self._asked = {part.host: self._pool.submit(self._ask, part) for part in self._request.hosts}
        said = {host: future.result() for host, future in self._asked.items() if future.done()}
        return {host: answer for host, answer in said.items() if answer is not None}

    def _ask(self, part: HostRequest) -> Any:
        """What the host says; None if it says nothing."""
        request = {"rank_files": part.rank_files, "ranks": part.ranks, "program": part.program}
        stdin = json.dumps({"request": request}).encode()
        try:
            result = self._transports[part.host].run((AGENT, "stacks"), stdin=stdin, timeout_s=TIMEOUT_S)
            return json.loads(result.stdout)
        except (GanglineError, OSError, *NONSENSE):
            return None


# Whether the user's own program still prints: it is all that tells of its getting on. Pure.


FRESH_S = 15.0
"""A host agent tells every second: one that has not for so long stands still, or its host does not answer."""
SAME_S = 3.0
"""Two ranks that fell silent within this time did so together: host agents look once a second."""
MOST_SILENT = 8
"""How many ranks or hosts are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a host agent said last."""

    at: float
    """When, by our clock."""
    beat: int | None
    silence: tuple[RankSilence, ...]
    has_ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """What is known of the output of one rank."""

    host: str
    rank: int
    last: float
    """When it printed last, or was first seen, by our clock."""
    printed_s: float
    """From when it was first seen to its last output."""
    age_s: float
    """From when it was first seen to the last word of its host agent."""
    has_printed: bool
    line: str
    is_known: bool
    """Its host agent tells now. What it printed since is not known otherwise."""


class Stall:
    """The output of one attempt, as its host agents tell of it.

    watch: None: nothing is looked for. is_told: that no rank prints was said before, by an earlier supervisor.
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
        self._told: dict[str, _Told] = {}
        self._joined_at: float | None = None
        self._has_looked = False
        self._stalled: _Stalled | None = None
        """How it stands still now, if it does."""

    def note(self, statuses: Sequence[HostStatus], *, joined: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Take in what the hosts say now; what is new, as events with their details. joined: the ranks have."""
        if self._watch is None:
            return
        self._hear(statuses)
        self._stalled = None
        if joined and self._joined_at is None:
            self._joined_at = self._clock() if self._has_looked else float("-inf")
        self._has_looked = True
        since = self._silent_since(statuses)
        if since is None:
            return
        silent_s, limit_s = self._known_until() - since, self._watch.after_s
        if silent_s >= limit_s:
            self._stalled = _Stalled(self._logs(), now=self._clock(), since=since)
            if not self._is_told:
                self._is_told = True
                yield "quiet", self._stalled.to_json()
        elif self._is_told and silent_s < limit_s - SAME_S:  # a little less comes of whole seconds
            self._is_told = False
            yield "printing", {"what": "ranks print again"}

    def failure(self) -> RunFailed | None:
        """Why the run is to be ended, if it is."""
        watch = self._watch
        if watch is None or watch.action == "tell" or self._stalled is None:
            return None
        run_id = self._run_id
        again = f"gangline resume {run_id} starts it again" if watch.can_resume else "start it again: gangline run"
        return RunFailed(
            f"no rank has printed anything for {format_duration(watch.after_s)}",
            seen="\n".join(self._stalled.evidence()),
            fix=f"gangline logs {run_id} shows what they printed, {again}; "
            "a script that is silent for longer by intent needs a longer --stall-after",
        )

    def _hear(self, statuses: Sequence[HostStatus]) -> None:
        for status in statuses:
            before = self._told.get(status.host)
            if status.phase == "ended":
                silence = before.silence if before else ()
                at = before.at if before else self._clock()
                self._told[status.host] = _Told(at=at, beat=None, silence=silence, has_ended=True)
            elif status.phase == "running" and status.silence and (before is None or status.beat != before.beat):
                self._told[status.host] = _Told(at=self._clock(), beat=status.beat, silence=status.silence)

    def _silent_since(self, statuses: Sequence[HostStatus]) -> float | None:
        """Since when no rank has printed anything; None where that cannot be said.

        Who printed last may print on, unseen, where its host does not answer: then nothing is said.
        """
        logs = self._logs()
        if self._joined_at is None or any(status.host not in self._told for status in statuses):
            return None
        known = max((log.last for log in logs if log.is_known), default=None)
        if known is None or any(log.last > known + SAME_S for log in logs if not log.is_known):
            return None
        return max(known, self._joined_at)

    def _known_until(self) -> float:
        """Until when it is known what was printed: the oldest word of a host agent that still tells."""
        told = [told.at for told in self._told.values() if not told.has_ended and self._is_fresh(told)]
        return min(told, default=self._clock())

    def _is_fresh(self, told: _Told) -> bool:
        return told.has_ended or self._clock() - told.at <= FRESH_S

    def _logs(self) -> list[_Log]:
        return [
            _Log(
                host=host,
                rank=row.rank,
                last=told.at - row.silent_s,
                printed_s=row.age_s - row.silent_s,
                age_s=row.age_s,
                has_printed=row.has_printed,
                line=row.line,
                is_known=self._is_fresh(told),
            )
            for host, told in self._told.items()
            for row in told.silence
        ]


class _Stalled:
    """A run that prints no more. logs: of all its ranks; since: when it began, by our clock."""

    def __init__(self, logs: Sequence[_Log], *, now: float, since: float) -> None:
        self._logs = logs
        self._now = now
        self._since = since
        longest_s = max((log.printed_s for log in logs if log.has_printed), default=0.0)
        # A rank that only said something at its start does not print, and is not the first to fall silent.
        printing = [log for log in logs if log.has_printed and log.printed_s >= min(longest_s, log.age_s) / 2]
        self._printing = sorted(printing, key=lambda log: (log.last, log.rank))

    @property
    def last(self) -> _Log | None:
        """Who printed last; None: nobody ever did."""
        return self._printing[-1] if self._printing else None

    @property
    def first(self) -> list[_Log]:
        """Who fell silent first while others printed on; [] where all did at about the same time."""
        if not self._printing or self._printing[-1].last - self._printing[0].last <= SAME_S:
            return []
        return [log for log in self._printing if log.last <= self._printing[0].last + SAME_S]

    def to_json(self) -> dict[str, Any]:
        """The details of an event."""
        shown = {"last": [self.last] if self.last else [], "first": self.first[:MOST_SILENT]}
        rows = {name: [{"host": log.host, "rank": log.rank} for log in logs] for name, logs in shown.items()}
        what = f"no rank has printed anything for {format_duration(self._now - self._since)}: {self._order()}"
        lines = [logs[0].line for logs in self._lines()]
        return {"what": what, "since": self._time(self._since), **rows, "line": lines[0] if lines else ""}

    def evidence(self) -> list[str]:
        """What was seen, line by line."""
        hosts = list(dict.fromkeys(log.host for log in self._logs))
        rows = [self._row(host) for host in hosts[:MOST_SILENT]]
        if len(hosts) > MOST_SILENT:
            rows.append(f"and {len(hosts) - MOST_SILENT} hosts more")
        said = [f"the last line of {_printers(logs)}: {logs[0].line}" for logs in self._lines()[:MOST_SILENT]]
        return [self._order(), *rows, *said]

    def _order(self) -> str:
        """Who fell silent first."""
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
        times = [log.last for log in logs if log.has_printed]
        unseen = "" if all(log.is_known for log in logs) else ", as far as known; the host does not answer"
        if not times:
            return f"{_printers(logs)}: nothing printed since the start{unseen}"
        first = f"{self._time(min(times))} to " if max(times) - min(times) > SAME_S else ""
        return f"{_printers(logs)}: last output {first}{self._time(max(times))}{unseen}"

    def _lines(self) -> list[list[_Log]]:
        """Those who may be the cause, by what they printed last; first what the fewest did: they stand elsewhere."""
        by_line: dict[str, list[_Log]] = {}
        for log in self.first or self._printing:
            by_line.setdefault(log.line, []).append(log)
        return sorted((logs for line, logs in by_line.items() if line), key=len)

    def _time(self, moment: float) -> str:
        return iso(time.time() - (self._now - moment))


def _printers(logs: Sequence[_Log]) -> str:
    """Ranks by host: "rank 0 on pc1 and ranks 2, 3 on pc2"."""
    by_host: dict[str, list[int]] = {}
    for log in logs:
        by_host.setdefault(log.host, []).append(log.rank)
    words = [f"{_ranks(sorted(ranks))} on {host}" for host, ranks in by_host.items()]
    words = (
        [*words[:MOST_SILENT], f"those of {len(words) - MOST_SILENT} hosts more"] if len(words) > MOST_SILENT else words
    )
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= MOST_SILENT else f"{len(ranks)} ranks"


# What host agents say of another supervisor with a higher epoch: what one host alone says is not obeyed. Pure.


DOUBT_S = 15.0
"""The others hear of it within seconds, if it is true."""
WITNESSES = 2


class EpochClaims:
    """The claims of one attempt's host agents. num_hosts: of the attempt; one host alone needs no second one."""

    def __init__(
        self, *, num_hosts: int, doubt_s: float = DOUBT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.believed: int | None = None
        """The epoch of who is in charge in our place; None: nobody is."""
        self._needed = min(WITNESSES, num_hosts)
        self._doubt_s = doubt_s
        self._clock = clock
        self._since: dict[str, float] = {}
        self._told: set[str] = set()

    def note(self, statuses: Sequence[HostStatus], *, epoch: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Take in what the hosts say now, beside our own epoch; what is new, as events with their details."""
        claims = {status.host: status.epoch for status in statuses if status.epoch is not None and status.epoch > epoch}
        ordered = sorted(claims.values(), reverse=True)
        self.believed = ordered[self._needed - 1] if len(ordered) >= self._needed else None
        self._since = {host: self._since.get(host, self._clock()) for host in claims}
        for host, since in self._since.items():
            if self.believed is None and self._clock() - since >= self._doubt_s and host not in self._told:
                self._told.add(host)
                what = (
                    f"it alone says that another supervisor (epoch {claims[host]}) is in charge; ignored, "
                    "because one host alone may be wrong"
                )
                yield "doubted", {"host": host, "epoch": claims[host], "what": what}


# How often the supervisor looks, and how long it waits.


@dataclass(frozen=True, slots=True, kw_only=True)
class PollIntervals:
    """How often the supervisor looks, and how long it waits."""

    poll_s: float = 0.3
    patience_s: float = PATIENCE_S
    """How long a commit or an order may keep us from looking: a host may die meanwhile."""
    failure_grace_s: float = 15.0
    """What is left of a gang that failed may take this long to leave by itself."""
    break_grace_s: float = 40.0
    """The same where host agents rest afterwards: they end ranks that do not get on themselves, and sooner."""
    silence_s: float = 30.0
    """Once the gang is broken or has ended elsewhere: how long a host that does not answer is waited for."""
    ordered_silence_s: float = 30.0
    """The same, at the most, once the user has ordered the end: a job may wait for a lost host for a day."""
    abandon_s: float = 120.0
    """How long silence may last after an order, where no host has ended yet; and for a host agent that does not get
    on."""
    notice_s: float = NOTICE_S
    stall_s: float = STALL_S
    doubt_s: float = DOUBT_S
    """After so long it is told that one host alone speaks of another supervisor."""
    trouble_s: float = 60.0
    """How long looks may fail before the supervisor gives up."""
    verify_s: float = VERIFY_S
    """How long what is left after the end may take to go."""
    disk_s: float = 60.0
    """How long a file that cannot be written is tried again."""
    lock_s: float = 2.0
    """A look at the lock by somebody else is no reason to refuse."""
    start: StartLimits = field(default_factory=StartLimits)


Statuses = Sequence[HostStatus]
Event = tuple[str, dict[str, Any]]


class Followed:
    """What one attempt is seen to do. is_quiet: that no rank prints was said before, by an earlier supervisor."""

    def __init__(
        self,
        request: LaunchRequest,
        cluster: Cluster,
        transports: Mapping[str, Transport],
        *,
        pace: PollIntervals,
        is_quiet: bool,
    ) -> None:
        self.presence = Presence(notice_s=pace.notice_s)
        self.heartbeats = Heartbeats(stall_s=pace.stall_s)
        self.start = StartFollower(request, cluster, transports, limits=pace.start)
        self.step: int | None = None
        """The last that it was seen to complete."""
        self._first_step = FirstStep(request)
        self._hang = Hang(request)
        self._stacks = StackAsking(request, transports)
        self._stall = Stall(request.stall, run_id=request.run_id, is_told=is_quiet)

    @property
    def joined(self) -> bool:
        """Whether all ranks have joined."""
        return self.start.done

    def take_for_joined(self) -> None:
        """An earlier supervisor has seen them join."""
        self.start.done = self._first_step.done = True

    def note(self, statuses: Statuses, *, ordered: bool) -> list[Event]:
        """Take in what the hosts say now; what is new. ordered: ranks were told to leave: they may be silent, and begin
        nothing any more.
        """
        events = [*self.presence.note(statuses), *self.heartbeats.note(statuses), *self.start.note(statuses)]
        if ordered:
            return events
        self.step = max(_completed(statuses), default=self.step)
        began = self._first_step.note(statuses) if self.joined else ()
        told = self._stall.note(statuses, joined=self.joined)
        hanging = list(self._hang.note(statuses, joined=self.joined))
        if (number := self._hang.suspicion) is not None:
            self._hang.take(self._stacks.about(number))
        return [*events, *began, *hanging, *told]

    def failure(self) -> GanglineError | None:
        """Why the gang is to be ended though no part of it has failed by itself."""
        return self.start.failure() or self._hang.failure() or self._stall.failure()

    @property
    def has_something_to_save(self) -> bool:
        """Ranks that wait for each other to join, or do not run yet, have nothing."""
        return self.joined or not (self.start.failure() or self.start.board.is_before_ranks)


def _completed(statuses: Statuses) -> list[int]:
    """Steps that ranks have behind them, as they tell on which they work."""
    signs = [sign for status in statuses if status.signs for sign in status.signs.ranks]
    return [sign.step - 1 for sign in signs if sign.step]
