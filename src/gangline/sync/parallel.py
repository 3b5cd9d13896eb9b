"""The same for many hosts at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def in_parallel(act: Callable[[_T], _R], things: Sequence[_T], *, at_once: int = 32) -> list[_R]:
    """Do it for all; the first error is raised, and neither that nor Ctrl-C waits for the others then."""
    if not things:
        return []
    pool = ThreadPoolExecutor(max_workers=min(at_once, len(things)))
    try:
        return list(pool.map(act, things))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
