"""What has to be said of a fault: who, and of what (faults.py). Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from benchmarks.faults_in_rank import PLANTED

_RANK = r"rank \d+ on {host}"
_SILENT = r"{host} does not answer|{host} (and .* )?(do|does) not reach|not reach {host}"
CAUSES = {
    "rank": rf"{_RANK}\b.*\bSIGKILL",
    "process": rf"{_RANK}\b.*\bSIGKILL",
    "stopped": rf"{_RANK} is stopped \(SIGSTOP\)",
    "host-agent": r"the gangline agent on {host} died; its ranks were stopped",
    "launcher": r"torchrun on {host} was killed by SIGKILL",
    "crash": r"{host} does not answer",
    "power": r"{host} does not answer",
    "partition": _SILENT,
    "one-way": _SILENT,
    "memory": rf"{_RANK} ran out of memory and was killed",
    "exception": rf"{_RANK}\b.*ValueError: {PLANTED}",
    "nan-stays": rf"the weights of {_RANK} are not those of the other ranks",
    "flip": rf"the weights of {_RANK} are not those of the other ranks",
    "flap": r"{host}",
    "disk-stop": r"{host}\b.*(no room|No space left|cannot be written)",
}
"""What the run has to name as its cause where a fault ends an attempt; the same for any attempt that it ends."""
FIXES = {"memory": "micro_batch", "disk-stop": "make room"}
"""What `gangline explain` has to tell to change."""
TOLD = {
    "nan": ("step-skipped", "samples", r"\d"),
    "disk": ("save-failed", "what", r"No space left|{host}"),
}
"""What rank 0 has to tell of a fault that ends nothing: an event, and what has to stand in which part of it."""


def is_named(kind: str, host: str, what: str) -> bool:
    """Whether words name the cause of a fault on a host."""
    return re.search(CAUSES[kind].format(host=re.escape(host)), what, re.DOTALL) is not None


def is_told(kind: str, host: str, event: dict[str, Any]) -> bool:
    """Whether an event of rank 0 tells of a fault on a host."""
    name, part, pattern = TOLD[kind]
    said = str(event.get(part, ""))
    return event.get("event") == name and re.search(pattern.format(host=re.escape(host)), said) is not None


def misnamed(kind: str, host: str, whats: Sequence[str]) -> list[str]:
    """What is wrong with the causes that were named for the attempts which a fault ended, oldest first.

    The first has to be right. What comes after it may be of the way back, and has to name that host at least.
    """
    wrong = []
    for number, what in enumerate(whats):
        if kind not in CAUSES:
            wrong.append(f"an attempt ended without need: {what}")
        elif number == 0 and not is_named(kind, host, what):
            wrong.append(f"{kind} on {host} is not what is named: {what}")
        elif number and host not in what:
            wrong.append(f"{host} is not named: {what}")
    return wrong
