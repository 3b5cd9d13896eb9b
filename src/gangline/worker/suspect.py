"""Whether something became worse for good: a level that was usual, and evidence against it, step by step. Pure.

Evidence is a cumulated sum (E. S. Page, Continuous inspection schemes, Biometrika 41, 1954): every step adds what it is
worse than usual, less a toll, so that noise adds up to nothing and a lasting rise to a lot. One step counts for a
fifth of what it takes at the most: no single one names anybody.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Literal

LEARNED = 12
"""Steps whose median is the level."""
TOLL = 0.06
"""A step that is worse than usual by less than this is evidence for nothing being wrong."""
EVIDENCE = 0.6
"""Seven steps that are 15 % worse."""
RARE = 15.0
"""Logarithm of the steps between two false alarms. Where noise has a standard deviation s, they are about
exp(2 * toll * evidence / s**2): from 7 % on more evidence is needed."""
NOISE_TOLL = 0.5
"""Standard deviations that the toll is at least: where there is much noise, the level is not known well either."""
LEAST = 0.08
"""What is less than so much worse is not named."""
OVER, OVER_STEPS = 0.05, 10
"""Who was named is as before when the median of so many steps is no worse than this."""
MOST_PATIENCE = 8
"""Times the evidence: whoever is slow now and then needs twice as much for the second time, then four times."""
FOLLOW, FARTHEST, SETTLED = 0.005, 0.04, 60
"""A level moves by this part of what a step differs from it, which counts up to 4 %: by 0.02 % per step at the most, a
drift of 20 % in some hundred steps is seen. Before so many steps it is the mean of those there were."""
NOISE_STEPS = 40


class Level:
    """What is usual: the median of the first values, and then what follows slowly."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._num_steps = LEARNED
        self.value: float | None = None

    def learn(self, value: float) -> None:
        """One of the first values."""
        self._first.append(value)
        if len(self._first) == LEARNED:
            self.value = statistics.median(self._first)

    def follow(self, value: float, *, scale: float) -> None:
        """Move towards a value. scale: what the 4 % are of."""
        assert self.value is not None
        self._num_steps += 1
        self.value += scale * moved((value - self.value) / scale, self._num_steps)


def moved(difference: float, num_steps: int) -> float:
    """By how much a level moves for a step that differs from it."""
    part = 1 / num_steps if num_steps < SETTLED else FOLLOW
    return part * min(FARTHEST, max(-FARTHEST, difference))


class WorkLevel:
    """Usual seconds of a rank for so many micro-batches of so many tokens.

    Long samples take time by the token, short ones by the micro-batch: see `spread`.
    """

    FIXED = 0.05
    """Part of a step's computation that may not shrink with a rank's work: whoever has less than usual is given it."""

    def __init__(self) -> None:
        self._first: list[tuple[float, int, int]] = []
        self._num_steps = LEARNED
        self._by_token = True
        self._usual_work = 0.0
        self._unit_s: float | None = None

    @property
    def has_learned(self) -> bool:
        """Whether the first steps are over."""
        return len(self._first) >= LEARNED

    @property
    def is_known(self) -> bool:
        """Whether there is a level."""
        return self._unit_s is not None

    def learn(self, seconds: float, *, micro_batches: int, tokens: int) -> None:
        """One of the first steps."""
        self._first.append((seconds, micro_batches, tokens))

    def spread(self, *, by_token: bool) -> float:
        """By what part the first steps differ from what this measure of work makes of them."""
        units = self._units(by_token=by_token)
        unit_s = statistics.median(units)
        return statistics.median(abs(unit - unit_s) for unit in units) / unit_s

    def settle(self, *, by_token: bool) -> None:
        """Take the first steps for usual, by this measure of work."""
        self._by_token = by_token
        self._unit_s = statistics.median(self._units(by_token=by_token))
        self._usual_work = statistics.median(self._work(count, tokens) for _, count, tokens in self._first)

    def expected_s(self, *, micro_batches: int, tokens: int) -> float:
        """What is usual for that work."""
        assert self._unit_s is not None
        work = self._work(micro_batches, tokens)
        return self._unit_s * (work + self.FIXED * max(0.0, self._usual_work - work))

    def follow(self, ratio: float) -> float:
        """Move towards a step that took `ratio` times as long as usual; by how many times it moved."""
        self._num_steps += 1
        factor = 1 + moved(ratio - 1, self._num_steps)
        self.scale(factor)
        return factor

    def scale(self, factor: float) -> None:
        """All take so many times as long, for a reason that is nobody's."""
        assert self._unit_s is not None
        self._unit_s *= factor

    def _units(self, *, by_token: bool) -> list[float]:
        return [seconds / (tokens if by_token else count) for seconds, count, tokens in self._first]

    def _work(self, micro_batches: int, tokens: int) -> int:
        return tokens if self._by_token else micro_batches


class Suspect:
    """The evidence for one cause."""

    def __init__(self) -> None:
        self.is_named = False
        self.excess = 0.0
        """By what part it is worse, once it is raised."""
        self._sum = 0.0
        self._run: deque[float] = deque(maxlen=OVER_STEPS)
        self._noise, self._num_steps = 0.0, 0
        self._patience = 1

    @property
    def is_calm(self) -> bool:
        """Whether nothing speaks against it now: levels follow then."""
        return not self.is_named and self._sum <= self._limit / 2

    def note(self, excess: float) -> Literal["raised", "over"] | None:
        """Take in a step that was worse by that part.

        "raised": there is evidence enough, in this and every following step until `name` or `dismiss`. "over": who was
        named is as before.
        """
        return self._recovery(excess) if self.is_named else self._evidence(excess)

    def name(self) -> None:
        """It has been told."""
        self.is_named = True
        self._patience = min(MOST_PATIENCE, 2 * self._patience)
        self._clear()

    def dismiss(self) -> None:
        """It was something else; it takes more to ask again."""
        self._patience = min(MOST_PATIENCE, 2 * self._patience)
        self._clear()

    def _evidence(self, excess: float) -> Literal["raised"] | None:
        if self._sum <= self._limit / 4:
            self._hear(excess)
        limit, at_once = self._patience * self._limit, self._limit / 5
        self._sum = min(limit, max(0.0, self._sum + min(excess - self._toll, at_once)))
        if not self._sum:
            self._run.clear()
            return None
        self._run.append(excess)
        self.excess = statistics.median(self._run)
        return "raised" if self._sum >= limit and self.excess >= LEAST else None

    def _hear(self, excess: float) -> None:
        """Learn how large noise is: the mean absolute value, in which what is much worse than usual counts less."""
        self._num_steps += 1
        heard = min(abs(excess), max(TOLL / 2, 3 * self._noise)) if excess > 0 else -excess
        self._noise += (heard - self._noise) / min(self._num_steps, NOISE_STEPS)

    def _recovery(self, excess: float) -> Literal["over"] | None:
        self._run.append(excess)
        if len(self._run) < OVER_STEPS or statistics.median(self._run) > OVER:
            return None
        self.is_named = False
        self._clear()
        return "over"

    @property
    def _deviation(self) -> float:
        """Of normal noise, from its mean absolute value."""
        return 1.25 * self._noise

    @property
    def _toll(self) -> float:
        return max(TOLL, NOISE_TOLL * self._deviation)

    @property
    def _limit(self) -> float:
        """Evidence that is enough for the first time."""
        return max(EVIDENCE, RARE * self._deviation**2 / (2 * self._toll))

    def _clear(self) -> None:
        self._sum = 0.0
        self._run.clear()
