"""Work in threads beside the supervisor, which keeps polling while a host does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

AT_ONCE = 32

Value = TypeVar("Value")


class Background(Generic[Value]):
    """Pieces of work by key, never two of one key at a time. Not thread-safe.

    patience_s: how long a call waits for a piece of work, counted from the start of that piece.
    """

    def __init__(self, *, patience_s: float = 0.0) -> None:
        self._patience_s = patience_s
        self._pool = ThreadPoolExecutor(max_workers=AT_ONCE, thread_name_prefix="gangline background")
        self._running: dict[str, tuple[float, Future[Value]]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether the result of any piece is still to come."""
        return bool(self._running)

    def start(self, key: str, work: Callable[[], Value]) -> bool:
        """Begin a piece of work, unless the last one of this key still runs; whether it has begun."""
        if key in self._running:
            return False
        self._running[key] = time.monotonic() + self._patience_s, self._pool.submit(work)
        return True

    def results(self) -> dict[str, Value]:
        """The pieces that have ended since the last call; raises the error of one that failed."""
        left_s = {future: deadline - time.monotonic() for deadline, future in self._running.values()}
        fresh = [future for future, seconds in left_s.items() if seconds > 0]
        wait(fresh, max((left_s[future] for future in fresh), default=0.0))
        ended = [key for key, (_, future) in self._running.items() if future.done()]
        return {key: self._running.pop(key)[1].result() for key in ended}

    def do(self, work: Callable[[], Value]) -> Value | None:
        """The result of the only piece of work, begun unless it runs; None: it takes longer, so ask again."""
        self.start("", work)
        return self.results().get("")

    def finish(self, work: Callable[[], Value]) -> Iterator[Value]:
        """The result of the only piece if it still runs, unless it fails; then that of the same work once more."""
        _, running = self._running.pop("", (0.0, None))
        if running is not None and running.exception() is None:
            yield running.result()
        yield work()
