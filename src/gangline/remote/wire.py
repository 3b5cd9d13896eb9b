"""Frames between us and a host, and how much of what a host says is believed.

The other end of this is gangline/agent/wire.py. A host may be broken or lie: every length has a cap, and what does not
fit raises `Nonsense` before it is read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

MAGIC = b"\x00\x01gangline channel 1\x01\x00\n"
"""What the agent says first: everything before it is noise of the login."""
LENGTHS = struct.Struct("!II")
MAX_NOISE_BYTES = 1 << 16
MAX_JSON_BYTES = 1 << 16
"""Of a header that a host sends: names, data and output are never in it."""
MAX_DATA_BYTES = 1 << 18
WINDOW_BYTES = 1 << 20
"""How much of one request's data may be under way without having been taken; in both directions."""

NAMES_BYTES = 8 << 20
"""The longest list of names."""


class Nonsense(Exception):
    """What came is not our protocol; the text says why."""


def frame(header: dict[str, Any], data: bytes = b"") -> bytes:
    """One frame as bytes."""
    words = json.dumps(header).encode()
    return LENGTHS.pack(len(words), len(data)) + words + data


class FrameReader:
    """Finds the start behind the noise, then cuts bytes into frames; holds one frame at most."""

    def __init__(self) -> None:
        self.started = False
        self.noise = bytearray()
        """What came before the start."""
        self._buffer = bytearray()

    def add(self, piece: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Take the next bytes; the frames that they complete. Raises Nonsense."""
        if not self.started:
            piece = self._search(piece)
        self._buffer += piece
        while (lengths := self._lengths()) is not None:
            json_length, data_length = lengths
            data_at = LENGTHS.size + json_length
            if len(self._buffer) < data_at + data_length:
                return
            header = _header(bytes(self._buffer[LENGTHS.size : data_at]))
            data = bytes(self._buffer[data_at : data_at + data_length])
            del self._buffer[: data_at + data_length]
            yield header, data

    def _search(self, piece: bytes) -> bytes:
        self.noise += piece
        at = self.noise.find(MAGIC)
        if at < 0 and len(self.noise) > MAX_NOISE_BYTES:
            raise Nonsense(f"{len(self.noise)} bytes of other text, and no end of it")
        if at < 0:
            return b""
        rest = bytes(self.noise[at + len(MAGIC) :])
        del self.noise[at:]
        self.started = True
        return rest

    def _lengths(self) -> tuple[int, int] | None:
        if len(self._buffer) < LENGTHS.size:
            return None
        json_length, data_length = LENGTHS.unpack_from(self._buffer)
        if json_length > MAX_JSON_BYTES or data_length > MAX_DATA_BYTES:
            raise Nonsense(f"a frame of {json_length} + {data_length} bytes")
        return json_length, data_length


def _header(words: bytes) -> dict[str, Any]:
    try:
        header = json.loads(words)
    except (ValueError, RecursionError):
        raise Nonsense("a header that is not JSON") from None
    if not isinstance(header, dict) or type(header.get("id")) is not int:
        raise Nonsense("a header without an id")
    return header
