"""Waiting for time to pass, or for a signal: whichever comes first."""

from __future__ import annotations

import contextlib
import os
import select
import signal


class Wake:
    """Wakes on `number`, and on every other signal that has a handler. One per process."""

    def __init__(self, number: int) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(number, lambda *_: None)

    def wait(self, seconds: float) -> None:
        """Wait for so long, or less."""
        select.select([self._reader], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
