"""The figure that ranks trials of a user's own script: rank 0 prints it, as JSON or as transformers does."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import dataclass, field
from typing import Any

LONGEST_CHARS = 100_000
"""A longer line is no figure."""


@dataclass(slots=True, kw_only=True)
class PrintedMetric:
    """The values of one metric, from lines of output."""

    name: str
    values: dict[int, float | None] = field(default_factory=dict)
    """Step -> value; None: it was not finite."""

    def read(self, line: str) -> None:
        """Take in a line; other lines than `{"eval_loss": 0.7, "step": 100}` are passed over.

        The step is that of the line; without one, the values are counted.
        """
        found = _mapping(line, self.name)
        value = None if found is None else _number(found.get(self.name))
        if found is None or value is None:
            return
        step = found.get("step")
        if type(step) is not int or step < 0:
            step = max(self.values, default=0) + 1
        self.values[step] = value if math.isfinite(value) else None


def _mapping(line: str, name: str) -> dict[str, Any] | None:
    """The mapping that a line ends in, behind a progress bar or a time, say."""
    begin = line.find("{")
    if begin < 0 or name not in line or len(line) > LONGEST_CHARS:
        return None
    text = line[begin:].strip()
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            continue
        return found if isinstance(found, dict) else None
    return None


def _number(value: object) -> float | None:
    """A number, or a text that is one, as newer versions of transformers print them."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None
