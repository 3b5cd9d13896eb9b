"""Who does how many micro-batches of the next step, by the speeds of the last ones.

Every rank keeps the same books from the same reports, so that all of them deal alike without another word.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gangline.runs.deal import shares_by_time, split_whole
from gangline.worker.agree import RankTimes
from gangline.worker.order import Indices

FAST, SLOW = (3, 0.10), (10, 0.03)
"""Steps whose median is looked at, and the part of a step that must be gained by dealing anew: a machine that became
twice as slow is believed after few steps, a small drift after many."""
CONFIRMED = 2
"""Steps in a row that must say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Shares before and after, and how fast each rank was found to be."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    unit_s: tuple[float, ...]
    """Seconds per token, by rank."""
    gain: float
    """Part of the slowest rank's time that dealing anew takes off a step."""

    def reason(self, hosts: Sequence[str]) -> str:
        """In words: who does more, who less, and what it gains. hosts: of every rank."""
        changes = [
            f"{host} {before} -> {after}"
            for host, before, after in zip(hosts, self.before, self.after, strict=True)
            if before != after
        ]
        return f"micro-batches moved: {', '.join(changes)}; steps become {self.gain:.0%} shorter"


class Dealer:
    """The shares of one attempt, by rank."""

    def __init__(self, shares: Sequence[int], *, moving: bool) -> None:
        self._shares = tuple(shares)
        self.moving = moving and len(shares) > 1
        self._recent: deque[tuple[float, ...]] = deque(maxlen=SLOW[0])
        self._unit_s: tuple[float, ...] | None = None
        self._said = 0

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches of a full step, by rank."""
        return self._shares

    def counts(self, num_micro_batches: int) -> tuple[int, ...]:
        """Micro-batches of a step that may be short, by rank."""
        if num_micro_batches == sum(self._shares):
            return self._shares
        if self._unit_s is not None:
            return shares_by_time(self._unit_s, num_micro_batches)
        return split_whole(num_micro_batches, self._shares)

    def deal(self, num_micro_batches: int) -> list[range]:
        """Which micro-batches each rank does: adjacent ones."""
        dealt, begin = [], 0
        for count in self.counts(num_micro_batches):
            dealt.append(range(begin, begin + count))
            begin += count
        return dealt

    def begin(self, seconds: Sequence[float], work: Sequence[int]) -> Moved:
        """Deal by the time that every rank took for the same micro-batch, the first of `work` (tokens, by micro-batch).

        seconds: by rank.
        """
        self._unit_s = tuple(each / max(1, work[0]) for each in seconds)
        return self._take(self._best(self._unit_s), self._unit_s)

    def learn(self, times: Sequence[RankTimes], work: Sequence[int]) -> Moved | None:
        """Take in one step's times; the move that it leads to, if any.

        work: tokens of every micro-batch of the step, padding included.
        """
        if not self.moving:
            return None
        dealt = self.deal(len(work))
        last = self._recent[-1] if self._recent else self._unit_s
        found = []
        for rank, mine in enumerate(dealt):
            tokens = sum(work[index] for index in mine)
            busy_s = times[rank].data_s + times[rank].compute_s
            if tokens and busy_s > 0:
                found.append(busy_s / tokens)
            elif last is None:
                return None
            else:  # a rank without work in this step is as fast as it was
                found.append(last[rank])
        self._recent.append(tuple(found))
        return self._consider()

    def _consider(self) -> Moved | None:
        for window, least in (FAST, SLOW):
            if len(self._recent) < window:
                continue
            steps = list(self._recent)[-window:]
            unit_s = tuple(statistics.median(column) for column in zip(*steps, strict=True))
            best = self._best(unit_s)
            if self._gain(best, unit_s) >= least:
                self._said += 1
                if self._said < CONFIRMED:
                    return None
                self._unit_s = unit_s
                return self._take(best, unit_s)
        self._said = 0
        return None

    def _best(self, unit_s: Sequence[float]) -> tuple[int, ...]:
        """A rank that has work keeps some, or nobody would notice that it has become faster."""
        least = [min(1, share) for share in self._shares]
        return shares_by_time(unit_s, sum(self._shares), least=least)

    def _gain(self, shares: Sequence[int], unit_s: Sequence[float]) -> float:
        now_s, then_s = (_slowest(each, unit_s) for each in (self._shares, shares))
        return 1 - then_s / now_s

    def _take(self, shares: tuple[int, ...], unit_s: tuple[float, ...]) -> Moved:
        moved = Moved(before=self._shares, after=shares, unit_s=unit_s, gain=self._gain(shares, unit_s))
        self._shares, self._said = shares, 0
        self._recent.clear()
        return moved


def _slowest(shares: Sequence[int], unit_s: Sequence[float]) -> float:
    return max(share * each for share, each in zip(shares, unit_s, strict=True))


def padded_tokens(micro_batches: Sequence[Indices], lengths: Indices) -> list[int]:
    """Tokens of every micro-batch, with the padding to its longest sample."""
    return [int(lengths[samples].max()) * len(samples) for samples in micro_batches]
