"""Whether the ranks get on: a step that takes far longer than any before it hangs, and somebody keeps it. Pure.

What lasts long by its nature is known by its phase, and has limits of its own. Nothing is said of a host that does not
answer, unless all others wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gangline.launch.backend import HostStatus, Request
from gangline.supervise.hung import Finding, Hung
from gangline.supervise.standing import Stack, Standing, Standings, listed, read_stack, seconds

STEP_S = 30.0
"""No shorter step hangs."""
TIMES = 3.0
"""A step that takes so many times as long as the slowest of the last ones hangs."""
WINDOW = 20
"""How many of the last steps count."""
FIRST_S = 300.0
"""The limit as long as no step is known: the first has more to do."""
PAUSE_S = 600.0
"""Ranks that evaluate or save may say nothing for so long."""
LOADING_S = 1800.0
"""The same for ranks that load the model; they have no sign of life to give."""
SILENT_S = 10.0
"""A host that does not answer for so long, while all others wait for so long, is what they wait for."""
OVERDUE = 1.5
"""If besides the step takes so many times as long as the slowest of the last ones: the host may compute, unseen."""
EVIDENCE_S = 5.0
"""How long the accused, and their hosts, have to say where they stand."""
LOADING = {"importing", "joining", "joined"}
PAUSES = LOADING | {"evaluate", "save"}


class Hang:
    """The steps of one attempt. Of the user's own program nothing is known.

    Once `suspicion` is there, the stacks of all ranks are to be fetched and handed in with `take`, as they come;
    `failure` is there when all have come, or a few seconds later.
    """

    def __init__(self, request: Request, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_wanted = all(part.program == "worker" for part in request.hosts)
        self._clock = clock
        self._standings = Standings(clock=clock)
        self._steps = _Steps()
        self._found: Finding | None = None
        self._num_suspicions = 0
        self._suspected_at = 0.0
        self._stacks: dict[str, dict[int, Stack]] = {}

    @property
    def suspicion(self) -> int | None:
        """Its number, as long as it is suspected that ranks hang; stacks that were fetched for another are old."""
        return None if self._found is None else self._num_suspicions

    def note(self, statuses: Sequence[HostStatus], *, joined: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Take in what the hosts say now; what is new, as events with their details. joined: the ranks have."""
        if not self._is_wanted:
            return
        self._standings.note(statuses)
        found = self._look() if joined else None
        before, self._found = self._found, found
        if found is None:
            if before is not None:
                yield "going on", {"what": f"the ranks go on after {seconds(self._clock() - self._suspected_at)}"}
        elif before is None or before.who != found.who:
            self._num_suspicions += 1
            self._suspected_at, self._stacks = self._clock(), {}
            yield "hanging", found.to_json()

    def take(self, evidence: Mapping[str, Any]) -> None:
        """What hosts have said of their ranks so far: host -> answer of `stacks`; whatever it is."""
        self._stacks = {host: _read(said) for host, said in evidence.items()}

    def failure(self) -> Hung | None:
        """Why the attempt is to be ended, if it is."""
        if self._found is None:
            return None
        missing = {each.host for each in self._found.seen} - self._stacks.keys()
        if self._found.kind != "silent" and missing and self._clock() < self._suspected_at + EVIDENCE_S:
            return None
        return self._found.with_stacks(self._stacks).error()

    def _look(self) -> Finding | None:
        now, seen = self._clock(), self._standings.seen
        if not seen:
            return None  # it may be our own link that is cut
        self._steps.note(seen, now=now, is_blind=self._standings.is_blind)
        silent = self._standings.silent(SILENT_S)
        if silent and self._wait_for_silent(seen, now):
            waited_s = now - max(each.moved_at for each in seen)
            return self._silent(silent, seen, limit=f"they wait since {seconds(waited_s)}; {self._steps.words(now)}")
        return self._overdue(seen, silent, now)

    def _wait_for_silent(self, seen: Sequence[Standing], now: float) -> bool:
        """Whether all that are seen wait in an exchange, for longer than hosts that compute would let them."""
        if any(each.phase != "exchange" for each in seen):
            return False
        waited_s = now - max(each.moved_at for each in seen)
        return waited_s >= SILENT_S and now - self._steps.since >= self._steps.patience_s

    def _silent(self, hosts: Sequence[str], seen: Sequence[Standing], *, limit: str) -> Finding:
        """All that are seen wait for these hosts."""
        are_frozen = all(map(self._standings.is_frozen, hosts))
        return Finding(
            kind="silent",
            now=self._clock(),
            seen=tuple(seen),
            silent=tuple(hosts),
            unseen=tuple(self._standings.last_of(hosts)),
            are_frozen=are_frozen,
            limit=limit,
        )

    def _overdue(self, seen: Sequence[Standing], silent: Sequence[str], now: float) -> Finding | None:
        """What is to be said of a step, or of a pause, that lasts too long."""
        phases = {each.phase for each in seen}
        if phases & PAUSES:
            limit_s = LOADING_S if phases & LOADING else PAUSE_S
            since = max(each.told_at for each in seen)
            words = f"nothing moved for {seconds(now - since)} while ranks {_listed_phases(phases & PAUSES)}"
            still_s = limit_s
        else:
            limit_s, since, words = self._steps.limit_s, self._steps.since, self._steps.words(now)
            # As long as the slowest step, or about: who has moved since is slow, and gets on.
            still_s = limit_s / TIMES
        if now - since <= limit_s:
            return None
        least = min(each.progress for each in seen)
        behind = [each for each in seen if each.progress == least]
        still = [each for each in behind if now - each.told_at >= still_s]
        if len(behind) < len(seen) or len(seen) == 1:
            found = Finding(kind="behind", now=now, behind=tuple(still), seen=tuple(seen), limit=words)
            return found if still else None
        if len(still) < len(seen):
            return None
        if silent:
            return self._silent(silent, seen, limit=words)
        return Finding(kind="together", now=now, seen=tuple(seen), limit=words)


class _Steps:
    """How long steps take: from when the slowest rank begins one to when it begins the next.

    Of local SGD it is the exchanges that are long, and many short steps lie between two: so it is exchanges by which
    is counted how many of the last ones are remembered, and each keeps the longest step since the one before.
    """

    def __init__(self) -> None:
        self.since = 0.0
        """When the step that is worked on began, or the pause in it ended."""
        self._step: int | None = None
        self._left = 0
        self._is_whole = False
        """Its begin was seen, and nothing since that makes its length say less."""
        self._lengths: dict[int, float] = {}
        """Exchanges that all had behind them -> seconds."""
        self._is_known = False

    def note(self, seen: Sequence[Standing], *, now: float, is_blind: bool) -> None:
        """Take in where the ranks stand. is_blind: there are more of them than are seen."""
        step, left = min(each.step for each in seen), min(each.left for each in seen)
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
    words = {"evaluate": "evaluate", "save": "save"}
    return listed(sorted({words.get(phase, "load") for phase in phases}))


def _read(said: object) -> dict[int, Stack]:
    rows = said.get("ranks") if isinstance(said, Mapping) else None
    if not isinstance(rows, Mapping):
        return {}
    found = {int(rank): read_stack(row) for rank, row in rows.items() if str(rank).isdecimal()}
    return {rank: stack for rank, stack in found.items() if stack is not None}
