"""What two hosts say to each other while the network between them is tried: `listen` answers, `reach` asks.

Over TCP: `hello(token)`, then one JSON object per line; see `listen.Visit`. Over UDP: token, number, padding; the
answer is the number and the length that arrived. Who does not know the token gets no answer.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import json
import re
import socket
import struct
from pathlib import Path
from typing import Any, BinaryIO

TOKEN = re.compile(r"[0-9a-f]{32}")
LINE_LIMIT_BYTES = 4096
ASK = struct.Struct("!16sI")
ACK = struct.Struct("!IH")
SCHEDULER = Path("/proc/thread-self/schedstat")
UDP_MIN_BYTES = 32
"""Shorter questions get no answer: nobody can make us send more than was sent to us."""


class Silent(OSError):
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
        raise Silent("not a line of ours") from None
    if not isinstance(words, dict):
        raise Silent("not a line of ours")
    return words


def waited_s() -> float:
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
