"""Frames between the controller and a host: eight bytes of lengths, a JSON object, then bytes.

The other end of this is gangline/remote/wire.py: the two share no code, because a host may have another Python, and
each refuses what the other should never send.
"""

from __future__ import annotations

import json
import os
import select
import struct
import threading
from typing import Any

MAGIC = b"\x00\x01gangline channel 1\x01\x00\n"
"""What we say first: everything before it is noise of the login."""
LENGTHS = struct.Struct("!II")
MAX_JSON_BYTES = 16 << 20
MAX_DATA_BYTES = 1 << 18
WINDOW_BYTES = 1 << 20
"""How much of one request's data may be under way without having been taken; in both directions."""


class Broken(Exception):
    """The other end is gone, silent, or does not speak our protocol."""


class Reader:
    """Frames from a descriptor."""

    def __init__(self, descriptor: int, *, silence_s: float) -> None:
        self._descriptor = descriptor
        self._silence_s = silence_s
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def frame(self) -> tuple[dict[str, Any], bytes]:
        """The next frame; raises Broken at the end, and after `silence_s` without a word."""
        json_length, data_length = LENGTHS.unpack(self._exactly(LENGTHS.size))
        if json_length > MAX_JSON_BYTES or data_length > MAX_DATA_BYTES:
            raise Broken("a frame that is too large")
        try:
            header = json.loads(self._exactly(json_length))
        except (ValueError, RecursionError):
            raise Broken("a header that is not JSON") from None
        if not isinstance(header, dict) or not isinstance(header.get("id"), int):
            raise Broken("a header without an id")
        return header, self._exactly(data_length)

    def _exactly(self, length: int) -> bytes:
        pieces = []
        while length:
            if not self._poll.poll(self._silence_s * 1000):
                raise Broken("silence")
            try:
                piece = os.read(self._descriptor, min(length, 1 << 16))
            except BlockingIOError:
                continue
            if not piece:
                raise Broken("the end")
            pieces.append(piece)
            length -= len(piece)
        return b"".join(pieces)


class Writer:
    """Frames to a descriptor, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._gone = False
        os.set_blocking(descriptor, False)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def frame(self, header: dict[str, Any], data: bytes = b"") -> None:
        """Write one frame; where nobody listens any more, nothing happens: the reader will notice."""
        words = json.dumps(header).encode()
        self.raw(LENGTHS.pack(len(words), len(data)) + words + data)

    def raw(self, data: bytes) -> None:
        """Write bytes as they are."""
        view = memoryview(data)
        with self._lock:
            while view and not self._gone:
                try:
                    view = view[os.write(self._descriptor, view) :]
                except BlockingIOError:
                    self._poll.poll(100)
                except OSError:
                    self._gone = True

    def give_up(self) -> None:
        """Nobody listens any more: whoever waits to write goes on with other things."""
        self._gone = True
