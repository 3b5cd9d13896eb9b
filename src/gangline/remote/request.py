"""One request to an agent that is under way: its caller waits, the channel's reader delivers."""

from __future__ import annotations

import threading
import time
from typing import Any

from gangline.remote.wire import WINDOW_BYTES, Nonsense


class Lost(Exception):
    """The connection is gone; the text says how it ended, as far as we know."""


class Request:
    """What came for one request, and how much may still be sent for it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answer: dict[str, Any] | None = None
        self.last_data = b""
        """Data of the answer itself."""
        self._changed = threading.Condition()
        self._pieces: list[bytes] = []
        self._lost = False
        self._credit = WINDOW_BYTES
        self._untaken_bytes = 0
        self._unsaid_bytes = 0

    def deliver(self, header: dict[str, Any], data: bytes) -> None:
        """Take a frame; raises Nonsense for what the agent would not send."""
        with self._changed:
            if self.answer is not None:
                raise Nonsense("more after the end of an answer")
            if header.get("end"):
                self.answer, self.last_data = header, data
            elif header.get("data"):
                self._untaken_bytes += len(data)
                if not data or self._untaken_bytes > WINDOW_BYTES:
                    raise Nonsense("data that nobody made room for")
                self._pieces.append(data)
            else:
                self._credit += _size(header.get("ack"))
                if self._credit > WINDOW_BYTES:
                    raise Nonsense("room for more than was sent")
            self._changed.notify_all()

    def lose(self) -> None:
        """The connection is gone."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def wait(self, deadline: float, *, sending: bool) -> list[bytes]:
        """Wait for data, the answer or, when `sending`, room to send; the data that came.

        Raises TimeoutError at `deadline` (monotonic), and Lost.
        """
        with self._changed:
            while not (self._pieces or self.answer is not None or (sending and self._credit > 0)):
                if self._lost:
                    raise Lost
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise TimeoutError
            pieces, self._pieces = self._pieces, []
            return pieces

    @property
    def has_pieces(self) -> bool:
        """Whether data came that was not taken."""
        return bool(self._pieces)

    def room(self) -> int:
        """How much may be sent now; 0 also when there is something to take first."""
        with self._changed:
            return 0 if self._pieces or self.answer is not None or self._lost else self._credit

    def sent(self, num_bytes: int) -> None:
        """Note that data was sent."""
        with self._changed:
            self._credit -= num_bytes

    def taken(self, num_bytes: int) -> int:
        """Note that data was used; how many bytes to tell the agent about, 0: later."""
        with self._changed:
            self._untaken_bytes -= num_bytes
            self._unsaid_bytes += num_bytes
            if self._unsaid_bytes < WINDOW_BYTES // 4:
                return 0
            said, self._unsaid_bytes = self._unsaid_bytes, 0
            return said


def _size(value: object) -> int:
    if type(value) is not int or value < 0:
        raise Nonsense("a frame that says nothing")
    return value
