"""`claim`: make folders for this user alone, and be sure that they are. JSON on stdin and stdout.

`discard` deletes the folder of a run that never ran.

Request: {"folders": [PATH, ...]}, or {"folder": PATH} to discard
Answer:  {"kind": "result"}, or {"kind": "error", "what", "seen", "fix"} and exit code 1

Where others may write, too (/tmp, a scratch disk), somebody could have put a folder or a link of his own in its place,
and would then decide what we write where. So it is made first and looked at then: once it is ours, and no link of
somebody else leads to it, nobody else can take its place any more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import Any, Dict, Optional

from gangline.agent.host_facts.paths import is_borrowed, strangers
from gangline.agent.verbs import VerbFailed

TRIES = 5
"""Somebody may take away what he has put there, just when we look."""
FIX = "name a folder of your own: `workdir` of this host in cluster.yaml, or GANGLINE_HOME where you type"


def claim_folders(request: Dict[str, Any]) -> Dict[str, Any]:
    """The verb."""
    for path in request["folders"]:
        claim(str(path))
    return {"kind": "result"}


def claim(path: str) -> None:
    """Make a folder, and those above it that are missing, mode 0700; raises VerbFailed where it is not ours alone.

    Each is made in one that was looked at before and that no stranger can replace, and looked at in turn.
    """
    try:
        for place in reversed(Path(path, "x").parents):
            if place == Path("/"):
                continue
            owner = _make(place, is_end=place == Path(path))
            if owner is not None and not is_borrowed(str(place)):
                raise VerbFailed("{} is not yours alone".format(path), owner, FIX)
    except OSError as error:
        raise VerbFailed("{} cannot be made".format(path), error.strerror or str(error), FIX) from error


def _make(place: Path, *, is_end: bool) -> Optional[str]:
    """Make a folder if it is missing; who else decides what is there. Raises OSError."""
    for _ in range(TRIES):
        if not os.path.lexists(str(place)):
            with contextlib.suppress(FileExistsError):
                place.mkdir(mode=0o700)
        found = strangers(str(place), is_end=is_end)
        if found.is_folder or found.owner is not None:
            return found.owner
    raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))


def discard(request: Dict[str, Any]) -> Dict[str, Any]:
    """The verb: delete <root>/runs/<id>; raises VerbFailed for a folder of another shape, or with signs of ranks."""
    folder = Path(request["folder"])
    if not os.path.lexists(str(folder)):
        return {"kind": "result"}
    ran = [*folder.glob("checkpoints"), *folder.glob("attempts/*/rank-*.pid")]
    if folder.is_symlink() or not folder.is_dir() or folder.parent.name != "runs" or ran:
        raise VerbFailed("{} is not the folder of a run that never ran".format(folder), str(ran[:1] or ""), "keep it")
    try:
        shutil.rmtree(str(folder))
    except OSError as error:
        raise VerbFailed("{} cannot be deleted".format(folder), str(error.strerror), "delete it by hand") from error
    return {"kind": "result"}
