"""What a host says may be anything: whatever comes of reading it is an error that names the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gangline.errors import GanglineError
from gangline.remote.ssh_options import printable

NONSENSE = (LookupError, TypeError, ValueError, AttributeError, RecursionError, ArithmeticError)
"""What comes of words that are not what was asked for."""


@contextlib.contextmanager
def understood(host: str, what: str) -> Iterator[None]:
    """For reading what a host says, or its files: what is not an answer, or cannot be read, is a GanglineError."""
    try:
        yield
    except (*NONSENSE, OSError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise GanglineError(
            f"what {host} says cannot be understood",
            seen=printable(f"{what}: {type(error).__name__}: {first}"[:300]),
            fix=f"look at {host}: is its disk full or damaged, or does something else answer in the agent's place?",
        ) from error


def whole(value: object) -> int:
    """A whole number that a host says; raises TypeError."""
    if type(value) is not int:
        raise TypeError(f"{str(value)[:40]!r} is no whole number")
    return value
