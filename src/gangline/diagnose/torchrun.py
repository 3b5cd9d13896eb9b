"""The verdict that torchrun prints when it ends: it is not believed, and not shown as a cause."""

from __future__ import annotations

import re
from collections.abc import Sequence

VERDICT = "Root Cause (first observed failure)"
LEFT_OUT = (
    'what torchrun calls the "root cause" is left out: it is the end that it saw first, often of a rank that waited'
)
_FENCE = re.compile(r"={20,}\s*$")


def without_verdict(lines: Sequence[str]) -> list[str]:
    """Lines of torchrun's output without its verdict, which ends at a line of equals signs; a line says so instead."""
    kept: list[str] = []
    inside = False
    for line in lines:
        if VERDICT in line:
            inside = True
            kept.append(LEFT_OUT)
        elif inside and _FENCE.search(line):
            inside = False
        elif not inside:
            kept.append(line)
    return kept
