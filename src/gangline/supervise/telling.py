"""Orders on their way to guards: a host that takes long keeps neither the others nor the supervisor waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

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
