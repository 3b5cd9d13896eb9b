"""Leases that all users of a machine see: whose run has a GPU, a CPU slot or a port. No user needs root for them.

`supervise.leases` keeps the runs of one user apart, in folders of that user; this module keeps users apart. A lease is
a file of its holder in a folder of root's in which everybody may make files and nobody may remove those of others.
Users share nothing else, so none of them can be the first to make a folder or a file that the others depend on.

- The name is `gangline-lease.<slot>.<random>`, and the file is made anew (O_EXCL): nothing of another user is ever
  opened for writing, no link is followed, and fs.protected_regular has nothing to refuse.
- Whose it is, the kernel says (the owner of the file). The text in it only adds the name of the run.
- It has mode 0600 until it is locked (flock) and written; then 0644, so that others may try the lock.
- It is held while the lock is: what the host agent starts inherits that. torchrun closes it in its ranks, so it is also
  held while a process that it names (pid, start in clock ticks after boot) runs as the owner of the file; and until
  the moment that it names, at most LIMIT_S after it was written: that is a port for ranks which still import torch.
- No other file counts, so nothing goes stale. Its owner's next claim, or the end of the run, deletes it.

Two users who claim at the same moment both look after they have made their leases known, so at least one sees the
other, takes its own back, and tries again a random moment later.

A user can make leases without a run, and lock the file of a lease whose holder has ended: docs/security.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import random
import re
import secrets
import stat
import time
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from gangline.agent.host_facts.paths import nobodies
from gangline.agent.host_files import as_record, read_record, read_text
from gangline.agent.supervise import processes

PLACES = ("/run/lock", "/dev/shm", "/tmp")  # noqa: S108  (nothing in them is trusted)
"""A lease is made in the first that takes it, and looked for in all. Some distributions let no user into the first."""
PREFIX = "gangline-lease."
NAME = re.compile(r"gangline-lease\.([A-Za-z0-9_-]{1,80})\.[0-9a-f]{16}")
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What is shown as the name of a run: text of another user could steer a terminal."""
TEXT_BYTES = 4096
MOST = 1024
"""Files of one user that are looked at."""
LIMIT_S = 120.0
SETTLED_S = 1.0
"""A lease that is older was not made at the same moment as ours."""
MEET_S = 3.0
PAUSE_S = (0.005, 0.1)
UNFINISHED_S = 60.0
"""A file that is not locked yet after this time never will be."""


class Mine(NamedTuple):
    """A lease of this process."""

    path: Path
    descriptor: int


class Lease(NamedTuple):
    """A lease that is held, by whichever user."""

    slot: str
    uid: int
    run: str
    attempt: int
    host: str
    """As the cluster file of its user calls this machine."""
    since: float
    changed: float
    """When the file was last written, as the kernel says."""
    pid: Optional[int]
    """A process that holds it; None: none that this user may see."""
    pid_uid: Optional[int]
    """Whose that process is."""

    @property
    def is_own(self) -> bool:
        """Whether it is this user's."""
        return self.uid == os.getuid()

    @property
    def user(self) -> str:
        """The login name of its owner."""
        return login(self.uid)

    @property
    def whose(self) -> str:
        """The user and the run."""
        return f"{self.user}: {self.run or 'no run is named'}"

    @property
    def seen(self) -> str:
        """Since when, and which process holds it."""
        said = "since " + time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        if self.pid is None:
            return f"{said}, by a process that cannot be seen from here"
        if self.pid_uid == self.uid:
            return f"{said} (process {self.pid})"
        return f"{said}; its file is locked by process {self.pid} of {login(self.pid_uid)}"

    def to_json(self) -> Dict[str, Any]:
        """As a record for the controller."""
        return {"slot": self.slot, "user": self.user, "run": self.run, "seen": self.seen}


def login(uid: Optional[int]) -> str:
    """What a user is called."""
    try:
        return pwd.getpwuid(-1 if uid is None else uid).pw_name
    except (KeyError, OverflowError):
        return "another user" if uid is None else f"user {uid}"


def take(
    slots: Sequence[str], record: Mapping[str, Any], *, against: Callable[[], List[Lease]]
) -> Tuple[List[Mine], List[Lease]]:
    """Leases for these slots; or none, and those that are in the way: `against` looks for them."""
    deadline = time.monotonic() + MEET_S
    while True:
        mine = [lease for lease in (publish(slot, record) for slot in slots) if lease is not None]
        found = against()
        if not found:
            return mine, []
        for lease in mine:
            withdraw(lease)
        now = time.time()
        if any(now - lease.changed > SETTLED_S for lease in found) or time.monotonic() > deadline:
            return [], found
        time.sleep(random.uniform(*PAUSE_S))


def publish(slot: str, record: Mapping[str, Any]) -> Optional[Mine]:
    """Make a lease known; None where no folder takes it: then users of this machine do not see each other's."""
    for place in _places():
        with contextlib.suppress(OSError):  # full, or mounted read-only
            return _publish_in(place, slot, record)
    return None


def _publish_in(place: Path, slot: str, record: Mapping[str, Any]) -> Mine:
    path = place / f"{PREFIX}{slot}.{secrets.token_hex(8)}"
    mine = Mine(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    try:
        fcntl.flock(mine.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write(mine, record)
        os.fchmod(mine.descriptor, 0o644)
    except OSError:
        withdraw(mine)
        raise
    return mine


def write(mine: Mine, record: Mapping[str, Any]) -> None:
    """Say something else in a lease; raises OSError."""
    data = json.dumps(record).encode()
    os.pwrite(mine.descriptor, data, 0)
    os.ftruncate(mine.descriptor, len(data))


def renewed(mine: Mine, record: Mapping[str, Any]) -> Mine:
    """The lease, for longer: folders of temporary files are cleared of what is old, and a service manager may clear
    /dev/shm of what is a user's who has logged out. It is made anew if its file is gone.
    """
    with contextlib.suppress(OSError):
        if os.fstat(mine.descriptor).st_nlink:
            os.utime(mine.descriptor)
            return mine
    fresh = publish(mine.path.name.split(".")[1], record)
    if fresh is None:
        return mine
    os.close(mine.descriptor)
    return fresh


def withdraw(mine: Mine) -> None:
    """End a lease, whoever has inherited it."""
    with contextlib.suppress(OSError):
        mine.path.unlink()
    os.close(mine.descriptor)


def held(kind: str = "") -> List[Lease]:
    """Leases of all users for slots whose names begin so. Changes nothing."""
    return [lease for path, status in _files() if (lease := _look(path, status, kind)) is not None]


def of_others(kind: str = "") -> List[Lease]:
    """Those of other users."""
    return [lease for lease in held(kind) if not lease.is_own]


def rows_of_others(_request: Dict[str, Any]) -> List[Dict[str, Any]]:
    """GPUs and CPU slots that other users of this machine have: a section of `facts`."""
    return [lease.to_json() for lease in of_others() if not lease.slot.startswith("port-")]


def sweep() -> None:
    """Delete files of this user's leases that have ended."""
    for path, status in _files():
        is_old = time.time() - status.st_ctime > UNFINISHED_S
        if status.st_uid == os.getuid() and (is_old or _is_published(status)) and _look(path, status, "") is None:
            with contextlib.suppress(OSError):
                path.unlink()


def supersede(mine: Mine) -> None:
    """Delete what this user's look for a free port left for the same slot: the slot has a holder now."""
    for path, status in _files():
        is_same = path != mine.path and path.name.split(".")[1] == mine.path.name.split(".")[1]
        if is_same and status.st_uid == os.getuid() and "until" in read_record(path):
            with contextlib.suppress(OSError):
                path.unlink()


def _places() -> Iterator[Path]:
    """Folders in which everybody may make files, and nobody but root remove those of others."""
    for place in map(Path, PLACES):
        with contextlib.suppress(OSError):
            status = place.lstat()
            is_everybodys = stat.S_ISDIR(status.st_mode) and status.st_mode & 0o1002 == 0o1002
            if is_everybodys and status.st_uid in {0, os.getuid(), *nobodies()}:
                yield place


def _files() -> Iterator[Tuple[Path, os.stat_result]]:
    """All that may be leases; a user who fills the folders hides only that user's own."""
    seen: Counter[int] = Counter()
    for place in _places():
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(place)):  # noqa: PTH208  (a pathlib object for each file of /tmp is slow)
                if not name.startswith(PREFIX) or not NAME.fullmatch(name):
                    continue
                with contextlib.suppress(OSError):
                    status = (place / name).lstat()
                    seen[status.st_uid] += 1
                    if stat.S_ISREG(status.st_mode) and seen[status.st_uid] <= MOST:
                        yield place / name, status


def _look(path: Path, before: os.stat_result, kind: str) -> Optional[Lease]:
    """The lease of a file; None if it is not held, not for such a slot, or another file by now."""
    match = NAME.fullmatch(path.name)
    if match is None or not match.group(1).startswith(kind) or not _is_published(before):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (before.st_dev, before.st_ino):
            return None
        record = _record(os.pread(descriptor, TEXT_BYTES, 0))
        holder = _named_process(record, status.st_uid)
        if not _is_locked(descriptor):
            until = min(_number(record.get("until"), 0.0), status.st_ctime + LIMIT_S)
            if holder is None and time.time() > until:
                return None
        return _lease(match.group(1), status, record, holder or _locker(status))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _record(data: bytes) -> Dict[str, Any]:
    """What a lease says; {} for what is no record. Another user's text may nest too deep for the reader."""
    try:
        return as_record(data)
    except RecursionError:
        return {}


def _lease(slot: str, status: os.stat_result, record: Dict[str, Any], holder: Optional[Tuple[int, int]]) -> Lease:
    run, host = (
        value if RUN.fullmatch(value) else "" for value in map(str, (record.get("run", ""), record.get("host", "")))
    )
    pid, uid = holder or (None, None)
    since = min(_number(record.get("since"), status.st_mtime), status.st_ctime)
    attempt = int(_number(record.get("attempt"), 0))
    return Lease(slot, status.st_uid, run, attempt, host, since, status.st_ctime, pid, uid)


def _is_published(status: os.stat_result) -> bool:
    return status.st_mode & 0o777 == 0o644


def _is_locked(descriptor: int) -> bool:
    """Whether a process has the lock of a lease. Those who try it at the same moment do not see each other."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _number(value: Any, otherwise: float) -> float:
    """A moment or a count of another user's text."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12
    return float(value) if is_number else otherwise


def _named_process(record: Mapping[str, Any], uid: int) -> Optional[Tuple[int, int]]:
    """The first process that a lease names and that runs as its owner."""
    named = record.get("processes")
    for each in named[:MOST] if isinstance(named, list) else []:
        is_pair = isinstance(each, list) and len(each) == 2 and all(type(part) is int for part in each)
        if is_pair and processes.is_alive(*each) and _uid_of(each[0]) == uid:
            return each[0], uid
    return None


def _locker(status: os.stat_result) -> Optional[Tuple[int, int]]:
    """The process that took the lock of a file, and whose it is, as /proc/locks says."""
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in (read_text("/proc/locks") or "").splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == place and fields[4].isdigit():
            uid = _uid_of(int(fields[4]))
            if uid is not None and int(fields[4]) != os.getpid():
                return int(fields[4]), uid
    return None


def _uid_of(pid: int) -> Optional[int]:
    for line in (read_text(f"/proc/{pid}/status") or "").splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    return None
