"""Why a rank leaves: rank-<r>.error.json, written before anything else is tried."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import traceback
from pathlib import Path

from gangline.errors import GanglineError, RunFailed
from gangline.runs.files import sync_folder, write_json

log = logging.getLogger(__name__)

_RESERVE_BYTES = 16 << 10
"""More than an error.json ever has."""


class LastWords:
    """The error that ends this rank. The first counts: what follows it may follow from it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reserve = path.with_suffix(".reserve")
        self._lock = threading.Lock()
        self.said: GanglineError | None = None

    def reserve(self) -> None:
        """Keep room for them on a disk that becomes full; one that is full already has none."""
        with contextlib.suppress(OSError):
            self._reserve.touch(mode=0o600)
            self._reserve.write_bytes(bytes(_RESERVE_BYTES))

    def say(self, error: GanglineError) -> int:
        """Write the error, unless one is there; the exit code of the one that is."""
        with self._lock:
            if self.said is None:
                self.said = error
                self._write(json.dumps(error.to_json(), indent=2).encode())
                log.error("%s", error)
            return self.said.exit_code

    def _write(self, words: bytes) -> None:
        """Into the room that was kept, which is given to nobody else in between: another program may be waiting for it.

        The log comes after that, for it could take the room as well.
        """
        try:
            with self._reserve.open("r+b") as stream:
                stream.write(words)
                stream.truncate()
                stream.flush()
                os.fsync(stream.fileno())
            self._reserve.rename(self._path)
            sync_folder(self._path.parent)
        except OSError:  # there was none to keep
            self._reserve.unlink(missing_ok=True)
            write_json(self._path, json.loads(words))

    def unneeded(self) -> None:
        """This rank leaves well: give the room back."""
        self._reserve.unlink(missing_ok=True)


def unexpected(error: BaseException, rank: int) -> RunFailed:
    """An error that nobody foresaw, in three parts."""
    last = "".join(traceback.format_exception(error)[-3:]).strip()
    return RunFailed(
        f"rank {rank} failed: {type(error).__name__}: {first_line(error)}",
        seen=last[-2000:],
        fix=f"the whole story is in rank-{rank}.log of this attempt",
    )


def first_line(error: BaseException) -> str:
    """Of what it says."""
    return str(error).splitlines()[0][:500] if str(error) else ""
