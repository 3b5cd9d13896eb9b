"""Who leads a run: terms, votes and majorities. Pure, so that thousands of schedules of a bad network can be played.

One supervisor leads in a term; it was elected by a majority of the hosts with a voice, each of which votes once per
term (gangline.agent.supervise.voting has that half of the rule). It may command as long as its heartbeats of the last
HOLD_S have reached a majority: for longer than that, HEARD_S, none of these hosts votes for another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gangline.runs.cluster import LEAST_VOICES, voices
from gangline.runs.decode import build, known_part
from gangline.runs.record_versions import Record

HEARTBEAT_S = 1.5
HOLD_S = 10.0
"""Less than HEARD_S of voting.py by more than clocks of machines drift apart meanwhile."""
EPOCHS = 1_000_000
"""Epochs of one term, as in voting.py."""
ANY_TERM = 10**9
"""The term of a trial, which is above all others."""


def is_majority(yes: Collection[str], members: Sequence[str]) -> bool:
    """Whether more than half of the members are among those that agree."""
    return 2 * len(set(yes) & set(members)) > len(set(members))


def with_voices(hosts: Sequence[str], own: str, witness: str | None = None) -> tuple[str, ...]:
    """Who has a voice in an attempt on these hosts. own: the leader's. witness: a host that trains nothing.

    Of two voices neither could go on without the other: then the leader's host has the only one, and keeps the lead.
    """
    found = voices(hosts, witness)
    return found if len(found) >= LEAST_VOICES else (own,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership(Record):
    """The hosts with a voice: those of the current attempt."""

    term: int
    """Of the leader that wrote it."""
    number: int
    """Counts those of one term."""
    attempt: int
    """The attempt that a person began, from which this one follows."""
    members: tuple[str, ...]
    before: tuple[str, ...] | None = None
    """While it changes: the members until now, of which a majority is needed, too."""

    @property
    def version(self) -> tuple[int, int]:
        """A higher one is newer."""
        return self.term, self.number

    @property
    def everybody(self) -> tuple[str, ...]:
        """All hosts that are asked."""
        return tuple(dict.fromkeys((*self.members, *(self.before or ()))))

    def is_won_by(self, yes: Collection[str]) -> bool:
        """Whether these hosts are enough."""
        return is_majority(yes, self.members) and (self.before is None or is_majority(yes, self.before))

    def toward(self, members: Sequence[str]) -> Membership:
        """The first half of a change: both majorities are needed."""
        assert self.before is None
        return replace(self, number=self.number + 1, members=tuple(members), before=self.members)

    def settled(self) -> Membership:
        """The second half, once a majority of both has the first."""
        return replace(self, number=self.number + 1, before=None)

    def in_term(self, term: int) -> Membership:
        """The same as a new leader writes it."""
        return replace(self, term=term, number=0)


class Campaign:
    """One try of a host to become the leader: a trial, which changes nothing, then the vote.

    afresh: a person has begun an attempt, and says who the members are. It ends with `term` or with `why`.
    """

    def __init__(self, membership: Membership, own: str, *, afresh: bool = False) -> None:
        self.membership = membership
        self.term: int | None = None
        """The term that it has won."""
        self.why: str | None = None
        """Why it has not."""
        self.leader: str | None = None
        """The leader that another host hears."""
        self.over = False
        """The run has ended."""
        self.records: dict[str, tuple[int, int]] = {}
        """Host -> version of the records that it has, of those that have answered."""
        self._own = own
        self._afresh = afresh
        self._highest = 0
        self._is_outdated = False
        """A host has a newer membership: the next campaign asks its members."""
        self._asked_term = ANY_TERM

    @property
    def request(self) -> dict[str, Any] | None:
        """What every member is asked next; None: it has ended."""
        if self.term is not None or self.why is not None:
            return None
        return {
            "term": self._asked_term,
            "candidate": self._own,
            "membership": list(self.membership.version),
            "trial": self._asked_term == ANY_TERM,
            "afresh": self._afresh,
        }

    def take(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on with the answers of those that gave one."""
        self._learn(answers)
        granted = {host for host, said in answers.items() if said["granted"]}
        if self.over and not self._afresh:
            self.why = "the run has ended"
        elif self.leader is not None:
            self.why = f"{self.leader} leads"
        elif self._is_outdated:
            self.why = "the hosts with a voice have changed"
        elif not self.membership.is_won_by(granted):
            others = [f"{host}: {said['why']}" for host, said in answers.items() if not said["granted"]]
            silent = [f"{host}: no answer" for host in self.membership.everybody if host not in answers]
            self.why = f"no majority ({'; '.join([*others, *silent])})"
        elif self._asked_term == ANY_TERM:
            self._asked_term = self._highest + 1
        else:
            self.term = self._asked_term
            self.membership = self.membership.in_term(self.term)

    def _learn(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        ended = [int(said["term"]) for said in answers.values() if said["over"]]
        others = [int(said["term"]) for said in answers.values() if not said["over"]]
        # One that was off since an end knows nothing of who has led after it.
        self.over = self.over or max(ended, default=-1) >= max(others, default=0)
        for host, said in answers.items():
            self._highest = max(self._highest, int(said["term"]))
            self.records[host] = (int(said["records"][0]), int(said["records"][1]))
            if said["hears"] not in (None, self._own):
                self.leader = str(said["hears"])
            known = build(Membership, known_part(Membership, said["membership"])) if said["membership"] else None
            if not self._afresh and known is not None and known.version > self.membership.version:
                self.membership, self._is_outdated = known, True

    @property
    def newest(self) -> tuple[tuple[int, int], str]:
        """The newest version of the records among those that have answered, and a host that has it."""
        return max((version, host) for host, version in self.records.items())


class Hold:
    """Until when a leader may command: the heartbeats that hosts have confirmed. Times are of the leader's clock."""

    def __init__(self) -> None:
        self._sent: dict[str, float] = {}

    def note(self, host: str, sent: float) -> None:
        """A host has confirmed a heartbeat. sent: before it was sent."""
        self._sent[host] = max(sent, self._sent.get(host, float("-inf")))

    def heard_at(self, host: str) -> float:
        """When the last heartbeat was sent that a host has confirmed."""
        return self._sent.get(host, float("-inf"))

    def until(self, membership: Membership) -> float:
        """The end of it."""
        groups = [membership.members, *([membership.before] if membership.before is not None else [])]
        return min(map(self._of, groups)) + HOLD_S

    def _of(self, members: Sequence[str]) -> float:
        times = sorted(map(self.heard_at, set(members)), reverse=True)
        return times[len(times) // 2]
