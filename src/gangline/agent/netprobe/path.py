"""The way to another host where `listen` runs: how long, how wide, how safe for large and for small packets.

Every function is bounded in time and bytes. Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import errno
import json
import re
import select
import socket
import statistics
import struct
import time
from pathlib import Path
from typing import Any, BinaryIO

# What two hosts say to each other while the network between them is tried: `listen` answers, `reach` asks.


TOKEN = re.compile(r"[0-9a-f]{32}")
LINE_LIMIT_BYTES = 4096
ASK = struct.Struct("!16sI")
ACK = struct.Struct("!IH")
SCHEDULER = Path("/proc/thread-self/schedstat")
UDP_MIN_BYTES = 32
"""Shorter questions get no answer: nobody can make us send more than was sent to us."""


class WrongGreeting(OSError):
    """The other end does not speak as `listen` does."""


def hello(token: str) -> bytes:
    """The first bytes of a TCP connection: 42, of which a stranger cannot know 32."""
    if not TOKEN.fullmatch(token):
        raise ValueError("a token is 32 hexadecimal digits")
    return b"gangline " + token.encode() + b"\n"


def question(token: str, number: int, length: int) -> bytes:
    """A UDP packet with `length` bytes of payload."""
    return ASK.pack(bytes.fromhex(token), number).ljust(length, b".")


def line(words: dict[str, Any]) -> bytes:
    """One JSON object as a line."""
    return json.dumps(words).encode() + b"\n"


def read_line(stream: BinaryIO) -> dict[str, Any] | None:
    """The next JSON object, None at the end; raises Silent for anything else."""
    text = stream.readline(LINE_LIMIT_BYTES)
    if not text:
        return None
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        raise WrongGreeting("not a line of ours") from None
    if not isinstance(words, dict):
        raise WrongGreeting("not a line of ours")
    return words


def waited_total_s() -> float:
    """How long this thread has been ready to run and had no core; 0 where the kernel does not say."""
    try:
        return int(SCHEDULER.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def socket_for(address: str, port: int, kind: socket.SocketKind) -> tuple[socket.socket, Any]:
    """A socket of the right family, and where it shall go; names are resolved. "" is every IPv4 address."""
    if not address:
        return socket.socket(socket.AF_INET, kind), ("", port)
    family, _, _, _, where = socket.getaddrinfo(address, port, type=kind)[0]
    return socket.socket(family, kind), where


PINGS, PINGS_S = 20, 0.3
SLOW_S, PAUSE_S = 0.002, 0.02
"""After a slow answer we wait: what is in the way, a queue or a busy core, may go."""
SEGMENT_S = (1.5, 4.0)
"""The second try is for hosts that were too busy to answer."""
PIECE_BYTES = 1 << 18
SEND_BUFFER_BYTES = 1 << 21
BYTES_LIMIT = 1 << 36
IP_MTU_DISCOVER, IP_PMTUDISC_DO, IP_MTU = 10, 2, 14
IPV6_MTU_DISCOVER, IPV6_MTU = 23, 24
HEADERS_BYTES = {socket.AF_INET: 28, socket.AF_INET6: 48}
"""Of a UDP packet."""
SIZES = (576, 1000, 1280, 1400, 1420, 1450, 1480, 1492, 1500, 4000, 9000)
"""Packets that tell where a path ends: minimum of IPv6, tunnels, PPPoE, Ethernet, jumbo frames."""
ROUND_S = 0.25
LOSS_PACKETS, LOSS_BYTES = 200, 128
LOSS_PACE_S = 0.0025
IN_FLIGHT = 16
"""Fewer than any socket buffer holds: a slow listener makes us wait, it does not look like loss."""
STALE_S = 0.15
LOSS_GRACE_S = 0.5
RETRANSMITS = struct.Struct("=100xI")
"""tcpi_total_retrans of the kernel's struct tcp_info."""


class ProbeConnection:
    """A connection to `listen` on another host."""

    def __init__(self, address: str, port: int, token: str, timeout_s: float) -> None:
        self.connection, where = socket_for(address, port, socket.SOCK_STREAM)
        try:
            self.connection.settimeout(timeout_s)
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connection.connect(where)
            self.source = self.connection.getsockname()[0]
            self._say(hello(token))
            self.stream = self.connection.makefile("rb")
        except BaseException:
            self.connection.close()
            raise

    def __enter__(self) -> ProbeConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        self.connection.close()

    def ask(self, words: dict[str, Any]) -> None:
        """Say one line; raises Silent where the other end has left."""
        self._say(line(words))

    def _say(self, data: bytes) -> None:
        try:
            self.connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            raise WrongGreeting("it took the connection and left") from None

    def answer(self) -> dict[str, Any]:
        """The next line; raises Silent where the other end leaves without a word or says something else."""
        try:
            words = read_line(self.stream)
        except ConnectionResetError:
            words = None
        if words is None:
            raise WrongGreeting("it took the connection and left")
        return words

    def ask_time(self) -> dict[str, Any]:
        """Who is there, and its clock; with the round trip and by how much its clock is ahead of ours, in seconds."""
        left, left_at = time.time(), time.monotonic()
        self.ask({"op": "time"})
        words = self.answer()
        if not {"host", "instance", "came", "went"} <= set(words):
            raise WrongGreeting("it does not say who it is")
        round_trip = time.monotonic() - left_at
        ahead = ((words["came"] - left) + (words["went"] - (left + round_trip))) / 2
        return dict(words, round_trip_s=round_trip, ahead_s=ahead)


def round_trips(way: ProbeConnection) -> dict[str, Any]:
    """Round trips of small messages, and the clock of the other host as the quickest of them saw it."""
    answers: list[dict[str, Any]] = []
    deadline = time.monotonic() + PINGS_S
    while len(answers) < PINGS and (len(answers) < 3 or time.monotonic() < deadline):
        answers.append(way.ask_time())
        if answers[-1]["round_trip_s"] > SLOW_S and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
    trips = [answer["round_trip_s"] for answer in answers]
    quickest = min(answers, key=lambda answer: answer["round_trip_s"])
    return {
        "latency_min_s": quickest["round_trip_s"],
        "latency_median_s": statistics.median(trips),
        "ahead_s": quickest["ahead_s"],
    }


def throughput(way: ProbeConnection, *, seconds: float, limit_bytes: int = BYTES_LIMIT) -> dict[str, Any]:
    """Send as fast as it goes; what the other end says that it got.

    `waited`: which part of the time one of the ends had no core to run on: the hosts slowed this down, not the link.
    """
    piece = memoryview(bytes(PIECE_BYTES))
    way.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    way.ask({"op": "take", "bytes": limit_bytes, "seconds": seconds})
    begun, waited_s = time.monotonic(), waited_total_s()
    deadline, sent = begun + seconds, 0
    while sent < limit_bytes and time.monotonic() < deadline:
        way.connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            sent += way.connection.send(piece[: limit_bytes - sent])
        except socket.timeout:
            break
    way.connection.settimeout(2.0)
    answer = way.answer()
    elapsed = time.monotonic() - begun
    waited_s = waited_total_s() - waited_s + answer["waited_s"]
    timed = answer["seconds"] > 0.001 and answer["timed_bytes"] > 0
    rate = answer["timed_bytes"] / answer["seconds"] if timed else answer["bytes"] / elapsed
    return {
        "throughput_mbps": rate * 8 / 1e6,
        "bytes": answer["bytes"],
        "retransmits": _retransmits(way.connection),
        "waited": waited_s / elapsed,
    }


def full_segment(address: str, port: int, token: str) -> bool | None:
    """Whether a TCP packet of full size arrives, and then 64 KiB; None where even small ones do not."""
    for timeout_s in SEGMENT_S:
        try:
            with ProbeConnection(address, port, token, timeout_s) as way:
                way.ask_time()
                size = way.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
                if _arrives(way, size, timeout_s) and _arrives(way, 1 << 16, timeout_s):
                    return True
        except OSError:
            return None
    return False


def _arrives(way: ProbeConnection, size: int, timeout_s: float) -> bool:
    try:
        way.ask({"op": "take", "bytes": size, "seconds": timeout_s * 2})
        way.connection.sendall(bytes(size))
        return bool(way.answer()["whole"])
    except OSError:
        return False


def largest_packet(address: str, port: int, token: str, own_mtu: int) -> dict[str, Any]:
    """Which packet sizes arrive whole, with headers; fragments are forbidden.

    `told_mtu`: the size that the kernel or a router on the way says is the limit; a path that says so harms nobody.
    `largest_packet` is None where not even small UDP packets are answered: then nothing is known.
    """
    sizes = sorted({size for size in SIZES if size < own_mtu} | {min(own_mtu, SIZES[-1])})
    with _udp(address, port) as sock:
        _forbid_fragments(sock)
        headers = HEADERS_BYTES[sock.family]
        arrived: set[int] = set()
        limited = False
        for _ in range(3):
            for size in sizes:
                if size not in arrived:
                    limited = _send(sock, question(token, size, size - headers)) == errno.EMSGSIZE or limited
            arrived |= _acknowledged(sock, len(sizes) - len(arrived), ROUND_S)
            if len(arrived) == len(sizes):
                break
        return {
            "own_mtu": own_mtu,
            "largest_packet": max(arrived, default=None),
            "told_mtu": _told(sock) if limited else None,
        }


def loss(address: str, port: int, token: str) -> dict[str, Any]:
    """How many small UDP packets are answered; a second, longer look before it is said that more than 1 % are not."""
    sent, answered = _volley(address, port, token, LOSS_PACKETS)
    if answered and answered < sent * 0.99:
        sent, answered = _volley(address, port, token, 2 * LOSS_PACKETS)
    return {"packets_sent": sent, "packets_answered": answered}


def _volley(address: str, port: int, token: str, count: int) -> tuple[int, int]:
    waiting: dict[int, float] = {}
    answered: set[int] = set()
    with _udp(address, port) as sock:
        for number in range(count):
            _send(sock, question(token, number, LOSS_BYTES))
            waiting[number] = time.monotonic()
            answered |= _acknowledged(sock, count, LOSS_PACE_S)
            while _in_flight(waiting, answered) >= IN_FLIGHT:
                answered |= _acknowledged(sock, 1, LOSS_PACE_S)
        answered |= _acknowledged(sock, count - len(answered), LOSS_GRACE_S)
    return count, len(answered)


def _in_flight(waiting: dict[int, float], answered: set[int]) -> int:
    stale = time.monotonic() - STALE_S
    for number in [number for number, since in waiting.items() if since < stale or number in answered]:
        del waiting[number]
    return len(waiting)


def _udp(address: str, port: int) -> socket.socket:
    sock, where = socket_for(address, port, socket.SOCK_DGRAM)
    sock.connect(where)
    sock.setblocking(False)
    return sock


def _send(sock: socket.socket, packet: bytes) -> int | None:
    """The error number, if it was not sent: too large, or a local firewall. An earlier refusal does not count."""
    for _ in range(2):
        try:
            sock.send(packet)
            return None
        except ConnectionRefusedError:
            continue
        except OSError as error:
            return error.errno
    return errno.ECONNREFUSED


def _acknowledged(sock: socket.socket, count: int, timeout_s: float) -> set[int]:
    """Numbers of answered packets: what is there, and `count` of them unless that takes longer than `timeout_s`."""
    found: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic() if len(found) < count else 0.0
        if not select.select([sock], [], [], max(0.0, left))[0]:
            return found
        try:
            packet = sock.recv(64)
        except OSError:  # a refusal; what was refused is not answered
            continue
        if len(packet) == ACK.size:
            found.add(ACK.unpack(packet)[0])


def _forbid_fragments(sock: socket.socket) -> None:
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, IP_PMTUDISC_DO)
    else:
        sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)


def _told(sock: socket.socket) -> int | None:
    try:
        if sock.family == socket.AF_INET6:
            return sock.getsockopt(socket.IPPROTO_IPV6, IPV6_MTU)
        return sock.getsockopt(socket.IPPROTO_IP, IP_MTU)
    except OSError:
        return None


def _retransmits(connection: socket.socket) -> int | None:
    try:
        count: int = RETRANSMITS.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RETRANSMITS.size))[0]
    except (OSError, struct.error):
        return None
    return count
