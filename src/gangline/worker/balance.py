"""Load balance: how many micro-batches of the next step each rank does, by the speeds of the last ones.

Every rank computes the same split from the same reports, so no further message is needed. They must come to the same
numbers, to the last bit, on other processors, C libraries and Pythons: so there are only + - * / and comparisons here,
whose results IEEE 754 fixes. No logarithms, which differ between libraries, and no sum() of floats, which differs
between Python 3.11 and 3.12.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, TypeVar

from gangline.runs.gang import shares_by_time, split_whole

if TYPE_CHECKING:
    from gangline.worker.batch import Indices

WINDOWS = ((3, 0.10), (10, 0.03), (30, 0.015))
"""Steps whose medians are looked at, and the part of a step that a new split must take off: a machine that became
twice as slow is believed after few steps, a small drift after many."""
CONFIRMED = 3
"""Steps in a row that must say so: two stalls one after the other are no change of speed."""
SURE = 3.0
"""Standard deviations of the times that the gain must exceed."""
MEDIAN = 1.2533
"""Deviation of a median over that of a mean (sqrt(pi / 2), for normal distributions)."""
AT_START = 0.03
"""Part of a step that the probe must promise to gain before the planned shares are left."""
MOVE_STEPS, SAVED_STEPS = 25, 100
"""Steps that one move costs, and how many can be saved up: a machine that changes its mind all the time moves shares
four times in a row, and then once in 25 steps."""
MOST_NAMED = 6
"""Hosts that a sentence names."""


T = TypeVar("T")


class Times(Protocol):
    """What counts of `RankTimes`."""

    @property
    def data_s(self) -> float:
        """Seconds of reading."""

    @property
    def compute_s(self) -> float:
        """Seconds of computing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesMoved:
    """Shares before and after, and what it rests on."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    micro_batch_s: tuple[float | None, ...]
    """Seconds of a mean micro-batch, by rank; None: not known."""
    gain: float
    """Part of the slowest rank's time that a new split takes off a step."""
    replica_groups: tuple[int, ...] = ()
    """By rank: those of one replica group do the same micro-batches. (): everybody does others."""

    def words(self, hosts: Sequence[str]) -> str:
        """For people: "pc1 20 -> 13 micro-batches, pc2 11 -> 15, pc3 9 -> 12; steps get 33 % shorter".

        hosts: of every rank; the shares of a host's ranks are added up, and only those that change are named.
        """
        if self.before == self.after:
            return f"{_list(self._by_host(hosts, self.after))}, as before"
        before, after = self._by_host(hosts, self.before), self._by_host(hosts, self.after)
        changed = {host: f"{before[host]} -> {count}" for host, count in after.items() if before[host] != count}
        gain = f"; steps get {100 * self.gain:.0f} % shorter" if self.gain >= 0.005 else ""
        return f"{_list(changed) if changed else 'moved between ranks of a host'}{gain}"

    def _by_host(self, hosts: Sequence[str], shares: Sequence[int]) -> dict[str, int]:
        """What a replica group does is its first rank's."""
        found = dict.fromkeys(hosts, 0)
        for rank, (host, share) in enumerate(zip(hosts, shares, strict=True)):
            found[host] += (
                share if not self.replica_groups or self.replica_groups.index(self.replica_groups[rank]) == rank else 0
            )
        return found


def _list(named: dict[str, int] | dict[str, str]) -> str:
    words = [f"{host} {count}" for host, count in named.items()]
    words[0] += " micro-batches"
    more = len(words) - MOST_NAMED
    return ", ".join(words[:MOST_NAMED]) + (f", and {more} more hosts" if more > 0 else "")


class LoadBalancer:
    """The shares of one attempt, by rank. A rank that begins with none gets none.

    Within, everything is by replica group: of ranks that do the same micro-batches the first one stands for all.
    """

    def __init__(self, shares: Sequence[int], *, moving: bool, replica_groups: Sequence[int] = ()) -> None:
        """Replica groups: see `Gang.replica_groups`; (): everybody does other micro-batches."""
        self._replica_groups = tuple(replica_groups) or tuple(range(len(shares)))
        self._firsts = [
            self._replica_groups.index(replica_group) for replica_group in dict.fromkeys(self._replica_groups)
        ]
        self._shares = tuple(shares[first] for first in self._firsts)
        self._working = [replica_group for replica_group, share in enumerate(self._shares) if share]
        self.moving = moving and len(self._working) > 1
        self._speeds = RankSpeeds()
        self._micro_batch_s: tuple[float, ...] | None = None
        """Of the ranks at work: what the present shares rest on."""
        self._said = 0
        self._credit = SAVED_STEPS

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches of a full step, by rank."""
        return self._by_rank(self._shares)

    def counts(self, num_micro_batches: int) -> tuple[int, ...]:
        """Micro-batches of a step that may be short, by rank."""
        return self._by_rank(self._counts(num_micro_batches))

    def split_work(self, num_micro_batches: int) -> list[range]:
        """Which micro-batches each rank does: adjacent ones."""
        return list(self._by_rank(self._split_work(num_micro_batches)))

    def _by_rank(self, by_replica_group: Sequence[T]) -> tuple[T, ...]:
        place = {self._replica_groups[first]: number for number, first in enumerate(self._firsts)}
        return tuple(by_replica_group[place[replica_group]] for replica_group in self._replica_groups)

    def _counts(self, num_micro_batches: int) -> tuple[int, ...]:
        if num_micro_batches == sum(self._shares):
            return self._shares
        if self._micro_batch_s is not None:
            return self._spread(shares_by_time(self._micro_batch_s, num_micro_batches, least=[1] * len(self._working)))
        return split_whole(num_micro_batches, self._shares)

    def _split_work(self, num_micro_batches: int) -> list[range]:
        work_split, begin = [], 0
        for count in self._counts(num_micro_batches):
            work_split.append(range(begin, begin + count))
            begin += count
        return work_split

    def begin(self, seconds: Sequence[float]) -> SharesMoved:
        """Split by the time that every rank took for the same micro-batch, where that is worth it.

        seconds: by rank. Where one of them is no time, the planned shares stay.
        """
        by_replica_group = [seconds[first] for first in self._firsts]
        found = tuple(by_replica_group[replica_group] for replica_group in self._working)
        if not self.moving or not all(0.0 < each < math.inf for each in found):
            return self._take(self._shares, self._micro_batch_s)
        best = self._best(found)
        return self._take(best if self._gain(best, found) >= AT_START else self._shares, found)

    def learn(self, times: Sequence[Times], work: Sequence[int]) -> SharesMoved | None:
        """Take in one step's times; the move that it leads to, if any.

        work: tokens of every micro-batch of the step, padding included.
        """
        if not self.moving:
            return None
        self._credit = min(SAVED_STEPS, self._credit + 1)
        work_split, took = self._split_work(len(work)), [times[first] for first in self._firsts]
        known = self._speeds.add(
            [took[replica_group].data_s + took[replica_group].compute_s for replica_group in self._working],
            [sum(work[index] for index in work_split[replica_group]) for replica_group in self._working],
            [len(work_split[replica_group]) for replica_group in self._working],
        )
        return self._consider() if known else None

    def _consider(self) -> SharesMoved | None:
        found = self._worthwhile()
        self._said = 0 if found is None else self._said + 1
        if found is None or self._said < CONFIRMED or self._credit < MOVE_STEPS:
            return None
        self._credit -= MOVE_STEPS
        return self._take(*found)

    def _worthwhile(self) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
        """Other shares, and the speeds that ask for them, where the gain is large enough and surely none of chance."""
        for window, least in WINDOWS:
            micro_batch_s = self._speeds.micro_batch_s(window)
            if micro_batch_s is None:
                return None
            best = self._best(micro_batch_s)
            gain = self._gain(best, micro_batch_s)
            if gain >= least and self._is_sure(gain, best, micro_batch_s, window=window):
                return best, micro_batch_s
        return None

    def _is_sure(self, gain: float, shares: Sequence[int], micro_batch_s: Sequence[float], *, window: int) -> bool:
        """It rests on two ranks: the slowest one as it is, and the one of the others that would then be the slowest."""
        now_s, then_s = self._ends(self._shares, micro_batch_s), self._ends(shares, micro_batch_s)
        slowest = now_s.index(max(now_s))
        then_s[slowest] = 0.0
        chance = self._speeds.unsteadiness(slowest, then_s.index(max(then_s))) * MEDIAN
        return gain * gain * window >= SURE * SURE * chance * chance

    def _best(self, micro_batch_s: Sequence[float]) -> tuple[int, ...]:
        """A replica group that has work keeps some, or nobody would notice that it has become faster."""
        return self._spread(shares_by_time(micro_batch_s, sum(self._shares), least=[1] * len(self._working)))

    def _gain(self, shares: Sequence[int], micro_batch_s: Sequence[float]) -> float:
        return 1 - max(self._ends(shares, micro_batch_s)) / max(self._ends(self._shares, micro_batch_s))

    def _ends(self, shares: Sequence[int], micro_batch_s: Sequence[float]) -> list[float]:
        """Seconds of every replica group at work."""
        return [shares[replica_group] * each for replica_group, each in zip(self._working, micro_batch_s, strict=True)]

    def _spread(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Counts of the replica groups at work, with nothing for the others."""
        working = dict(zip(self._working, counts, strict=True))
        return tuple(working.get(replica_group, 0) for replica_group in range(len(self._shares)))

    def _take(self, shares: tuple[int, ...], micro_batch_s: tuple[float, ...] | None) -> SharesMoved:
        known = dict(zip(self._working, micro_batch_s or (), strict=False))
        moved = SharesMoved(
            before=self._by_rank(self._shares),
            after=self._by_rank(shares),
            micro_batch_s=self._by_rank([known.get(replica_group) for replica_group in range(len(shares))]),
            gain=0.0 if micro_batch_s is None else self._gain(shares, micro_batch_s),
            replica_groups=self._replica_groups,
        )
        self._shares, self._micro_batch_s, self._said = shares, micro_batch_s, 0
        self._speeds.restart()
        return moved


def padded_tokens(
    micro_batches: Sequence[Indices], lengths: Indices, passes: Iterable[range] | None = None
) -> list[int]:
    """Tokens of every micro-batch, with the padding to the longest sample of its pass.

    passes: the micro-batches of a step that share a forward pass; None: each has its own.
    """
    longest = [int(lengths[samples].max()) for samples in micro_batches]
    for together in passes or ():
        longest[together.start : together.stop] = [max(longest[index] for index in together)] * len(together)
    return [each * len(samples) for each, samples in zip(longest, micro_batches, strict=True)]


LONGEST = 30
"""Steps that are remembered."""
FLOORS = (0.0, 0.25, 1.0, 4.0, 16.0)
"""What a micro-batch may cost beside its tokens, as a part of what the tokens of a mean one cost."""
NUM_JUDGED = 6
"""Steps before which the floor is taken for none."""
DEVIATION = 0.954
"""Of two draws from one normal distribution, the median distance is 0.6745 * sqrt(2) of its standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """By rank."""

    busy_s: tuple[float, ...]
    tokens: tuple[int, ...]
    micro_batches: tuple[int, ...]


class RankSpeeds:
    """Seconds of a mean micro-batch, by rank.

    Micro-batches of unlike lengths are made comparable by a floor for each rank, in tokens: the one of FLOORS under
    which its times are steadiest. A GPU takes nearly as long for a short row as for a longer one, a processor does not.
    """

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=LONGEST)
        self._floors: list[float] = []
        self._length = 0.0
        """Tokens of a mean micro-batch of the steps that are remembered."""
        self._num_fresh = 0
        self._num_added = 0

    def add(self, busy_s: Sequence[float], tokens: Sequence[int], micro_batches: Sequence[int]) -> bool:
        """Take in a step; False, and nothing is taken, where a rank had no work or its time is none."""
        if min(tokens) <= 0 or not all(0.0 < each < math.inf for each in busy_s):
            return False
        self._steps.append(_Step(busy_s=tuple(busy_s), tokens=tuple(tokens), micro_batches=tuple(micro_batches)))
        self._num_fresh += 1
        num_tokens = sum(sum(step.tokens) for step in self._steps)
        self._length = num_tokens / sum(sum(step.micro_batches) for step in self._steps)
        if self._num_added % 5 == 0:
            self._floors = [self._best_floor(rank) for rank in range(len(busy_s))]
        self._num_added += 1
        return True

    def restart(self) -> None:
        """Work was split anew: steps before tell how unsteady a rank is, but no more how fast."""
        self._num_fresh = 0

    def micro_batch_s(self, num_steps: int) -> tuple[float, ...] | None:
        """Medians of the last steps; None where there were not so many since work was split."""
        if self._num_fresh < num_steps:
            return None
        return tuple(
            statistics.median(self._series(rank, floor, last=num_steps)) for rank, floor in enumerate(self._floors)
        )

    def unsteadiness(self, rank: int, other: int) -> float:
        """Standard deviation of what one rank takes over what another takes, from the changes from step to step.

        What makes both slower at once does not count, and neither a stall nor a lasting change of speed counts much.
        """
        series = [self._series(each, self._floors[each]) for each in (rank, other)]
        return _unsteadiness([one / two for one, two in zip(*series, strict=True)])

    def _best_floor(self, rank: int) -> float:
        per_micro_batch = {step.tokens[rank] / step.micro_batches[rank] for step in self._steps}
        if len(self._steps) <= NUM_JUDGED or len(per_micro_batch) == 1:
            return FLOORS[0]
        return min(FLOORS, key=lambda floor: (_unsteadiness(self._series(rank, floor)), floor))

    def _series(self, rank: int, floor: float, *, last: int = LONGEST) -> list[float]:
        """Seconds of a mean micro-batch in each of the last steps."""
        floor_tokens = floor * self._length
        whole = self._length + floor_tokens
        return [
            step.busy_s[rank] / (step.tokens[rank] + floor_tokens * step.micro_batches[rank]) * whole
            for step in list(self._steps)[-last:]
        ]


def _unsteadiness(series: Sequence[float]) -> float:
    changes = [abs(after - before) / (after + before) * 2 for before, after in pairwise(series)]
    return statistics.median(changes) / DEVIATION if changes else 0.0
