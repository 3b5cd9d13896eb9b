"""Reading files that grow, through a transport, by offset."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Any, Protocol


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
        self._offset = 0
        self._rest = b""

    def lines(self) -> list[str]:
        """Lines completed since the last call; a line still being written waits for its end."""
        self._read()
        *whole, self._rest = self._rest.split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]

    def _read(self) -> None:
        """What was read stays, though the host may stop answering in the middle."""
        try:
            while piece := self._transport.read(self._path, offset=self._offset):
                self._offset += len(piece)
                self._rest += piece
        except FileNotFoundError:
            pass


class JsonTail:
    """One growing file of JSON objects, one per line. Lines that are not JSON objects are passed over."""

    def __init__(self, transport: Readable, path: PurePath) -> None:
        self._tail = Tail(transport, path)

    def objects(self) -> list[dict[str, Any]]:
        """Objects completed since the last call."""
        found = []
        for line in self._tail.lines():
            try:
                value = json.loads(line)
            except ValueError:
                continue  # torn by a crash; the next attempt goes on below it
            if isinstance(value, dict):
                found.append(value)
        return found
