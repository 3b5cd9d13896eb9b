"""The text of a converted job.yaml, and the report of what became of every key. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gangline.config.mistakes import printable
from gangline.convert.draft import Draft, KeyVerdict
from gangline.convert.outcomes import VERDICTS, is_off

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./@+-]*")
"""Texts that YAML reads as they are."""
_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n", "~"})
_ORDER = (
    "name", "model", "method", "tokens", "data", "batch", "micro_batch", "epochs", "steps", "seed", "precision",
    "activation_checkpointing", "activation_offloading", "strategy", "optimizer", "schedule", "evaluation",
    "early_stopping", "checkpoint", "failures", "report",
)  # fmt: skip
_SHORT = {"model": "path", "precision": "compute", "report": None}
"""Sections of one key that are written as its bare value."""


def nested(job: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as mappings in mappings, in the order of docs/job.md."""
    values: dict[str, Any] = {}
    for key in sorted(job, key=_rank):
        holder = values
        *above, last = key.split(".")
        for part in above:
            holder = holder.setdefault(part, {})
        holder[last] = job[key]
    for section, only in _SHORT.items():
        inside = values.get(section)
        if only is not None and isinstance(inside, dict) and list(inside) == [only]:
            values[section] = inside[only]
    return values


def _rank(key: str) -> int:
    first = key.partition(".")[0]
    return _ORDER.index(first) if first in _ORDER else len(_ORDER)


def job_text(job: Mapping[str, Any], *, head: Sequence[str]) -> str:
    """The file. Reading it gives the same values again; `head`: lines of a comment at its top."""
    lines = [f"# {printable(line, limit=100)}" for line in head]
    for key, value in nested(job).items():
        lines += _entry(key, value, "")
    return "\n".join(lines) + "\n"


def _entry(key: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, dict) and value and not (indent and _is_flat(value)):
        yield f"{indent}{_scalar(key)}:"
        for inner, below in value.items():
            yield from _entry(inner, below, f"{indent}  ")
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        yield f"{indent}{_scalar(key)}:"
        for item in value:
            yield f"{indent}  - {_flow(item)}"
    else:
        yield f"{indent}{_scalar(key)}: {_flow(value)}"


def _is_flat(value: Mapping[str, Any]) -> bool:
    return not any(isinstance(item, dict | list) for item in value.values())


def _flow(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(str(key))}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if isinstance(value, str):
        return _scalar(value)
    if isinstance(value, float) and "e" in repr(value):
        mantissa, _, exponent = repr(value).partition("e")
        return f"{mantissa}e{int(exponent)}"
    return json.dumps(value)


def _scalar(text: str) -> str:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if plain else json.dumps(text, ensure_ascii=False)


# The report.


HEADER = ("verdict", "key", "value", "in the job, or why not")


def report_rows(made: Draft) -> list[tuple[str, str, str, str]]:
    """(verdict, key, value, what became of it): the refused first, defaults last; keys without a value share a row."""
    empty = [each for each in made.verdicts if each.value is None and each.verdict == "dropped"]
    told = [each for each in made.verdicts if not each.is_default and each not in empty]
    rows = [_row(each) for verdict in VERDICTS for each in told if each.verdict == verdict]
    if empty:
        rows.append(("dropped", f"{len(empty)} keys", "no value", ", ".join(each.key for each in empty)))
    defaults = [each for each in made.verdicts if each.is_default]
    return rows + [_row(each) for each in defaults]


def _row(each: KeyVerdict) -> tuple[str, str, str, str]:
    shown = "" if each.is_default else printable(_shown(each.value), limit=32)
    verdict = "default" if each.is_default and each.verdict != "refused" else each.verdict
    return verdict, each.key, shown, _became(each)


def _became(each: KeyVerdict) -> str:
    job = "; ".join(f"{key}: {_flow(value)}" for key, value in each.outcome.job.items())
    reason = each.outcome.reason
    if each.verdict == "refused" and not reason.startswith(("not supported", "a contradiction", "a value", "a key")):
        return f"missing: {reason}"
    return f"{printable(job, limit=90)}  ({reason})" if job and reason else printable(job, limit=110) or reason


def _shown(value: Any) -> str:
    return "" if value is None else _flow(value) if not isinstance(value, str) else value


def counts_line(made: Draft) -> str:
    """`12 same, 3 equivalent, 20 dropped, 1 refused; 9 defaults written out`."""
    told = [each for each in made.verdicts if not each.is_default]
    parts = [f"{sum(each.verdict == verdict for each in told)} {verdict}" for verdict in VERDICTS]
    stated = sum(each.is_default for each in made.verdicts)
    return f"{', '.join(parts)}; {stated} defaults of {made.tool.name} written out"


def report_json(made: Draft) -> list[dict[str, Any]]:
    """The report as plain data."""
    return [
        {
            "key": each.key,
            "value": None if is_off(each.value) and not isinstance(each.value, bool | int | float) else each.value,
            "verdict": each.verdict,
            "default": each.is_default,
            "job": dict(each.outcome.job),
            "reason": each.outcome.reason,
        }
        for each in made.verdicts
    ]
