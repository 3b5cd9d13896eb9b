"""The Python that runs the agent, for a program of its own: `python WORDS...` becomes that Python with those words."""

from __future__ import annotations

import os
import sys
from typing import List


def main(argv: List[str]) -> int:
    """Entry point; does not return."""
    os.execv(sys.executable, [sys.executable, *argv])  # noqa: S606  (no shell is wanted)
