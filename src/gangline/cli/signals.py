"""SIGHUP and SIGTERM as an exception, so that a command cleans up as after Ctrl-C."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
HUNG_UP = 128 + signal.SIGHUP
"""Exit code after the terminal was closed."""

TERMINATION_SIGNALS = (signal.SIGHUP, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """The terminal was closed, or somebody ended the command."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """The exit code of a command that was interrupted so."""
    return interrupt.exit_code if isinstance(interrupt, Terminated) else INTERRUPTED


def say_interrupted() -> None:
    """Print one line; the terminal may be closed."""
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
    """Raise Terminated in here at the first SIGHUP or SIGTERM. One that was ignored (nohup) stays ignored."""
    ours = terminals()

    def end(number: int, _frame: FrameType | None) -> None:
        # Terminal and shell both send SIGHUP: the second one must not interrupt the cleaning up.
        for each in caught:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGHUP:
            redirect_to_null(ours)
        raise Terminated(number)

    caught = [number for number in TERMINATION_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in caught:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def leaving_within(seconds: float) -> Iterator[None]:
    """After a SIGHUP or SIGTERM in here this process ends in that time at the latest, whatever a library does with the
    exception: for commands that only show something, and leave nothing to clean up.
    """
    before = {number: signal.getsignal(number) for number in TERMINATION_SIGNALS}

    def end(number: int, frame: FrameType | None) -> None:
        timer = threading.Timer(seconds, os._exit, (128 + number,))
        timer.daemon = True
        timer.start()
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    handled = [number for number, handler in before.items() if callable(handler)]
    for number in handled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            if signal.getsignal(number) is end:
                signal.signal(number, before[number])


def redirect_to_null(descriptors: list[int]) -> None:
    """Point descriptors of a closed terminal at /dev/null: an error of writing would hide the cause of the end."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)
