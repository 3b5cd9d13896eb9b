"""Connections between the stages of a served pipeline: both ends show that they know the endpoint's key first.

What travels is a JSON object and at most one tensor, as bytes: nothing that is received is code. torch's process groups
are not used here: their store listens on every interface and asks for nothing, and an endpoint stays for weeks.
Nothing is encrypted, as between the ranks of a run. While nothing else is said, beats are: a process that hangs leaves
its connections open.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gangline.errors import HostUnreachable, UsageError, error_summary

_HEAD = struct.Struct(">IQ")
"""Bytes of the JSON object, and of the tensor."""
_HEAD_LIMIT_BYTES = 4 << 20
_TENSOR_LIMIT_BYTES = 1 << 34
_NONCE_BYTES = 32
_SHAKE_S = 10.0
"""For each answer while the key is shown; who calls is heard beside the others, so a stranger holds nobody up."""
_CALLED, _CALLER = b"called", b"caller"
_TYPES = {str(each).removeprefix("torch."): each for each in (torch.float32, torch.float64, torch.bfloat16)}
_TYPES |= {"float16": torch.float16}
_ALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""A host that is off is known to have gone after 25 s without an answer."""
_UNANSWERED_MS = 25_000
BEAT_S = 3.0
SILENT_S = 40.0
"""Who waits for a beat so long counts the other end as hanging; a host that is off has been found before."""
_BEAT = "beat"

Message = tuple[dict[str, Any], "torch.Tensor | None"]


class LinkLost(Exception):
    """The other end has gone, or says what no stage says."""


class LinkSilent(LinkLost):
    """The connection is there, and nothing is heard: the other end hangs."""


class StageLink:
    """One connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending, self._closed = threading.Lock(), threading.Event()
        connection.settimeout(None)
        # for what is received alone: a large tensor may take its time on a slow way
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(SILENT_S), 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _ALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)

    def send(self, head: Mapping[str, Any], tensor: torch.Tensor | None = None) -> None:
        """Raises LinkLost."""
        said, payload = dict(head), memoryview(b"")
        if tensor is not None:
            tensor = tensor.detach().to("cpu").contiguous()
            said["tensor"] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            payload = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        text = json.dumps(said).encode()
        try:
            with self._sending:
                self._connection.sendall(_HEAD.pack(len(text), len(payload)) + text)
                if payload:
                    self._connection.sendall(payload)
        except OSError as error:
            raise LinkLost(str(error)) from error

    def beat(self, is_well: Callable[[], bool] = lambda: True) -> StageLink:
        """Say from now on that this end is there, as long as `is_well` says so. The other end has to receive."""
        threading.Thread(target=self._beat, args=(is_well,), daemon=True).start()
        return self

    def _beat(self, is_well: Callable[[], bool]) -> None:
        with contextlib.suppress(LinkLost):
            while not self._closed.wait(BEAT_S):
                if is_well():
                    self.send({"do": _BEAT})

    def receive(self) -> Message:
        """The next message, beats left out. Raises LinkLost; LinkSilent where the other end does not even beat."""
        try:
            while True:
                num_text, num_tensor = _HEAD.unpack(_exactly(self._connection, _HEAD.size))
                if num_text > _HEAD_LIMIT_BYTES or num_tensor > _TENSOR_LIMIT_BYTES:
                    raise LinkLost("a message is too long")
                head = json.loads(_exactly(self._connection, num_text))
                if head.get("do") != _BEAT:
                    return head, self._tensor(head, num_tensor)
        except BlockingIOError as error:
            raise LinkSilent(f"its process says nothing for {SILENT_S:.0f} s, and its connection is there") from error
        except (LinkLost, OSError) as error:
            raise LinkLost(str(error)) from error
        except Exception as error:  # no memory for the tensor, too: who waits for the message has to hear it
            raise LinkLost(error_summary(error)) from error

    def _tensor(self, head: dict[str, Any], num_bytes: int) -> torch.Tensor | None:
        if not num_bytes:
            return None
        name, shape = head.pop("tensor")
        if num_bytes != math.prod(shape) * _TYPES[name].itemsize:
            raise LinkLost("a tensor has another size than it says")
        tensor = torch.empty(shape, dtype=_TYPES[name])
        _fill(self._connection, memoryview(tensor.view(-1).view(torch.uint8).numpy()))
        return tensor

    def close(self) -> None:
        """End it, for both ends and every thread that waits."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def listen_for_stages(address: str, ports: tuple[int, int] | None) -> socket.socket:
    """A socket that other stages may call, of IPv4 or IPv6. ports: the first and last that it may have.

    Raises UsageError.
    """
    said = ""
    for port in range(ports[0], ports[1] + 1) if ports else (0,):
        try:
            family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(place, family=family)
        except OSError as error:
            said = str(error)
    raise UsageError(
        f"no port of {address} can be had for a stage",
        seen=f"{said}; tried {f'{ports[0]} to {ports[1]}' if ports else 'any'}",
        fix="set address of this host in the cluster file to one that it has, or name other ports",
    )


def await_call(listener: socket.socket, key: str, *, until: Callable[[], bool]) -> StageLink:
    """The next one who knows the key; others get nothing. Raises LinkLost once `until` says so."""
    known: queue.Queue[StageLink] = queue.Queue()

    def hear(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if _shake(connection, key, mine=_CALLED, theirs=_CALLER):
                known.put(StageLink(connection))
                return
        connection.close()

    listener.settimeout(0.1)
    while not until():
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            threading.Thread(target=hear, args=(connection,), daemon=True).start()
        with contextlib.suppress(queue.Empty):
            return known.get_nowait()
    raise LinkLost("nobody called")


def call_stage(name: str, address: str, port: int, key: str, *, patience_s: float = 20.0) -> StageLink:
    """A connection to a stage. Raises HostUnreachable."""
    deadline, said = time.monotonic() + patience_s, ""
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((address, port), timeout=patience_s)
            if _shake(connection, key, mine=_CALLER, theirs=_CALLED):
                return StageLink(connection)
        except OSError as error:
            said = str(error)
            time.sleep(0.2)
            continue
        connection.close()
        said = "it does not show that it knows the key of this endpoint"
        break
    raise HostUnreachable(
        f"the stage on {name} cannot be reached at {address}, port {port}",
        seen=said,
        fix="gangline check --tier full looks at the ways between the hosts; a firewall has to let them through",
    )


def _shake(connection: socket.socket, key: str, *, mine: bytes, theirs: bytes) -> bool:
    """Whether both ends know the key. Each proves it over what both have drawn, and says which end it is.

    Raises OSError where the other end says nothing.
    """
    connection.settimeout(_SHAKE_S)
    own = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(own)
    other = _exactly(connection, _NONCE_BYTES)
    if mine == _CALLER:  # who calls shows it first: a stranger who calls learns nothing
        connection.sendall(_proof(key, mine, own, other))
    if not hmac.compare_digest(_exactly(connection, 32), _proof(key, theirs, other, own)):
        return False
    if mine == _CALLED:
        connection.sendall(_proof(key, mine, own, other))
    return True


def _proof(key: str, role: bytes, own: bytes, other: bytes) -> bytes:
    return hmac.new(key.encode(), b"gangline stage " + role + own + other, hashlib.sha256).digest()


def _exactly(connection: socket.socket, number: int) -> bytes:
    data = bytearray(number)
    _fill(connection, memoryview(data))
    return bytes(data)


def _fill(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        if not (got := connection.recv_into(view)):
            raise ConnectionResetError("the other end has closed the connection")
        view = view[got:]
