"""Hosts that a run has lost, looked for until they answer again; how long a run took to come back after a failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from gangline.supervise.aside import Aside

BACK_S = 10.0
"""A host that has answered for so long is back: one that comes and goes would only disturb the others."""
LOOK_S = 3.0
PATIENCE_S = 0.2


class Away:
    """The hosts that are away. answers: whether a host answers now; it may take long, and nobody waits for it."""

    def __init__(self, answers: Callable[[str], bool], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._answers = answers
        self._clock = clock
        self._since: dict[str, float | None] = {}
        """Since when it has answered each time; None: it does not."""
        self._looks: dict[str, Aside[bool]] = {}
        self._looked_at: dict[str, float] = {}

    @property
    def silent(self) -> set[str]:
        """Those that are not back."""
        return set(self._since) - set(self.back())

    def lose(self, hosts: Iterable[str]) -> None:
        """These are away now; those that were, and are not among them, have joined again."""
        names = set(hosts)
        self._since = {host: self._since.get(host) for host in names}
        self._looks = {host: look for host, look in self._looks.items() if host in names}

    def look(self) -> None:
        """Look for them, beside whatever else is done."""
        now = self._clock()
        for host in self._since:
            if now < self._looked_at.get(host, float("-inf")) + LOOK_S:
                continue
            look = self._looks.setdefault(host, Aside(self._ask(host), patience_s=PATIENCE_S))
            said = look.do()
            if said is None:
                continue
            self._looked_at[host] = now
            self._since[host] = None if not said else self._since[host] or now

    def _ask(self, host: str) -> Callable[[], bool]:
        return lambda: self._answers(host)

    def back(self) -> list[str]:
        """Those that have answered for a while."""
        now = self._clock()
        return [host for host, since in self._since.items() if since is not None and now - since >= BACK_S]


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
