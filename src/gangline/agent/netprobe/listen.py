"""`listen`: let the other hosts of a cluster try the ports of this one, for a bounded time.

    gangline-agent listen < {"token", "host", "addresses": [...], "interface": null or a name,
                             "ports": [0, [29500, 29999]], "udp": bool, "any": bool, "seconds": n,
                             "claims": folder or null, "hold_s": n}        as `free-port` has them

The first line says what is open:
    {"instance", "time", "ports": [{"address", "asked", "port"} or {"address", "asked", "error", "code"}],
     "udp": {address: port}, "data": address of the interface or null, "own": bool, "macs", "ephemeral": [low, high]}
then {"beat": time} comes several times a second until the time is over or nobody reads any more.

Ports are opened on the host's own addresses, never on all. Only where the address in the cluster file is not the
host's own (behind an address translation) and `any` is set, it is all IPv4 addresses. Who does not present the token
gets no answer, and 42 bytes are read from it at the most.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, Iterator

from gangline.agent.host_facts import interfaces
from gangline.agent.netprobe import path
from gangline.agent.netprobe.free_ports import RecentPorts

SECONDS_LIMIT = 180.0
STRANGER_S = 2.0
"""How long a connection may take to present the token."""
IDLE_S = 10.0
CONNECTIONS = 256
"""At the same time; more are closed at once."""
TAKE_SECONDS_LIMIT = 15.0
PIECE_BYTES = 1 << 20
BEAT_S = 0.2


class OpenPorts:
    """The open ports of this host."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.token = str(request["token"])
        self.me = {"host": str(request["host"]), "instance": secrets.token_hex(8)}
        self._expected = path.hello(self.token)
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        self._any = bool(request.get("any"))
        folder = request.get("claims")
        self._claims = RecentPorts(Path(folder) if folder else None, float(request.get("hold_s", 0)))
        self.own = True
        """Whether the addresses asked for are this host's."""
        self.ports: list[dict[str, Any]] = []
        self.udp: dict[str, int] = {}
        self.data = interfaces.data_address(request.get("interface"))
        for address in dict.fromkeys([*request["addresses"], *([self.data] if self.data else [])]):
            for asked in request["ports"]:
                self.ports.append(self._open(address, asked))
            if request.get("udp", True):
                self._open_udp(address)

    def _open(self, address: str, asked: int | list[int]) -> dict[str, Any]:
        """Listen on a port, or on the first free one of a range."""
        said = {"address": address, "asked": asked}
        wanted = range(asked[0], asked[1] + 1) if isinstance(asked, list) else [asked]
        # What was handed out to a run is not taken from it while torch is being imported.
        wanted = [port for port in wanted if not self._claims.holds(port)]
        problem: OSError | None = None
        for port in wanted:
            try:
                listener = self._bound(address, port, socket.SOCK_STREAM)
                listener.listen(CONNECTIONS)
            except OSError as error:
                problem = error
                if error.errno != errno.EADDRINUSE:
                    break
            else:
                _in_background(self._accept, listener)
                return dict(said, port=listener.getsockname()[1])
        name = errno.errorcode.get(problem.errno or 0, "") if problem else ""
        return dict(said, error=str(problem and (problem.strerror or problem)), code=name)

    def _open_udp(self, address: str) -> None:
        try:
            sock = self._bound(address, 0, socket.SOCK_DGRAM)
        except OSError:
            return
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 21)
        self.udp[address] = sock.getsockname()[1]
        _in_background(self._acknowledge, sock)

    def _bound(self, address: str, port: int, kind: socket.SocketKind) -> socket.socket:
        try:
            return _bind(address, port, kind)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            self.own = False
            if not self._any:
                raise
            return _bind("", port, kind)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # it left again, or there are no more descriptors
                time.sleep(BEAT_S)
                continue
            if self._room.acquire(blocking=False):
                _in_background(self._receive, connection)
            else:
                connection.close()

    def _receive(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(STRANGER_S)
                if self._is_ours(connection):
                    connection.settimeout(IDLE_S)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    Visit(connection, self.me).serve()
        finally:
            self._room.release()

    def _is_ours(self, connection: socket.socket) -> bool:
        said = b""
        while len(said) < len(self._expected):
            piece = connection.recv(len(self._expected) - len(said))
            if not piece:
                return False
            said += piece
        return hmac.compare_digest(said, self._expected)

    def _acknowledge(self, sock: socket.socket) -> None:
        secret = bytes.fromhex(self.token)
        while True:
            try:
                packet, sender = sock.recvfrom(1 << 16)
                if len(packet) >= path.UDP_MIN_BYTES and hmac.compare_digest(packet[:16], secret):
                    _, number = path.ASK.unpack_from(packet)
                    sock.sendto(path.ACK.pack(number, len(packet)), sender)
            except OSError:  # an answer that could not be sent; the next one may
                continue


class Visit:
    """One connection of a host that knows the token. It asks, line by line:

    {"op": "time"}                      -> who we are, and our clock when the question came and when the answer went
    {"op": "take", "bytes": n, "seconds": s}, then bytes -> how many came, as soon as all did or s seconds are over
    """

    def __init__(self, connection: socket.socket, me: dict[str, str]) -> None:
        self._connection = connection
        self._stream: BinaryIO = connection.makefile("rb")
        self._me = me

    def serve(self) -> None:
        """Answer until it leaves."""
        with self._stream:
            while True:
                words = path.read_line(self._stream)
                if words is None:
                    return
                came = time.time()
                if words.get("op") == "time":
                    self._connection.sendall(path.line(dict(self._me, came=came, went=time.time())))
                elif words.get("op") == "take":
                    answer = self._take(words)
                    self._connection.sendall(path.line(answer))
                    if not answer["whole"]:
                        self._drain()
                        return
                else:
                    return

    def _take(self, words: dict[str, Any]) -> dict[str, Any]:
        left = int(words["bytes"])
        deadline = time.monotonic() + min(float(words.get("seconds", IDLE_S)), TAKE_SECONDS_LIMIT)
        piece = memoryview(bytearray(min(PIECE_BYTES, max(left, 1))))
        taken = first_bytes = 0
        waited_s = path.waited_total_s()
        first = last = time.monotonic()
        with contextlib.suppress(socket.timeout):
            while left > 0 and last < deadline:
                self._connection.settimeout(max(0.001, deadline - last))
                count = self._stream.readinto1(piece[: min(left, len(piece))])  # type: ignore[attr-defined]
                if not count:
                    break
                last = time.monotonic()
                if not taken:
                    first, first_bytes = last, count
                taken, left = taken + count, left - count
        self._connection.settimeout(IDLE_S)
        timed = {
            "timed_bytes": taken - first_bytes,
            "seconds": last - first,
            "waited_s": path.waited_total_s() - waited_s,
        }
        return dict(timed, bytes=taken, whole=left == 0)

    def _drain(self) -> None:
        """Read on for a moment: closing with bytes unread would destroy our answer on its way."""
        deadline = time.monotonic() + STRANGER_S
        self._connection.settimeout(STRANGER_S)
        while time.monotonic() < deadline and self._connection.recv(PIECE_BYTES):
            pass


def _bind(address: str, port: int, kind: socket.SocketKind) -> socket.socket:
    listener, where = path.socket_for(address, port, kind)
    try:
        if where[0].startswith("127.") and not address.startswith("127."):
            # Debian's hosts file gives a host's own name an address that nobody else reaches.
            raise OSError(errno.EADDRNOTAVAIL, address + " is " + where[0] + " here")
        if kind == socket.SOCK_STREAM:  # connections that have just been closed do not count
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
    except BaseException:
        listener.close()
        raise
    return listener


def _in_background(work: Any, *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()


def listen(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The verb. Threads that wait for connections do not end; everything is closed with the process."""
    deadline = time.monotonic() + min(float(request["seconds"]), SECONDS_LIMIT)
    ports = OpenPorts(request)
    opened = {"time": time.time(), "ports": ports.ports, "udp": ports.udp, "data": ports.data, "own": ports.own}
    yield dict(ports.me, **opened, macs=interfaces.macs(), ephemeral=interfaces.ephemeral_range())
    while time.monotonic() < deadline:
        time.sleep(min(BEAT_S, max(0.0, deadline - time.monotonic())))
        yield {"beat": time.time()}
