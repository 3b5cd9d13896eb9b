"""The answer of `gangline plan` as lines and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gangline.errors import DoesNotFit
from gangline.inventory.network import load_network, network_line
from gangline.planning.explain import explain
from gangline.planning.figures import verdict_json
from gangline.planning.option import Option
from gangline.planning.report import Length, change_line, report, terms, ways_lines
from gangline.planning.saves import save_cost
from gangline.steps.foretell import Foretold
from gangline.steps.traced import Traced

SAID = ("strategy", "shares", "divides", "memory", "step", "saves")
"""Titles of the plan's lines that the report says better."""


def plan_lines(foretold: Foretold, traced: Sequence[Traced], *, home: Path, why: bool, width: int) -> list[str]:
    """What people read, on a screen of that many columns."""
    lines: list[str] = []
    decision, verdict = foretold.decision, foretold.outlook.verdict
    if verdict is None:
        lines.append(f"note       {foretold.outlook.unknown}")
    else:
        lines += report(verdict, foretold.length, why=why, width=width)
        lines += terms(verdict, width) if why else []
        lines += change_line(foretold.before, verdict, width) if foretold.before is not None else []
    lines += [f"traced     {each.line}" for each in traced]
    if verdict is not None and verdict.best is None:
        lines += ways_lines(foretold.ways, width)
    if decision is not None and foretold.world != decision.world:
        lines += [f"note       {note}" for note in foretold.outlook.dated(decision.inventory)]
    if decision is not None and foretold.world == decision.world:
        lines += explain(decision.plan, without=SAID if verdict is not None else ())
        if (network := load_network(home, decision.sight.cluster)) is not None:
            lines.append(network_line(network))
    if decision is not None:
        lines += [line for finding in decision.findings for line in finding.lines()]
    return lines


def plan_json(foretold: Foretold, traced: Sequence[Traced]) -> dict[str, Any]:
    """What programs read."""
    decision, verdict = foretold.decision, foretold.outlook.verdict
    return {
        "plan": None if decision is None else decision.plan.to_json(),
        "findings": [] if decision is None else [finding.to_json() for finding in decision.findings],
        "verdict": None if verdict is None else verdict_json(verdict, list(foretold.ways)),
        "saves": None if verdict is None or verdict.best is None else _saves_json(verdict.best, foretold.length),
        "unknown": foretold.outlook.unknown,
        "traced": [{"strategy": each.option.strategy.kind, **each.answer} for each in traced],
    }


def _saves_json(best: Option, length: Length) -> dict[str, Any]:
    """What checkpoints cost; seconds are the least, what is likely, and the most."""
    cost = save_cost(best, length.saving)
    return {**dataclasses.asdict(cost), "share": cost.share}


def require_fit(foretold: Foretold) -> None:
    """Raise DoesNotFit, with exit code 6, where nothing that was weighed fits."""
    verdict = foretold.outlook.verdict
    if verdict is None or verdict.best is not None:
        return
    nearest = max(verdict.by_kind, key=lambda option: (option.chance, -option.tightest.shortage_bytes))
    need = nearest.tightest
    raise DoesNotFit(
        f"the job does not fit on {need.seat.host}",
        seen=f"of all ways the nearest is {nearest.strategy.kind}, which needs about "
        f"{need.memory.process.likely / 2**30:.1f} GiB there; {(need.seat.free_bytes or 0) / 2**30:.1f} GiB are free",
        fix="see above, under instead" if foretold.ways else "take a smaller model, or more machines",
    )
