"""Hang detection: a step that takes far longer than any before it hangs, and one rank or host is the cause. Pure.

Phases that last long by nature, such as loading, have limits of their own. Time in which a rank was ready and had no
processor, or waited for swapped pages, does not count: on a busy computer ranks are slow, and do not hang. A host that
does not answer is suspected only if all others wait for it. The positions of all ranks, and the stacks of their
processes, name the cause.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gangline.errors import RunFailed
from gangline.launch.backend import HostStatus, LaunchRequest, RankSigns
from gangline.supervise.liveness import Event, Liveness
from gangline.transport.ssh_options import NONSENSE, printable, whole
from gangline.units import MOST_NAMED, format_duration, listed, listed_ranks, shortened

# The positions of the ranks of an attempt, as their host agents report them. Pure.


FRESH_S = 10.0
"""A host agent reports every second; without a new report for so long its data is stale."""
MOST_FRAMES = 60
MOST_LETTERS = 200
SLACK_S = 6.0
"""A report may be read late by so much: only one that is newer by more is a sign of life."""
NOT_BEGUN = "importing"
"""The phase of a rank that has not reported any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStack:
    """The stack of one process, as its host reports it (gangline.agent.supervise.stacks)."""

    pid: int
    state: str
    """One letter, as in proc(5)."""
    wchan: str
    where: str
    """The innermost call that a person would look at; "": unknown."""
    waits: bool
    """`where` is a call that waits for other ranks."""
    frames: tuple[str, ...]
    """Calls of its main thread, innermost first."""
    unheard: tuple[str, ...]
    """Addresses that do not acknowledge sent data."""

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal: it does nothing until it is continued."""
        return self.state in {"T", "t"}

    @property
    def waits_for_disk(self) -> bool:
        """Whether it is in uninterruptible sleep."""
        return self.state == "D"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The last known state of one rank. Times are by our clock."""

    host: str
    rank: int
    phase: str
    """"": unknown, as of a rank of the user's own program."""
    step: int
    """1-based; 0: before the first."""
    collectives: int
    """Number that it has entered."""
    moved_at: float
    """When it got there."""
    told_at: float
    """Time of its last sign of life: it may report the same state again."""
    starved_s: float = 0.0
    """For how long in all it wanted to go on and could not (`RankSigns.starved_s`)."""
    stack: ProcessStack | None = None

    @property
    def progress(self) -> tuple[int, int]:
        """The others wait for ranks with the least progress."""
        return self.collectives, self.step

    @property
    def left(self) -> int:
        """Exchanges that it has completed."""
        return self.collectives - (self.phase == "exchange")

    @property
    def name(self) -> str:
        """As in: rank 2 on pc3"""
        return f"rank {self.rank} on {self.host}"

    @property
    def point(self) -> str:
        """As in: `data` of step 57"""
        return f"`{self.phase}` of step {self.step}" if self.step else f"`{self.phase}`"

    def place(self, now: float) -> str:
        """Its position and how long it has been there, in a sentence."""
        where = f", at {self.where}" if self.where else ""
        return f"{self.name} {self.does} in {self.point} since {seconds(now - self.moved_at)}{where}"

    @property
    def where(self) -> str:
        """The call in which it stands; "": unknown."""
        return self.stack.where if self.stack else ""

    @property
    def at(self) -> str:
        """As in: ` at train (train.py:8)`; "": unknown."""
        return f" at {self.where}" if self.where else ""

    @property
    def stands(self) -> str:
        """As in: rank 2 on pc3 is stopped (SIGSTOP) at train (train.py:8)"""
        return f"{self.name} {self.does}{self.at}"

    @property
    def does(self) -> str:
        """As in: stands, or is stopped (SIGSTOP)"""
        words = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger"}
        words |= {"D": "waits for a disk or a network file system"} | dict.fromkeys("ZX", "has ended")
        return words.get(self.stack.state if self.stack else "", "stands")


class RankStates:
    """All ranks of an attempt."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_rank: dict[int, RankState] = {}
        self._liveness = Liveness(clock=clock)
        self._silent: dict[str, float] = {}
        """Hosts without fresh data, and since when."""
        self._frozen: set[str] = set()
        """Those that answer, but whose host agent does not respond."""

    @property
    def seen(self) -> list[RankState]:
        """Ranks that have not ended and whose position is known now."""
        return [each for each in self._all() if each.host not in self._silent and each.phase != "ended"]

    @property
    def is_blind(self) -> bool:
        """Whether the position of any rank is unknown."""
        return bool(self._silent)

    def silent(self, seconds: float) -> list[str]:
        """Hosts without fresh data for so long."""
        return [host for host, since in self._silent.items() if self._clock() - since >= seconds]

    def is_frozen(self, host: str) -> bool:
        """Whether the host answers, but its host agent does not respond."""
        return host in self._frozen

    def last_of(self, hosts: Sequence[str]) -> list[RankState]:
        """The last known positions of the ranks of some hosts."""
        return [each for each in self._all() if each.host in hosts]

    def note(self, statuses: Sequence[HostStatus]) -> None:
        """Take in the statuses of now."""
        now = self._clock()
        list(self._liveness.note(statuses))  # its events are those of `GangView.liveness`
        since = {status.host: self._liveness.unknown_since(status, frozen_s=FRESH_S) for status in statuses}
        self._silent = {host: min(at, self._silent.get(host, at)) for host, at in since.items() if at is not None}
        self._frozen = {status.host for status in statuses if status.phase != "unreachable"} & self._silent.keys()
        for status in statuses:
            if status.host in self._silent:
                continue
            if status.phase != "running":
                self._by_rank = {rank: each for rank, each in self._by_rank.items() if each.host != status.host}
            elif status.signs is not None:
                for sign in status.signs.ranks:
                    self._by_rank[sign.rank] = _moved(self._by_rank.get(sign.rank), status.host, sign, now)

    def _all(self) -> list[RankState]:
        return [self._by_rank[rank] for rank in sorted(self._by_rank)]


def read_stack(said: object) -> ProcessStack | None:
    """The stack of one rank's process; None for a malformed answer."""
    try:
        if not isinstance(said, Mapping):
            return None
        return ProcessStack(
            pid=whole(said["pid"]),
            state=_text(said["state"])[:1],
            wchan=_text(said["wchan"]),
            where=_text(said["where"]),
            waits=said["waits"] is True,
            frames=tuple(_text(frame) for frame in list(said["stack"])[:MOST_FRAMES]),
            unheard=tuple(_text(address) for address in list(said["unheard"])[:MOST_NAMED]),
        )
    except NONSENSE:
        return None


def named(positions: Sequence[RankState]) -> str:
    """As in: rank 0 on pc1 and ranks 2, 3 on pc2"""
    return listed_ranks((each.host, each.rank) for each in positions)


def seconds(duration_s: float) -> str:
    """As in: 41 s, or 3 min 05 s"""
    return f"{duration_s:.0f} s" if duration_s < 60 else format_duration(duration_s)


def _moved(before: RankState | None, host: str, sign: RankSigns, now: float) -> RankState:
    """The state of a rank after a report of its host agent."""
    told_at = now - (sign.same_s or 0.0)
    here = RankState(
        host=host,
        rank=sign.rank,
        phase=sign.phase or NOT_BEGUN,
        step=sign.step or 0,
        collectives=sign.collectives or 0,
        moved_at=told_at,
        told_at=told_at,
        starved_s=sign.starved_s or 0.0,
    )
    if before is None:
        return here
    if (before.phase, before.progress) != (here.phase, here.progress):
        return replace(here, moved_at=max(told_at, before.moved_at))
    is_news = sign.same_s is not None and told_at > before.told_at + SLACK_S
    before = replace(before, starved_s=here.starved_s)
    return replace(before, told_at=told_at) if is_news else before


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return printable(value[:MOST_LETTERS].replace("\n", " "))


SHOWN_FRAMES = 12

Stacks = Mapping[str, Mapping[int, ProcessStack]]
"""Host -> rank -> stack."""


class Hung(RunFailed):
    """Ranks wait for another one. Its details: "host" and "rank" of that one, and "stacks" of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """A hang. Times are by our clock."""

    kind: Literal["behind", "together", "silent"]
    """behind: some ranks have less progress than others. together: all are equally far. silent: all known ranks wait
    for hosts without fresh data."""
    now: float
    behind: tuple[RankState, ...] = ()
    seen: tuple[RankState, ...]
    """All ranks with a known position."""
    silent: tuple[str, ...] = ()
    """Hosts without fresh data."""
    unseen: tuple[RankState, ...] = ()
    """The last known state of their ranks."""
    are_frozen: bool = False
    """The silent hosts answer, but their host agents do not respond."""
    limit: str
    """The expected and the actual duration, in words."""

    @property
    def who(self) -> tuple[object, ...]:
        """The key by which two verdicts are the same."""
        return self.kind, tuple(each.rank for each in self.behind), self.silent

    def to_json(self) -> dict[str, Any]:
        """The details of an event."""
        first = self.behind[0] if self.behind else None
        last = first or max(self.seen, key=lambda each: each.moved_at)
        host = first.host if first else next(iter(self.silent), None)
        details = {"what": self._what(), "host": host, "rank": first.rank if first else None}
        return {**details, "phase": last.phase, "step": last.step, "seconds": round(self.now - last.moved_at, 1)}

    def with_stacks(self, stacks: Stacks) -> HangVerdict:
        """The same with the stacks of ranks."""

        def asked(position: RankState) -> RankState:
            return replace(position, stack=stacks.get(position.host, {}).get(position.rank))

        return replace(self, behind=tuple(map(asked, self.behind)), seen=tuple(map(asked, self.seen)))

    def error(self) -> Hung:
        """The error: the accused ranks, the evidence, and the fix."""
        accused = self._accused()
        others = [each for each in self.seen if each not in accused]
        what = self._what() if not accused else "; ".join([_places(accused, self.now), *_waiting(others)])
        rows = [*accused, *others]
        places = [_row(each, self.now) for each in rows]
        places += [f"{each.name} was last seen in {each.point}" for each in self.unseen]
        return Hung(
            what,
            seen="\n".join([self.limit, *shortened(places), *frames_of(accused or rows)]),
            fix=self._fix(accused),
            details={
                "host": accused[0].host if accused else next(iter(self.silent), None),
                "rank": accused[0].rank if accused else None,
                "stacks": [evidence_of(each, each.stack) for each in rows if each.stack is not None],
            },
        )

    def _what(self) -> str:
        if self.kind == "silent":
            return _waited_for(self.silent, are_frozen=self.are_frozen)
        if self.behind:
            return _places(self.behind, self.now)
        if all(each.phase == "exchange" for each in self.seen):
            return f"all {len(self.seen)} ranks wait in the same exchange; suspect the network between hosts"
        return f"no rank is making progress (0 of {len(self.seen)}): {_places(self.seen, self.now)}"

    def _accused(self) -> list[RankState]:
        """The ranks that the others wait for. A stopped process is always a cause."""
        return [] if self.kind == "silent" else waited_for(self.seen, behind=self.behind)

    def _fix(self, accused: Sequence[RankState]) -> str:
        if accused:
            return _fix(accused[0])
        if not self.silent:
            return "test every pair of hosts: gangline check; read the ranks' logs: gangline logs"
        one = len(self.silent) == 1
        if self.are_frozen:
            return f"on {listed(self.silent)}: look for a stopped gangline agent or a full disk"
        return f"{'is' if one else 'are'} {listed(self.silent)} switched on and on the network?"


def waited_for(seen: Sequence[RankState], *, behind: Sequence[RankState] = ()) -> list[RankState]:
    """The ranks that the others wait for, by their stacks. behind: those that are known to be."""
    stopped = [each for each in seen if each.stack and each.stack.is_stopped]
    among = behind or seen
    at_disk = [each for each in among if each.stack and each.stack.waits_for_disk]
    busy = [each for each in among if each.stack and each.stack.where and not each.stack.waits]
    busy = busy if len(busy) < len(among) else []
    return stopped or at_disk or busy or list(behind) or _most_unheard(seen) or _elsewhere(seen)


def read_stacks(evidence: Mapping[str, Any]) -> dict[str, dict[int, ProcessStack]]:
    """The answers of hosts to `stacks`, unchecked -> host -> rank -> stack."""
    return {host: _read(said) for host, said in evidence.items()}


def _waited_for(hosts: Sequence[str], *, are_frozen: bool) -> str:
    does, them = ("does", "it") if len(hosts) == 1 else ("do", "them")
    who = (
        f"the gangline agent on {listed(hosts)} does not respond"
        if are_frozen
        else f"{listed(hosts)} {does} not answer"
    )
    return f"{who}, and the others wait for {them}"


def _places(positions: Sequence[RankState], now: float) -> str:
    return listed([each.place(now) for each in positions])


def _waiting(others: Sequence[RankState]) -> list[str]:
    return [f"{named(others)} {'waits' if len(others) == 1 else 'wait'}"] if others else []


def _most_unheard(seen: Sequence[RankState]) -> list[RankState]:
    """The ranks of the host with the most peers that do not acknowledge its data, if there is one."""
    places: dict[str, set[str]] = {}
    for each in seen:
        places.setdefault(each.host, set()).update(each.stack.unheard if each.stack else ())
    counts = sorted((len(addresses) for addresses in places.values()), reverse=True)
    if len(counts) < 2 or counts[0] == counts[1]:
        return []
    return [each for each in seen if len(places[each.host]) == counts[0]]


def _elsewhere(seen: Sequence[RankState]) -> list[RankState]:
    """The few ranks at another line than most."""
    places = [each.stack.where if each.stack else "" for each in seen]
    most, count = Counter(places).most_common(1)[0]
    if not all(places) or 2 * count <= len(seen):
        return []
    return [each for each, place in zip(seen, places, strict=True) if place != most]


def _row(position: RankState, now: float) -> str:
    unheard = position.stack.unheard if position.stack else ()
    return position.place(now) + (f"; what it sends to {listed(unheard)} is not acknowledged" if unheard else "")


def _fix(accused: RankState) -> str:
    stack = accused.stack
    if stack is not None and stack.is_stopped:
        return f"somebody stopped the process; let it continue on {accused.host}: kill -CONT {stack.pid}"
    if stack is not None and stack.waits_for_disk:
        return f"look at the disk of {accused.host}, or at the file server that it reads from"
    if stack is not None and stack.unheard:
        return f"look at the network of {accused.host}; test every pair of hosts: gangline check"
    where = f"find out what {stack.where} waits for" if stack and stack.where else "look at the process there"
    return f"{where}; the log of that rank: gangline logs"


def frames_of(positions: Sequence[RankState]) -> list[str]:
    """The stacks of the first few, line by line."""
    rows: list[str] = []
    for each in positions[:3]:
        frames = each.stack.frames[:SHOWN_FRAMES] if each.stack else ()
        rows += [f"stack of {each.name}, innermost first:"] if frames else []
        rows += [f"  {frame}" for frame in frames]
    return rows


def evidence_of(position: RankState, stack: ProcessStack) -> dict[str, Any]:
    """A rank's stack as plain data."""
    here = {"host": position.host, "rank": position.rank, "phase": position.phase, "step": position.step}
    process = {"state": stack.state, "wchan": stack.wchan, "unheard": list(stack.unheard)}
    return {**here, **process, "where": stack.where, "stack": list(stack.frames)}


STEP_S = 30.0
"""A shorter step never counts as hung."""
TIMES = 3.0
"""A step hangs once it takes so many times as long as the slowest of the last ones."""
WINDOW = 20
"""The number of last steps that count."""
FIRST_S = 300.0
"""The limit of the first step, which has more to do."""
PAUSE_S = 600.0
"""The limit for ranks that evaluate or save, without a sign of life."""
LOADING_S = 1800.0
"""The limit for ranks that load the model, or compile it; they give no sign of life."""
SILENT_S = 10.0
"""After so long without an answer, a host is the cause if all others wait."""
OVERDUE = 1.5
"""And the step takes so many times as long as the slowest of the last ones: the host may still compute."""
EVIDENCE_S = 5.0
"""How long stacks are waited for."""
STARVED_S = 1800.0
"""So much time without a processor, or of swapping, is no part of a step's duration."""
LOADING = {"importing", "joining", "joined"}
SLOW = LOADING | {"compile"}
"""In these a rank gives no sign of life for long."""
PAUSES = SLOW | {"evaluate", "save"}


class Hang:
    """The steps of one attempt. Of the user's own program nothing is known.

    Once there is a `suspicion`, the stacks of all ranks are to be fetched and passed to `take` as they arrive;
    `failure` is set when all have arrived, or a few seconds later.
    """

    def __init__(self, request: LaunchRequest, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_wanted = all(part.program == "worker" for part in request.hosts)
        self._clock = clock
        self._positions = RankStates(clock=clock)
        self._steps = _Steps()
        self._found: HangVerdict | None = None
        self._num_suspicions = 0
        self._suspected_at = 0.0
        self._stacks: dict[str, dict[int, ProcessStack]] = {}

    @property
    def suspicion(self) -> int | None:
        """The number of the current suspicion; stacks that were fetched for another number are old."""
        return None if self._found is None else self._num_suspicions

    def note(self, statuses: Sequence[HostStatus], *, joined: bool) -> Iterator[Event]:
        """Take in the statuses; yields new events with their details. joined: the ranks have joined."""
        if not self._is_wanted:
            return
        self._positions.note(statuses)
        found = self._look() if joined else None
        before, self._found = self._found, found
        if found is None:
            if before is not None:
                yield "going on", {"what": f"the ranks continue after {seconds(self._clock() - self._suspected_at)}"}
        elif before is None or before.who != found.who:
            self._num_suspicions += 1
            self._suspected_at, self._stacks = self._clock(), {}
            yield "hanging", found.to_json()

    def take(self, evidence: Mapping[str, Any]) -> None:
        """Take in the answers so far: host -> answer of `stacks`, unchecked."""
        self._stacks = read_stacks(evidence)

    def failure(self) -> Hung | None:
        """The error that ends the attempt; None: it continues."""
        if self._found is None:
            return None
        missing = {each.host for each in self._found.seen} - self._stacks.keys()
        if self._found.kind != "silent" and missing and self._clock() < self._suspected_at + EVIDENCE_S:
            return None
        return self._found.with_stacks(self._stacks).error()

    def _look(self) -> HangVerdict | None:
        now, seen = self._clock(), self._positions.seen
        if not seen:
            return None  # our own link may be cut
        self._steps.note(seen, now=now, is_blind=self._positions.is_blind)
        silent = self._positions.silent(SILENT_S)
        if silent and self._wait_for_silent(seen, now):
            waited_s = now - max(each.moved_at for each in seen)
            return self._silent(
                silent, seen, limit=f"they have waited for {seconds(waited_s)}; {self._steps.words(now)}"
            )
        return self._overdue(seen, silent, now)

    def _wait_for_silent(self, seen: Sequence[RankState], now: float) -> bool:
        """Whether all known ranks wait in an exchange, for longer than a host that computes would take."""
        if any(each.phase != "exchange" for each in seen):
            return False
        waited_s = now - max(each.moved_at for each in seen)
        return waited_s >= SILENT_S and now - self._steps.since >= self._steps.patience_s

    def _silent(self, hosts: Sequence[str], seen: Sequence[RankState], *, limit: str) -> HangVerdict:
        """The verdict that all known ranks wait for these hosts."""
        are_frozen = all(map(self._positions.is_frozen, hosts))
        return HangVerdict(
            kind="silent",
            now=self._clock(),
            seen=tuple(seen),
            silent=tuple(hosts),
            unseen=tuple(self._positions.last_of(hosts)),
            are_frozen=are_frozen,
            limit=limit,
        )

    def _overdue(self, seen: Sequence[RankState], silent: Sequence[str], now: float) -> HangVerdict | None:
        """The verdict on a step or a pause that lasts too long."""
        phases = {each.phase for each in seen}
        starved_s = {} if phases & PAUSES else {each.rank: self._steps.starved_s(each) for each in seen}
        if phases & PAUSES:
            limit_s = LOADING_S if phases & SLOW else PAUSE_S
            since = max(each.told_at for each in seen)
            words = f"no progress for {seconds(now - since)} while ranks {_listed_phases(phases & PAUSES)}"
            still_s = limit_s
        else:
            limit_s, since, words = self._steps.limit_s, self._steps.since, self._steps.words(now)
            # About as long as the slowest step: a rank that has moved since is slow, not hung.
            still_s = limit_s / TIMES
        if now - since <= limit_s:
            return None
        least = min(each.progress for each in seen)
        behind = [each for each in seen if each.progress == least]
        due_s = {rank: limit_s + wanted_s for rank, wanted_s in starved_s.items()}
        still = [
            each for each in behind if now - each.told_at >= still_s and now - since > due_s.get(each.rank, limit_s)
        ]
        if len(behind) < len(seen) or len(seen) == 1:
            found = HangVerdict(kind="behind", now=now, behind=tuple(still), seen=tuple(seen), limit=words)
            return found if still else None
        if len(still) < len(seen):
            return None
        if silent:
            return self._silent(silent, seen, limit=words)
        return HangVerdict(kind="together", now=now, seen=tuple(seen), limit=words)


class _Steps:
    """Durations of steps: from when the slowest rank begins one to when it begins the next.

    Under local SGD many short steps lie between two long exchanges. So the last exchanges are remembered, each with the
    longest step since the one before.
    """

    def __init__(self) -> None:
        self.since = 0.0
        """When the current step began, or the pause in it ended."""
        self._step: int | None = None
        self._left = 0
        self._is_whole = False
        """Its begin was seen, and its duration has been measured without gaps since."""
        self._starved: dict[int, float] = {}
        """Rank -> for how long in all it had been starved then."""
        self._lengths: dict[int, float] = {}
        """Number of exchanges that all ranks had completed -> seconds."""
        self._is_known = False

    def note(self, seen: Sequence[RankState], *, now: float, is_blind: bool) -> None:
        """Take in the positions of ranks. is_blind: some are unknown."""
        step, left, since = min(each.step for each in seen), min(each.left for each in seen), self.since
        if self._step is None:
            self.since, self._left = now, left
        elif step > self._step:
            self._learn(step, left, now)
        self._step = step
        phases = {each.phase for each in seen}
        if phases & PAUSES:
            # One rank saves while others compute; all begin together after anything else.
            self.since, self._left, self._is_whole = now, left, "save" not in phases
        self._is_whole = self._is_whole and not is_blind
        if self.since != since:
            self._starved = {each.rank: each.starved_s for each in seen}

    def starved_s(self, rank: RankState) -> float:
        """For how long of this step a rank wanted to go on and could not; longer than `STARVED_S` is no excuse."""
        return min(STARVED_S, max(0.0, rank.starved_s - self._starved.get(rank.rank, rank.starved_s)))

    def _learn(self, step: int, left: int, now: float) -> None:
        if self._is_whole and self._step is not None:
            length_s = (now - self.since) / (step - self._step)
            self._lengths[self._left] = max(length_s, self._lengths.get(self._left, 0.0))
            self._is_known = self._is_known or left > self._left
            for key in list(self._lengths)[:-WINDOW]:
                del self._lengths[key]
        self.since, self._left, self._is_whole = now, left, True

    @property
    def _slowest_s(self) -> float:
        return max(self._lengths.values(), default=0.0)

    @property
    def limit_s(self) -> float:
        """How long a step may take."""
        return max(STEP_S if self._is_known else FIRST_S, TIMES * self._slowest_s)

    @property
    def patience_s(self) -> float:
        """How long a step may take while a host that it needs does not answer."""
        return max(SILENT_S if self._is_known else STEP_S, OVERDUE * self._slowest_s)

    def words(self, now: float) -> str:
        """How long the step takes, and what was expected."""
        known = (
            f"the slowest of the last {WINDOW} took {self._slowest_s:.3g} s" if self._is_known else "it is the first"
        )
        return f"step {self._step} takes {seconds(now - self.since)}; {known}"


def _listed_phases(phases: set[str]) -> str:
    return listed(sorted({"load" if phase in LOADING else phase for phase in phases}))


def _read(said: object) -> dict[int, ProcessStack]:
    rows = said.get("ranks") if isinstance(said, Mapping) else None
    if not isinstance(rows, Mapping):
        return {}
    found = {int(rank): read_stack(row) for rank, row in rows.items() if str(rank).isdecimal()}
    return {rank: stack for rank, stack in found.items() if stack is not None}
