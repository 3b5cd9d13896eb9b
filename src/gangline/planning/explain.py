"""The plan as lines for people."""

from __future__ import annotations

from gangline.planning.plan import Plan, PlannedRank
from gangline.units import format_count


def explain(plan: Plan) -> list[str]:
    """The plan in plain lines, most important first."""
    rows = [
        ("strategy", f"{plan.strategy}: {plan.reason}"),
        ("method", f"{plan.method}, compute in {_precision(plan)}"),
        ("batch", f"{plan.batch} samples = {plan.num_micro_batches} micro-batches of {plan.micro_batch}"),
        ("shares", _shares(plan)),
        ("length", length(plan)),
        ("saves", _saves(plan)),
        ("evaluates", _evaluates(plan)),
    ]
    rows += [("note", note) for note in plan.notes]
    return [f"{title:<10} {text}" for title, text in rows]


def _precision(plan: Plan) -> str:
    return "what every device can do" if plan.precision == "auto" else plan.precision


def _shares(plan: Plan) -> str:
    """One entry per host, ranks of equal share folded: "pc1 2 x 5 (41.7 % each)"."""
    hosts: dict[str, list[PlannedRank]] = {}
    for rank in plan.ranks:
        hosts.setdefault(rank.host, []).append(rank)
    return ", ".join(_host_share(host, ranks) for host, ranks in hosts.items())


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
    every += [f"every {minutes:g} min"] if minutes is not None else []
    return " and ".join([*every, "at the end"])


def _evaluates(plan: Plan) -> str:
    if not plan.evaluates:
        return "never: the job has no data.eval"
    start = "at the start, " if plan.evaluation_at_start else ""
    every = f"every {plan.evaluation_every_steps} steps, " if plan.evaluation_every_steps is not None else ""
    return f"{start}{every}at the end"
