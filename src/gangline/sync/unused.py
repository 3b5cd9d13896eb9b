"""Wheels on this computer that no environment was built from for a while: they may be gigabytes, and go."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from gangline.sync.gathering import size_of
from gangline.sync.tell import SILENT, Tell
from gangline.units import format_bytes

KEPT_S = 30 * 86400.0
"""Far longer than gathering, bringing and building may take together: what is that old is not in use."""


def mark_used(whole: Path) -> bool:
    """Whether a folder has its last file; from now on it counts as used, and is not deleted."""
    whole.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(whole.parent.parent, fcntl.LOCK_SH):
        try:
            os.utime(whole)
        except FileNotFoundError:
            return False
    return True


def delete_unused(house: Path, whole: str, *, tell: Tell = SILENT) -> None:
    """Delete what lies in a folder and was not used for 30 days, and what an interrupted start left there so long ago.

    whole: the name of the file that is marked. Nobody can begin to use what is deleted: it is renamed first.
    """
    old: list[Path] = []
    with _locked(house, fcntl.LOCK_EX):
        for path in house.iterdir():
            if time.time() - _used_s(path, whole) > KEPT_S:
                # a dot before its name, as of all that is not whole
                aside = path.with_name(f".{path.name.lstrip('.')}.old")
                with contextlib.suppress(OSError):  # what cannot be taken away stays
                    path.rename(aside)
                    old.append(aside)
    size = sum(size_of(path) if path.is_dir() else path.stat().st_size for path in old)
    for path in old:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    if old:
        tell.say(f"wheels that were not used for 30 days deleted: {format_bytes(size)} in {house}")


def lock_of(house: Path) -> Path:
    """Held while it is looked whether wheels are there, or which of them are old."""
    return house.with_name(f"{house.name}.lock")


def _used_s(path: Path, whole: str) -> float:
    for marked in (path / whole, path):
        with contextlib.suppress(OSError):
            return marked.stat().st_mtime
    return time.time()  # somebody else has just taken it away


@contextlib.contextmanager
def _locked(house: Path, kind: int) -> Iterator[None]:
    # A file that may be written, beside it: on NFS nobody else gets an exclusive lock.
    descriptor = os.open(lock_of(house), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)
