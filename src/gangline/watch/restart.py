"""A run that goes on by itself after a failure, in one line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gangline.checks.finding import fold_names

MOST_NAMES = 3
"""More hosts are folded: pc[1-8]."""


def restart_line(record: Mapping[str, Any]) -> str:
    """Attempt 2 on pc1 and pc2: pc3 does not answer; going on from step 1,240 (1 step again)

    record: the supervisor's event `restarting`.
    """
    what = next(iter(str(record.get("what") or "").splitlines()), "")
    without = [name for name in _names(record.get("without")) if not _says(what, name)]
    hosts = _names(record.get("hosts"))
    where = f" on {in_words(hosts)}" if hosts else ""
    less = f", without {in_words(without)}" if without else ""
    missing = f"missing: {record['missing']}" if record.get("missing") else ""
    smaller = f" with micro_batch {record['micro_batch']}" if type(record.get("micro_batch")) is int else ""
    parts = [what, f"going on from {_step(record)}{smaller}", missing]
    return f"attempt {started_attempt(record)}{where}{less}: {'; '.join(part for part in parts if part)}"


def started_attempt(record: Mapping[str, Any]) -> int | None:
    """The number of the attempt that an event `restarting` tells of."""
    number = record.get("next")
    return number if type(number) is int else None


def in_words(names: Sequence[str]) -> str:
    """pc1, pc2 and pc3; many names are folded."""
    if len(names) > MOST_NAMES:
        return fold_names(names)
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def _step(record: Mapping[str, Any]) -> str:
    step, lost = record.get("step"), record.get("lost_steps")
    start = f"step {step:,}" if type(step) is int and step > 0 else "the beginning"
    if type(lost) is not int or lost < 1:
        return start
    return f"{start} ({lost:,} {'step' if lost == 1 else 'steps'} again)"


def _says(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text) is not None


def _names(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else []
