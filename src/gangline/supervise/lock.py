"""Locks of a run on the computer that keeps it: one process prepares an attempt, one looks after it.

The kernel lets go of them when their process ends, however it ends. A supervisor touches its lock as it gets on, so
that one that is frozen can be told from one that works.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gangline.errors import RunFailed, UsageError
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import damaged

FROZEN_S = 60.0
"""A supervisor that has not touched its lock for so long does nothing any more."""


def has_supervisor(layout: RunLayout) -> bool:
    """Whether a supervisor looks after the run now."""
    descriptor = _open(layout.supervisor_lock)
    try:
        # Shared: several may look at once, and none of them is taken for a supervisor.
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def is_frozen(layout: RunLayout) -> bool:
    """Whether the run has a supervisor that does nothing any more: it was stopped, or hangs."""
    try:
        touched = layout.supervisor_lock.stat().st_mtime
    except FileNotFoundError:
        return False
    return time.time() - touched > FROZEN_S and has_supervisor(layout)


def break_lock(layout: RunLayout) -> None:
    """Take the run away from a supervisor that is frozen. If it wakes up it finds a higher epoch, and leaves."""
    layout.supervisor_lock.unlink(missing_ok=True)


@contextmanager
def supervisor_lock(layout: RunLayout, *, timeout_s: float = 0.0) -> Iterator[Callable[[], None]]:
    """Hold the run's lock; gives what touches it. Raises RunFailed when another process holds it after `timeout_s`."""
    descriptor = _open(layout.supervisor_lock)
    deadline = time.monotonic() + timeout_s
    try:
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline:
                raise RunFailed(
                    f"{layout.run_id} is running already",
                    seen="another supervisor holds its lock",
                    fix=f"gangline stop {layout.run_id}, or follow the run: gangline attach {layout.run_id}",
                )
            time.sleep(0.05)
        os.utime(descriptor)
        yield lambda: os.utime(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def prepare_lock(layout: RunLayout) -> Iterator[None]:
    """Be the only one who prepares an attempt of the run; raises UsageError when somebody else does."""
    descriptor = _open(layout.prepare_lock)
    try:
        if not _try_lock(descriptor):
            raise UsageError(
                f"{layout.run_id} is being resumed already",
                seen=f"another command holds {layout.prepare_lock}",
                fix=f"wait until the run has started, then follow it: gangline attach {layout.run_id}",
            )
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except (IsADirectoryError, PermissionError) as error:
        raise damaged(str(path), str(error.strerror)) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise damaged(str(path), str(error.strerror)) from error
        raise


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
