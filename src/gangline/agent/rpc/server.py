"""The channel: the controller's hand on this host, for as long as the connection lasts.

stdin and stdout carry frames (gangline.agent.rpc.wire). A request is a frame with "op"; every one has a thread of its
own.
When the connection ends, or nothing is heard for a minute, running commands are ended and the channel leaves; who
detached himself, as the host agent does, is not touched.

    controller -> host                         host -> controller
    {id, op: run|read|write|names|ping, ...}   {id: 0, hello: {...}}                 once, at the start
    {id, in: true|false} data                  {id, data: true} data                 false: the last of it
    {id, ack: bytes}                           {id, ack: bytes}                      room for so much more
    {id, cancel: true}                         {id, end: true, ...answer} data       data of a run: the end of stderr
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any, Callable, NoReturn

from gangline import __version__
from gangline.agent.host_files import read_text, sync
from gangline.agent.rpc import command
from gangline.agent.rpc.wire import MAGIC, MAX_DATA_BYTES, NAMES_BYTES, Broken, Reader, ServedRequest, Writer

# File work for the controller: read a piece, write whole or not at all, list a folder.


def to_path(asked: dict[str, Any]) -> bytes:
    """The path that a request is about, as bytes."""
    path: str = asked["path"]
    return path.encode("utf-8", "surrogateescape")


def read(request: ServedRequest, asked: dict[str, Any]) -> None:
    """Send at most `limit` bytes from `offset`."""
    left = int(asked["limit"])
    with open(to_path(asked), "rb") as stream:
        stream.seek(int(asked["offset"]))
        while left > 0:
            piece = stream.read(min(left, MAX_DATA_BYTES))
            if not piece:
                break
            request.send(piece)
            left -= len(piece)
    request.end({})


def write(request: ServedRequest, asked: dict[str, Any]) -> None:
    """Write what comes in, to a file that is whole or absent; mode 0600, missing parents 0700."""
    path = to_path(asked)
    folder, name = os.path.split(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    # a name that nobody can guess, for others may write to the folder, too
    temporary = os.path.join(folder, b"." + name + b".%s.tmp" % os.urandom(8).hex().encode())
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            for piece in request.input():
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync(folder)
    request.end({})


def names(request: ServedRequest, asked: dict[str, Any]) -> None:
    """Send the names in a folder, each followed by a NUL; none where there is no such folder."""
    try:
        found = os.listdir(to_path(asked))
    except (FileNotFoundError, NotADirectoryError):
        found = []
    listing = b"".join(name + b"\0" for name in found)
    if len(listing) > NAMES_BYTES:
        raise OSError(7, "too many names to list")  # E2BIG
    request.send(listing)
    request.end({})


OPERATIONS: dict[str, Callable[[ServedRequest, dict[str, Any]], None]] = {
    "read": read,
    "write": write,
    "names": names,
    "ping": lambda request, _asked: request.end({}),
}
SILENCE_S = 60.0
"""The controller says something every few seconds; a laptop that fell asleep, or a cut cable, does not."""
LEAVE_S = 10.0
MAX_REQUESTS = 512


class ChannelServer:
    """The requests of one connection."""

    def __init__(self, reader: Reader, writer: Writer) -> None:
        self._reader = reader
        self._writer = writer
        self._requests: dict[int, ServedRequest] = {}
        self._lock = threading.Lock()
        self._program, self._keep = own_program()

    def serve(self) -> None:
        """Answer until the connection ends."""
        self._writer.raw(MAGIC)
        self._writer.frame({"id": 0, "hello": hello()})
        with contextlib.suppress(Broken):
            while True:
                self._take(*self._reader.frame())

    def _take(self, header: dict[str, Any], data: bytes) -> None:
        number = header["id"]
        with self._lock:
            request = self._requests.get(number)
            if "op" not in header:
                if request is not None:  # else it ended while the frame was under way
                    request.take_news(header, data)
                return
            if request is not None or len(self._requests) >= MAX_REQUESTS:
                raise Broken("an id that is in use, or too many requests")
            request = self._requests[number] = ServedRequest(number, self._writer)
            if "in" in header:  # short input comes with the question
                request.take_news({"in": header["in"]}, data)
        threading.Thread(target=self._work, args=(request, header), daemon=True).start()

    def _work(self, request: ServedRequest, asked: dict[str, Any]) -> None:
        try:
            self._answer(request, asked)
        except Broken:
            request.end({"cancelled": True})
        except OSError as error:
            request.end({"errno": error.errno or 5, "text": error.strerror or str(error)})
        except Exception as error:  # noqa: BLE001  (the controller shall hear of it, whatever it is)
            request.end({"error": f"{type(error).__name__}: {error}"})
        finally:
            with self._lock:
                del self._requests[request.number]
                request.close()

    def _answer(self, request: ServedRequest, asked: dict[str, Any]) -> None:
        operation = asked["op"]
        if operation == "run":
            command.run(request, asked, program=self._program, keep=self._keep)
        elif operation in OPERATIONS:
            OPERATIONS[operation](request, asked)
        else:
            raise ValueError(f"no operation is called {operation!r}")

    def leave(self) -> None:
        """End what still runs."""
        self._writer.give_up()
        with self._lock:
            for request in self._requests.values():
                request.cancel()
        deadline = time.monotonic() + LEAVE_S
        while self._requests and time.monotonic() < deadline:
            time.sleep(0.01)


def own_program() -> tuple[list[str], tuple[int, ...]]:
    """The words that run the agent's program, and the descriptors that they need."""
    # Of a zipapp __file__ is <archive>/gangline/agent/rpc/server.py, and the archive may have no name but a descriptor.
    archive = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    if os.path.isdir(archive):
        return [sys.executable, *(["-P"] if hasattr(sys.flags, "safe_path") else []), "-m", "gangline.agent"], ()
    folder, _, number = archive.rpartition("/")
    keep = (int(number),) if folder == "/proc/self/fd" else ()
    return [sys.executable, "-I", "-S", archive], keep


def hello() -> dict[str, Any]:
    """Who and where we are."""
    return {
        "version": __version__,
        "python": "%d.%d.%d" % sys.version_info[:3],
        "executable": sys.executable,
        "hostname": os.uname().nodename,
        "home": os.fsencode(os.path.expanduser("~")).decode("utf-8", "surrogateescape"),
        "uid": os.getuid(),
        "user": _user(),
        "boot_id": read_text("/proc/sys/kernel/random/boot_id") or "",
        "pid": os.getpid(),
    }


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _hung_up(*_: object) -> NoReturn:
    raise Broken("told to go")


def _stay(*_signal: object) -> None:
    """A handler, unlike an ignored signal, is not inherited by the commands that we run."""


def main(argv: list[str]) -> int:
    """Entry point: serve stdin and stdout."""
    if argv:
        sys.stderr.write("usage: gangline.agent channel\n")
        return 2
    # From here on stray output of anybody goes to stderr, and nobody but us reads what the controller says.
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        # who starts us ignores a signal that is no order to leave, as Slurm's notice to all steps of a job is none
        is_ignored = signal.getsignal(number) == signal.SIG_IGN
        signal.signal(number, _stay if is_ignored else _hung_up)
    channel = ChannelServer(Reader(reader, silence_s=SILENCE_S), Writer(writer))
    with contextlib.suppress(Broken):
        channel.serve()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    channel.leave()
    os._exit(0)  # threads that hang on a dead disk shall not keep us
