"""Locks of a run on the controller: one process prepares an attempt, one looks after it.

The kernel lets go of them when their process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gangline.errors import RunFailed, UsageError
from gangline.runs.layout import RunLayout


def has_supervisor(layout: RunLayout) -> bool:
    """Whether a supervisor looks after the run now."""
    descriptor = _open(layout, "supervisor.lock")
    try:
        # Shared: several may look at once, and none of them is taken for a supervisor.
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


@contextmanager
def supervisor_lock(layout: RunLayout, *, timeout_s: float = 0.0) -> Iterator[None]:
    """Hold the run's lock; raises RunFailed when another process holds it after `timeout_s`."""
    descriptor = _open(layout, "supervisor.lock")
    deadline = time.monotonic() + timeout_s
    try:
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline:
                raise RunFailed(
                    f"{layout.run_id} is running already",
                    seen="another supervisor holds its lock",
                    fix=f"gangline stop {layout.run_id}, or follow it: gangline attach {layout.run_id}",
                )
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def prepare_lock(layout: RunLayout) -> Iterator[None]:
    """Be the only one who prepares an attempt of the run; raises UsageError when somebody else does."""
    descriptor = _open(layout, "prepare.lock")
    try:
        if not _try_lock(descriptor):
            raise UsageError(
                f"{layout.run_id} is being resumed already",
                seen=f"another command holds {layout.folder / 'prepare.lock'}",
                fix=f"wait until it has started, then follow it: gangline attach {layout.run_id}",
            )
        yield
    finally:
        os.close(descriptor)


def _open(layout: RunLayout, name: str) -> int:
    return os.open(layout.folder / name, os.O_RDWR | os.O_CREAT, 0o600)


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
