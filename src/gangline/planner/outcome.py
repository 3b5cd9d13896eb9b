"""What was planned beside what came of it, and what the difference teaches the next plan. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from gangline.planner.calibration import Profile, refit
from gangline.planner.speed import RankWork
from gangline.runs.decode import build
from gangline.runs.record_versions import Record
from gangline.runs.step_schedule import Cadence
from gangline.units import format_bytes

if TYPE_CHECKING:
    from gangline.planner.plan import Forecast, Plan


# The steps of a run that a plan is held against, out of the lines of metrics.jsonl. Pure.


NUM_WARM_UP = 2
LEAST_STEPS = 5
MOST = 1e18
_OF_RANKS = ("micro_batches", "compute_s", "wait_s", "memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """One step; what ranks say is by global rank."""

    number: int
    time: str
    """When it was written, in ISO format."""
    step_s: float
    tokens_per_sample: float
    micro_batches: tuple[int, ...]
    """Of this step: shares may move while a run goes on."""
    compute_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One attempt."""

    steps: tuple[ObservedStep, ...]
    """All full ones, but for the first two of the attempt."""
    evaluated: frozenset[int]
    """Steps after which there was an evaluation."""

    def calm(self, saves: Cadence | None) -> tuple[ObservedStep, ...]:
        """Those that nothing else has made longer; all, where fewer than five are so.

        saves: the steps of checkpoints, where they are counted in steps or epochs.
        """

        def is_calm(step: ObservedStep) -> bool:
            before = step.number - 1
            return before not in self.evaluated and not (saves is not None and saves.is_due(before, before=before - 1))

        calm = tuple(filter(is_calm, self.steps))
        return calm if len(calm) >= LEAST_STEPS else self.steps


def observe(records: Iterable[Mapping[str, Any]], *, attempt: int, batch: int, num_ranks: int) -> Observed:
    """The lines of metrics.jsonl, of which those of other attempts and damaged ones are passed over.

    batch: samples of a full step.
    """
    steps: list[ObservedStep] = []
    evaluated: set[int] = set()
    first: int | None = None
    for record in records:
        number = record.get("step")
        if record.get("attempt") != attempt or type(number) is not int:
            continue
        if record.get("kind") == "evaluation":
            evaluated.add(number)
        elif record.get("kind") == "step":
            first = number if first is None else first
            if number >= first + NUM_WARM_UP and (step := _step(record, batch=batch, num_ranks=num_ranks)) is not None:
                steps.append(step)
    return Observed(steps=tuple(steps), evaluated=frozenset(evaluated))


def _step(record: Mapping[str, Any], *, batch: int, num_ranks: int) -> ObservedStep | None:
    """One line; None where it is no full step, was skipped, or is damaged."""
    try:
        rows = sorted(record["ranks"], key=lambda row: row["rank"])
        shares, compute, wait, memory = ([row[name] for row in rows] for name in _OF_RANKS)
        step_s, tokens, time = record["step_s"], record["tokens"], record["time"]
        num_steps = steps_told(record)
        full = record["samples"] == batch * num_steps and not record.get("skipped")
        if not full or [row["rank"] for row in rows] != [*range(num_ranks)]:
            return None
    except (LookupError, TypeError, AttributeError):
        return None
    if not isinstance(time, str) or not all(map(is_amount, (step_s, tokens, *shares, *compute, *wait, *memory))):
        return None
    if not step_s or not tokens:
        return None
    return ObservedStep(
        number=record["step"],
        time=time,
        step_s=step_s,
        tokens_per_sample=tokens / (batch * num_steps),
        micro_batches=tuple(round(share / num_steps) for share in shares),
        compute_s=tuple(compute),
        wait_s=tuple(wait),
        memory_bytes=tuple(map(int, memory)),
    )


def steps_told(record: Mapping[str, Any]) -> int:
    """Optimizer steps that one line tells of: with local-sgd those of a round; its seconds are of one of them.

    Raises TypeError for what is no such number.
    """
    num_steps = record.get("round_steps", 1)
    if type(num_steps) is not int or not 1 <= num_steps < MOST:
        raise TypeError("no number of steps")
    return num_steps


def is_amount(value: object) -> bool:
    """Whether it is a number, of seconds, bytes or tokens, as there may be; a truth value is none."""
    return type(value) in {int, float} and 0 <= value < MOST  # type: ignore[operator]


SCHEMA_VERSION = 1
BELIEVABLE = 10.0
"""A run that takes so many times, or so small a part, of what its profile says was not what the profile is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure, in the unit that its name says."""

    planned: float | None
    """None: the plan did not know."""
    measured: float

    @property
    def error(self) -> float | None:
        """Of the plan: -0.08 where it said 8 % less than was measured."""
        return None if self.planned is None or not self.measured else self.planned / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    """One rank; seconds are medians over the steps used."""

    host: str
    gpu: str | None
    """As NVML names it; None: it computed on the processor."""
    profile: str | None
    """`Profile.name` of the measurement behind the plan; None: it was an estimate, or a pipeline's rank, which does not
    compute what was measured."""
    micro_batches: int
    """Of a full step: those that most of the steps used had, where shares moved."""
    micro_batch_size: int | None = None
    """Samples of its forward passes at the most, where ranks have sizes of their own."""
    compute_s: Figure
    """Forward and backward of so many micro-batches, and the norm of the gradient; planned and measured."""
    wait_s: Figure
    """From its last gradients being ready to the end of the exchange: for the network, and for slower ranks."""
    planned_allocated_bytes: int
    planned_process_bytes: int
    allocated_bytes: int | None
    """On a GPU: the peak of torch's allocator, to be held against `planned_allocated_bytes`."""
    resident_bytes: int | None
    """On a processor: the most at the end of a step, to be held against `planned_process_bytes`."""

    @property
    def memory(self) -> Figure:
        """Like with like: of tensors on a GPU, of the process on a processor."""
        if self.allocated_bytes is not None:
            return Figure(planned=self.planned_allocated_bytes, measured=self.allocated_bytes)
        return Figure(planned=self.planned_process_bytes, measured=self.resident_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Record):
    """comparison.json: one attempt of a run. Measured seconds are medians over the steps used."""

    run: str
    attempt: int
    ended: str
    """When its last full step was written, in ISO format."""
    num_steps: int
    """Steps used."""
    micro_batch: int
    """Samples."""
    step_s: Figure
    step_low_s: float | None
    step_high_s: float | None
    """Between which the plan expected the step."""
    exposed_s: Figure
    """What the exchange makes a step longer; measured: the wait of the rank that waits least."""
    tokens_per_sample: Figure
    ranks: tuple[RankComparison, ...]
    """By global rank."""
    source: str
    """Where the planned times were from, for people."""
    schema_version: int = SCHEMA_VERSION

    @property
    def line(self) -> str:
        """For people: "step 2.61 s, planned 2.4 s (-8 %); memory pc1 5.3 GiB, planned 5.5 GiB (+4 %)".

        Of the ranks it names the one whose memory came closest to what was planned, or went furthest beyond.
        """
        rank = max(self.ranks, key=lambda each: each.memory.measured / max(1.0, each.memory.planned or 0.0))
        kind = "resident memory" if rank.allocated_bytes is None else "memory"
        memory = f"{kind} {rank.host} {_against(rank.memory, format_bytes)}"
        return f"step {_against(self.step_s, _seconds)}{self._outside()}; {memory}"

    def _outside(self) -> str:
        low, high = self.step_low_s, self.step_high_s
        if low is None or high is None or low <= self.step_s.measured <= high:
            return ""
        return f", outside of {_seconds(low)} to {_seconds(high)}"

    @classmethod
    def from_json(cls, data: Any) -> Comparison:
        """What `to_json` wrote; raises ValueError for anything else."""
        comparison = build(Comparison, data)
        if not comparison.ranks or not all(map(is_amount, _numbers(data))):
            raise ValueError("a comparison with figures that are none")
        return comparison


def compare(plan: Plan, observed: Observed, *, run_id: str, attempt: int) -> Comparison | None:
    """A plan beside the steps of one attempt; None where nothing was planned, or fewer than five steps can be used.

    Raises ValueError for a forecast that is not of the plan's ranks.
    """
    forecast = plan.forecast
    used = observed.calm(plan.saves)
    if forecast is None or len(used) < LEAST_STEPS:
        return None
    if len(forecast.ranks) != len(plan.ranks):
        raise ValueError(f"a forecast for {len(forecast.ranks)} ranks in a plan for {len(plan.ranks)}")
    return Comparison(
        run=run_id,
        attempt=attempt,
        ended=observed.steps[-1].time,
        num_steps=len(used),
        micro_batch=plan.micro_batch,
        step_s=_figure(forecast.step_s, (step.step_s for step in used)),
        step_low_s=forecast.step_low_s,
        step_high_s=forecast.step_high_s,
        exposed_s=_figure(forecast.exposed_s, (min(step.wait_s) for step in used)),
        tokens_per_sample=_figure(forecast.tokens_per_sample, (step.tokens_per_sample for step in used)),
        ranks=tuple(_rank(plan, forecast, rank, observed, used) for rank in range(len(plan.ranks))),
        source=forecast.source,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """What runs have taught."""

    profiles: dict[str, Profile]
    """By `Profile.name`."""
    lines: tuple[str, ...]
    """For people: one for every profile and run."""


def fold(profiles: Iterable[Profile], comparisons: Iterable[Comparison]) -> Folded:
    """The profiles, corrected by runs that ended after they were measured, one run after the other.

    A run counts once for each profile, however many of its ranks it stands for. What is held against the measured
    seconds is what the profile says *now* of micro-batches as they were, not what a plan said then: another run may
    have corrected it since, and samples may have been shorter than the plan reckoned with.
    """
    current = {profile.name: profile for profile in profiles}
    lines = []
    for comparison in sorted(comparisons, key=lambda each: (_when(each.ended), each.run, each.attempt)):
        for profile in [current[name] for name in _profiles(comparison) if name in current]:
            ratios = _ratios(profile, comparison)
            if not ratios or _when(comparison.ended) <= _when(profile.measured):
                continue
            ratio = statistics.geometric_mean(ratios)
            words = f"{profile.key.gpu} ({profile.host}): {comparison.run} took {ratio:.2f} x what was measured"
            if profile.num_runs:
                words += " and corrected"
            if 1 / BELIEVABLE <= ratio <= BELIEVABLE:
                corrected = refit(profile, predicted_s=1.0, measured_s=ratio)
                current[profile.name] = corrected
                lines.append(f"{words}; plans now take {corrected.factor:.2f} x the measured times")
            else:
                lines.append(f"{words}, too far off to be the same work: left out")
    return Folded(profiles=current, lines=tuple(lines))


def _rank(
    plan: Plan, forecast: Forecast, number: int, observed: Observed, used: Sequence[ObservedStep]
) -> RankComparison:
    planned, rank_forecast, half = plan.ranks[number], forecast.ranks[number], plan.half
    most_bytes = max(step.memory_bytes[number] for step in observed.steps)
    # the shares of most of the steps, by rank; of two that were as frequent, the first
    done = statistics.mode(step.micro_batches for step in used)
    computed = [_computed(plan, forecast, rank, done[rank]) for rank in range(len(plan.ranks))]
    own_s, wait_s = computed[number], None
    if forecast.exposed_s is not None and own_s is not None:
        wait_s = max(each or 0.0 for each in computed) + forecast.exposed_s - own_s
    return RankComparison(
        host=planned.host,
        gpu=rank_forecast.gpu,
        # a profile is of all layers, and of no exchange: what a rank takes for some of them, or with weights that come
        # and go in between, corrects none
        profile=rank_forecast.profile if half.layers == "all" and half.parts == "none" else None,
        micro_batches=done[number],
        micro_batch_size=planned.micro_batch_size,
        compute_s=_figure(own_s, _compute_s(used, number, done[number])),
        wait_s=_figure(wait_s, (step.wait_s[number] for step in used)),
        planned_allocated_bytes=rank_forecast.allocated_bytes,
        planned_process_bytes=rank_forecast.process_bytes,
        allocated_bytes=None if rank_forecast.gpu is None else most_bytes,
        resident_bytes=most_bytes if rank_forecast.gpu is None else None,
    )


def _computed(plan: Plan, forecast: Forecast, number: int, micro_batches: int) -> float | None:
    """Seconds that the plan foresaw for so many micro-batches of a rank."""
    planned_s, share = forecast.ranks[number].compute_s, plan.ranks[number].share
    if planned_s is None or micro_batches == share:
        return planned_s
    return planned_s * micro_batches / share if share else None


def _compute_s(used: Sequence[ObservedStep], number: int, micro_batches: int) -> Iterator[float]:
    """Seconds of a rank in every step, as they would be with so many micro-batches."""
    for step in used:
        own = step.micro_batches[number]
        if own == micro_batches:
            yield step.compute_s[number]
        elif own:
            yield step.compute_s[number] * micro_batches / own


def _figure(planned: float | None, measured: Iterable[float]) -> Figure:
    return Figure(planned=planned, measured=round(statistics.median(measured), 6))


def _profiles(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(rank.profile for rank in comparison.ranks if rank.profile is not None))


def _ratios(profile: Profile, comparison: Comparison) -> list[float]:
    """Measured seconds over what the profile says, of every rank that it stands for and that had work."""
    length = comparison.tokens_per_sample.measured
    planned = ((rank, _expected_s(profile, rank, comparison.micro_batch, length)) for rank in comparison.ranks)
    return [
        rank.compute_s.measured / planned_s
        for rank, planned_s in planned
        if rank.profile == profile.name and planned_s > 0 and rank.compute_s.measured > 0
    ]


def _expected_s(profile: Profile, rank: RankComparison, micro_batch: int, length: float) -> float:
    """Of the micro-batches of a rank, in its own passes; length: tokens of a sample."""
    if not rank.micro_batches:
        return 0.0
    joined = max(1, (rank.micro_batch_size or micro_batch) // micro_batch)
    work = RankWork(
        compute=profile.corrected, micro_batches=rank.micro_batches, passes=-(-rank.micro_batches // joined)
    )
    return work.passes_s(tokens=micro_batch * length, length=length)[0]


def _numbers(data: Any) -> Iterator[int | float]:
    """All numbers in plain data: in a record of ours each of them has to be an amount."""
    if isinstance(data, (int, float)):
        yield data
    for inner in data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ():
        yield from _numbers(inner)


def _when(time: str) -> float:
    """Seconds since 1970 of an ISO time; 0 for what is no time."""
    try:
        return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def _against(figure: Figure, shown: Callable[[float], str]) -> str:
    if figure.planned is None:
        return f"{shown(figure.measured)}, with no speed known to plan with"
    error = "" if figure.error is None else f" ({round(100 * figure.error):+d} %)"
    return f"{shown(figure.measured)}, planned {shown(figure.planned)}{error}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


# Where the time of an attempt went, rank by rank, out of the lines of metrics.jsonl. Pure.


SPENT_SCHEMA_VERSION = 1
MOST_RANKS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """Seconds of one rank over all steps used."""

    host: str
    rank: int
    compute_s: float
    data_s: float
    waits_s: float
    """For slower ranks."""
    network_s: float
    """For the exchange, after the last rank was ready: the wait of the rank that waited least, step by step."""
    rest_s: float
    """The update of the weights, and what is measured nowhere else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeReport(Record):
    """times.json: one attempt of a run. Evaluations and saves are not in it."""

    run: str
    attempt: int
    num_steps: int
    total_s: float
    """Of the steps used: all that were read but the first two, where enough are left."""
    ranks: tuple[RankTime, ...]
    schema_version: int = SPENT_SCHEMA_VERSION

    @classmethod
    def from_json(cls, data: Any) -> TimeReport:
        """What `to_json` wrote; raises ValueError for anything else."""
        report = build(TimeReport, data)
        if not report.ranks or not all(map(is_amount, _numbers(data))):
            raise ValueError("a report of times that are none")
        return report


def spent(records: Iterable[Mapping[str, Any]], *, run_id: str, attempt: int) -> TimeReport | None:
    """Add up the steps of an attempt; None where there are none. Damaged lines are passed over."""
    mine = (record for record in records if record.get("kind") == "step" and record.get("attempt") == attempt)
    steps = [step for record in mine if (step := timed_rows(record)) is not None]
    if not steps:
        return None
    names = [(host, rank) for host, rank, *_ in steps[-1][1]]
    steps = [step for step in steps if [(host, rank) for host, rank, *_ in step[1]] == names]
    used = steps[NUM_WARM_UP:] if len(steps) >= NUM_WARM_UP + LEAST_STEPS else steps
    ranks = []
    for place, (host, rank) in enumerate(names):
        compute_s = data_s = waits_s = network_s = rest_s = 0.0
        for step_s, rows in used:
            exposed_s = min(row[4] for row in rows)
            _, _, computing_s, reading_s, waiting_s = rows[place]
            compute_s, data_s = compute_s + computing_s, data_s + reading_s
            waits_s, network_s = waits_s + waiting_s - exposed_s, network_s + exposed_s
            rest_s += max(0.0, step_s - computing_s - reading_s - waiting_s)
        found = {"compute_s": compute_s, "data_s": data_s, "waits_s": waits_s, "network_s": network_s, "rest_s": rest_s}
        ranks.append(RankTime(host=host, rank=rank, **{name: round(seconds, 3) for name, seconds in found.items()}))
    total_s = round(sum(step_s for step_s, _ in used), 3)
    return TimeReport(run=run_id, attempt=attempt, num_steps=len(used), total_s=total_s, ranks=tuple(ranks))


_Row = tuple[str, int, float, float, float]
"""Host, rank, and seconds of computing, reading and waiting."""


def timed_rows(record: Mapping[str, Any]) -> tuple[float, list[_Row]] | None:
    """Seconds of a line of a step, and of each of its ranks; None for a damaged line."""
    try:
        num_steps = steps_told(record)
        rows = [
            (row["host"], row["rank"], *(num_steps * row[name] for name in ("compute_s", "data_s", "wait_s")))
            for row in record["ranks"][:MOST_RANKS]
        ]
        step_s = num_steps * record["step_s"]
    except (LookupError, TypeError):
        return None
    texts = all(isinstance(host, str) and type(rank) is int for host, rank, *_ in rows)
    amounts = all(is_amount(value) for _, _, *values in rows for value in values)
    return (step_s, rows) if rows and texts and amounts and is_amount(step_s) else None
