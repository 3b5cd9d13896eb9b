"""What the zygote and who asks it say to each other: JSON documents on a socket."""

import json
import socket
import struct

_HEADER = struct.Struct("!Q")


def send(channel: socket.socket, message) -> None:
    """One JSON document with its length before it."""
    data = json.dumps(message).encode()
    channel.sendall(_HEADER.pack(len(data)) + data)


def receive(channel: socket.socket):
    """The next document; raises EOFError when the other side has closed, or died."""
    (length,) = _HEADER.unpack(_read(channel, _HEADER.size))
    return json.loads(_read(channel, length))


def _read(channel: socket.socket, length: int) -> bytes:
    pieces = []
    while length:
        try:
            piece = channel.recv(min(length, 1 << 20))
        except ConnectionResetError:
            piece = b""
        if not piece:
            raise EOFError
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)


def nccl_on_one_card(rank: int) -> dict[str, str]:
    """Variables of a rank that has its GPU in common with others.

    NCCL refuses two ranks of one host on one card. Each of ours says that it is a host of its own: then NCCL takes the
    card for two, and its sockets are the link between them.
    """
    return {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
    }
