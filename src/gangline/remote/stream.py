"""The output of a command: whole lines as they come, and a bounded tail of everything."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable

OUTPUT_LIMIT_BYTES = 8 << 20
LINE_LIMIT_CHARACTERS = 1 << 20
BLOCK_BYTES = 1 << 16


class TailBuffer:
    """The last `limit_bytes` of a stream: the end is where results and errors stand."""

    def __init__(self, limit_bytes: int = OUTPUT_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._blocks: deque[bytearray] = deque()
        """None is small but the last: a stream that comes byte by byte costs no more memory than any other."""
        self._size = 0
        self._dropped = 0

    def add(self, piece: bytes) -> None:
        """Take the next piece."""
        if self._blocks and len(self._blocks[-1]) < BLOCK_BYTES:
            self._blocks[-1] += piece
        else:
            self._blocks.append(bytearray(piece))
        self._size += len(piece)
        while self._size - len(self._blocks[0]) >= self._limit_bytes:
            first = self._blocks.popleft()
            self._size -= len(first)
            self._dropped += len(first)

    def text(self) -> str:
        """What is kept, as text; says how much is not."""
        data = bytearray()
        while self._blocks:  # one by one: at no time all of it is held twice
            data += self._blocks.popleft()
        self._blocks.append(data)
        cut = max(0, len(data) - self._limit_bytes)
        dropped = self._dropped + cut
        note = f"[the first {dropped} bytes are left out]\n" if dropped else ""
        return note + str(memoryview(data)[cut:], "utf-8", "replace")


class LineFeed:
    """Cuts a stream into lines and hands each one on at once; an endless line is cut at 1 Mi characters."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest: list[str] = []
        """The line that has no end yet, in pieces: joining it for every piece would cost the square of its length."""
        self._rest_characters = 0

    def add(self, piece: bytes) -> None:
        """Take the next piece."""
        *lines, rest = self._decoder.decode(piece).split("\n")
        for line in lines:
            self._keep(line)
            self._on_line(self._take().removesuffix("\r"))
        self._keep(rest)
        if self._rest_characters > LINE_LIMIT_CHARACTERS:
            self.end()

    def end(self) -> None:
        """Hand on a last line without an end."""
        if self._rest_characters:
            self._on_line(self._take())

    def _keep(self, piece: str) -> None:
        if piece:
            self._rest.append(piece)
            self._rest_characters += len(piece)

    def _take(self) -> str:
        line = "".join(self._rest)
        self._rest.clear()
        self._rest_characters = 0
        return line
