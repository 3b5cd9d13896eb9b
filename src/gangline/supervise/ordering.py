"""What the guards of an attempt are told, and which of them have not heard it yet.

A host that takes long keeps neither the others nor the supervisor waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, Literal, TypeVar

from gangline.launch.backend import Backend, HostStatus, Request
from gangline.remote.transport import Transport

Word = TypeVar("Word")
AT_ONCE = 32


class Telling(Generic[Word]):
    """Tells hosts something, all at once, each of them never two things at a time. Not for several threads.

    tell: tells one host; whether it heard. patience_s: how long we wait for what is under way.
    """

    def __init__(self, tell: Callable[[str, Word], bool], *, patience_s: float) -> None:
        self._tell = tell
        self._patience_s = patience_s
        self._pool = ThreadPoolExecutor(max_workers=AT_ONCE, thread_name_prefix="gangline order")
        self._running: dict[str, tuple[Word, float, Future[bool]]] = {}

    def tell(self, hosts: Collection[str], word: Word) -> set[str]:
        """The hosts that have heard it. Ask again for the others; what takes long goes on meanwhile.

        Raises what `tell` raises for one of them.
        """
        now = time.monotonic()
        for host in hosts:
            if host not in self._running:
                self._running[host] = word, now, self._pool.submit(self._tell, host, word)
        fresh = [future for _, begun, future in self._running.values() if begun + self._patience_s > now]
        wait(fresh, self._patience_s)  # for those that take longer nobody waits again
        heard = set()
        for host, (told, _, future) in list(self._running.items()):
            if future.done():
                del self._running[host]
                if future.result() and told == word and host in hosts:
                    heard.add(host)
        return heard


GuardOrder = Literal["yield", "break", "stop", "kill"]
"""yield: save at the next step, leave, and rest. break: the gang has failed; save what is complete, leave, and rest.
stop: save at the next step and end. kill: end."""
STRENGTH: tuple[GuardOrder, ...] = ("yield", "break", "stop", "kill")
"""A later one takes the place of an earlier one."""


class Ordering:
    """Orders of one attempt. epoch: under which they are given."""

    def __init__(
        self,
        request: Request,
        transports: Mapping[str, Transport],
        *,
        backend: Backend,
        epoch: int,
        patience_s: float,
    ) -> None:
        self.given: GuardOrder | None = None
        """The strongest."""
        self.given_at = float("inf")
        """When, by the monotonic clock."""
        self._request = request
        self._transports = transports
        self._backend = backend
        self._epoch = epoch
        self._telling = Telling(self._tell_one, patience_s=patience_s)
        self._untold: set[str] = set()
        """Hosts that have not heard the last of it."""

    def give(self, order: GuardOrder) -> None:
        """Order something of all guards; what was ordered before counts on if it is stronger."""
        if self.given is None or STRENGTH.index(order) >= STRENGTH.index(self.given):
            self.given = order
        self.given_at = time.monotonic()
        self._untold = set(self._request.names)

    def announce(self) -> None:
        """Have all guards told who is in charge."""
        self._untold = set(self._request.names)

    def tell(self, statuses: Sequence[HostStatus]) -> None:
        """Tell the guards that have not heard it, and those that do not answer as soon as they do."""
        reachable = self._untold - {status.host for status in statuses if status.phase == "unreachable"}
        if reachable:
            self._untold -= self._telling.tell(reachable, self.given)

    def _tell_one(self, host: str, order: GuardOrder | None) -> bool:
        """Whether its guard was told."""
        part = self._request.on({host})
        if order is None:
            return not self._backend.announce(part, self._transports, epoch=self._epoch)
        now, resting = order in {"break", "kill"}, order in {"yield", "break"}
        return not self._backend.stop(part, self._transports, now=now, resting=resting, epoch=self._epoch)
