"""Points that learn from the trials before: optuna's samplers, and its pruners for trials that fall behind.

The records of the trials are all that is kept: another supervisor tells a new study of optuna what they reached.
optuna is an extra (gangline[optuna]), imported when a sweep with `--sampler` is planned or driven, and not before.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from gangline.errors import UsageError
from gangline.sweep.points import Axis, Point, axes_of
from gangline.sweep.records import SamplerRecord, SweepRecord, TrialRecord

SAMPLERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tpe": ("TPESampler", ()),
    "gp": ("GPSampler", ("scipy", "torch")),
    "cmaes": ("CmaEsSampler", ("cmaes",)),
}
"""Our word -> the class in optuna.samplers, and the packages that it needs besides."""
PRUNERS = {"halving": "SuccessiveHalvingPruner", "hyperband": "HyperbandPruner", "median": "MedianPruner"}
"""Our word -> the class in optuna.pruners."""
MOST_REPEATS = 50
"""So often in a row a sampler may come back to points that were tried before it has no more."""


def require_sampler(record: SamplerRecord) -> None:
    """Raise UsageError for an unknown sampler or pruner, and where a package that it needs is missing."""
    _known("--sampler", record.sampler, SAMPLERS)
    if record.pruner is not None:
        _known("--pruner", record.pruner, PRUNERS)
    needed = ("optuna", *SAMPLERS[record.sampler][1])
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"--sampler {record.sampler} needs {' and '.join(missing)} on this computer",
            seen="the Python of gangline does not have it",
            fix='pip install "gangline[optuna]"' if missing == ["optuna"] else f"pip install {' '.join(missing)}",
        )


def _known(option: str, word: str, table: Sequence[str] | dict[str, Any]) -> None:
    if word not in table:
        raise UsageError(f"{option} {word!r} is not known", seen=f"expected one of {', '.join(table)}", fix="name one")


class LearnedPoints:
    """A study of optuna over the axes of a sweep."""

    def __init__(self, request: SweepRecord, trials: Sequence[TrialRecord]) -> None:
        """trials: those that there are. Raises as `require_sampler` does."""
        assert request.sampler is not None, "a sweep with a sampler"
        require_sampler(request.sampler)
        # it takes a second, which no other sweep pays
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna: Any = optuna
        self._axes = axes_of(request.words)
        self._spaces = {axis.key: _space(optuna, axis) for axis in self._axes if axis.is_range or len(axis.values) > 1}
        self._study: Any = _quietly(lambda: _study(optuna, request, len(trials)))
        self._asked: dict[int, Any] = {}
        """Trial -> optuna's, of those that have not ended."""
        self._told: dict[int, set[int]] = {}
        """Trial -> the steps whose figures the study has."""
        for trial in trials:
            self._take_over(trial)

    def ask(self, number: int, known: Sequence[TrialRecord]) -> Point | None:
        """The point of a new trial with that number; None where the sampler only comes back to points of before."""
        for _ in range(MOST_REPEATS):
            asked = _quietly(lambda: self._study.ask(fixed_distributions=self._spaces))
            point = {axis.key: _spelled(axis, asked.params.get(axis.key)) for axis in self._axes}
            same = next((trial for trial in known if trial.point == point), None)
            if same is None:
                self._asked[number] = asked
                return point
            self._tell(asked, same)
        return None

    def take_in(self, trial: TrialRecord) -> bool:
        """Tell the study where a trial stands; whether it is so far behind that it is to be dropped."""
        if (asked := self._asked.get(trial.number)) is None:
            return False
        told, is_behind = self._told.setdefault(trial.number, set()), False
        for step, loss in sorted((int(step), loss) for step, loss in trial.losses.items() if loss is not None):
            if step not in told:
                told.add(step)
                asked.report(loss, step)
                is_behind = _quietly(asked.should_prune)
        if trial.ended:
            self._tell(asked, trial)
            del self._asked[trial.number]
        return is_behind and not trial.ended

    def _tell(self, asked: Any, trial: TrialRecord) -> None:
        states = self._optuna.trial.TrialState
        if trial.phase == "finished" and trial.loss is not None:
            self._study.tell(asked, trial.loss)
        else:
            self._study.tell(asked, state=states.PRUNED if trial.phase == "dropped" else states.FAIL)

    def _take_over(self, trial: TrialRecord) -> None:
        """Tell a new study of a trial for which an earlier supervisor asked."""
        values = {axis.key: _value(axis, trial.point[axis.key]) for axis in self._axes if axis.key in self._spaces}
        self._study.enqueue_trial(values)
        self._asked[trial.number] = self._study.ask(fixed_distributions=self._spaces)
        self.take_in(trial)


def corners(axes: Sequence[Axis]) -> list[Point]:
    """Points that are planned before a sampler chooses any: all first values, all last ones, and each other value."""
    ends = [(axis.values[0], axis.values[-1]) if axis.values else _ends(axis) for axis in axes]
    low = {axis.key: end[0] for axis, end in zip(axes, ends, strict=True)}
    high = {axis.key: end[1] for axis, end in zip(axes, ends, strict=True)}
    others = [{**low, axis.key: value} for axis in axes for value in axis.values[1:-1]]
    return [low, high, *others]


def _ends(axis: Axis) -> tuple[str, str]:
    return _spelled(axis, axis.low), _spelled(axis, axis.high)


def _study(optuna: Any, request: SweepRecord, num_trials: int) -> Any:
    record = request.sampler
    assert record is not None, "a sweep with a sampler"
    # another seed after a change of supervisor: a sampler does not go through its first draws again
    sampler = getattr(optuna.samplers, SAMPLERS[record.sampler][0])(seed=record.seed + num_trials)
    pruner = getattr(optuna.pruners, PRUNERS[record.pruner])() if record.pruner else optuna.pruners.NopPruner()
    return optuna.create_study(direction="maximize" if request.highest else "minimize", sampler=sampler, pruner=pruner)


def _space(optuna: Any, axis: Axis) -> Any:
    distributions = optuna.distributions
    if not axis.is_range:
        return distributions.CategoricalDistribution(axis.values)
    if axis.is_whole:
        return distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.is_log)
    return distributions.FloatDistribution(axis.low, axis.high, log=axis.is_log)


def _spelled(axis: Axis, value: Any) -> str:
    """A value as it is typed. Numbers that are not whole have four digits, as those of `--random`."""
    if not axis.is_range:
        return axis.values[0] if value is None else str(value)
    return str(int(value)) if axis.is_whole else f"{value:.4g}"


def _value(axis: Axis, text: str) -> Any:
    """The value that a text stands for; four digits may lie just outside of a range."""
    if not axis.is_range:
        return text
    value = min(max(float(text), axis.low), axis.high)
    return math.floor(value) if axis.is_whole else value


def _quietly(call: Callable[[], Any]) -> Any:
    """What a call returns; that a sampler is an experiment of optuna's is no news for the user of a sweep."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()
