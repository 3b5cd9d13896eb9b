"""`free-port`: a port for the ranks to meet at. `connect`: whether this host can open TCP connections.

    gangline-agent free-port < {"address", "range": [low, high], "avoid": [...], "claims": folder or null, "hold_s": n}
        -> {"port", "taken": [...], "ephemeral": [low, high], "may_be_given_away": bool}, or "port": null

The range lies below the ports that the kernel gives to any program that asks: such a port could be given away between
our look and the start of the ranks. A port that was handed out is claimed for `hold_s` seconds with a file in `claims`,
because torch listens on it only seconds later, when it has been imported. Other users of this host see a lease for as
long (gangline.agent.machine_leases); the host agent makes one that lasts as long as the run.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Iterator

from gangline.agent import machine_leases
from gangline.agent.host_facts.interfaces import ephemeral_range
from gangline.agent.netprobe import path as hello

PORT_SLOT = "port-"
FIRST_USER = 1000
"""The first user of a computer begins at the beginning of the range, as root does."""
STRIDE = 37
"""Between two users that follow each other."""


def free(request: dict[str, Any]) -> dict[str, Any]:
    """The verb: the first port of the range that nobody listens on and nobody has claimed."""
    low, high = request["range"]
    avoid, taken = set(request.get("avoid", ())), []
    ephemeral = ephemeral_range()
    with _claims(request.get("claims"), float(request.get("hold_s", 0))) as claims:
        order = list(own_order(low, high, os.getuid()))
        for port, reuse in [*((port, False) for port in order), *((port, True) for port in order)]:
            if port in avoid or claims.holds(port):
                continue
            if not is_free(str(request["address"]), port, reuse=reuse):
                taken += [] if port in taken else [port]
                continue
            if not claims.take(port):
                continue
            exposed = ephemeral[0] <= port <= ephemeral[1]
            return {"port": port, "taken": taken, "ephemeral": ephemeral, "may_be_given_away": exposed}
    return {"port": None, "taken": taken, "ephemeral": ephemeral, "may_be_given_away": False}


def own_order(low: int, high: int, uid: int) -> Iterator[int]:
    """The ports of a range, from another one on for each user: users of one host do not see each other's claims."""
    size = high - low + 1
    first = uid % FIRST_USER * STRIDE % size
    for number in range(size):
        yield low + (first + number) % size


def is_free(address: str, port: int, *, reuse: bool = False) -> bool:
    """Whether a server could listen there: torch's binds all addresses, so nobody may have the port on any.

    Neither may a host agent hold it for a launcher that is to listen there (`reserve`). reuse: that and connections of
    a minute ago are no hindrance; torch's server does without them.
    """
    for where in ("", address):
        sock, target = hello.socket_for(where, port, socket.SOCK_STREAM)
        with sock:
            if reuse:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(target)
                sock.listen(1)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    return False
    return True


def reserve(port: int) -> socket.socket:
    """Hold a port until the socket is closed. A server that asks for SO_REUSEADDR, as torch's does, can still listen
    there; nobody who looks by `is_free` takes it. Raises OSError where somebody listens.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", port))
    except OSError:
        sock.close()
        raise
    return sock


def leased() -> list[str]:
    """Slots of the ports that others have, and that were handed out to this user's other work folders. A run of this
    user holds its port itself by now: that one is seen by `is_free`.
    """
    return [lease.slot for lease in machine_leases.held(PORT_SLOT) if not (lease.is_own and lease.run)]


class RecentPorts:
    """Ports that were handed out a short time ago, one empty file each, named after the port; and ports of others."""

    def __init__(self, folder: Path | None, hold_s: float) -> None:
        self._folder = folder
        self._hold_s = hold_s
        self._leased = set(leased())

    def holds(self, port: int) -> bool:
        """Whether somebody is about to use it."""
        if f"{PORT_SLOT}{port}" in self._leased:
            return True
        if self._folder is None:
            return False
        try:
            age = time.time() - (self._folder / str(port)).stat().st_mtime
        except FileNotFoundError:
            return False
        return -self._hold_s < age < self._hold_s

    def take(self, port: int) -> bool:
        """Claim it; False if somebody else has claimed it at the same moment, from another folder."""
        if self._folder is None:
            return True
        now = time.time()
        mine = machine_leases.publish(f"{PORT_SLOT}{port}", {"since": now, "until": now + self._hold_s})
        if leased().count(f"{PORT_SLOT}{port}") > (mine is not None):
            if mine is not None:
                machine_leases.withdraw(mine)
            return False
        if mine is not None:
            os.close(mine.descriptor)  # until then it is not locked, and held all the same
        path = self._folder / str(port)
        path.touch(mode=0o600)
        os.utime(path)
        return True


@contextlib.contextmanager
def _claims(folder: str | None, hold_s: float) -> Iterator[RecentPorts]:
    """The claims of a folder, while nobody else looks at them."""
    if folder is None or hold_s <= 0:
        yield RecentPorts(None, 0)
        return
    place = Path(folder)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (place / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield RecentPorts(place, hold_s)


# `connect`: can this host open a TCP connection to an address and port? Says nothing there, and closes at once.


TARGETS_LIMIT = 64
SECONDS_LIMIT = 10.0
NAMES = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "timed out",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
}


def outcome(address: str, port: int, timeout_s: float) -> str:
    """How a connection goes."""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except socket.timeout:
        return "timed out"
    except OSError as error:
        return NAMES.get(error.errno or 0, error.strerror or str(error))
    return "open"


def connect(request: dict[str, Any]) -> dict[str, Any]:
    """The verb: how connections to all targets go, tried at the same time."""
    timeout_s = min(float(request.get("timeout_s", 3.0)), SECONDS_LIMIT)
    targets = [(str(address), int(port)) for address, port in request["targets"][:TARGETS_LIMIT]]
    with ThreadPoolExecutor(max_workers=max(1, len(targets))) as pool:
        return {"outcomes": list(pool.map(lambda target: outcome(target[0], target[1], timeout_s), targets))}
