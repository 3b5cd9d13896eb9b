"""Run folders written before records had a version (gangline 0.1.0 until November 2026), in one place.

Tables: a row per thing that has another name or shape now. To drop the old format, delete this module, its two uses in
`versions`, and tests/fixtures/runs/0.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

FILES: Mapping[str, str] = {"agent.json": "guard.json"}
"""Name of a file now -> its name then. Both lie in the same folder."""

KEYS: Mapping[str, Mapping[str, str]] = {
    "request.json": {"hosts[].guard_argv": "hosts[].agent_argv"},
    "cluster.json": {"hosts[].slowdown": ""},
    "comparison.json": {"ranks[].slowdown": ""},
    "gang.json": {"ranks[].slowdown": ""},
    "plan.json": {"ranks[].slowdown": ""},
}
"""Name of a file now -> {key then: key now}. Dots lead into mappings, [] into every item of a list, and * into every
value of a mapping. A key of "" is dropped."""

VALUES: Mapping[str, Mapping[str, Mapping[Any, Any]]] = {}
"""Name of a file now -> {key now: {value then: value now}}: {"status.json": {"phase": {"stand-by": "warm"}}}."""

LISTS: Mapping[str, str] = {"findings.json": "findings"}
"""Name of a file that was a list -> the key under which that list lies now."""


def _exporters(job: dict[str, Any]) -> None:
    report = job.get("report")
    if isinstance(report, dict) and "exporters" not in report:
        project = report.get("wandb_project")
        wandb = {} if project is None else {"wandb": {"project": project}}
        job["report"] = {"exporters": {**({"tensorboard": {}} if report.get("tensorboard", True) else {}), **wandb}}


def _agent_verb(request: dict[str, Any]) -> None:
    for part in request["hosts"]:
        part["agent_argv"] = ["host-agent" if word == "guard" else word for word in part["agent_argv"]]


SHAPES: Mapping[str, Callable[[dict[str, Any]], None]] = {"job.json": _exporters, "request.json": _agent_verb}
"""Name of a file now -> what a row of the tables above cannot say. It changes the record."""


def old_names(name: str) -> tuple[str, ...]:
    """Names that a file had then, where they differ from that of now."""
    return (FILES[name],) if name in FILES else ()


def translated(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """A record of the old format with the keys and values of now. `name`: of its file, then or now."""
    now = next((new for new, old in FILES.items() if old == name), name)
    for old, new in KEYS.get(now, {}).items():
        for holder, key in _holders(record, old):
            value = holder.pop(key)
            if new:
                holder[new.rpartition(".")[2]] = value
    if now in SHAPES:
        SHAPES[now](record)
    for key_path, values in VALUES.get(now, {}).items():
        for holder, key in _holders(record, key_path):
            value = holder[key]
            if isinstance(value, str | int) and value in values:
                holder[key] = values[value]
    return record


def _holders(record: dict[str, Any], path: str) -> list[tuple[dict[str, Any], str]]:
    """Mappings that have the last key of a path, with that key."""
    *before, last = path.replace("[]", ".[]").split(".")
    places: list[Any] = [record]
    for step in before:
        places = [inner for place in places for inner in _into(place, step)]
    return [(place, last) for place in places if isinstance(place, dict) and last in place]


def _into(place: Any, step: str) -> list[Any]:
    if step == "[]":
        return list(place) if isinstance(place, list) else []
    if not isinstance(place, dict):
        return []
    return list(place.values()) if step == "*" else [place[step]] if step in place else []
