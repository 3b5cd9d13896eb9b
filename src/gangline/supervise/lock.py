"""Locks of a run on the host of its supervisor: one process prepares an attempt, one supervises it.

The kernel releases them when their process ends, however it ends. A supervisor touches its lock while it works, so that
a frozen one can be recognised.
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
"""A supervisor that has not touched its lock for so long is frozen."""


def has_supervisor(layout: RunLayout) -> bool:
    """Whether the run has a supervisor now."""
    descriptor = _open(layout.supervisor_lock)
    try:
        # Shared: several processes may ask at once, and none of them counts as a supervisor.
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def is_frozen(layout: RunLayout) -> bool:
    """Whether the supervisor of the run is stopped or hangs."""
    try:
        touched = layout.supervisor_lock.stat().st_mtime
    except FileNotFoundError:
        return False
    return time.time() - touched > FROZEN_S and has_supervisor(layout)


def break_lock(layout: RunLayout) -> None:
    """Take the lock from a frozen supervisor. If it wakes up it sees a higher epoch, and exits."""
    layout.supervisor_lock.unlink(missing_ok=True)


@contextmanager
def supervisor_lock(layout: RunLayout, *, timeout_s: float = 0.0) -> Iterator[Callable[[], None]]:
    """Hold the run's lock; yields the function that touches it. Raises RunFailed when another process holds it after
    `timeout_s`.
    """
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
    """Hold the lock on preparing an attempt; raises UsageError while another command holds it."""
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
    except OSError as error:
        if error.errno in {errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP}:
            raise damaged(str(path), str(error.strerror)) from error
        raise


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
