"""Hosts that a run has lost, looked for until they answer again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

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
