"""Room, kind and rights of folders. Reads only; what has to write is in gangline.agent.disk."""

from __future__ import annotations

import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from gangline.agent.bounded import within
from gangline.agent.strangers import BORROWED, Strangers, strangers

FOLDER_S = 5.0
"""A file server that is gone hangs whoever asks; the other folders are told all the same."""
NUM_FOLDERS = 16


def storage(request: Dict[str, Any]) -> List[Dict[str, Any]]:
    """The work folder, the one for temporary files, and every shared folder. Of a folder that is not there yet: the one
    that it would be in.
    """
    asked = [request.get("workdir") or ".", tempfile.gettempdir(), *(request.get("shared") or [])]
    paths = list(dict.fromkeys(map(str, asked)))[:NUM_FOLDERS]
    with ThreadPoolExecutor(max_workers=NUM_FOLDERS) as pool:
        return list(pool.map(_bounded, paths))


def _bounded(path: str) -> Dict[str, Any]:
    try:
        answer: Dict[str, Any] = within(FOLDER_S, lambda: folder(path))
    except OSError as error:
        return {"path": path, "error": error.strerror or str(error)}
    return answer


def folder(path: str) -> Dict[str, Any]:
    """What there is to say of one folder."""
    real = os.path.realpath(path)
    there = nearest(real)
    room = os.statvfs(there)
    mount, filesystem, source = mounted(there)
    read_only = bool(room.f_flag & os.ST_RDONLY)
    others = Strangers(None, None) if is_borrowed(path) else strangers(os.path.abspath(path))  # noqa: PTH100  (links count)
    return {
        "path": path,
        "real_path": real,
        "exists": Path(real).is_dir(),
        "filesystem": filesystem,
        "mount": mount,
        "source": source,
        "total_bytes": room.f_blocks * room.f_frsize,
        "free_bytes": room.f_bavail * room.f_frsize,
        # btrfs and others have no fixed number of inodes
        "inodes_total": room.f_files or None,
        "inodes_free": room.f_favail if room.f_files else None,
        "read_only": read_only,
        "writable": not read_only and os.access(there, os.W_OK | os.X_OK),
        "owner": others.owner,
        "door": others.door,
    }


def is_borrowed(path: str) -> bool:
    """Whether owners mean nothing on the file system at a path."""
    filesystem = mounted(nearest(os.path.realpath(path)))[1]
    return filesystem is not None and filesystem.startswith(BORROWED)


def nearest(path: str) -> str:
    """The folder itself, or the first above it that is there."""
    place = Path(path)
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return str(place)


def mounted(path: str, table: str = "/proc/self/mountinfo") -> Tuple[Optional[str], Optional[str], Optional[str]]:
    """Mount point, filesystem and source of what lies at an absolute path."""
    best: Tuple[Optional[str], Optional[str], Optional[str]] = (None, None, None)
    try:
        with Path(table).open(encoding="utf-8", errors="replace") as stream:
            rows = [line.split(" - ", 1) for line in stream]
    except OSError:
        return best
    for row in rows:
        left, right = row[0].split(" "), row[-1].split(" ")
        if len(row) != 2 or len(left) < 5 or len(right) < 2:
            continue
        place = _plain(left[4])
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        # the last of equal ones lies on top
        if inside and len(place) >= len(best[0] or ""):
            best = (place, right[0], _plain(right[1]))
    return best


def _plain(text: str) -> str:
    """A path of mountinfo, where blanks are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
