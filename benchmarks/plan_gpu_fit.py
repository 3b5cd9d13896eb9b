"""Fit the constants of a time that nobody measured to public runs, and leave sources and cards out.

    python -m benchmarks.plan_gpu_fit                 # constants fitted to all rows, beside those in the source
    python -m benchmarks.plan_gpu_fit --left-out      # each source, and each card, by constants that never saw it

Rows of all sources count as much as the square root of their number. Residuals are logarithms of planned over measured
speed; those beyond 15 % count linearly. Each constant is held near a plausible value (PRIOR) as if by one row with 40 %
of error. Rows apart (see plan_gpu_time) are left out of all. What the plan's interval has to hold is the size of the
residuals of left-out sources and cards.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from gangline.planner.candidate import Candidate
from gangline.planner.estimate import CAUSES, SPREAD, Causes, uncalibrated
from gangline.planner.speed import RankWork, step_query, step_s
from tests.unit.planner.gpu_rows import TimedRun, factor_off, mean_factor, timed_runs

PRIOR = {
    "products": 0.8,
    "tile": 128.0,
    "rows": 64.0,
    "traffic": 1.0,
    "attention": 0.7,
    "experts": 0.7,
    "launch_s": 25e-6,
    "update": 1.5,
}
"""The fitted constants, and their plausible values. The others are reasoned: see `Causes`."""
LOOSE, ROW_ERROR, LINEAR_FROM = 0.4, 0.12, 0.15
STEPS, STEP_MOST = 12, 0.5
NEAR = 1.5


@dataclasses.dataclass(frozen=True)
class FittedRun:
    """A run whose way was chosen once, with the constants of the source."""

    run: TimedRun
    candidate: Candidate

    def residual(self, causes: Causes) -> float:
        """Logarithm of planned over measured speed."""
        way = self.candidate
        spec = self.run.machines.placements[0].spec
        assert spec is not None
        model = uncalibrated(spec, way.architecture, way.scenario.training, causes=causes)
        ranks = [RankWork(compute=model, micro_batches=share) for share in way.shares]
        tokens, length = way.scenario.tokens
        asked = step_query(way.strategy, way.traffic, ranks, way.world.fabric, tokens=tokens, length=length)
        return math.log(self.run.speed(step_s(asked)) / self.run.measured)


def fitted_runs() -> list[FittedRun]:
    """All rows that count."""
    return [FittedRun(run, run.candidate()) for run in timed_runs() if not run.is_apart]


def fit(runs: Sequence[FittedRun]) -> Causes:
    """The constants with the smallest robust residuals: Gauss and Newton, with weights that are made anew each step."""
    counts = Counter(each.run.source for each in runs)
    weights = np.array([counts[each.run.source] ** -0.5 for each in runs])
    weights *= len(runs) / weights.sum()
    prior = np.log(list(PRIOR.values()))
    place = prior.copy()

    def residuals(at: np.ndarray) -> np.ndarray:
        causes = dataclasses.replace(CAUSES, **dict(zip(PRIOR, np.exp(at).tolist(), strict=True)))
        return np.array([each.residual(causes) for each in runs])

    for _ in range(STEPS):
        now = residuals(place)
        slopes = np.stack([(residuals(place + 1e-3 * unit) - now) / 1e-3 for unit in np.eye(len(place))], axis=1)
        robust = weights / np.sqrt(1 + (now / LINEAR_FROM) ** 2) / ROW_ERROR**2
        hessian = slopes.T @ (slopes * robust[:, None]) + np.eye(len(place)) / LOOSE**2
        gradient = slopes.T @ (robust * now) + (place - prior) / LOOSE**2
        place = place - np.clip(np.linalg.solve(hessian, gradient), -STEP_MOST, STEP_MOST)
    return dataclasses.replace(CAUSES, **dict(zip(PRIOR, np.exp(place).tolist(), strict=True)))


def left_out(runs: Sequence[FittedRun], key: Callable[[FittedRun], str]) -> dict[str, list[tuple[FittedRun, float]]]:
    """Residuals of each group by constants that were fitted to all others."""
    found: dict[str, list[tuple[FittedRun, float]]] = {}
    for name in dict.fromkeys(map(key, runs)):
        causes = fit([each for each in runs if key(each) != name])
        found[name] = [(each, each.residual(causes)) for each in runs if key(each) == name]
    return found


def main() -> int:
    """Print constants, or what left-out rows are off by."""
    parser = argparse.ArgumentParser(description="fit the constants of the plan's time to public runs on GPUs")
    parser.add_argument("--left-out", action="store_true", help="leave each source, and each card, out")
    options = parser.parse_args()
    runs = fitted_runs()
    if options.left_out:
        for what, key in (("source", lambda each: each.run.source), ("card", lambda each: each.run.card)):
            _print_left_out(what, left_out(runs, key))
        return 0
    causes = fit(runs)
    print("| constant | plausible | fitted | in the source |\n|---|---|---|---|")
    for name, plausible in PRIOR.items():
        print(f"| {name} | {plausible:.3g} | {getattr(causes, name):.3g} | {getattr(CAUSES, name):.3g} |")
    for name, which in (("fitted", causes), ("in the source", CAUSES)):
        print(f"{name}: {_summary([each.residual(which) for each in runs])}")
    return 0


def _print_left_out(what: str, groups: dict[str, list[tuple[FittedRun, float]]]) -> None:
    print(f"\n| {what} left out | rows | mean off | within 1.5 | planned over measured |\n|---|---|---|---|---|")
    for name, rows in groups.items():
        print(f"| {name} | {_summary([residual for _, residual in rows])} |")
    every = [row for rows in groups.values() for row in rows]
    print(f"| all | {_summary([residual for _, residual in every])} |")
    for method in ("full", "lora", "qlora"):
        sizes = [abs(residual) for each, residual in every if each.run.row["method"] == method]
        print(f"nine of ten {method} rows are off by at most {math.exp(np.quantile(sizes, 0.9)):.2f}")
    inside = [abs(residual) <= math.log1p(SPREAD[each.run.row["method"]]) for each, residual in every]
    print(f"inside the plan's interval: {sum(inside) / len(inside):.0%}")


def _summary(residuals: Sequence[float]) -> str:
    offs = [factor_off(math.exp(residual), 1.0) for residual in residuals]
    near = sum(off <= NEAR for off in offs) / len(offs)
    middle = math.exp(sum(residuals) / len(residuals))
    return f"{len(offs)} | {mean_factor(offs):.2f} | {near:.0%} | {middle:.2f}"


if __name__ == "__main__":
    sys.exit(main())
