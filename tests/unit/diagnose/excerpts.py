"""Excerpts of real logs for every row of the families of known failures: `tests/fixtures/failures`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import tomli

FOLDER = Path(__file__).parents[2] / "fixtures" / "failures"

MADE_UP = "no thread: the usual form"
"""Of general words, which stand in every log: the excerpt is nobody's."""


@functools.cache
def excerpts() -> dict[str, dict[str, dict[str, Any]]]:
    """By family and id: `seen` (an excerpt), `seen_at` (where, or MADE_UP), `near` (alike, and another thing)."""
    return {path.stem: tomli.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.toml"))}
