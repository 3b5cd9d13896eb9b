"""Changes in words: what is shown before the yes, what an undo would do, and what stands."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

from gangline.prepare.host_side import Undoable
from gangline.prepare.prepare_step import StepPlan, content_diff
from gangline.report.text_table import table


def plan_lines(host: str, step: str, plan: StepPlan) -> list[str]:
    """One step on one host."""
    rows = [f"{host}  {step}  {_how_much(plan)}"]
    rows += [f"  why   {plan.reason}"] if plan.reason else []
    rows += [f"  risk  {plan.risk}"] if plan.risk else []
    if plan.revert_s is not None and plan.changes:
        rows.append(f"  back  {host} takes it back by itself after {plan.revert_s:.0f} s, unless a new login works")
    rows += [f"  {line}" for change in plan.changes for line in change.lines()]
    rows += [f"  left  {line}" for line in plan.remains]
    return rows


def _how_much(plan: StepPlan) -> str:
    if not plan.changes:
        return "nothing to change"
    number = f"{len(plan.changes)} change{'' if len(plan.changes) == 1 else 's'}"
    return f"{number}, as root" if any(change.scope == "root" for change in plan.changes) else number


def plan_json(plan: StepPlan) -> dict[str, Any]:
    """The same as plain data; contents as their difference."""
    return {
        "changes": [{"scope": change.scope, "lines": change.lines()} for change in plan.changes],
        "reason": plan.reason,
        "risk": plan.risk,
        "remains": list(plan.remains),
        "revert_s": plan.revert_s,
        "restart": plan.restart,
    }


def undo_lines(host: str, found: Undoable) -> list[str]:
    """What an undo would do on a host, and what it refuses."""
    rows = []
    for row in found.rows:
        change = row["change"]
        if change["kind"] == "file":
            difference = content_diff(_content(row["current"]), _content(row["target"]))
            rows += [f"{host}  {row['step']}  file  {change['path']}", *(f"    {line}" for line in difference)]
        elif change["undo"]:
            rows.append(f"{host}  {row['step']}  run   {' '.join(change['undo'])}")
    return [*rows, *(line for each in found.refused for line in refused_lines(host, each))]


def refused_lines(host: str, refused: Mapping[str, Any]) -> list[str]:
    """A change that somebody else has touched since: both are shown."""
    return [
        f"{host}  {refused['step']}  refused: somebody changed {refused['what']} since",
        *(f"    ours    {line}" for line in str(refused["ours"]).splitlines()),
        *(f"    theirs  {line}" for line in str(refused["theirs"]).splitlines()),
    ]


def _content(state: Mapping[str, Any]) -> bytes | None:
    return base64.b64decode(state["content"]) if state["kind"] == "file" else None


def status_lines(standing: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[str]:
    """The table of the changes that stand, by host."""
    rows = [
        (
            host,
            str(each["step"]),
            str(each["what"]),
            str(each["when"]),
            f"{each['who']} ({each['by']})",
            "as made" if each["as_made"] else "changed since",
        )
        for host, changes in standing.items()
        for each in changes
    ]
    return table(("host", "step", "change", "when", "by", "now"), rows) if rows else ["no change stands"]
