"""Hashes of files, remembered by path, size and time of change, so that a second start need not read them again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gangline.runs.files import file_digest, read_json, write_json

# A file that changed this recently may change again without a new time of change.
_SETTLED_NS = 2_000_000_000


class DigestCache:
    """The remembered hashes of one root, in `<root>/data/digests.json`. `beat` is called before every file."""

    def __init__(self, path: Path, *, beat: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._beat = beat
        self._entries = _read(path)
        self._changed = False

    def digest(self, path: Path) -> str:
        """blake2b-256 of a file's content in hexadecimal; raises OSError."""
        status = path.stat()
        stamp = [status.st_size, status.st_mtime_ns]
        known = self._entries.get(str(path))
        if known and known[:2] == stamp:
            return str(known[2])
        self._beat()
        found = file_digest(path)
        if time.time_ns() - status.st_mtime_ns > _SETTLED_NS:
            self._entries[str(path)] = [*stamp, found]
            self._changed = True
        return found

    def save(self) -> None:
        """Write what was learned; the entries of files that are gone go with them."""
        if not self._changed:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        entries = {**_read(self._path), **self._entries}
        write_json(self._path, {path: entry for path, entry in entries.items() if Path(path).exists()})
        self._changed = False


def combine(value: Any) -> str:
    """One hash (blake2b-128, hexadecimal) of plain data, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _read(path: Path) -> dict[str, list[Any]]:
    try:
        entries = read_json(path)
    except (OSError, ValueError):
        return {}
    return {str(name): entry for name, entry in entries.items() if isinstance(entry, list) and len(entry) == 3}
