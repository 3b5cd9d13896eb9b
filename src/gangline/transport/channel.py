"""Our end of a connection to the agent: many requests at once over the pipes of one process."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from gangline.agent.rpc.wire import END, LENGTHS, MAGIC, MAX_DATA_BYTES, WINDOW_BYTES, frame, parsed_header

# Frames between us and a host, and how much of what a host says is believed.


MAX_NOISE_BYTES = 1 << 16
MAX_JSON_BYTES = 1 << 16
"""The longest header that is taken from a host: names, data and output are never in it."""


class Nonsense(Exception):
    """What came is not our protocol; the text says why."""


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
            end_at = data_at + data_length
            if len(self._buffer) < end_at + len(END):
                return
            try:
                header = parsed_header(bytes(self._buffer[LENGTHS.size : data_at]))
            except ValueError as error:
                raise Nonsense(str(error)) from None
            data = bytes(self._buffer[data_at:end_at])
            if not self._buffer.startswith(END, end_at):
                raise Nonsense("a frame without an end")
            del self._buffer[: end_at + len(END)]
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


# One request to an agent that is under way: its caller waits, the channel's reader delivers.


class Lost(Exception):
    """The connection is gone; the text says how it ended, as far as we know."""


class PendingRequest:
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


KEEPALIVE_S = 10.0
"""How often the agent hears of us at least; it leaves after a minute of silence."""
WRITE_S = 30.0
"""How long a pipe may take nothing: ssh itself gives a dead host up after 15 s."""
CANCEL_S = 10.0
CLOSE_S = 1.0
END_S = 5.0
STDERR_BYTES = 1 << 14
STRAY_BYTES = 64 << 20
"""How much may come for requests that have ended."""
PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What the agent says of its host."""

    version: str
    python: str
    executable: str
    hostname: str
    home: str
    uid: int
    user: str
    boot_id: str


class AgentChannel:
    """The agent at the other end of a process's pipes. Owns the process; it leads a session of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.hello: Hello | None = None
        self.ending = ""
        """Why it is over."""
        self.stderr = bytearray()
        """The last words of the process."""
        self.frames = FrameReader()
        self._process = process
        self._requests: dict[int, PendingRequest] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._greeted = threading.Event()
        self._over = False
        self._stray_bytes = 0
        self._spoken_at = time.monotonic()
        assert process.stdin is not None
        self._stdin = process.stdin.fileno()
        os.set_blocking(self._stdin, False)
        self._reader = threading.Thread(target=self._read, name="gangline channel", daemon=True)
        self._reader.start()

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return not self._over

    @property
    def returncode(self) -> int | None:
        """The process's; None while it runs."""
        return self._process.returncode

    def greet(self, first_words: bytes, timeout_s: float) -> Hello:
        """Say the first words and wait for the agent's; each may take `timeout_s`. Raises Lost."""
        with contextlib.suppress(Lost):
            self._write(first_words, within_s=timeout_s)
        if not self._greeted.wait(timeout_s):
            self.end(f"no answer within {timeout_s:g} s")
        if self.hello is None:
            raise self._lost()
        return self.hello

    def ask(
        self,
        body: dict[str, Any],
        *,
        timeout_s: float,
        data: bytes | Iterator[bytes] = b"",
        on_piece: Callable[[bytes], None] | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """Ask, and wait for the answer and its own data. `data` goes there, `on_piece` sees what comes before.

        Raises Lost, and TimeoutError if there is no answer within `timeout_s`; the agent ends what it does then.
        """
        deadline = time.monotonic() + timeout_s
        request = self._begin()
        try:
            feed = self._open(request, body, data)
            while True:
                feed = self._feed(request, feed)
                for piece in request.wait(deadline, sending=feed is not None):
                    if on_piece:
                        on_piece(piece)
                    if said := request.taken(len(piece)):
                        self._write(frame({"id": request.number, "ack": said}))
                if request.answer is not None and not request.has_pieces:
                    return request.answer, request.last_data
                if time.monotonic() > deadline:  # it talks, but never ends
                    raise TimeoutError
        except Lost:
            raise self._lost() from None
        except BaseException:  # Ctrl-C, the time limit, or on_piece
            self._cancel(request)
            raise
        finally:
            with self._lock:
                self._requests.pop(request.number, None)

    def _begin(self) -> PendingRequest:
        with self._lock:
            if self._over:
                raise self._lost()
            request = PendingRequest(next(self._numbers))
            self._requests[request.number] = request
            return request

    def _open(
        self, request: PendingRequest, body: dict[str, Any], data: bytes | Iterator[bytes]
    ) -> Iterator[bytes] | None:
        """Send the request, with its data if that is short; what is left to send."""
        if isinstance(data, bytes) and len(data) <= PIECE_BYTES:
            request.sent(len(data))
            self._write(frame({"id": request.number, **body, "in": False}, data))
            return None
        self._write(frame({"id": request.number, **body}))
        return _pieces(data) if isinstance(data, bytes) else data

    def _feed(self, request: PendingRequest, feed: Iterator[bytes] | None) -> Iterator[bytes] | None:
        """Send what there is room for; what is left, None once all of it was sent."""
        while feed is not None and (room := request.room()) > 0:
            piece = next(feed, None)
            if piece is None:
                self._write(frame({"id": request.number, "in": False}))
                return None
            size = min(len(piece), room, MAX_DATA_BYTES)
            request.sent(size)
            self._write(frame({"id": request.number, "in": True}, piece[:size]))
            if size < len(piece):
                feed = itertools.chain([piece[size:]], feed)
        return feed

    def _cancel(self, request: PendingRequest) -> None:
        """Have the agent end what it does, and wait until it says so."""
        deadline = time.monotonic() + CANCEL_S
        with contextlib.suppress(Lost, TimeoutError):
            self._write(frame({"id": request.number, "cancel": True}))
            while request.answer is None:
                request.taken(sum(map(len, request.wait(deadline, sending=False))))

    def _write(self, data: bytes, *, within_s: float = WRITE_S) -> None:
        view = memoryview(data)
        deadline = time.monotonic() + within_s
        with self._write_lock:
            while view:
                if self._over:
                    raise Lost
                try:
                    view = view[os.write(self._stdin, view[:PIECE_BYTES]) :]
                except BlockingIOError:
                    self._await_room(deadline)
                except OSError:
                    break
        if view:  # nobody reads it any more: the reader will say why
            self._join(END_S)
            raise Lost

    def _await_room(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._stdin, select.POLLOUT)
        poll.poll(100)
        if time.monotonic() > deadline:
            self._signal(signal.SIGKILL, "the connection is stuck: writes time out")

    def _join(self, timeout_s: float) -> None:
        """Wait for the reader; not for oneself, should the reader's thread happen to collect garbage."""
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout_s)

    def _lost(self) -> Lost:
        self._join(END_S)
        return Lost(self.ending)

    # The reader's thread

    def _read(self) -> None:
        """Deliver frames until the process closes its output."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        stdout, stderr = self._process.stdout.fileno(), self._process.stderr.fileno()
        poll = select.poll()
        for descriptor in (stdout, stderr):
            poll.register(descriptor, select.POLLIN)
        try:
            while True:
                ready = [descriptor for descriptor, _ in poll.poll(KEEPALIVE_S * 1000)]
                if time.monotonic() > self._spoken_at + KEEPALIVE_S / 2:
                    self._keep_alive()
                if stderr in ready and not self._hear(stderr):
                    poll.unregister(stderr)
                if stdout in ready and not self._deliver(os.read(stdout, PIECE_BYTES)):
                    break
        except Nonsense as error:
            self._signal(signal.SIGTERM, f"it does not speak our protocol: {error}")
        finally:
            self._finish()

    def _hear(self, stderr: int) -> bool:
        piece = os.read(stderr, PIECE_BYTES)
        self.stderr += piece
        del self.stderr[:-STDERR_BYTES]
        return bool(piece)

    def _deliver(self, piece: bytes) -> bool:
        for header, data in self.frames.add(piece):
            number = header["id"]
            if number == 0:
                self._welcome(header)
                continue
            with self._lock:
                request = self._requests.get(number)
            if request is not None:
                request.deliver(header, data)
            else:
                self._stray_bytes += len(data) + 1024
                if self._stray_bytes > STRAY_BYTES:
                    raise Nonsense("answers to what was not asked")
        return bool(piece)

    def _welcome(self, header: dict[str, Any]) -> None:
        said = header.get("hello")
        if self.hello is not None or not isinstance(said, dict):
            raise Nonsense("a greeting that is none")
        types = {field.name: int if field.name == "uid" else str for field in fields(Hello)}
        if any(type(said.get(name)) is not kind for name, kind in types.items()):
            raise Nonsense("a greeting that is not whole")
        self.hello = Hello(**{name: said[name] for name in types})
        self._greeted.set()

    def _keep_alive(self) -> None:
        if not self._greeted.is_set() or not self._write_lock.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(OSError):  # short enough to go whole or not at all
                os.write(self._stdin, frame({"id": 0}))
                self._spoken_at = time.monotonic()
        finally:
            self._write_lock.release()

    def _finish(self) -> None:
        """The end: reap the process, tell every caller."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL, "")
            self._process.wait()
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while self._hear(self._process.stderr.fileno()):
                pass
        self.ending = self.ending or f"the connection ended with code {self._process.returncode}"
        with self._lock:
            self._over = True
            requests = list(self._requests.values())
        self._greeted.set()
        for request in requests:
            request.lose()
        with self._write_lock:
            self._stdin = -1
            for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
                assert stream is not None
                with contextlib.suppress(OSError):
                    stream.close()

    # The end

    def _signal(self, number: int, why: str) -> None:
        self.ending = self.ending or why
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)  # with the commands that lead ssh through other hosts

    def end(self, why: str) -> None:
        """End the process."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._reader.is_alive():
                self._signal(number, why)
                self._join(CLOSE_S)

    def close(self) -> None:
        """Let the agent leave, and end the process."""
        if not self._over:
            assert self._process.stdin is not None
            with self._write_lock, contextlib.suppress(OSError):
                self._stdin = -1
                self._process.stdin.close()
            self._join(CLOSE_S)
        self.end("closed")


def _pieces(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), MAX_DATA_BYTES):
        yield data[at : at + MAX_DATA_BYTES]
