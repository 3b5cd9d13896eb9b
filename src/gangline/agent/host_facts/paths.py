"""Folders of this host: room, kind and rights, whether files can be written, and whether hosts share them."""

from __future__ import annotations

import errno
import os
import pwd
import re
import stat
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

from gangline.agent.bounded import within

# Who besides this user decides what lies at a path: owners of folders on the way, and makers of links.


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
    may_replace: Optional[str]
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
    replaceable = [each.may_replace for each in found if each.may_replace]
    is_folder = bool(steps and steps[-1].is_end and stat.S_ISDIR(steps[-1].status.st_mode))
    return Strangers(owners[0] if owners else None, replaceable[0] if replaceable else None, is_folder)


def _judge(step: _Step) -> Strangers:
    place, mode = step.place, step.status.st_mode
    is_ours = step.status.st_uid in {0, os.getuid(), *nobodies()}
    if stat.S_ISLNK(mode):
        return Strangers(None if is_ours else "{} is a link that {} made".format(place, _who(step.status)), None)
    if not stat.S_ISDIR(mode):
        return Strangers(None, None)
    if step.is_end:
        if step.status.st_uid != os.getuid():
            return Strangers("{} belongs to {}".format(place, _who(step.status)), None)
        return Strangers("anybody may write to {}".format(place) if mode & stat.S_IWOTH else None, None)
    if not is_ours:
        may_replace = "{} belongs to {}, who may replace what is in it".format(place, _who(step.status))
        return Strangers(may_replace if step.is_loose else None, may_replace)
    is_replaceable = mode & stat.S_IWOTH and not mode & stat.S_ISVTX
    return Strangers(None, "anybody may replace what is in {}".format(place) if is_replaceable else None)


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


def nobodies() -> List[int]:
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
        return list(pool.map(lambda path: {"path": path, **_bounded(FOLDER_S, lambda: folder(path))}, paths))


def _bounded(duration_s: float, work: Callable[[], Dict[str, Any]]) -> Dict[str, Any]:
    """What `work` returns, or {"error"} where it cannot, or takes longer."""
    try:
        answer: Dict[str, Any] = within(duration_s, work)
    except OSError as error:
        return {"error": error.strerror or str(error)}
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
        "may_replace": others.may_replace,
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


# `disk`: whether files can really be written, synced and renamed in folders. It leaves nothing behind.


TRY_FOLDER_S = 8.0
SAMPLE_BYTES = 1 << 20


def disk(request: Dict[str, Any]) -> Dict[str, Any]:
    """The verb."""
    paths = [str(path) for path in request["folders"]][:16]
    with ThreadPoolExecutor(max_workers=16) as pool:
        tries = pool.map(lambda path: _bounded(TRY_FOLDER_S, lambda: {"seconds": write_and_remove(path)}), paths)
        return {"folders": dict(zip(paths, tries))}


def write_and_remove(path: str) -> float:
    """Seconds to write, sync, rename and remove a file of 1 MiB; raises OSError."""
    folder = nearest(os.path.realpath(path))
    name = f"{folder}/.gangline-{os.getpid()}-{os.urandom(6).hex()}"
    begun = time.monotonic()
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(b"\0" * SAMPLE_BYTES)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(name, name + ".renamed")  # noqa: PTH104 - beside os.open
        name += ".renamed"
    finally:
        os.unlink(name)  # noqa: PTH108 - beside os.open
    return time.monotonic() - begun


# `shared`: whether a folder is the same one on all hosts. The controller has it done in turns, on every host at
# once.


TURN_S = 8.0
VISIBLE_S = 3.0
"""A file server may show a rename later to who has just looked; much later, and a checkpoint seems not to be there."""
NAME = re.compile(r"[A-Za-z0-9]{1,64}")
RENAMED = ".renamed"


def shared(request: Dict[str, Any]) -> Dict[str, Any]:
    """The verb."""
    return _bounded(TURN_S, lambda: TURNS[str(request["do"])](Markers(request)))


class Markers:
    """The markers of one probe in one folder; raises ValueError for names that could lead elsewhere."""

    def __init__(self, request: Dict[str, Any]) -> None:
        probe, mine = str(request["probe"]), str(request["mine"])
        if not NAME.fullmatch(probe) or not NAME.fullmatch(mine):
            raise ValueError("names of markers are letters and digits")
        self.folder = Path(str(request["folder"])).expanduser()
        self.start = f".gangline-shared-{probe}-"
        self.own = self.folder / (self.start + mine)

    def names(self) -> List[str]:
        """The hosts whose markers are seen, renamed or not, as they are written now; raises OSError."""
        found = [path.name for path in self.folder.iterdir()]
        return sorted(name[len(self.start) :] for name in found if name.startswith(self.start))


def _write(markers: Markers) -> Dict[str, Any]:
    descriptor = os.open(markers.own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(b"made by `gangline check`, and removed by it\n")
        stream.flush()
        os.fsync(stream.fileno())
    return {}


def _look(markers: Markers) -> Dict[str, Any]:
    return {"seen": [name for name in markers.names() if not name.endswith(RENAMED)]}


def _rename(markers: Markers) -> Dict[str, Any]:
    markers.own.rename(markers.own.with_name(markers.own.name + RENAMED))
    return {}


def _renamed(markers: Markers) -> Dict[str, Any]:
    deadline = time.monotonic() + VISIBLE_S
    while True:
        seen = [name[: -len(RENAMED)] for name in markers.names() if name.endswith(RENAMED)]
        if seen or time.monotonic() > deadline:
            return {"seen": seen}
        time.sleep(0.1)


def _remove(markers: Markers) -> Dict[str, Any]:
    for name in markers.names():
        try:
            markers.own.with_name(markers.start + name).unlink()
        except FileNotFoundError:  # another host was faster
            continue
    return {}


TURNS: Dict[str, Callable[[Markers], Dict[str, Any]]] = {
    "write": _write,
    "look": _look,
    "rename": _rename,
    "renamed": _renamed,
    "remove": _remove,
}
