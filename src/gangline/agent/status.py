"""status.json: all that a guard knows of its part, in one small file that is replaced whole.

It is written when something changes, and at least every second with a higher "beat": who reads it sees that the guard
gets on.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any, Dict

from gangline.agent import names

BEAT_S = 1.0


class Status:
    """The status file of a folder. identity: what every version of it says of the guard."""

    def __init__(self, folder: Path, identity: Dict[str, Any]) -> None:
        self._path = folder / names.STATUS
        self._identity = identity
        self._beat = 0
        self._told: Dict[str, Any] = {}
        self._told_at = float("-inf")

    def is_due(self) -> bool:
        """Whether a second has passed since it was written."""
        return time.monotonic() >= self._told_at + BEAT_S

    def tell(self, facts: Dict[str, Any]) -> None:
        """Write what is new, or the next beat. On a full disk nothing is told; exit.json will."""
        if facts == self._told and not self.is_due():
            return
        with contextlib.suppress(OSError):
            self.write(facts)

    def write(self, facts: Dict[str, Any]) -> None:
        """Write now; raises OSError."""
        self._told_at = time.monotonic()
        self._beat += 1
        # Not synced: after a power cut there is no guard whose status could matter.
        fresh = self._path.with_name(".status.tmp")
        fresh.write_text(json.dumps(dict(facts, beat=self._beat, time=time.time(), **self._identity)), encoding="utf-8")
        fresh.replace(self._path)
        self._told = json.loads(json.dumps(facts))
