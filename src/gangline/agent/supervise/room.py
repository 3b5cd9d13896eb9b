"""Whether the folders that a part needs have room and answer: a full disk, a full /dev/shm, a dead file server.

The host agent looks every few seconds, in threads that a dead file server may keep. On a full disk it cannot write what
it sees, so the supervisor asks by the verb `room`, too.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional

from gangline.agent import host_files

EVERY_S = 4.0
ANSWER_S = 3.0
"""A folder that has not answered by then is reported: a local disk takes less than a second, whatever it does."""
FULL_BYTES = 1 << 20
"""Less room than this is none: a status takes a few KiB, a save far more."""
SHM = "/dev/shm"  # noqa: S108  (looked at, not written)
FROM_SERVERS = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "fuse.gluster", "ceph", "lustre", "beegfs", "afs", "gpfs")
"""How the names of file systems begin that another computer serves."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Mount(NamedTuple):
    """A file system of this host."""

    point: str
    kind: str
    source: str

    @property
    def is_served(self) -> bool:
        """Whether another computer serves it."""
        return self.kind.startswith(FROM_SERVERS)


class Trouble(NamedTuple):
    """What is wrong with the file system of a folder."""

    point: str
    kind: str
    """full, inodes (no more files can be made), or silent."""
    words: str

    def row(self) -> Dict[str, str]:
        """Plain data."""
        return self._asdict()


Statistics = Callable[[str], os.statvfs_result]


def mounts() -> List[Mount]:
    """All file systems, in the order in which they were mounted. Asks none of them."""
    try:
        rows = [line.split() for line in Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()]
    except OSError:
        return []
    found = []
    for row in rows:
        if "-" in row and len(row) > row.index("-") + 2:
            kind, source = row[row.index("-") + 1 : row.index("-") + 3]
            found.append(Mount(row[4].replace("\\040", " "), kind, source))
    return found


def mount_of(path: str, among: Iterable[Mount]) -> Mount:
    """The file system of an absolute path, by its name alone: a dead file server is not asked."""
    best = Mount("/", "", "")
    for mount in among:
        if (path + "/").startswith(mount.point.rstrip("/") + "/") and len(mount.point) >= len(best.point):
            best = mount
    return best


def folders_of(request: Mapping[str, Any], among: Iterable[Mount]) -> List[str]:
    """A folder on each file system that a part needs: that of its files, /dev/shm, and those that servers have of which
    its command, its variables or its job speak.
    """
    among = list(among)
    words = json.dumps([request.get("argv"), request.get("env"), request.get("cwd"), _job(request)])
    served = [mount.point for mount in among if mount.is_served and mount.point in words]
    by_point = {mount_of(path, among).point: path for path in (*served, SHM, str(request["folder"]))}
    return [path for path in by_point.values() if path != SHM or mount_of(SHM, among).point == SHM]


def _job(request: Mapping[str, Any]) -> str:
    """job.json of the run, as text; it names the model and the data."""
    try:
        return (Path(request["rank_files"]).parent.parent / host_files.JOB).read_text("utf-8", "replace")
    except (OSError, KeyError):
        return ""


class RoomWatch:
    """Looks at the file systems of some folders. statistics: os.statvfs."""

    def __init__(
        self,
        folders: Iterable[str],
        *,
        statistics: Statistics = os.statvfs,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._statistics = statistics
        self._clock = clock
        self._looks: Dict[str, Optional[_Look]] = dict.fromkeys(folders)
        self.troubles: List[Trouble] = []

    def look(self) -> None:
        """Take in what has been answered, and ask anew where that is due. Does not wait."""
        known = mounts()
        self.troubles = []
        for folder, look in self._looks.items():
            if look is None or (look.is_done and self._clock() >= look.begun_at + EVERY_S):
                self._looks[folder] = _Look(folder, self._statistics, self._clock(), before=look)
            now = self._looks[folder]
            trouble = None if now is None else now.trouble(mount_of(folder, known), self._clock())
            if trouble is not None:
                self.troubles.append(trouble)

    def wait(self) -> None:
        """Wait until all have answered, or until it is clear that one does not."""
        for look in self._looks.values():
            if look is not None:
                look.wait(max(0.0, look.begun_at + ANSWER_S - self._clock()))


class _Look:
    """One question to one file system, in a thread of its own."""

    def __init__(self, folder: str, statistics: Statistics, now: float, *, before: "Optional[_Look]") -> None:
        self.begun_at = now
        self._folder = folder
        self._statistics = statistics
        self._found: List[os.statvfs_result] = list(before._found) if before is not None else []
        """The last answer, also of the look before."""
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it was answered."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait so long for the answer."""
        self._thread.join(seconds)

    def trouble(self, mount: Mount, now: float) -> Optional[Trouble]:
        """What is wrong, as far as is known now."""
        if not self.is_done and now >= self.begun_at + ANSWER_S:
            who = (
                f"the file server of {mount.point} ({mount.source})"
                if mount.is_served
                else f"the disk at {mount.point}"
            )
            return Trouble(mount.point, "silent", f"{who} does not answer")
        return next(_troubles(mount, self._found[-1]), None) if self._found else None

    def _ask(self) -> None:
        try:
            self._found.append(self._statistics(self._folder))
        except OSError:  # such as a folder that was removed: somebody else says so
            self._found.clear()


def _troubles(mount: Mount, found: os.statvfs_result) -> Iterator[Trouble]:
    blocks = found.f_bfree if os.getuid() == 0 else found.f_bavail
    free, whole = blocks * found.f_frsize, found.f_blocks * found.f_frsize
    if found.f_blocks and free < FULL_BYTES:
        what = mount.point if mount.point == SHM else f"the disk at {mount.point}"
        yield Trouble(mount.point, "full", f"{what} is full: {_size(free)} of {_size(whole)} are free")
    elif found.f_files and not found.f_ffree:
        yield Trouble(mount.point, "inodes", f"the disk at {mount.point} takes no more files: all its inodes are used")


def _size(number: float) -> str:
    for unit in UNITS[:-1]:
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} {UNITS[-1]}"


def room(asked: Dict[str, Any]) -> Dict[str, Any]:
    """The verb: what is wrong with the file systems of a part, within a few seconds."""
    watch = RoomWatch(folders_of(asked["request"], mounts()))
    watch.look()
    watch.wait()
    watch.look()
    return {"troubles": [trouble.row() for trouble in watch.troubles]}
