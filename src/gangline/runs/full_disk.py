"""A disk that takes nothing more is no bug of ours: which file, on which computer, and what to do."""

from __future__ import annotations

import errno
import os

from gangline.errors import RunFailed

FULL = {
    errno.ENOSPC: ("its disk is full", "make room there"),
    errno.EDQUOT: ("your quota there is used up", "make room there, or ask for more"),
    errno.EROFS: ("its file system is read-only", "look at its disk: Linux ends writing after errors"),
}
"""What is seen then, and what to do."""


def full_disk(error: BaseException, *, here: str = "this computer") -> RunFailed | None:
    """The error for the user; None for another error.

    here: what this computer is called. What came from a host has its name in the text already.
    """
    if not isinstance(error, OSError) or error.errno not in FULL:
        return None
    seen, fix = FULL[error.errno]
    is_here = error.strerror in {None, os.strerror(error.errno)}
    elsewhere = "GANGLINE_HOME (or `workdir` of a host that is this computer)" if is_here else "`workdir` of that host"
    return RunFailed(
        f"{here}: {os.strerror(error.errno)}" if is_here else str(error.strerror),
        seen=f"expected room for {os.fsdecode(error.filename) if error.filename else 'a file'}; {seen}",
        fix=f"{fix}; or let {elsewhere} be a folder on another disk",
    )
