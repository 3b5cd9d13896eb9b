"""Who besides this user decides what lies at a path: owners of folders on the way, and makers of links."""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path
from typing import Iterator, List, NamedTuple, Optional

UID_MAP = Path("/proc/self/uid_map")
OVERFLOW = Path("/proc/sys/kernel/overflowuid")
LINKS = 40
"""As many as the kernel follows."""
BORROWED = ("nfs", "cifs", "smb", "9p", "fuse", "virtiofs", "vfat", "exfat", "ntfs", "afs")
"""How the names of file systems begin on which owners are whatever a server or a mount option says."""


class Strangers(NamedTuple):
    """Who else could decide what lies at a path, in words; None: nobody but this user and root."""

    owner: Optional[str]
    """Who does: it is somebody else's, or somebody else has led the way to it."""
    door: Optional[str]
    """Who could: the owner of a folder above it, or everybody."""
    is_folder: bool = False
    """There is a folder at the end of the way."""


class _Step(NamedTuple):
    """Something on the way."""

    place: Path
    status: os.stat_result
    is_end: bool
    is_loose: bool
    """It lies in a folder in which everybody may make something."""


def strangers(path: str, *, is_end: bool = True) -> Strangers:
    """Look once at every folder and link on the way to an absolute path, and at what is there. Raises OSError.

    is_end: it shall be this user's own; else it is only on the way.
    """
    steps = list(_way(path))
    found = [_judge(step if is_end else step._replace(is_end=False)) for step in steps]
    owners = [each.owner for each in found if each.owner]
    doors = [each.door for each in found if each.door]
    is_folder = bool(steps and steps[-1].is_end and stat.S_ISDIR(steps[-1].status.st_mode))
    return Strangers(owners[0] if owners else None, doors[0] if doors else None, is_folder)


def _judge(step: _Step) -> Strangers:
    place, mode = step.place, step.status.st_mode
    is_ours = step.status.st_uid in {0, os.getuid(), *_nobodies()}
    if stat.S_ISLNK(mode):
        return Strangers(None if is_ours else "{} is a link that {} made".format(place, _who(step.status)), None)
    if not stat.S_ISDIR(mode):
        return Strangers(None, None)
    if step.is_end:
        if step.status.st_uid != os.getuid():
            return Strangers("{} belongs to {}".format(place, _who(step.status)), None)
        return Strangers("anybody may write to {}".format(place) if mode & stat.S_IWOTH else None, None)
    if not is_ours:
        door = "{} belongs to {}, who may replace what is in it".format(place, _who(step.status))
        return Strangers(door if step.is_loose else None, door)
    is_door = mode & stat.S_IWOTH and not mode & stat.S_ISVTX
    return Strangers(None, "anybody may replace what is in {}".format(place) if is_door else None)


def _way(path: str) -> Iterator[_Step]:
    """Everything on the way that is there, with the links and what they lead to."""
    here, left, links = Path("/"), list(Path(path).parts[1:]), 0
    is_loose = False
    while left:
        name = left.pop(0)
        if name == "..":
            here = here.parent
            continue
        here = here / name
        try:
            status = here.lstat()
        except FileNotFoundError:
            return
        is_link = stat.S_ISLNK(status.st_mode)
        yield _Step(here, status, not left and not is_link, is_loose)
        is_loose = bool(stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_IWOTH)
        if is_link:
            links += 1
            if links > LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            # nothing above it is a link any more
            leads_to = here.parent / os.readlink(str(here))  # noqa: PTH115  (Path.readlink is of Python 3.9)
            here, left = Path("/"), [*leads_to.parts[1:], *left]


def _nobodies() -> List[int]:
    """In a container that maps some users only, root outside has the number of nobody."""
    try:
        is_whole = UID_MAP.read_text(encoding="ascii").split() == ["0", "0", "4294967295"]
        return [] if is_whole else [int(OVERFLOW.read_text(encoding="ascii"))]
    except (OSError, ValueError):
        return []


def _who(status: os.stat_result) -> str:
    try:
        return pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        return "user {}".format(status.st_uid)
