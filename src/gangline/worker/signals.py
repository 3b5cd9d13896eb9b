"""Orders to this process: SIGTERM asks it to save at the next step boundary and leave; SIGUSR1 shows its stacks.

SIGUSR2 tells it that the gang has failed elsewhere: `worker/cut.py`.
"""

from __future__ import annotations

import faulthandler
import signal
from types import FrameType
from typing import TextIO


def hold() -> None:
    """What comes before there is somebody to take it: SIGUSR2 waits until then, SIGUSR1 shows stacks on stderr.

    Either would end a process that imports torch, which takes seconds.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    faulthandler.register(signal.SIGUSR1, all_threads=True)


class StopFlag:
    """Whether this rank was asked to leave. The gang agrees on it at a step boundary, never one rank alone."""

    def __init__(self) -> None:
        self.raised = False

    def install(self, log: TextIO) -> None:
        """Listen to SIGTERM, ignore the terminal's Ctrl-C, write stacks to `log` on SIGUSR1."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.raised = True
