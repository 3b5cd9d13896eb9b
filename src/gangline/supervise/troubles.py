"""Looks that fail: the next one may be better, and nobody restarts a supervisor (docs/decisions/0010)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gangline.supervise.records import Records, Superseded


class Troubles:
    """What goes wrong in looks of the supervisor; borne for `patience_s`, counted from the last look that was good."""

    def __init__(self, records: Records, *, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = records
        self._patience_s = patience_s
        self._clock = clock
        self._since: float | None = None

    @contextmanager
    def borne(self) -> Iterator[None]:
        """Do one look in here. What it raises is kept, until it has lasted too long or somebody else is in charge."""
        try:
            yield
        except Superseded:
            raise
        except Exception as error:
            now = self._clock()
            self._since = now if self._since is None else self._since
            words = f"{type(error).__name__}: {error}"
            self._records.complain(f"a look failed: {words}", error=error)
            if now - self._since < self._patience_s:
                return
            self._records.event("unsupervised", what=f"the supervisor gave up, and the ranks run on: {words}")
            raise
        self._since = None
