"""Steps of a gang as they would be reported, made up from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gangline.worker.step_statistics import StepStatistics, StepWork, Straggler

Factor = Callable[[int, int], float]


def no_factor(_step: int, _rank: int) -> float:
    return 1.0


def no_seconds(_step: int, _rank: int) -> float:
    return 0.0


@dataclass(kw_only=True)
class Gang:
    """Machines with their speeds, and what happens to them, by step and rank."""

    hosts: Sequence[str] = ("pc1", "pc2", "pc3")
    micro_batch_s: Sequence[float] = (0.1, 0.18, 0.22)
    shares: Callable[[int], Sequence[int]] = lambda _step: (20, 11, 9)
    noise: float = 0.04
    factor: Factor = no_factor
    reading_s: Factor = no_seconds
    """Per micro-batch, beside the millisecond that it always takes."""
    exchange_s: Callable[[int], float] = lambda _step: 0.1
    lengths: Callable[[int, random.Random], float] = lambda _step, _draw: 1.0
    """Of one micro-batch, in usual ones."""
    by_token: bool = True
    fixed_s: float = 0.0
    """Of every step, whatever the work."""
    seed: int = 0
    named: list[tuple[int, Straggler]] = field(default_factory=list)

    def step(self, number: int, draw: random.Random) -> StepWork:
        shares = self.shares(number)
        data, compute, tokens = [], [], []
        for rank, count in enumerate(shares):
            lengths = [self.lengths(number, draw) for _ in range(count)]
            work = sum(lengths) if self.by_token else count
            wobble = max(0.3, draw.gauss(1.0, self.noise))
            took_s = (work * self.micro_batch_s[rank] + self.fixed_s) * self.factor(number, rank) * wobble
            compute.append(took_s if count else 0.0)
            data.append(count * (0.001 * draw.uniform(0.8, 1.6) + self.reading_s(number, rank)))
            tokens.append(round(1000 * sum(lengths)))
        ends = [a + b for a, b in zip(data, compute, strict=True)]
        exchange_s = self.exchange_s(number) * max(0.3, draw.gauss(1.0, self.noise))
        return StepWork(
            micro_batches=tuple(shares),
            tokens=tuple(tokens),
            data_s=tuple(data),
            compute_s=tuple(compute),
            wait_s=tuple(max(ends) - end + exchange_s for end in ends),
        )

    def run(self, num_steps: int, *, links_are_slow: bool = True) -> list[tuple[int, Straggler]]:
        """What is found, with the step (from 0). links_are_slow: what a look at the links says."""
        books, draw = StepStatistics(self.hosts), random.Random(self.seed)
        for number in range(num_steps):
            for finding in books.learn(self.step(number, draw)):
                if finding.what == "suspected":
                    books.judge(is_slow=links_are_slow)
                self.named.append((number, finding))
        return self.named


def said(found: Iterable[tuple[int, Straggler]], hosts: Sequence[str] = ("pc1", "pc2", "pc3")) -> list[str]:
    """In short: "compute pc3", "over compute pc3", "network"."""
    words = []
    for _, finding in found:
        who = "network" if finding.cause == "network" else f"{finding.cause} {hosts[finding.rank]}"
        words.append(f"over {who}" if finding.what == "over" else who)
    return words
