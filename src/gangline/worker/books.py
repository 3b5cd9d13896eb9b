"""What is usual for every rank of an attempt, and who is slower than that, by cause. Pure: the same on all ranks.

A rank is held against its own first steps, not against other ranks: machines may be unlike. What becomes slower on all
of them alike (longer samples) is excused.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gangline.worker.suspect import Level, Suspect, WorkLevel

Cause = Literal["compute", "data", "network"]
MATTERS = 0.03
"""Part of a step that a rank must have become slower by."""
EXCUSE_STEPS = 3
BY_TOKEN = 1.25
"""Work is counted in tokens unless steps differ from that by so many times as much as from counting micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
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
class Finding:
    """Something that has changed."""

    what: Literal["slow", "over", "suspected"]
    """suspected: the exchange takes longer, and the links have to be looked at; see `Books.judge`."""
    cause: Cause
    rank: int = 0
    factor: float = 1.0
    """Times as long: computation; data and computation, where data is the cause."""
    before_s: float = 0.0
    now_s: float = 0.0
    """Per micro-batch; of the exchange, per step."""


class Books:
    """hosts: of every rank."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(hosts)
        ranks = range(len(hosts))
        self._work = [WorkLevel() for _ in ranks]
        self._by_token: bool | None = None
        """Whether work is counted in tokens or in micro-batches; None: not known yet."""
        self._data = [Level() for _ in ranks]
        self._exchange = Level()
        self._suspects: dict[Cause, list[Suspect]] = {
            "compute": [Suspect() for _ in ranks],
            "data": [Suspect() for _ in ranks],
        }
        self._network = Suspect()
        self._units: tuple[Hashable, ...] = self._hosts if len(set(hosts)) > 1 else tuple(ranks)
        self._recent: dict[Cause, deque[Mapping[int, float]]] = {
            "compute": deque(maxlen=EXCUSE_STEPS),
            "data": deque(maxlen=EXCUSE_STEPS),
        }

    def learn(self, work: Work) -> list[Finding]:
        """Take in a step; what has changed by it."""
        found = [*self._compute(work), *self._reading(work)]
        if len(set(self._hosts)) > 1:
            found += self._exchanging(work)
        return found

    def judge(self, *, is_slow: bool) -> None:
        """Whether the links, once looked at, are what was suspected."""
        (self._network.name if is_slow else self._network.dismiss)()

    def _compute(self, work: Work) -> Iterator[Finding]:
        ratios = self._ratios(work)
        suspects, excuses = self._suspects["compute"], self._excuses("compute", ratios)
        for rank, ratio in ratios.items():
            excuse = max(1.0, excuses[rank])
            rise_s = work.compute_s[rank] * (1 - excuse / ratio)
            before_s = work.compute_s[rank] / ratio / work.micro_batches[rank]
            yield from self._note(
                Finding(what="slow", cause="compute", rank=rank, before_s=before_s),
                ratio / excuse - 1,
                matters=rise_s >= MATTERS * work.step_s,
                per=before_s,
            )
        moved = [self._work[rank].follow(ratio) for rank, ratio in ratios.items() if suspects[rank].is_calm]
        for rank in ratios:
            if moved and not suspects[rank].is_calm:
                self._work[rank].scale(statistics.median_low(moved))

    def _ratios(self, work: Work) -> dict[int, float]:
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

    def _reading(self, work: Work) -> Iterator[Finding]:
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
                Finding(what="slow", cause="data", rank=rank, before_s=level.value),
                rise - excuse,
                matters=(rise - excuse) * busy[rank] * work.micro_batches[rank] >= MATTERS * work.step_s,
                per=busy[rank],
            )
            if self._suspects["data"][rank].is_calm:
                level.follow(level.value + rise * busy[rank], scale=busy[rank])

    def _exchanging(self, work: Work) -> Iterator[Finding]:
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
            yield Finding(what=what, cause="network", before_s=level.value, now_s=now_s)
        if self._network.is_calm:
            level.follow(exposed_s, scale=work.step_s)

    def _note(self, finding: Finding, excess: float, *, matters: bool, per: float) -> Iterator[Finding]:
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

    def _is_named(self, finding: Finding) -> bool:
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


def _amount(work: Work, rank: int) -> dict[str, int]:
    return {"micro_batches": work.micro_batches[rank], "tokens": work.tokens[rank]}
