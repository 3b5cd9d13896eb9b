"""Everything that is followed of an attempt from look to look: who answers, who has joined, what ranks do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gangline.errors import GanglineError
from gangline.launch.backend import HostStatus, Request
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster
from gangline.supervise.first_step import FirstStep
from gangline.supervise.hang import Hang
from gangline.supervise.pace import Pace
from gangline.supervise.presence import Heartbeats, Presence
from gangline.supervise.stacks import StackAsking
from gangline.supervise.stall import Stall
from gangline.supervise.start import Start

Statuses = Sequence[HostStatus]
Event = tuple[str, dict[str, Any]]


class Followed:
    """What one attempt is seen to do. is_quiet: that no rank prints was said before, by an earlier supervisor."""

    def __init__(
        self,
        request: Request,
        cluster: Cluster,
        transports: Mapping[str, Transport],
        *,
        pace: Pace,
        is_quiet: bool,
    ) -> None:
        self.presence = Presence(notice_s=pace.notice_s)
        self.heartbeats = Heartbeats(stall_s=pace.stall_s)
        self.start = Start(request, cluster, transports, limits=pace.start)
        self.step: int | None = None
        """The last that it was seen to complete."""
        self._first_step = FirstStep(request)
        self._hang = Hang(request)
        self._stacks = StackAsking(request, transports)
        self._stall = Stall(request.stall, run_id=request.run_id, is_told=is_quiet)

    @property
    def joined(self) -> bool:
        """Whether all ranks have joined."""
        return self.start.done

    def take_for_joined(self) -> None:
        """An earlier supervisor has seen them join."""
        self.start.done = self._first_step.done = True

    def note(self, statuses: Statuses, *, ordered: bool) -> list[Event]:
        """Take in what the hosts say now; what is new. ordered: ranks were told to leave: they may be silent, and begin
        nothing any more.
        """
        events = [*self.presence.note(statuses), *self.heartbeats.note(statuses), *self.start.note(statuses)]
        if ordered:
            return events
        self.step = max(_completed(statuses), default=self.step)
        began = self._first_step.note(statuses) if self.joined else ()
        told = self._stall.note(statuses, joined=self.joined)
        hanging = list(self._hang.note(statuses, joined=self.joined))
        if (number := self._hang.suspicion) is not None:
            self._hang.take(self._stacks.about(number))
        return [*events, *began, *hanging, *told]

    def failure(self) -> GanglineError | None:
        """Why the gang is to be ended though no part of it has failed by itself."""
        return self.start.failure() or self._hang.failure() or self._stall.failure()

    @property
    def has_something_to_save(self) -> bool:
        """Ranks that wait for each other to join, or do not run yet, have nothing."""
        return self.joined or not (self.start.failure() or self.start.board.is_before_ranks)


def _completed(statuses: Statuses) -> list[int]:
    """Steps that ranks have behind them, as they tell on which they work."""
    signs = [sign for status in statuses if status.signs for sign in status.signs.ranks]
    return [sign.step - 1 for sign in signs if sign.step]
