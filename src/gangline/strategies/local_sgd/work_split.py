"""Who does which micro-batches of a round of local SGD, by the speeds of the last one.

Hosts take turns in proportion to their speeds, so that all of them go through a round's steps at one pace, and at one
learning rate. Every rank computes all of it, from numbers that all of them know: only + - * / and comparisons, and
`fsum`, come to the same bits on other processors and Pythons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gangline.runs.gang import Gang, shares_by_time, split_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerBatch:
    """One inner step of a host."""

    by_rank: tuple[tuple[int, ...], ...]
    """Which micro-batches of the round each of the host's ranks does."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(number for numbers in self.by_rank for number in numbers)


class RoundBalancer:
    """The split of one attempt. A rank that begins with no share gets none."""

    def __init__(self, gang: Gang, *, per_step: int) -> None:
        """per_step: micro-batches of a full step of the run."""
        self._per_step = per_step
        self._planned = tuple(rank.share for rank in gang.ranks)
        self._ranks = [gang.ranks_on(host) for host in gang.hosts]
        self._working = [[rank for rank in ranks if self._planned[rank]] for ranks in self._ranks]
        self._unit_s: tuple[float, ...] | None = None
        """Seconds per token, by rank; of one without work: infinite."""
        self.moving = gang.moving_shares and len(self._hosts_at_work()) > 1

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches of a full step, by rank, as nearly as whole ones go."""
        if self._unit_s is None:
            return self._planned
        counts = shares_by_time(self._hosts_s(self._unit_s), self._per_step)
        by_rank = [0] * len(self._planned)
        for host, count in zip(self._hosts_at_work(), counts, strict=True):
            for rank, share in zip(self._working[host], self._inside(host, count), strict=True):
                by_rank[rank] = share
        return tuple(by_rank)

    def split_work(self, num_micro_batches: int) -> list[list[InnerBatch]]:
        """The inner steps of a round, by host."""
        work_split: list[list[InnerBatch]] = [[] for _ in self._ranks]
        for host, numbers in zip(self._hosts_at_work(), self._turns(num_micro_batches), strict=True):
            sizes = _even(len(numbers), self._inner_size(host), least=len(self._working[host]))
            starts = [sum(sizes[:index]) for index in range(len(sizes))]
            work_split[host] = [
                self._inner_batch(host, numbers[start : start + size], least=int(start == 0))
                for start, size in zip(starts, sizes, strict=True)
            ]
        return work_split

    def learn(self, busy_s: Sequence[float], tokens: Sequence[float]) -> tuple[int, ...] | None:
        """Split the next round by what ranks took for this one; the new shares if they are others. Both by rank.

        One round is enough to go by: it is as long as many steps, and a new split costs nothing. A rank that had
        nothing to do is taken to be as fast as it was.
        """
        if not self.moving:
            return None
        unit_s = list(self._unit_s or [math.inf] * len(self._planned))
        at_work = [rank for ranks in self._working for rank in ranks]
        for rank in at_work:
            if tokens[rank]:
                unit_s[rank] = busy_s[rank] / tokens[rank]
        if not all(0 < unit_s[rank] < math.inf for rank in at_work):
            return None
        before = self.shares
        self._unit_s = tuple(unit_s)
        return self.shares if self.shares != before else None

    def _hosts_at_work(self) -> list[int]:
        return [host for host, ranks in enumerate(self._working) if ranks]

    def _hosts_s(self, unit_s: Sequence[float]) -> list[float]:
        """Seconds per token of every host at work, whose ranks share its tokens."""
        return [1 / math.fsum(1 / unit_s[rank] for rank in self._working[host]) for host in self._hosts_at_work()]

    def _turns(self, num_micro_batches: int) -> list[list[int]]:
        """The micro-batches of every host at work: whoever has done the smaller part of its own is next."""
        hosts = self._hosts_at_work()
        if self._unit_s is not None:
            least = [len(self._working[host]) for host in hosts]
            counts = shares_by_time(self._hosts_s(self._unit_s), num_micro_batches, least=least)
        else:
            planned = [sum(self._planned[rank] for rank in self._working[host]) for host in hosts]
            counts = split_whole(num_micro_batches, planned)
        turns = sorted(((turn + 0.5) / count, place) for place, count in enumerate(counts) for turn in range(count))
        numbers: list[list[int]] = [[] for _ in hosts]
        for number, (_, place) in enumerate(turns):
            numbers[place].append(number)
        return numbers

    def _inner_size(self, host: int) -> int:
        """Micro-batches of an inner step: a full step's part of this host's ranks, however fast they are."""
        at_work = sum(len(ranks) for ranks in self._working)
        return max(1, round(self._per_step * len(self._working[host]) / at_work))

    def _inner_batch(self, host: int, numbers: Sequence[int], *, least: int) -> InnerBatch:
        by_rank: dict[int, tuple[int, ...]] = {}
        begin = 0
        for rank, count in zip(self._working[host], self._inside(host, len(numbers), least=least), strict=True):
            by_rank[rank] = tuple(numbers[begin : begin + count])
            begin += count
        return InnerBatch(by_rank=tuple(by_rank.get(rank, ()) for rank in self._ranks[host]))

    def _inside(self, host: int, count: int, *, least: int = 0) -> tuple[int, ...]:
        """Micro-batches of the host's ranks at work.

        least: of each, where there are enough. One in a round is enough to hear of a rank that has become faster; one
        in every inner step would hold the fast ones up.
        """
        ranks = self._working[host]
        if self._unit_s is not None:
            return shares_by_time([self._unit_s[rank] for rank in ranks], count, least=[least] * len(ranks))
        return split_whole(count, [self._planned[rank] for rank in ranks])


def _even(total: int, size: int, *, least: int) -> list[int]:
    """Pieces of about `size`, none of them more than one larger than another: a short last one would be mere noise.

    least: of a piece, unless all is less.
    """
    if total == 0:
        return []
    count = max(1, min(round(total / size), total // least))
    return [total // count + (index < total % count) for index in range(count)]
