"""Which trial starts where next, and which ones go on at a rung of halving. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gangline.errors import UsageError
from gangline.sweep.records import HalvingRecord, TrialRecord

# Free hosts.


def placements(
    trials: Sequence[TrialRecord], *, hosts: Sequence[str], free: Sequence[str], room: int | None
) -> list[tuple[TrialRecord, tuple[str, ...]]]:
    """The waiting trials that start now, each with its hosts, in their order.

    A trial that fits one host gets one host: its own of before, if that is free, as its checkpoint lies there. One that
    needs all hosts waits until all are free, and no later one overtakes it. free: hosts that hold nothing. room: how
    many trials may start; None: any number.
    """
    left, found = list(free), list[tuple[TrialRecord, tuple[str, ...]]]()
    for trial in waiting(trials):
        if room is not None and len(found) >= room:
            break
        if not trial.fits:
            if set(left) == set(hosts):
                found.append((trial, tuple(hosts)))
            break
        host = next((name for name in (*trial.hosts, *left) if name in left and name in trial.fits), None)
        if host is not None:
            left.remove(host)
            found.append((trial, (host,)))
    return found


def worthwhile(num_waiting: int, *, free_in_s: Mapping[str, float], trial_s: Mapping[str, float]) -> set[str]:
    """The hosts that get one of the waiting trials if each goes where it ends first: a slow host does not take the last
    trial where a fast one would be through with it sooner, although that is busy now.

    free_in_s: host -> when it is free, 0.0 for now. trial_s: how long it takes for a trial. Both have the same hosts.
    """
    ready, found = dict(free_in_s), set[str]()
    for _ in range(num_waiting if ready else 0):
        host = min(ready, key=lambda name: ready[name] + trial_s[name])
        ready[host] += trial_s[host]
        found.add(host)
    return found


def waiting(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Trials that wait for a host: those at a higher rung first, as the end of the sweep waits for them."""
    return sorted(
        (trial for trial in trials if trial.phase == "waiting"), key=lambda trial: (-trial.rung, trial.number)
    )


# Successive halving.


def make_halving(*, num_points: int, steps: int, eta: int = 3) -> HalvingRecord:
    """Rungs at steps / eta^k, as many as it takes until one trial is left, each at least one step above the last.

    Raises UsageError for a job that is too short to be divided.
    """
    num_rungs = 1 + int(math.log(num_points, eta) + 1e-9)
    rungs = [math.ceil(steps / eta**power) for power in reversed(range(num_rungs))]
    if len(set(rungs)) < len(rungs) or len(rungs) < 2:
        raise UsageError(
            f"--halving cannot divide {steps} steps among {num_points} points",
            seen=f"with eta {eta} the rungs would be after steps {', '.join(map(str, rungs))}",
            fix=f"take at least {eta} points and {eta ** max(1, num_rungs - 1)} steps, or leave --halving out",
        )
    return HalvingRecord(eta=eta, rungs=tuple(rungs))


def promote(trials: Sequence[TrialRecord], halving: HalvingRecord) -> dict[int, str]:
    """Number of a trial -> "waiting" for one that goes on to the next rung, "dropped" for one that does not.

    A rung is judged once nobody is on the way to it or to one below: the best 1/eta of all that have ever reached it
    go on, one at least. So the result does not depend on the order in which trials end, and a point that is added later
    is held to the same bar; where it makes room for more, one that was dropped goes on after all.
    """
    found: dict[int, str] = {}
    for rung, step in enumerate(halving.rungs[:-1]):
        if found or any(trial.rung == rung and trial.phase in {"waiting", "running"} for trial in trials):
            break
        there = [trial for trial in trials if reached(trial, rung)]
        ranked = sorted(there, key=lambda trial: (_or_infinite(trial.loss_at(step)), trial.number))
        best = {trial.number for trial in ranked[: max(1, len(ranked) // halving.eta)]}
        for trial in there:
            if trial.rung != rung:
                continue
            if trial.number in best and trial.phase in {"paused", "dropped"}:
                found[trial.number] = "waiting"
            elif trial.phase == "paused":
                found[trial.number] = "dropped"
    return found


def reached(trial: TrialRecord, rung: int) -> bool:
    """Whether a trial has trained up to a rung."""
    return trial.rung > rung or (trial.rung == rung and trial.phase in {"paused", "dropped"})


def pause_of(trial: TrialRecord, halving: HalvingRecord | None) -> int | None:
    """The step after which a trial pauses; None: it trains to its end."""
    if halving is None or trial.rung >= len(halving.rungs) - 1:
        return None
    return halving.rungs[trial.rung]


# The ranking.


def ranking(trials: Sequence[TrialRecord], *, highest: bool = False) -> list[TrialRecord]:
    """All trials, the lowest last loss first; those without one, then failed ones, come last. highest: of a metric
    whose highest value is the best.

    A trial that got to a higher rung of halving is better than all that were dropped below, and one that was not
    dropped than one that was.
    """

    def place(trial: TrialRecord) -> tuple[bool, int, bool, float, int]:
        figure = _or_infinite(trial.loss)
        is_known = math.isfinite(figure)
        figure = -figure if highest and is_known else figure
        return trial.phase == "failed", -trial.rung, trial.phase == "dropped", figure, trial.number

    return sorted(trials, key=place)


def best_trial(trials: Sequence[TrialRecord], *, highest: bool = False) -> TrialRecord | None:
    """The best trial that has saved something, so that it can be exported; None: there is none yet."""
    ranked = [trial for trial in ranking(trials, highest=highest) if trial.loss is not None and trial.run is not None]
    return next((trial for trial in ranked if trial.phase in {"finished", "paused", "stopped", "dropped"}), None)


def utilisation(busy_s: Mapping[str, float], wall_s: float) -> float:
    """The part of the hosts' time in which they trained: 1.0 is all of it."""
    return sum(busy_s.values()) / (len(busy_s) * wall_s) if busy_s and wall_s > 0 else 0.0


def _or_infinite(loss: float | None) -> float:
    return math.inf if loss is None or math.isnan(loss) else loss
