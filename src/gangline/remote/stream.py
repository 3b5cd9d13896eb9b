"""The output of a command: whole lines as they come, and a bounded tail of everything."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable

OUTPUT_LIMIT_BYTES = 8 << 20
LINE_LIMIT_CHARACTERS = 1 << 20


class TailBuffer:
    """The last `limit_bytes` of a stream: the end is where results and errors stand."""

    def __init__(self, limit_bytes: int = OUTPUT_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._dropped = 0

    def add(self, piece: bytes) -> None:
        """Take the next piece."""
        self._pieces.append(piece)
        self._size += len(piece)
        while self._size - len(self._pieces[0]) >= self._limit_bytes:
            first = self._pieces.popleft()
            self._size -= len(first)
            self._dropped += len(first)

    def text(self) -> str:
        """What is kept, as text; says how much is not."""
        data = b"".join(self._pieces)
        cut = max(0, len(data) - self._limit_bytes)
        dropped = self._dropped + cut
        note = f"[the first {dropped} bytes are left out]\n" if dropped else ""
        return note + data[cut:].decode("utf-8", "replace")


class LineFeed:
    """Cuts a stream into lines and hands each one on at once; an endless line is cut at 1 Mi characters."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def add(self, piece: bytes) -> None:
        """Take the next piece."""
        lines = (self._rest + self._decoder.decode(piece)).split("\n")
        self._rest = lines.pop()
        for line in lines:
            self._on_line(line.removesuffix("\r"))
        if len(self._rest) > LINE_LIMIT_CHARACTERS:
            self.end()

    def end(self) -> None:
        """Hand on a last line without an end."""
        if self._rest:
            self._on_line(self._rest)
            self._rest = ""
