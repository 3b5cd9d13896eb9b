"""Work that waits for hosts, done beside the supervisor: a host that dies meanwhile does not keep it from looking."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Aside(Generic[Value]):
    """One piece of work again and again, never twice at a time. Not for several threads."""

    def __init__(self, work: Callable[[], Value], *, patience_s: float) -> None:
        self._work = work
        self._patience_s = patience_s
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gangline aside")
        self._running: Future[Value] | None = None
        self._begun = 0.0

    def do(self) -> Value | None:
        """What it comes to, or raises; None if that takes longer than a few seconds: ask again, it goes on."""
        if self._running is None:
            self._running, self._begun = self._pool.submit(self._work), time.monotonic()
        running = self._running
        wait([running], max(0.0, self._begun + self._patience_s - time.monotonic()))
        if not running.done():
            return None
        self._running = None
        return running.result()

    def finish(self) -> Iterator[Value]:
        """What has not ended yet comes to, unless it fails; then the same work once more, however long it takes."""
        running, self._running = self._running, None
        if running is not None and running.exception() is None:
            yield running.result()
        yield self._work()
