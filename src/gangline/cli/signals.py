"""SIGHUP and SIGTERM as an exception, so that what a command has begun is ended and written down as after Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

TOLD_TO_END = (signal.SIGHUP, signal.SIGTERM)


class ToldToEnd(KeyboardInterrupt):
    """The terminal was closed, or somebody ended the command."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """What a shell would say of a command that was ended so."""
    return interrupt.exit_code if isinstance(interrupt, ToldToEnd) else INTERRUPTED


def say_interrupted() -> None:
    """One line, if anybody still reads."""
    with suppress(OSError):
        sys.stderr.write("\ninterrupted\n")


@contextmanager
def raising() -> Iterator[None]:
    """Raise ToldToEnd in here at the first SIGHUP or SIGTERM. One that was ignored (nohup) stays ignored."""
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def end(number: int, _frame: FrameType | None) -> None:
        # Terminal and shell both send SIGHUP: the second shall not interrupt what the first has us clean up.
        for each in caught:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGHUP:
            _lead_nowhere(terminals)
        raise ToldToEnd(number)

    caught = [number for number in TOLD_TO_END if signal.getsignal(number) is signal.SIG_DFL]
    for number in caught:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


def _lead_nowhere(descriptors: list[int]) -> None:
    """Writing to a terminal that is gone is an error, which would hide why we end."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)
