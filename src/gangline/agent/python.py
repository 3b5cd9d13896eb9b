"""The Python that runs the agent, for a program of its own: `python WORDS...` becomes that Python with those words."""

from __future__ import annotations

import os
import sys
from typing import List


def main(argv: List[str]) -> int:
    """Entry point; does not return."""
    # The current folder may be anybody's; Pythons before 3.11 import from it all the same.
    alone = ["-P"] if hasattr(sys.flags, "safe_path") else []
    os.execv(sys.executable, [sys.executable, *alone, *argv])  # noqa: S606  (no shell is wanted)
