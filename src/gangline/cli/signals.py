"""SIGHUP and SIGTERM as an exception, so that what a command has begun is ended and written down as after Ctrl-C."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
HUNG_UP = 128 + signal.SIGHUP
"""Exit code after the terminal was closed."""

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


def terminals() -> list[int]:
    """Which of our output streams lead to a terminal."""
    return [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]


def is_hangup(error: Exception, before: list[int]) -> bool:
    """Whether writing failed because a terminal that was there before has been closed: SIGHUP may come later."""
    return isinstance(error, OSError) and error.errno == errno.EIO and terminals() != before


@contextmanager
def raising() -> Iterator[None]:
    """Raise ToldToEnd in here at the first SIGHUP or SIGTERM. One that was ignored (nohup) stays ignored."""
    ours = terminals()

    def end(number: int, _frame: FrameType | None) -> None:
        # Terminal and shell both send SIGHUP: the second shall not interrupt what the first has us clean up.
        for each in caught:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGHUP:
            lead_nowhere(ours)
        raise ToldToEnd(number)

    caught = [number for number in TOLD_TO_END if signal.getsignal(number) is signal.SIG_DFL]
    for number in caught:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


def lead_nowhere(descriptors: list[int]) -> None:
    """Writing to a terminal that is gone is an error, which would hide why we end."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)
