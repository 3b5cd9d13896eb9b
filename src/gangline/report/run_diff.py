"""How two runs differ: job, data, versions, machines, division of the work, and from which step on their losses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangline.report.commands import joined
from gangline.report.run_summary import RunRecords
from gangline.report.text_table import table
from gangline.units import format_bytes

NOT_THERE = "-"
CLEARLY = 0.01
"""A relative difference of losses that the order of sums alone does not explain."""
_NO_DIFFERENCE = frozenset({"run_id", "schema_version"})
_PLAN = ("strategy", "method", "precision", "batch", "micro_batch", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """One value that two runs do not share."""

    key: str
    values: tuple[str, str]
    """As text; "-": it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossesApart:
    """Where the losses of two runs part, over the steps that both have."""

    num_common: int
    """Steps that both have."""
    first: tuple[int, float, float] | None
    """The first step with different losses, and both; None: all are equal."""
    clear: tuple[int, float, float] | None
    """The first step at which they differ by 1 % or more, and both."""
    last: tuple[int, float, float] | None
    """The last common step, and both losses there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Two runs side by side."""

    runs: tuple[str, str]
    parts: Mapping[str, Sequence[RunDifference]]
    """job, data, versions, machines, division -> the differences there."""
    losses: LossesApart
    missing: tuple[str, ...]


def compare_runs(one: RunRecords, other: RunRecords) -> RunComparison:
    """What differs between two runs."""
    sides = (one, other)
    first, second = map(described, sides)
    return RunComparison(
        runs=(one.history.id, other.history.id),
        parts={part: _differences(first[part], second[part]) for part in first},
        losses=losses_apart(one.figures.curves["loss"], other.figures.curves["loss"]),
        missing=tuple(f"{side.history.id}: {gap}" for side in sides for gap in side.gaps),
    )


def described(run: RunRecords) -> dict[str, dict[str, str]]:
    """What a run was, by part: key -> value as text."""
    return {
        "job": _job(run),
        "data": _data(run),
        "versions": _versions(run),
        "machines": _machines(run),
        "division": _division(run),
    }


def losses_apart(one: Mapping[int, float], other: Mapping[int, float]) -> LossesApart:
    """Where two loss curves, by step, part."""
    both = [(step, one[step], other[step]) for step in sorted(set(one) & set(other))]
    return LossesApart(
        num_common=len(both),
        first=next((row for row in both if row[1] != row[2]), None),
        clear=next((row for row in both if _apart(row) >= CLEARLY), None),
        last=both[-1] if both else None,
    )


def _apart(row: tuple[int, float, float]) -> float:
    """The difference of two losses, as a part of the larger."""
    _, one, other = row
    return abs(one - other) / (max(abs(one), abs(other)) or 1.0)


def _differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[RunDifference]:
    return [
        RunDifference(key=key, values=values)
        for key in dict.fromkeys([*one, *other])
        if len(set(values := (one.get(key, NOT_THERE), other.get(key, NOT_THERE)))) > 1
    ]


def _job(run: RunRecords) -> dict[str, str]:
    if run.own is not None:
        return {"command": joined(run.own)}
    return dict(_flat(run.job.to_json(), "")) if run.job else {}


def _flat(value: Mapping[str, Any], above: str) -> Iterator[tuple[str, str]]:
    """Dotted keys and their values."""
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _flat(inner, f"{above}{key}.")
        elif key not in _NO_DIFFERENCE:
            yield f"{above}{key}", _shown(inner)


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None or value == {} else str(value)


def _data(run: RunRecords) -> dict[str, str]:
    """Fingerprints of what was read, and how much it was."""
    inputs = run.inputs or {}
    counts = run.plan.data if run.plan else None
    found = {name: str(inputs[name]) for name in ("model", "train", "evaluation") if inputs.get(name)}
    return found | ({"samples": str(counts.num_samples), "tokens": _shown(counts.num_tokens)} if counts else {})


def _versions(run: RunRecords) -> dict[str, str]:
    """Versions over all hosts, each with its hosts where they differ among themselves."""
    found: dict[str, dict[str, list[str]]] = {}
    for facts in run.inventory.hosts if run.inventory else ():
        named = {"Python": facts.python, **{name: version or "" for name, version in facts.packages.items()}}
        for name, version in named.items():
            if version:
                found.setdefault(name, {}).setdefault(version, []).append(facts.host)
    shown = {
        name: next(iter(versions))
        if len(versions) == 1
        else "; ".join(f"{version} ({', '.join(hosts)})" for version, hosts in versions.items())
        for name, versions in found.items()
    }
    return shown | ({"gangline": run.typed.gangline} if run.typed else {})


def _machines(run: RunRecords) -> dict[str, str]:
    found: dict[str, str] = {}
    for facts in run.inventory.hosts if run.inventory else ():
        gpus = itertools.groupby(sorted(f"{gpu.name} {format_bytes(gpu.memory_total_bytes)}" for gpu in facts.gpus))
        driver = next((gpu.driver for gpu in facts.gpus), None)
        found |= {
            f"{facts.host} GPUs": "; ".join(f"{len(list(group))} x {name}" for name, group in gpus) or "none",
            f"{facts.host} driver": _shown(driver),
            f"{facts.host} processors": str(facts.num_cpus),
            f"{facts.host} memory": format_bytes(facts.memory_total_bytes) if facts.memory_total_bytes else "none",
            f"{facts.host} system": _shown(facts.system.os),
            f"{facts.host} kernel": _shown(facts.system.kernel),
        }
    return found


def _division(run: RunRecords) -> dict[str, str]:
    """What the plan made of the job on these machines."""
    if run.plan is None:
        return {}
    plan = run.plan.to_json()
    ranks = ", ".join(f"{rank.host}: {rank.share}" for rank in run.plan.ranks)
    return {name: _shown(plan.get(name)) for name in _PLAN} | {"micro-batches by rank": ranks}


# For people and for programs.


def diff_lines(compared: RunComparison) -> list[str]:
    """The differences as tables, then the losses."""
    lines: list[str] = []
    for part, rows in compared.parts.items():
        if rows:
            lines += [*table((part, *compared.runs), [(row.key, *row.values) for row in rows]), ""]
    equal = [part for part, rows in compared.parts.items() if not rows]
    if equal:
        lines += [f"no difference recorded: {', '.join(equal)}", ""]
    return [*lines, *_loss_lines(compared.losses), *(f"missing: {gap}" for gap in compared.missing)]


def _loss_lines(losses: LossesApart) -> list[str]:
    if not losses.num_common or losses.last is None:
        return ["losses   no step with a loss in both"]
    if losses.first is None:
        return [f"losses   equal in all {losses.num_common:,} common steps, the last one {losses.last[0]:,}"]
    rows = [("part", losses.first), ("1 % apart", losses.clear), ("last common", losses.last)]
    return [f"losses   {name:<12} {_loss_words(row)}" for name, row in rows if row is not None]


def _loss_words(row: tuple[int, float, float]) -> str:
    step, one, other = row
    return f"step {step:,}: {one:.6g} and {other:.6g} ({100 * _apart(row):.2g} %)"


def diff_json(compared: RunComparison) -> dict[str, Any]:
    """The same as plain data."""
    losses = compared.losses
    return {
        "runs": list(compared.runs),
        "differences": {
            part: [{"key": row.key, "values": list(row.values)} for row in rows]
            for part, rows in compared.parts.items()
        },
        "losses": {
            "common_steps": losses.num_common,
            "part_at": _loss_json(losses.first),
            "one_percent_apart_at": _loss_json(losses.clear),
            "last_common": _loss_json(losses.last),
        },
        "missing": list(compared.missing),
    }


def _loss_json(row: tuple[int, float, float] | None) -> dict[str, Any] | None:
    return None if row is None else {"step": row[0], "losses": [row[1], row[2]]}
