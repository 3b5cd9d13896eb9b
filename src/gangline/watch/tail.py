"""Reading files that grow, through a transport, by offset."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, Protocol

from gangline.errors import HostUnreachable
from gangline.runs.versions import damaged

LINE_BYTES = 1 << 20
"""A longer line is cut there: a file without an end must not cost memory without an end."""
AT_ONCE_BYTES = 64 << 20
"""How much of a file of records is read at once; the rest is for the next call."""


class Readable(Protocol):
    """What a tail needs of a Transport."""

    def read(self, path: PurePath, *, offset: int = 0, limit: int = 1 << 22) -> bytes:
        """See `Transport.read`."""
        ...


class Tail:
    """One growing text file on a host. A file that is not there yet is empty."""

    def __init__(self, transport: Readable, path: PurePath) -> None:
        self._transport = transport
        self._path = path
        self.is_behind = False
        """The last call read as much as it might, and there may be more."""
        self._offset = 0
        self._rest = b""

    def lines(self, *, limit_bytes: int | None = None) -> list[str]:
        """Lines completed since the last call; a line still being written waits for its end.

        limit_bytes: about how much is read at most.
        """
        found: list[str] = []
        try:
            for line in self.stream(limit_bytes=limit_bytes):
                found.append(line)  # noqa: PERF402  (kept when the next one fails)
        except HostUnreachable:
            if not found:  # else the next call says so, and what was read is told first
                raise
        return found

    def stream(self, *, limit_bytes: int | None = None) -> Iterator[str]:
        """As `lines`, each as soon as it is read."""
        begun = self._offset
        self.is_behind = False
        while not self.is_behind:
            try:
                piece = self._transport.read(self._path, offset=self._offset)
            except FileNotFoundError:
                return
            except OSError as error:
                raise damaged(str(self._path), error.strerror or str(error)) from error
            if not piece:
                return
            self._offset += len(piece)
            self.is_behind = limit_bytes is not None and self._offset - begun >= limit_bytes
            *whole, self._rest = (self._rest + piece).split(b"\n")
            if len(self._rest) > LINE_BYTES:
                whole, self._rest = [*whole, self._rest], b""
            for line in whole:
                yield line.decode("utf-8", "replace")


class JsonTail:
    """One growing file of JSON objects, one per line. Lines that are not JSON objects are passed over."""

    def __init__(self, transport: Readable, path: PurePath) -> None:
        self._tail = Tail(transport, path)

    @property
    def is_behind(self) -> bool:
        """See `Tail.is_behind`."""
        return self._tail.is_behind

    def objects(self) -> list[dict[str, Any]]:
        """Objects completed since the last call, from at most 64 MiB at once."""
        found: list[dict[str, Any]] = []
        for line in self._tail.lines(limit_bytes=AT_ONCE_BYTES):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue  # torn by a crash; the next attempt goes on below it
            if isinstance(value, dict):
                found.append(value)
        return found
