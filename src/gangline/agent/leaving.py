"""How the ranks of one part are made to leave, as ordered: ranks first, then torchrun, then everything."""

from __future__ import annotations

import signal
import time
from typing import Any, Callable, Mapping, Optional

from gangline.agent import processes
from gangline.agent.orders import outweighs
from gangline.agent.ranks import Ranks
from gangline.agent.seats import Seats

LEAVE_S = 10.0
"""How long torchrun may take to leave after SIGTERM, and ranks after SIGKILL, before everything is killed."""
BREAK_S = 10.0
"""Ranks whose gang is broken have nothing to wait for: how long they may show no progress before they are killed."""
RESTING = ("yield", "break")
"""Orders that end ranks, and not what stands by for the next ones."""


class Leaving:
    """What was ordered of a part, and how far that has come. seats: None: nothing of it stands by."""

    def __init__(
        self,
        request: Mapping[str, Any],
        ranks: Ranks,
        *,
        seats: Optional[Seats],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.order: Optional[str] = None
        self.is_late = False
        """The ranks had their time, and were ended."""
        self._request = request
        self._ranks = ranks
        self._seats = seats
        self._clock = clock
        self._deadline = float("inf")
        self._progress: Any = None
        """What was last seen of the ranks' progress while they are to leave."""

    @property
    def rests(self) -> bool:
        """Whether the order in force lets the guard rest afterwards."""
        return self.order in RESTING

    def take(self, order: Optional[str]) -> None:
        """Begin to carry out an order, unless a stronger one is in force."""
        order = self._meant(order)
        if order is None or not outweighs(order, self.order):
            return
        self.order, self.is_late, self._progress = order, False, None
        self._deadline = self._clock() + self._patience_s()
        if self._seats is not None and order in RESTING:
            self._seats.hold()
        elif self._seats is not None:
            self._seats.release()

    def go_on(self, launcher: processes.Process) -> None:
        """Take the next step; when all else has failed, the order becomes "kill"."""
        if self.order in (None, "kill"):
            return
        self._ranks.terminate(signal.SIGUSR2 if self.order == "break" else signal.SIGTERM)
        if self.order == "break":
            self._ranks.end_stopped()
        if self._seats is not None and self.order == "stop" and self._ranks.ended:
            self._seats.leave()  # as torchrun ends the others when one has failed
        if not self.is_late:
            self._extend()
        if self._clock() < self._deadline:
            return
        if self.is_late:
            self.order = "kill"
            return
        self.is_late = True
        self._deadline = self._clock() + LEAVE_S
        if self.order == "stop":
            processes.send(launcher, signal.SIGTERM)
        else:
            self._ranks.terminate(signal.SIGKILL)

    def _meant(self, order: Optional[str]) -> Optional[str]:
        """What an order means here: nothing rests where nothing stands by, and only our ranks know how to break off."""
        if order == "yield" and self._seats is None:
            return "stop"
        if order == "break" and self._request.get("program", "worker") == "command":
            return "kill"
        return order

    def _extend(self) -> None:
        """Their time begins anew with every sign of progress: a long step or a large save is no hang."""
        signs = self._ranks.signs(logs=self._request.get("program") == "command")
        if signs != self._progress:
            self._progress = signs
            self._deadline = self._clock() + self._patience_s()

    def _patience_s(self) -> float:
        return BREAK_S if self.order == "break" else float(self._request.get("grace_s", 120.0))
