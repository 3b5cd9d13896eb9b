"""Folders of our own for one connection each: the key that is trusted, and the socket of ssh's master."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

from gangline.remote.once import once
from gangline.remote.ssh_options import SAFE_PATH, ssh_version

KNOWN_HOSTS = "known_hosts"
PREFIX = "gangline-ssh-"
SOCKET_PATH_BYTES = 80
"""sun_path holds 104 bytes on some systems, and ssh adds 17 while it binds."""
YOUNG_S = 60.0
"""A folder may be without its lock for a moment when it is made."""


class PrivateFolder:
    """One folder; `close` removes it, at the latest when Python ends, and after a kill -9 the next of us does."""

    def __init__(self) -> None:
        base = _base()
        _sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def known_hosts(self, name: str, key: tuple[str, str]) -> list[str]:
        """Options that trust this key (type and base64) for this host, and nothing else."""
        path = self.path / KNOWN_HOSTS
        path.write_text(f"{name} {key[0]} {key[1]}\n", encoding="ascii")
        options = [f"UserKnownHostsFile={path}", f"GlobalKnownHostsFile={path}", f"HostKeyAlias={name}"]
        if ssh_version() >= (8, 5):
            options.append("KnownHostsCommand=none")
        return options

    @property
    def control_path(self) -> Path | None:
        """Where the master listens; None where no folder has a path short enough for a socket."""
        path = self.path / "ctl"
        return path if len(os.fsencode(path)) <= SOCKET_PATH_BYTES else None

    def close(self) -> None:
        """Remove the folder."""
        self._remove()


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # a process that was forked ends without it
        shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _base() -> Path:
    """The temp folder, or /tmp where that has a long path or one that ssh would have to be told in quotes."""
    folder = tempfile.gettempdir()
    short = SAFE_PATH.fullmatch(folder) and len(folder) < 60
    return Path(folder if short else "/tmp")  # noqa: S108  (mkdtemp makes a private folder in it)


@once
def _sweep(base: Path) -> None:
    """Remove what a process of ours that was killed has left: nobody holds its lock."""
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < YOUNG_S:
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
