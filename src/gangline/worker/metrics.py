"""The figures and events of a run as JSON lines, written by rank 0."""

from __future__ import annotations

import errno
import json
import math
import os
from collections import deque
from pathlib import Path
from typing import Any

from gangline.runs.events import now_iso

MOST_WAITING = 4096
"""Lines that are kept in memory while a disk is full."""


class Lines:
    """A file of JSON lines, each whole: one write call with O_APPEND.

    What finds no room on a full disk waits, and goes before the next line; of very many the last ones.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._stream = path.open("ab+", buffering=0)
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._is_torn = False
        self._close_torn_line()

    def write(self, kind: str, **values: Any) -> None:
        """Append one line with its kind and the time. Raises OSError where it has to wait."""
        line = {"kind": kind, "time": now_iso(), **values}
        self._waiting.append((json.dumps(_finite(line)) + "\n").encode())
        self.flush()

    def flush(self) -> None:
        """Append what waits. Raises OSError where there is still no room."""
        while self._waiting:
            line = (b"\n" if self._is_torn else b"") + self._waiting[0]
            written = self._stream.write(line) or 0
            self._is_torn = written < len(line) and (written > 0 or self._is_torn)
            if written >= len(line) - 1:  # all of it, but perhaps for its end
                self._waiting.popleft()
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def _close_torn_line(self) -> None:
        """A full disk may have cut the last line of an attempt before; ours must not be glued to it."""
        if self._stream.seek(0, 2) > 0:
            self._stream.seek(-1, 2)
            if self._stream.read(1) != b"\n":
                self._stream.write(b"\n")

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _finite(value: Any) -> Any:
    """JSON has no NaN: say it in words, so that any reader can parse the line and nobody overlooks it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
