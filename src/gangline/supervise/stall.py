"""Whether the user's own program still prints: it is all that tells of its getting on. Pure.

A rank that is silent while others print is nothing: many scripts print on rank 0 only. What counts is the whole run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gangline.errors import RunFailed
from gangline.launch.backend import HostStatus, RankSilence
from gangline.launch.program import StallWatch
from gangline.runs.events import iso
from gangline.units import format_duration

FRESH_S = 15.0
"""A guard tells every second: one that has not for so long stands still, or its host does not answer."""
SAME_S = 3.0
"""Two ranks that fell silent within this time did so together: guards look once a second."""
MOST = 8
"""How many ranks or hosts are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a guard said last."""

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
    """From when it was first seen to the last word of its guard."""
    has_printed: bool
    line: str
    is_known: bool
    """Its guard tells now. What it printed since is not known otherwise."""


class Stall:
    """The output of one attempt, as its guards tell of it.

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
        again = f"gangline resume {run_id} starts it again" if watch.can_resume else "gangline run starts it anew"
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
        """Until when it is known what was printed: the oldest word of a guard that still tells."""
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
        shown = {"last": [self.last] if self.last else [], "first": self.first[:MOST]}
        rows = {name: [{"host": log.host, "rank": log.rank} for log in logs] for name, logs in shown.items()}
        what = f"no rank has printed anything for {format_duration(self._now - self._since)}: {self._order()}"
        lines = [logs[0].line for logs in self._lines()]
        return {"what": what, "since": self._time(self._since), **rows, "line": lines[0] if lines else ""}

    def evidence(self) -> list[str]:
        """What was seen, line by line."""
        hosts = list(dict.fromkeys(log.host for log in self._logs))
        rows = [self._row(host) for host in hosts[:MOST]]
        if len(hosts) > MOST:
            rows.append(f"and {len(hosts) - MOST} hosts more")
        said = [f"the last line of {_named(logs)}: {logs[0].line}" for logs in self._lines()[:MOST]]
        return [self._order(), *rows, *said]

    def _order(self) -> str:
        """Who fell silent first."""
        if self.last is None:
            return "they have printed nothing since their start"
        if self.first:
            before = format_duration(self.last.last - self.first[0].last)
            return f"{_named(self.first)} fell silent first, {before} before {_named([self.last])}, the last"
        if len(self._printing) == 1:
            return f"the last was {_named([self.last])}, which alone prints"
        return f"{_named(self._printing)} fell silent at about the same time"

    def _row(self, host: str) -> str:
        logs = [log for log in self._logs if log.host == host]
        times = [log.last for log in logs if log.has_printed]
        unseen = "" if all(log.is_known for log in logs) else ", as far as known: it does not answer"
        if not times:
            return f"{_named(logs)}: nothing printed since the start{unseen}"
        first = f"{self._time(min(times))} to " if max(times) - min(times) > SAME_S else ""
        return f"{_named(logs)}: last output {first}{self._time(max(times))}{unseen}"

    def _lines(self) -> list[list[_Log]]:
        """Those who may be the cause, by what they printed last; first what the fewest did: they stand elsewhere."""
        by_line: dict[str, list[_Log]] = {}
        for log in self.first or self._printing:
            by_line.setdefault(log.line, []).append(log)
        return sorted((logs for line, logs in by_line.items() if line), key=len)

    def _time(self, moment: float) -> str:
        return iso(time.time() - (self._now - moment))


def _named(logs: Sequence[_Log]) -> str:
    """Ranks by host: "rank 0 on pc1 and ranks 2, 3 on pc2"."""
    by_host: dict[str, list[int]] = {}
    for log in logs:
        by_host.setdefault(log.host, []).append(log.rank)
    words = [f"{_ranks(sorted(ranks))} on {host}" for host, ranks in by_host.items()]
    words = [*words[:MOST], f"those of {len(words) - MOST} hosts more"] if len(words) > MOST else words
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= MOST else f"{len(ranks)} ranks"
