"""Frames between the controller and a host: eight bytes of lengths, a JSON object, then bytes, then a newline.

The newline is for Slurm, which hands on only whole lines of what a program on a node prints.

The other end of this is gangline.transport.channel. Each end refuses frames that the other one should never send.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import struct
import threading
from typing import Any, Iterator

MAGIC = b"\x00\x01gangline channel 2\x01\x00\n"
"""What we say first: everything before it is noise of the login."""
LENGTHS = struct.Struct("!II")
END = b"\n"
MAX_JSON_BYTES = 16 << 20
MAX_DATA_BYTES = 1 << 18
WINDOW_BYTES = 1 << 20
"""How much of one request's data may be under way without having been taken; in both directions."""


NAMES_BYTES = 8 << 20
"""The longest list of names; a longer one is refused, not cut."""


def frame(header: dict[str, Any], data: bytes = b"") -> bytes:
    """One frame as bytes."""
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), len(data)) + text + data + END


def parsed_header(text: bytes) -> dict[str, Any]:
    """The header of a frame; raises ValueError that says what it is instead."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("a header that is not JSON") from None
    if not isinstance(header, dict) or type(header.get("id")) is not int:
        raise ValueError("a header without an id")
    return header


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
            header = parsed_header(self._exactly(json_length))
        except ValueError as error:
            raise Broken(str(error)) from None
        data = self._exactly(data_length)
        if self._exactly(len(END)) != END:
            raise Broken("a frame without an end")
        return header, data

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
        self.raw(frame(header, data))

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


# One request that the channel works on: what came in for it, and how much may go out.


class ServedRequest:
    """One request; its thread takes from it, the channel's reader puts in."""

    def __init__(self, number: int, writer: Writer) -> None:
        self.number = number
        self.input_ended = False
        self.cancelled = False
        self._writer = writer
        self._changed = threading.Condition()
        self._inbox: list[bytes] = []
        self._inbox_bytes = 0
        self._taken_bytes = 0
        self._credit = WINDOW_BYTES
        self._wake: tuple[int, int] | None = None

    @property
    def credit(self) -> int:
        """How many bytes may be sent now."""
        return self._credit

    def take_news(self, header: dict[str, Any], data: bytes) -> None:
        """What a later frame says about this request; raises Broken for more than the window allows."""
        with self._changed:
            if "in" in header:
                self._inbox_bytes += len(data)
                if self._inbox_bytes > WINDOW_BYTES:
                    raise Broken("more than the window")
                if data:
                    self._inbox.append(data)
                self.input_ended = self.input_ended or not header["in"]
            self._credit += int(header.get("ack", 0))
            self.cancelled = self.cancelled or "cancel" in header
            self._changed.notify_all()
            self._poke()

    def cancel(self) -> None:
        """Ask whoever works on it to leave."""
        self.take_news({"cancel": True}, b"")

    def inbox(self) -> list[bytes]:
        """Take what came in."""
        with self._changed:
            pieces, self._inbox = self._inbox, []
            return pieces

    def input(self) -> Iterator[bytes]:
        """What comes in, piece by piece, to its end; raises Broken once cancelled."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self.input_ended or self.cancelled)
                if self.cancelled:
                    raise Broken("cancelled")
                pieces, ended = self.inbox(), self.input_ended
            for piece in pieces:
                yield piece
                self.acknowledge(len(piece))
            if ended:
                return

    @property
    def has_inbox(self) -> bool:
        """Whether something came in that was not taken."""
        return bool(self._inbox)

    def acknowledge(self, num_bytes: int) -> None:
        """Say that input was used up, so that more may come."""
        with self._changed:
            self._inbox_bytes -= num_bytes
            self._taken_bytes += num_bytes
            if self._taken_bytes < WINDOW_BYTES // 4:
                return
            taken, self._taken_bytes = self._taken_bytes, 0
        self._writer.frame({"id": self.number, "ack": taken})

    def send(self, data: bytes) -> None:
        """Send data in pieces, as fast as the window allows; raises Broken once cancelled."""
        view = memoryview(data)
        while view:
            with self._changed:
                self._changed.wait_for(lambda: self._credit > 0 or self.cancelled)
                if self.cancelled:
                    raise Broken("cancelled")
                size = min(len(view), self._credit, MAX_DATA_BYTES)
                self._credit -= size
            self._writer.frame({"id": self.number, "data": True}, bytes(view[:size]))
            view = view[size:]

    def end(self, answer: dict[str, Any], data: bytes = b"") -> None:
        """Say the last word."""
        self._writer.frame(dict(answer, id=self.number, end=True), data)

    def wake_descriptor(self) -> int:
        """A descriptor that becomes readable when something new comes, for who waits for other descriptors too."""
        with self._changed:
            if self._wake is None:
                self._wake = os.pipe()
                for end in self._wake:
                    os.set_blocking(end, False)
            return self._wake[0]

    def forget_wake(self) -> None:
        """Empty the wake descriptor."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_descriptor(), 4096)

    def _poke(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(BlockingIOError):  # full: it is awake anyway
                os.write(self._wake[1], b"x")

    def close(self) -> None:
        """Let go of its descriptors."""
        with self._changed:
            wake, self._wake = self._wake, None
        for end in wake or ():
            os.close(end)
