"""Run folders written before records had a version (gangline 0.1.0 until November 2026), in one place.

Tables: a row per thing that has another name or shape now. To drop the old format, delete this module, its uses in
`record_versions` and `launch.poll`, and tests/fixtures/runs/0.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

FILES: Mapping[str, str] = {"agent.json": "guard.json", "supervision.json": "keeper.json"}
"""Name of a file now -> its name then. Both lie in the same folder."""

ITEMS: Mapping[str, tuple[str, str, str]] = {
    "request.json": ("hosts", "guard_argv", "agent_argv"),
    "cluster.json": ("hosts", "slowdown", ""),
    "comparison.json": ("ranks", "slowdown", ""),
    "gang.json": ("ranks", "slowdown", ""),
    "plan.json": ("ranks", "slowdown", ""),
}
"""Name of a file now -> a list in it, a key that its items had then, and the name of that key now ("": dropped)."""

LISTS: Mapping[str, str] = {"findings.json": "findings"}
"""Name of a file that was a list -> the key under which that list lies now."""


def _exporters(job: dict[str, Any]) -> None:
    report = job.get("report")
    if isinstance(report, dict) and "exporters" not in report:
        project = report.get("wandb_project")
        wandb = {} if project is None else {"wandb": {"project": project}}
        job["report"] = {"exporters": {**({"tensorboard": {}} if report.get("tensorboard", True) else {}), **wandb}}


def _on_stall(record: dict[str, Any], key: str) -> None:
    if record.get(key) == "tell":
        record[key] = "report"


def _request(request: dict[str, Any]) -> None:
    _on_stall(request.get("stall") or {}, "action")
    for part in request["hosts"]:
        part["agent_argv"] = ["host-agent" if word == "guard" else word for word in part["agent_argv"]]
        if "stand_by" in part:
            part["warm_pool"] = part.pop("stand_by")


def _gang(gang: dict[str, Any]) -> None:
    for rank in gang["ranks"]:
        if "foreseen_bytes" in rank:
            rank["planned_bytes"] = rank.pop("foreseen_bytes")


SHAPES: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "job.json": _exporters,
    "gang.json": _gang,
    "request.json": _request,
    "command.json": lambda command: _on_stall(command, "on_stall"),
    "again.json": lambda again: _on_stall(again["program"].get("stall") or {}, "action"),
}
"""Name of a file now -> a change that no row of the tables above expresses. It changes the record in place."""


def old_names(name: str) -> tuple[str, ...]:
    """Names that a file had then, where they differ from that of now."""
    return (FILES[name],) if name in FILES else ()


def translated(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """A record of the old format with the keys of now. `name`: of its file, then or now."""
    now = next((new for new, old in FILES.items() if old == name), name)
    items, then, key = ITEMS.get(now, ("", "", ""))
    for item in record.get(items, ()):
        if then in item:
            value = item.pop(then)
            item.update({key: value} if key else {})
    if now in SHAPES:
        SHAPES[now](record)
    return record
