"""What the ranks do once they have joined, until they work on their first step: nobody else tells of it. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gangline.launch.backend import HostStatus, Request
from gangline.units import format_duration

AGAIN_S = 15.0
"""After so long it is said again, then after twice as long, and so on."""
MOST = 8
"""How many ranks are named."""
STAGES = ("load", "evaluate", "step")
WORDS = {
    "load": ("loads the model", "load the model"),
    "evaluate": ("evaluates before the first step", "evaluate before the first step"),
    "step": ("works on the first step", "work on the first step"),
}
"""For one rank, and for several."""

_Rank = tuple[int, str]
"""Its number, and its host."""


class FirstStep:
    """Follows the ranks of one attempt from the moment they have joined until all work on their first step.

    done: nothing more is told; so from the beginning for the user's own program, which says nothing of itself.
    """

    def __init__(self, request: Request, *, clock: Callable[[], float] = time.monotonic) -> None:
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
