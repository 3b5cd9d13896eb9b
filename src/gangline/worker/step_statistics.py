"""Step statistics: what is usual for every rank of an attempt, and who became slower, by cause. Pure.

A rank is compared with its own first steps, not with other ranks: machines may be unlike. A slowdown of all of them
alike (longer samples) is excused.

Change detection is a cumulated sum (E. S. Page, Continuous inspection schemes, Biometrika 41, 1954): every step adds by
how much it is worse than usual, less a slack, so that noise adds up to nothing and a lasting rise to a lot. One step
counts for a fifth of the threshold at most: no single step names a rank.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Cause = Literal["compute", "data", "network"]
MATTERS = 0.03
"""Part of a step that a rank must have become slower by."""
EXCUSE_STEPS = 3
BY_TOKEN = 1.25
"""Work is counted in tokens unless steps differ from that by so many times as much as from counting micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One step by rank: what was to be done, and where its time went."""

    micro_batches: tuple[int, ...]
    tokens: tuple[int, ...]
    """Padding included."""
    data_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    wait_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Of the longest rank, without the update."""
        return max(sum(times) for times in zip(self.data_s, self.compute_s, self.wait_s, strict=True))

    @property
    def exposed_s(self) -> float:
        """What the exchange takes visibly: the wait of the rank that waits least."""
        return min(self.wait_s)

    @property
    def at_work(self) -> list[int]:
        """Ranks that had something to do."""
        return [rank for rank, tokens in enumerate(self.tokens) if tokens and self.compute_s[rank] > 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Something that has changed."""

    what: Literal["slow", "over", "suspected"]
    """suspected: the exchange takes longer, and the links have to be looked at; see `StepStatistics.judge`."""
    cause: Cause
    rank: int = 0
    factor: float = 1.0
    """Times as long: computation; data and computation, where data is the cause."""
    before_s: float = 0.0
    now_s: float = 0.0
    """Per micro-batch; of the exchange, per step."""


class StepStatistics:
    """hosts: of every rank."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(hosts)
        ranks = range(len(hosts))
        self._work = [WorkLevel() for _ in ranks]
        self._by_token: bool | None = None
        """Whether work is counted in tokens or in micro-batches; None: not known yet."""
        self._data = [Level() for _ in ranks]
        self._exchange = Level()
        causes: tuple[Cause, Cause] = ("compute", "data")
        self._suspects = {cause: [ChangeDetector() for _ in ranks] for cause in causes}
        self._network = ChangeDetector()
        self._units: tuple[Hashable, ...] = self._hosts if len(set(hosts)) > 1 else tuple(ranks)
        self._recent: dict[Cause, deque[Mapping[int, float]]] = {cause: deque(maxlen=EXCUSE_STEPS) for cause in causes}

    def learn(self, work: StepWork) -> list[Straggler]:
        """Take in a step; what has changed by it."""
        found = [*self._compute(work), *self._reading(work)]
        if len(set(self._hosts)) > 1:
            found += self._exchanging(work)
        return found

    def judge(self, *, is_slow: bool) -> None:
        """Whether the links, once looked at, are what was suspected."""
        (self._network.name if is_slow else self._network.dismiss)()

    def _compute(self, work: StepWork) -> Iterator[Straggler]:
        ratios = self._ratios(work)
        suspects, excuses = self._suspects["compute"], self._excuses("compute", ratios)
        for rank, ratio in ratios.items():
            excuse = max(1.0, excuses[rank])
            rise_s = work.compute_s[rank] * (1 - excuse / ratio)
            before_s = work.compute_s[rank] / ratio / work.micro_batches[rank]
            yield from self._note(
                Straggler(what="slow", cause="compute", rank=rank, before_s=before_s),
                ratio / excuse - 1,
                matters=rise_s >= MATTERS * work.step_s,
                per=before_s,
            )
        moved = [self._work[rank].follow(ratio) for rank, ratio in ratios.items() if suspects[rank].is_calm]
        for rank in ratios:
            if moved and not suspects[rank].is_calm:
                self._work[rank].scale(statistics.median_low(moved))

    def _ratios(self, work: StepWork) -> dict[int, float]:
        """How many times as long as usual ranks computed, as far as that is known."""
        ratios: dict[int, float] = {}
        for rank in work.at_work:
            level, amount = self._work[rank], _amount(work, rank)
            if level.is_known:
                ratios[rank] = work.compute_s[rank] / level.expected_s(**amount)
            else:
                level.learn(work.compute_s[rank], **amount)
        learned = [self._work[rank] for rank in work.at_work if not self._work[rank].is_known]
        if learned and all(level.has_learned for level in learned):
            if self._by_token is None:
                spreads = {each: sum(level.spread(by_token=each) for level in learned) for each in (True, False)}
                self._by_token = spreads[True] <= BY_TOKEN * spreads[False]
            for level in learned:
                level.settle(by_token=self._by_token)
        return ratios

    def _reading(self, work: StepWork) -> Iterator[Straggler]:
        rises: dict[int, float] = {}
        busy: dict[int, float] = {}
        for rank in work.at_work:
            level, each_s = self._data[rank], work.data_s[rank] / work.micro_batches[rank]
            if level.value is None:
                level.learn(each_s)
                continue
            rise_s = each_s - level.value
            busy[rank] = work.compute_s[rank] / work.micro_batches[rank] + min(each_s, level.value)
            rises[rank] = rise_s / busy[rank]
        excuses = self._excuses("data", rises)
        for rank, rise in rises.items():
            excuse = max(0.0, excuses[rank])
            level = self._data[rank]
            assert level.value is not None
            yield from self._note(
                Straggler(what="slow", cause="data", rank=rank, before_s=level.value),
                rise - excuse,
                matters=(rise - excuse) * busy[rank] * work.micro_batches[rank] >= MATTERS * work.step_s,
                per=busy[rank],
            )
            if self._suspects["data"][rank].is_calm:
                level.follow(level.value + rise * busy[rank], scale=busy[rank])

    def _exchanging(self, work: StepWork) -> Iterator[Straggler]:
        level, exposed_s = self._exchange, work.exposed_s
        if level.value is None:
            level.learn(exposed_s)
            return
        rise_s = exposed_s - level.value
        usual_s = max(1e-9, work.step_s - max(0.0, rise_s))
        said = self._network.note(rise_s / usual_s)
        if said is not None:
            now_s = level.value + self._network.excess * usual_s
            what: Literal["suspected", "over"] = "suspected" if said == "raised" else "over"
            yield Straggler(what=what, cause="network", before_s=level.value, now_s=now_s)
        if self._network.is_calm:
            level.follow(exposed_s, scale=work.step_s)

    def _note(self, finding: Straggler, excess: float, *, matters: bool, per: float) -> Iterator[Straggler]:
        """A step of one rank. per: the seconds that an excess of 1 is."""
        suspect = self._suspects[finding.cause][finding.rank]
        was_named = self._is_named(finding)
        said = suspect.note(excess)
        if said == "raised" and matters:
            suspect.name()
            if not was_named:
                now_s = finding.before_s + suspect.excess * per
                yield replace(finding, factor=1 + suspect.excess, now_s=now_s)
        elif said == "over" and not self._is_named(finding):
            yield replace(finding, what="over", now_s=finding.before_s)

    def _is_named(self, finding: Straggler) -> bool:
        """Whether a rank of that host is named for that cause."""
        suspects, host = self._suspects[finding.cause], self._hosts[finding.rank]
        return any(each.is_named for each, name in zip(suspects, self._hosts, strict=True) if name == host)

    def _excuses(self, cause: Cause, values: Mapping[int, float]) -> dict[int, float]:
        """For every rank what the others have in common: other hosts, or other ranks of a single one.

        The median of three steps, so that the others' noise does not become its own.
        """
        self._recent[cause].append(values)
        found: dict[int, float] = {}
        for rank, value in values.items():
            steps = [_others(step, self._units[rank], self._units) for step in self._recent[cause]]
            known = [each for each in steps if each is not None]
            found[rank] = statistics.median(known) if known else value
        return found


def _others(values: Mapping[int, float], unit: Hashable, units: Sequence[Hashable]) -> float | None:
    """The median over all units but one; None where there are no others."""
    by_unit: dict[Hashable, list[float]] = {}
    for rank, value in values.items():
        if units[rank] != unit:
            by_unit.setdefault(units[rank], []).append(value)
    return statistics.median([statistics.median(each) for each in by_unit.values()]) if by_unit else None


def _amount(work: StepWork, rank: int) -> dict[str, int]:
    return {"micro_batches": work.micro_batches[rank], "tokens": work.tokens[rank]}


LEARNED = 12
"""Steps whose median is the level."""
SLACK = 0.06
"""A step that is worse than usual by less than this is evidence for nothing being wrong."""
EVIDENCE = 0.6
"""Seven steps that are 15 % worse."""
RARE = 15.0
"""Logarithm of the steps between two false alarms. Where noise has a standard deviation s, they are about
exp(2 * slack * evidence / s**2): from 7 % on more evidence is needed."""
NOISE_SLACK = 0.5
"""Standard deviations that the slack is at least: where there is much noise, the level is not known well either."""
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


class ChangeDetector:
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
        self._sum = min(limit, max(0.0, self._sum + min(excess - self._slack, at_once)))
        if not self._sum:
            self._run.clear()
            return None
        self._run.append(excess)
        self.excess = statistics.median(self._run)
        return "raised" if self._sum >= limit and self.excess >= LEAST else None

    def _hear(self, excess: float) -> None:
        """Learn how large noise is: the mean absolute value, in which what is much worse than usual counts less."""
        self._num_steps += 1
        heard = min(abs(excess), max(SLACK / 2, 3 * self._noise)) if excess > 0 else -excess
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
    def _slack(self) -> float:
        return max(SLACK, NOISE_SLACK * self._deviation)

    @property
    def _limit(self) -> float:
        """Evidence that is enough for the first time."""
        return max(EVIDENCE, RARE * self._deviation**2 / (2 * self._slack))

    def _clear(self) -> None:
        self._sum = 0.0
        self._run.clear()
