"""How long a run took to come back after a failure, and where that time went."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

STAGES = ("ended", "prepared", "started", "joined", "step")
"""ended: nothing of the attempt before runs any more. prepared: the checkpoint and the next attempt lie on every host.
started: its guards stand. joined: its ranks. step: they have completed one.
"""


class Returning:
    """From the moment a failure was seen to the first step after it. begun: that moment, by `clock`."""

    def __init__(self, begun: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reached: dict[str, float] = {}
        self._last = begun
        self._begun = begun

    def reach(self, stage: str) -> None:
        """This stage is reached; only the first time counts."""
        if stage not in self._reached:
            now = self._clock()
            self._reached[stage], self._last = now - self._last, now

    @property
    def done(self) -> bool:
        """Whether it has come back."""
        return STAGES[-1] in self._reached

    def to_json(self) -> dict[str, Any]:
        """Seconds in all, and of each stage."""
        stages = {stage: round(self._reached[stage], 2) for stage in STAGES if stage in self._reached}
        return {"seconds": round(self._last - self._begun, 2), "stages": stages}
