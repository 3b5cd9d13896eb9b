"""How fast ranks were in the last steps, out of times that all of them know alike.

Every rank must come to the same numbers, to the last bit, on other processors, C libraries and Pythons: so there are
only + - * / and comparisons here, whose results IEEE 754 fixes. No logarithms, which differ between libraries, and no
sum() of floats, which differs between Python 3.11 and 3.12.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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


class Speeds:
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
        num_tokens, num_micro_batches = (sum(map(sum, each)) for each in self._amounts())
        self._length = num_tokens / num_micro_batches
        if self._num_added % 5 == 0:
            self._floors = [self._best_floor(rank) for rank in range(len(busy_s))]
        self._num_added += 1
        return True

    def restart(self) -> None:
        """Work was dealt anew: steps before tell how unsteady a rank is, but no more how fast."""
        self._num_fresh = 0

    def micro_batch_s(self, num_steps: int) -> tuple[float, ...] | None:
        """Medians of the last steps; None where there were not so many since work was dealt."""
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

    def _amounts(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        return [step.tokens for step in self._steps], [step.micro_batches for step in self._steps]

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
