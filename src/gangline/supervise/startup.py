"""The start of an attempt: the start board on disk, probes where it is stuck, and the error that ends it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gangline.errors import HostUnreachable, RunFailed
from gangline.launch.backend import HostRequest, HostStatus, LaunchRequest, RankSigns, WorkSigns
from gangline.runs.cluster import Cluster
from gangline.supervise.background import Background
from gangline.supervise.liveness import Event
from gangline.transport.transport import AGENT, Transport
from gangline.units import format_bytes, listed, listed_ranks

# The start board: the stage of each host, the hosts that are behind, and the time limits. Pure.


STAGES = ("ssh", "agent", "launcher", "port", "python", "torch", "joined")
TOGETHER = {"python", "joined"}
"""Stages in which hosts wait for each other: one that does nothing says nothing."""
IMPORTS = {"launcher", "torch"}
"""Stages that wait for an import, which takes long on a slow disk."""
BUSY = 2.0
"""A load per core that makes a start slow."""
ARRIVED = {"joined", "compile", "data", "compute", "exchange", "update", "evaluate", "save", "ended"}
"""Phases of a rank that has joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLimits:
    """How long the start may take."""

    sentence_s: float = 15.0
    """From then on the hosts that are behind are named."""
    silence_s: float = 5.0
    """A host that answers again within this time is not reported."""
    stage_s: float = 90.0
    """A stage without work of the processes that it waits for, from when the last host has reached the one before."""
    import_s: float = 300.0
    """The same for a stage that imports, where the work of processes is not known."""
    most_load: float = 4.0
    """Both are multiplied by the load per core of the busiest host, at most by this."""
    longest_s: float = 3600.0
    """Every stage, with work or without."""
    idle_s: float = 10.0
    """Processes without work for so long are reported."""
    beat_s: float = 30.0
    """A host agent that has reported nothing new for so long does not know what its processes do."""


@dataclass(slots=True, kw_only=True)
class HostRow:
    """One host."""

    host: str
    ranks: tuple[int, ...]
    is_worker: bool
    """Its ranks report themselves when they have joined."""
    is_head: bool = False
    """The launchers meet there."""
    reached: dict[str, float] = field(default_factory=dict)
    """Stage -> seconds after the start at which it was first seen."""
    signs: tuple[RankSigns, ...] = ()
    waits_for: tuple[str, ...] = ()
    knocks: bool = False
    """Its launcher has a socket to the place where launchers meet."""
    load: float = 1.0
    """Processes that want to run, per core; at least 1."""
    launcher_work: WorkSigns | None = None
    beat: tuple[int | None, float] = (None, 0.0)
    """The last beat of its host agent, and when it was new."""
    is_stale: bool = False
    """The host does not answer, or its host agent reports nothing new."""
    silent_since: float | None = None
    """Since when the host does not answer, in seconds after the start; None: it answers."""
    is_silent: bool = False
    """The host does not answer now, and has not for a while."""

    @property
    def stage(self) -> str | None:
        """The first stage that it has not reached; None: it has reached all."""
        return next((stage for stage in STAGES if stage not in self.reached), None)

    @property
    def joined(self) -> list[int]:
        """Its ranks that have joined."""
        return [sign.rank for sign in self.signs if self._has_joined(sign)]

    @property
    def behind(self) -> list[int]:
        """Its ranks that have not reached its stage."""
        ready = {
            "python": {sign.rank for sign in self.signs},
            "torch": {sign.rank for sign in self.signs if sign.has_torch},
            "joined": set(self.joined),
        }.get(self.stage or "", set())
        return [rank for rank in self.ranks if rank not in ready]

    @property
    def works(self) -> list[WorkSigns]:
        """The work of what this host is waited for: of its ranks that are behind, or of its launcher; [] if unknown."""
        if self.is_stale:
            return []
        behind = set(self.behind) if self.stage in {"torch", "joined"} else set()
        found = [sign.work for sign in self.signs if sign.rank in behind] or [self.launcher_work]
        return [work for work in found if work is not None]

    @property
    def idle_s(self) -> float | None:
        """For how long nothing that this host is waited for has worked; None: unknown.

        At an import every rank has to get on. Ranks that join wait for each other, so one is enough.
        """
        idle = [work.idle_s for work in self.works]
        if not idle:
            return None
        return min(idle) if self.stage == "joined" else max(idle)

    def note(self, status: HostStatus, seconds: float, *, limits: StartLimits) -> None:
        """Take in the status of the host."""
        if status.phase != "unreachable":
            self.silent_since = None
        elif self.silent_since is None:
            self.silent_since = seconds
        self.is_silent = self.silent_since is not None and seconds - self.silent_since >= limits.silence_s
        if status.beat != self.beat[0] or status.beat is None:
            self.beat = status.beat, seconds
        self.is_stale = self.silent_since is not None or seconds - self.beat[1] >= limits.beat_s
        if status.signs is not None:
            self._note_signs(status)
        last = max((STAGES.index(stage) for stage in self._seen(status)), default=-1)
        for stage in STAGES[: last + 1]:  # a rank that has joined has imported torch, seen or not
            self.reached.setdefault(stage, round(seconds, 1))

    def _note_signs(self, status: HostStatus) -> None:
        assert status.signs is not None
        signs = status.signs
        self.signs, self.waits_for, self.knocks = signs.ranks, signs.waits_for, signs.knocks
        self.launcher_work, self.load = signs.work, max(1.0, signs.load or 1.0)
        if status.phase == "running" and not self.is_worker and len(self.joined) < len(self.ranks):
            self.reached.pop("joined", None)  # they seemed to have joined, until they opened more connections

    def _seen(self, status: HostStatus) -> list[str]:
        if status.phase == "ended" and status.returncode == 0:
            return list(STAGES)
        if status.phase in {"unreachable", "starting"}:
            return ["ssh"] if status.phase == "starting" else []
        if status.phase == "running" and status.signs is None:  # this host agent reports no stages
            return list(STAGES)
        signs = status.signs
        whole = signs is not None and len(signs.ranks) >= len(self.ranks)
        seen = {
            "agent": True,
            "launcher": signs is not None and signs.launcher,
            "port": signs is not None and signs.met,
            "python": whole,
            "torch": whole and signs is not None and all(sign.has_torch for sign in signs.ranks),
            "joined": whole and len(self.joined) >= len(self.ranks),
        }
        return [stage for stage, is_seen in seen.items() if is_seen]

    def _has_joined(self, sign: RankSigns) -> bool:
        return sign.phase in ARRIVED if self.is_worker else sign.has_torch and sign.has_met


class StartBoard:
    """The start of one attempt."""

    def __init__(
        self, request: LaunchRequest, *, limits: StartLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rows = {part.host: _row(part, is_head=part is request.hosts[0]) for part in request.hosts}
        self.limits = limits or StartLimits()
        self._clock = clock
        self._begun = clock()
        self._stage: str | None = STAGES[0]
        self._stage_since = self._begun

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._begun

    @property
    def is_before_ranks(self) -> bool:
        """Whether no rank runs yet: launchers start them once they have all met."""
        return self.stage in {"ssh", "agent", "launcher", "port"}

    @property
    def is_final(self) -> bool:
        """Whether ranks that have joined stay so; those of the user's own program may want more connections later."""
        return all(row.is_worker for row in self.rows.values())

    @property
    def is_told(self) -> bool:
        """Whether any host agent reports stages."""
        return any(row.signs for row in self.rows.values())

    @property
    def stage(self) -> str | None:
        """The first stage that the slowest host has not reached; None: all have joined."""
        stages = [STAGES.index(row.stage) for row in self.rows.values() if row.stage is not None]
        return STAGES[min(stages)] if stages else None

    @property
    def stage_seconds(self) -> float:
        """Time since the slowest host began this stage."""
        return self._clock() - self._stage_since

    @property
    def lagging(self) -> list[HostRow]:
        """The hosts that have not reached it."""
        return [row for row in self.rows.values() if row.stage is not None and row.stage == self.stage]

    def note(self, statuses: Sequence[HostStatus]) -> None:
        """Take in the statuses of all hosts."""
        for status in statuses:
            self.rows[status.host].note(status, self.seconds, limits=self.limits)
        if self.stage != self._stage:
            self._stage, self._stage_since = self.stage, self._clock()

    def is_late(self) -> bool:
        """Whether it is time to name the hosts that are behind."""
        return self.stage is not None and self.seconds >= self.limits.sentence_s

    @property
    def awaited(self) -> list[HostRow]:
        """Those of them that can go on by themselves: nobody meets at a port before the head has opened it."""
        heads = [row for row in self.lagging if row.is_head]
        return heads if self.stage == "port" and heads else self.lagging

    @property
    def limit_s(self) -> float:
        """How long this stage may last without work."""
        limits = self.limits
        is_known = all(row.idle_s is not None for row in self.awaited)
        limit_s = limits.import_s if self.stage in IMPORTS and not is_known else limits.stage_s
        return limit_s * min(max((row.load for row in self.rows.values()), default=1.0), limits.most_load)

    def still_s(self, row: HostRow) -> float:
        """For how long a host that is behind has not got on."""
        idle_s = row.idle_s
        return self.stage_seconds if idle_s is None else min(idle_s, self.stage_seconds)

    def is_overdue(self) -> bool:
        """Whether the start has failed by time. The user's own program does not report that it has joined."""
        if self.stage is None or (self.stage in {"torch", "joined"} and not all(row.is_worker for row in self.lagging)):
            return False
        if self.stage_seconds > self.limits.longest_s:
            return True
        are_still = [self.still_s(row) > self.limit_s for row in self.awaited]
        return all(are_still) if self.stage in TOGETHER else any(are_still)

    def to_json(self, *, sentence: str | None, news: str = "") -> dict[str, Any]:
        """Plain data for board.json. news: the sentence without figures that change by themselves."""
        rows = [
            {
                "host": row.host,
                "ranks": len(row.ranks),
                "joined": len(row.joined) if row.stage is not None else len(row.ranks),
                "stages": {stage: row.reached.get(stage) for stage in STAGES},
                "waits_for": list(row.waits_for) if row.stage is not None else [],
            }
            for row in self.rows.values()
        ]
        return {
            "done": self.stage is None,
            "order": list(STAGES),
            "seconds": round(self.seconds, 1),
            "ranks": sum(len(row.ranks) for row in self.rows.values()),
            "joined": sum(int(str(row["joined"])) for row in rows),
            "hosts": rows,
            "sentence": sentence,
            "news": news,
        }


def _row(part: HostRequest, *, is_head: bool) -> HostRow:
    return HostRow(host=part.host, ranks=part.ranks, is_worker=part.program == "worker", is_head=is_head)


def sentence(board: StartBoard, *, meet: str, places: Mapping[str, str], probes: Mapping[str, str]) -> str:
    """The hosts that are behind, their stage, and the results of probes; for a board that is late.

    meet: where launchers meet. places: address -> name of a host. probes: host -> result of the probe on it, which
    says more than the sockets there.
    """
    whole = board.to_json(sentence=None)
    silent = [row for row in board.rows.values() if row.is_silent and row.stage is not None]
    awaited = [row for row in board.awaited if not row.is_silent]
    said = [f"{whole['joined']} of {whole['ranks']} ranks have joined after {board.seconds:.0f} s"]
    if silent:
        said.append(f"{listed([row.host for row in silent])} {'does' if len(silent) == 1 else 'do'} not answer")
    if awaited:
        said.append(_behind(board.stage or "joined", awaited, meet=meet))
    said += [
        f"{row.host} gets no answer from {', '.join(_place(each, places) for each in row.waits_for[:3])}"
        for row in awaited
        if row.waits_for and row.host not in probes
    ]
    said += [probes[row.host] for row in awaited if row.host in probes]
    said += _works(awaited, idle_s=board.limits.idle_s) if board.stage != "joined" else []
    return "; ".join(said)


def _behind(stage: str, rows: Sequence[HostRow], *, meet: str) -> str:
    """The stage that hosts which answer have not reached, in words."""
    names = listed([row.host for row in rows])
    does = {
        "ssh": f"no answer yet from {names}",
        "agent": f"the gangline agent on {names} has not started",
        "launcher": f"torchrun on {names} has not imported torch yet",
        "port": f"torchrun on {names} is not connected to {meet} yet",
        "python": f"the ranks of {names} have not started yet",
        "torch": f"{_ranks(rows)} {_verb(rows, 'has', 'have')} not finished importing",
        "joined": f"{_ranks(rows)} {_verb(rows, 'has', 'have')} not joined",
    }
    if stage == "torch" and not all(row.is_worker for row in rows):
        return f"{_ranks(rows)} {_verb(rows, 'has', 'have')} not imported torch"
    if stage == "port" and rows[0].is_head:
        return f"torchrun on {names} has not opened the port where the launchers meet yet"
    return does[stage]


def _works(rows: Sequence[HostRow], *, idle_s: float) -> list[str]:
    """Which of them are slow, and which are stuck; and how busy their computers are."""
    said = []
    for row in rows if all(row.is_worker or row.stage != "torch" for row in rows) else ():
        behind = {sign.rank: sign.work for sign in row.signs if sign.rank in row.behind and sign.work is not None}
        idle = [rank for rank, work in behind.items() if work.idle_s >= idle_s]
        if row.stage == "torch" and idle and not row.is_stale:
            still_s = min(work.idle_s for rank, work in behind.items() if rank in idle)
            who = listed_ranks((row.host, rank) for rank in idle)
            said.append(f"{who} {'has' if len(idle) == 1 else 'have'} done nothing for {still_s:.0f} s")
        elif row.idle_s is not None and row.idle_s >= idle_s and row.stage in TOGETHER:
            continue
        elif row.idle_s is not None and row.idle_s >= idle_s:
            said.append(f"{row.host} has done nothing for it for {row.idle_s:.0f} s")
        elif row.works:
            cpu_s, read = sum(work.cpu_s for work in row.works), sum(work.read_bytes for work in row.works)
            said.append(f"{row.host} works on it: {cpu_s:.0f} s of processor time, {format_bytes(read)} read")
    busy = [row for row in rows if row.load >= BUSY]
    load = max((row.load for row in busy), default=0.0)
    names = listed([row.host for row in busy])
    return [*said, *([f"{names}: busy, {load:.1f} processes per core want to run"] if busy else [])]


def _ranks(rows: Sequence[HostRow]) -> str:
    return listed_ranks((row.host, rank) for row in rows for rank in row.behind)


def _verb(rows: Sequence[HostRow], one: str, many: str) -> str:
    return one if len(rows) == 1 and len(rows[0].behind) <= 1 else many


def _place(endpoint: str, places: Mapping[str, str]) -> str:
    address, _, port = endpoint.rpartition(":")
    return f"{places[address]} ({address}, port {port})" if address in places else endpoint


WRITE_EVERY_S = 1.0
PROBE_EVERY_S = 10.0
PROBE_S = 3.0
PROBE_TIMEOUT_S = 15.0
TARGETS = 4
"""The number of silent addresses that are tried from each host."""
FRESH_S = 30.0
"""A result that is older says nothing of now."""
WORDS = {
    "timed out": "packets are dropped on the way; suspect a firewall",
    "refused": "no program listens there, or a firewall refuses it",
    "no route": "there is no route to that network",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The result of a probe."""

    stage: str | None
    """The stage for which it was made."""
    begun_at: float
    words: str


class StartFollower:
    """Follows the start of one attempt until all ranks have joined."""

    def __init__(
        self,
        request: LaunchRequest,
        cluster: Cluster,
        transports: Mapping[str, Transport],
        *,
        limits: StartLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.board = StartBoard(request, limits=limits, clock=clock)
        self._clock = clock
        self._transports = transports
        self._meet = request.hosts[0].meet
        self._places = {host.address: host.name for host in cluster.hosts}
        self._probes = Background[_Answer]()
        self._probed_at = float("-inf")
        self._answers: dict[str, _Answer] = {}
        """Host -> result of the last probe on it."""
        self._sentence: str | None = None
        self._told = ""
        self._written_at = float("-inf")
        self.done = False

    @property
    def head(self) -> str:
        """The host where the launchers meet."""
        return next(iter(self.board.rows))

    def note(self, statuses: Sequence[HostStatus]) -> Iterator[Event]:
        """Take in the statuses; yields new events with their details."""
        if self.done and self.board.is_final:
            return
        self.board.note(statuses)
        was_done, self.done = self.done, self.board.stage is None
        if self.done:
            self._sentence, self._told = None, ""
            if self.board.is_told and not was_done:
                yield "joined", {"seconds": round(self.board.seconds, 1)}
        elif self.board.is_late():
            self._probe()
            self._sentence = self._say()
            if (news := self._news()) != self._told:
                self._told = news
                yield "waiting", {"what": self._sentence}

    def is_due(self) -> bool:
        """Whether board.json is a second old; a reader sees its time advance."""
        if self.done or self._clock() < self._written_at + WRITE_EVERY_S:
            return False
        self._written_at = self._clock()
        return True

    def to_json(self) -> dict[str, Any]:
        """Plain data for board.json."""
        return self.board.to_json(sentence=self._sentence, news=self._told)

    def failure(self) -> RunFailed | None:
        """The error that ends the start; None: it goes on."""
        if self.done or not self.board.is_overdue():
            return None
        board = self.board
        names = listed([row.host for row in board.awaited])
        still_s = max((board.still_s(row) for row in board.awaited), default=0.0)
        return RunFailed(
            f"the start was given up: {self._say()}",
            seen=f"waited for {names} at the stage {board.stage!r} for {board.stage_seconds:.0f} s, the last "
            f"{still_s:.0f} s without any progress there; the limit is {board.limit_s:.0f} s without progress, "
            f"{board.limits.longest_s:.0f} s in all",
            fix=self._fix(),
        )

    def _news(self) -> str:
        """The parts of a sentence whose change is reported; its figures are none."""
        limit_s = self.board.limits.idle_s
        hosts = [
            f"{row.host} {row.is_silent} {(row.idle_s or 0) >= limit_s} {bool(row.waits_for)} {self._words(row.host)}"
            for row in self.board.awaited
        ]
        return "; ".join([str(self.board.stage), *hosts])

    def _words(self, host: str) -> str:
        answer = self._answers.get(host)
        return "" if answer is None else answer.words

    def _say(self) -> str:
        meet = f"{self.head} at {self._meet[0]}, port {self._meet[1]}" if self._meet else self.head
        probes = {host: answer.words for host, answer in self._answers.items() if answer.words}
        return sentence(self.board, meet=meet, places=self._places, probes=probes)

    def _fix(self) -> str:
        said = " ".join(map(self._words, self._answers))
        waits = any(row.waits_for for row in self.board.lagging)
        if WORDS["timed out"] in said or waits:
            return "let the hosts of the cluster reach each other on all TCP ports; test every pair: gangline check"
        if self.board.stage in {"launcher", "torch"}:
            return "suspect a slow or shared disk: import torch there by hand once; read the ranks' logs: gangline logs"
        return "test every host and pair: gangline check; read the ranks' logs: gangline logs"

    def _probe(self) -> None:
        """Have the hosts that are behind connect to the addresses that they do not reach, every few seconds."""
        now, stage = self._clock(), self.board.stage
        targets = {row.host: wanted for row in self.board.awaited if (wanted := self._targets(row))}
        self._answers |= self._probes.results()
        self._answers = {
            host: answer
            for host, answer in self._answers.items()
            if host in targets and answer.stage == stage and now - answer.begun_at < FRESH_S
        }
        if self._probes.is_busy or now - self._probed_at < PROBE_EVERY_S:
            return
        for host, wanted in targets.items():
            self._probed_at = now
            self._probes.start(host, partial(self._try, host, wanted, stage, now))

    def _targets(self, row: HostRow) -> list[tuple[str, int]]:
        """The addresses that a host does not reach although somebody listens there; [] where that is not known."""
        if row.is_silent:
            return []
        if self.board.stage == "port" and self._meet:
            # The head's port is open, or this would be the head. A launcher that works may not have come to it yet.
            is_stuck = bool(row.waits_for) or row.idle_s is None or row.idle_s >= self.board.limits.idle_s
            return [self._meet] if is_stuck and not row.is_head else []
        if self.board.stage != "joined":
            return []
        pairs = [endpoint.rpartition(":") for endpoint in row.waits_for]
        return [(address, int(port)) for address, _, port in pairs][:TARGETS]

    def _try(self, host: str, targets: Sequence[tuple[str, int]], stage: str | None, now: float) -> _Answer:
        return _Answer(stage=stage, begun_at=now, words=self._tried(host, targets))

    def _tried(self, host: str, targets: Sequence[tuple[str, int]]) -> str:
        stdin = json.dumps({"targets": targets, "timeout_s": PROBE_S}).encode()
        try:
            result = self._transports[host].run((AGENT, "connect"), stdin=stdin, timeout_s=PROBE_TIMEOUT_S)
            outcomes = json.loads(result.stdout)["outcomes"]
        except (HostUnreachable, OSError) as error:
            return f"{host} cannot be asked: {str(error).splitlines()[0]}"
        except (ValueError, KeyError):
            return ""
        tried = sorted(zip(outcomes, targets, strict=True), key=lambda pair: pair[0] == "open")
        outcome, (address, port) = tried[0]
        place = f"{self._places.get(address, address)} ({address}, port {port})"
        if outcome == "open":
            return f"a new connection from {host} to {place} works"
        return f"a connection from {host} to {place}: {outcome}: {WORDS.get(outcome, 'tried')}"
