"""Who keeps the others waiting: judged by where all ranks stand, and by what their processes say. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gangline.errors import RunFailed
from gangline.supervise.standing import Stack, Standing, listed, named, shortened

SHOWN_FRAMES = 12

Stacks = Mapping[str, Mapping[int, Stack]]
"""What hosts said of their ranks' processes."""


class Hung(RunFailed):
    """Ranks wait for one that does not come.

    accused: a rank, or only a host; None: nobody in particular. stacks: ranks, where they stand.
    """

    def __init__(
        self, what: str, *, seen: str, fix: str, accused: Standing | str | None, stacks: Sequence[Standing]
    ) -> None:
        super().__init__(what, seen=seen, fix=fix)
        self.host = accused.host if isinstance(accused, Standing) else accused
        self.rank = accused.rank if isinstance(accused, Standing) else None
        self._stacks = [_evidence(each, each.stack) for each in stacks if each.stack is not None]

    def to_json(self) -> dict[str, Any]:
        """See `GanglineError.to_json`; and "host", "rank", "stacks"."""
        return {**super().to_json(), "host": self.host, "rank": self.rank, "stacks": self._stacks}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """That nothing gets on. Times are by our clock."""

    kind: Literal["behind", "together", "silent"]
    """behind: some ranks have done less than others. together: all are equally far. silent: all that are seen wait for
    hosts of which nothing is known."""
    now: float
    behind: tuple[Standing, ...] = ()
    seen: tuple[Standing, ...]
    """All ranks of which it is known where they stand."""
    silent: tuple[str, ...] = ()
    """Hosts of which nothing is known."""
    unseen: tuple[Standing, ...] = ()
    """Their ranks, as they were seen last."""
    are_frozen: bool = False
    """They answer, but their guards do not get on."""
    limit: str
    """What was expected, and how long it has lasted, in words."""

    @property
    def who(self) -> tuple[object, ...]:
        """What makes it another finding."""
        return self.kind, tuple(each.rank for each in self.behind), self.silent

    def to_json(self) -> dict[str, Any]:
        """The details of an event."""
        first = self.behind[0] if self.behind else None
        last = first or max(self.seen, key=lambda each: each.moved_at)
        host = first.host if first else next(iter(self.silent), None)
        details = {"what": self._what(), "host": host, "rank": first.rank if first else None}
        return {**details, "phase": last.phase, "step": last.step, "seconds": round(self.now - last.moved_at, 1)}

    def with_stacks(self, stacks: Stacks) -> Finding:
        """The same, with what processes said of themselves."""
        behind, seen = ([_asked(each, stacks) for each in ranks] for ranks in (self.behind, self.seen))
        return replace(self, behind=tuple(behind), seen=tuple(seen))

    def error(self) -> Hung:
        """Who is accused, the evidence, and what to do about it."""
        accused = self._accused()
        others = [each for each in self.seen if each not in accused]
        what = self._what() if not accused else "; ".join([_places(accused, self.now), *_waiting(others)])
        rows = [*accused, *others]
        places = [_row(each, self.now) for each in rows]
        places += [f"{each.name} was in {each.point} when it was seen last" for each in self.unseen]
        return Hung(
            what,
            seen="\n".join([self.limit, *shortened(places), *_frames(accused or rows)]),
            fix=self._fix(accused),
            accused=accused[0] if accused else next(iter(self.silent), None),
            stacks=rows,
        )

    def _what(self) -> str:
        if self.kind == "silent":
            return _waited_for(self.silent, are_frozen=self.are_frozen)
        if self.behind:
            return _places(self.behind, self.now)
        if all(each.phase == "exchange" for each in self.seen):
            return f"all {len(self.seen)} ranks wait in the same exchange: the network between hosts?"
        return f"none of {len(self.seen)} ranks gets on: {_places(self.seen, self.now)}"

    def _accused(self) -> list[Standing]:
        """Who keeps the others. A process that is stopped is a cause, whoever else waits."""
        if self.kind == "silent":
            return []
        stopped = [each for each in self.seen if each.stack and each.stack.is_stopped]
        among = self.behind or self.seen
        at_disk = [each for each in among if each.stack and each.stack.waits_for_disk]
        # Who waits for others does so in gangline's own calls.
        foreign = [each for each in among if each.stack and each.stack.where and not each.stack.is_ours]
        foreign = foreign if len(foreign) < len(among) else []
        found = stopped or at_disk or foreign or list(self.behind)
        return found or _most_unheard(self.seen) or _elsewhere(self.seen)

    def _fix(self, accused: Sequence[Standing]) -> str:
        if accused:
            return _fix(accused[0])
        if not self.silent:
            return "gangline check tries every pair of hosts; the ranks' logs: gangline logs"
        one = len(self.silent) == 1
        if self.are_frozen:
            return f"on {listed(self.silent)}: was the guard stopped, or is the disk full?"
        return f"{'is' if one else 'are'} {listed(self.silent)} on, and on the network?"


def _waited_for(hosts: Sequence[str], *, are_frozen: bool) -> str:
    does, them = ("does", "it") if len(hosts) == 1 else ("do", "them")
    who = f"the guard on {listed(hosts)} does not get on" if are_frozen else f"{listed(hosts)} {does} not answer"
    return f"{who}, and the others wait for {them}"


def _places(standings: Sequence[Standing], now: float) -> str:
    return listed([each.place(now) for each in standings])


def _waiting(others: Sequence[Standing]) -> list[str]:
    return [f"{named(others)} {'waits' if len(others) == 1 else 'wait'}"] if others else []


def _most_unheard(seen: Sequence[Standing]) -> list[Standing]:
    """The ranks of the host that more others do not acknowledge than any other host's, if there is one."""
    places: dict[str, set[str]] = {}
    for each in seen:
        places.setdefault(each.host, set()).update(each.stack.unheard if each.stack else ())
    counts = sorted((len(addresses) for addresses in places.values()), reverse=True)
    if len(counts) < 2 or counts[0] == counts[1]:
        return []
    return [each for each in seen if len(places[each.host]) == counts[0]]


def _elsewhere(seen: Sequence[Standing]) -> list[Standing]:
    """The few that stand at another line than most."""
    places = [each.stack.where if each.stack else "" for each in seen]
    most, count = Counter(places).most_common(1)[0]
    if not all(places) or 2 * count <= len(seen):
        return []
    return [each for each, place in zip(seen, places, strict=True) if place != most]


def _row(standing: Standing, now: float) -> str:
    unheard = standing.stack.unheard if standing.stack else ()
    return standing.place(now) + (f"; what it sends to {listed(unheard)} is not acknowledged" if unheard else "")


def _fix(accused: Standing) -> str:
    stack = accused.stack
    if stack is not None and stack.is_stopped:
        return f"who stopped it? on {accused.host}, kill -CONT {stack.pid} lets it go on"
    if stack is not None and stack.waits_for_disk:
        return f"look at the disk of {accused.host}, or at the server of the network file system that it reads from"
    if stack is not None and stack.unheard:
        return f"look at the network of {accused.host}; gangline check tries every pair of hosts"
    where = f"look at what {stack.where} waits for" if stack and stack.where else "look at what it does there"
    return f"{where}; the log of that rank: gangline logs"


def _frames(standings: Sequence[Standing]) -> list[str]:
    """The stacks of the first few."""
    rows: list[str] = []
    for each in standings[:3]:
        frames = each.stack.frames[:SHOWN_FRAMES] if each.stack else ()
        rows += [f"stack of {each.name}, innermost first:"] if frames else []
        rows += [f"  {frame}" for frame in frames]
    return rows


def _asked(standing: Standing, stacks: Stacks) -> Standing:
    return replace(standing, stack=stacks.get(standing.host, {}).get(standing.rank))


def _evidence(standing: Standing, stack: Stack) -> dict[str, Any]:
    """A rank's stack as plain data."""
    here = {"host": standing.host, "rank": standing.rank, "phase": standing.phase, "step": standing.step}
    process = {"state": stack.state, "wchan": stack.wchan, "unheard": list(stack.unheard)}
    return {**here, **process, "where": stack.where, "stack": list(stack.frames)}
