"""The plan as lines for people."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from gangline.planning.plan import Plan, PlannedRank
from gangline.runs.cadence import LEAST_MIN, MOST_MIN
from gangline.runs.rows import rows_of
from gangline.units import format_bytes, format_count, format_duration

MOST_ROWS = 4
"""Pipelines whose layers are named."""


def explain(plan: Plan, *, without: Container[str] = ()) -> list[str]:
    """The plan in plain lines, most important first. without: titles of lines that were said already."""
    rows = [
        ("strategy", f"{plan.strategy}: {plan.reason}"),
        ("method", f"{plan.method}, compute in {_precision(plan)}"),
        ("batch", f"{plan.batch} samples = {plan.num_micro_batches} micro-batches of {plan.micro_batch}"),
        ("shares", _shares(plan)),
        *([("divides", plan.divides)] if plan.divides else []),
        *_speeds(plan),
        *_forecast(plan),
        ("length", length(plan)),
        ("saves", _saves(plan)),
        ("evaluates", _evaluates(plan)),
    ]
    rows += [("note", note) for note in plan.notes]
    return [f"{title:<10} {text}" for title, text in rows if title not in without]


def _forecast(plan: Plan) -> Iterator[tuple[str, str]]:
    """What is foreseen, as far as it is known."""
    forecast = plan.forecast
    if forecast is None:
        return
    known = [(rank, planned) for rank, planned in zip(forecast.ranks, plan.ranks, strict=True) if rank.free_bytes]
    if known:
        rank, planned = min(known, key=lambda row: 1.0 if row[0].chance is None else row[0].chance)
        free = format_bytes(rank.free_bytes or 0)
        text = f"{format_bytes(rank.process_bytes)} for a rank; {free} free on {planned.host}"
        yield "memory", text
    if forecast.step_s is not None:
        low, high = (format_duration(each or 0.0) for each in (forecast.step_low_s, forecast.step_high_s))
        yield "step", f"about {format_duration(forecast.step_s)} ({low} to {high}), {forecast.source}"


def _precision(plan: Plan) -> str:
    return "what every device can do" if plan.precision == "auto" else plan.precision


def _shares(plan: Plan) -> str:
    """One entry per host, ranks of equal share folded: "pc1 2 x 5 (41.7 % each)"; of a pipeline, everybody's layers.

    Under tp all ranks of a host do what the first of them does.
    """
    layers = plan.half.layers
    if layers == "staged":
        return _layers(plan)
    hosts: dict[str, list[PlannedRank]] = {}
    for rank in plan.ranks:
        hosts.setdefault(rank.host, []).append(rank)
    kept = 1 if layers == "sliced" else None
    return ", ".join(_host_share(host, ranks[:kept]) for host, ranks in hosts.items())


def _layers(plan: Plan) -> str:
    """For instance: all 24 micro-batches go through every rank; layers: pc1 13, pc2 10+17.

    Of several pipelines: 14 of 24 micro-batches go through pc1 13, pc2 10; 10 through pc3 12, pc4 11.
    """
    # without stages where no layer could be cut
    parts = [(rank.host, layers) for rank, layers in zip(plan.ranks, plan.stages, strict=False)]
    if plan.replicas == 1:
        named = _by_host(parts) or "not known"
        return f"all {plan.num_micro_batches} micro-batches go through every rank; layers: {named}"
    rows = rows_of(plan.stages, replicas=plan.replicas)
    words = [f"{plan.ranks[row[0]].share} through {_by_host(parts[row.start : row.stop])}" for row in rows[:MOST_ROWS]]
    more = f"; and {len(rows) - MOST_ROWS} more pipelines" if len(rows) > MOST_ROWS else ""
    return f"of {plan.num_micro_batches} micro-batches {'; '.join(words)} (layers){more}"


def _by_host(parts: Sequence[tuple[str, int]]) -> str:
    hosts: dict[str, list[str]] = {}
    for host, layers in parts:
        hosts.setdefault(host, []).append(str(layers))
    return ", ".join(f"{host} {'+'.join(layers)}" for host, layers in hosts.items())


def _speeds(plan: Plan) -> Iterator[tuple[str, str]]:
    """What shares do once the run is on its way; nothing where the cluster file gave them, for they stay then."""
    if plan.moving_shares and plan.half.in_rounds:
        yield "speeds", "measured before the first step and in every round; shares follow them, and numbers with these"
    elif plan.moving_shares:
        yield "speeds", "measured before the first step and in every step; shares follow them, with the same numbers"


def _host_share(host: str, ranks: list[PlannedRank]) -> str:
    if len(ranks) == 1:
        return f"{host} {ranks[0].share} ({ranks[0].percent:g} %)"
    if len({rank.share for rank in ranks}) == 1:
        return f"{host} {len(ranks)} x {ranks[0].share} ({ranks[0].percent:g} % each)"
    return f"{host} {'+'.join(str(rank.share) for rank in ranks)} ({sum(rank.percent for rank in ranks):.3g} %)"


def length(plan: Plan) -> str:
    """How long the run is, as far as it is known."""
    epochs = "" if plan.epochs is None else f"{plan.epochs:g} {'epoch' if plan.epochs == 1 else 'epochs'}"
    if plan.data is None:
        return f"{plan.steps} steps" if epochs == "" else f"{epochs}; steps are known once the data is tokenised"
    size = f"{plan.data.num_samples} samples"
    if plan.data.num_tokens is not None:
        size += f", {format_count(plan.data.num_tokens)} tokens"
    return f"{plan.steps} steps{f' = {epochs}' if epochs else ''} over {size}"


def _saves(plan: Plan) -> str:
    steps, minutes = plan.checkpoint_every_steps, plan.checkpoint_every_minutes
    every = [f"every {steps} steps"] if steps is not None else []
    if minutes == "auto":
        every.append(f"every {LEAST_MIN:g} to {MOST_MIN:g} min (by what a save costs)")
    elif minutes is not None:
        every.append(f"every {minutes:g} min")
    return " and ".join([*every, "at the end"])


def _evaluates(plan: Plan) -> str:
    if not plan.evaluates:
        return "never: the job has no data.eval"
    start = "at the start, " if plan.evaluation_at_start else ""
    every = f"every {plan.evaluation_every_steps} steps, " if plan.evaluation_every_steps is not None else ""
    return f"{start}{every}at the end"
