"""`ports`: a port for the ranks to meet at, and who listens on which port of this host.

    gangline-agent ports free < {"address", "range": [low, high], "avoid": [...], "claims": folder or null, "hold_s": n}
        -> {"port", "taken": [...], "ephemeral": [low, high], "may_be_given_away": bool}, or "port": null
    gangline-agent ports listening < {"ports": [...]}
        -> {"listening": [{"address", "port", "pid", "command"}], "ephemeral"}

A free port is looked for below the range from which the kernel serves who asks for any port: in that range another
program may be given it at any time between our look and the start of the ranks. What has been handed out is claimed for
`hold_s` with a file in `claims`, because torch listens on it only seconds later, when it has been imported.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, Iterator

from gangline.agent import hello
from gangline.agent.interfaces import ephemeral_range

REQUEST_LIMIT_BYTES = 1 << 16
LISTEN_STATE = "0A"
PROGRAM_CHARACTERS = 200


def free(request: dict[str, Any]) -> dict[str, Any]:
    """The first port of the range that nobody listens on and nobody has claimed."""
    low, high = request["range"]
    avoid, taken = set(request.get("avoid", ())), []
    ephemeral = ephemeral_range()
    with _claims(request.get("claims"), float(request.get("hold_s", 0))) as claims:
        for port in range(low, high + 1):
            if port in avoid or claims.holds(port):
                continue
            if not is_free(str(request["address"]), port):
                taken.append(port)
                continue
            claims.take(port)
            exposed = ephemeral[0] <= port <= ephemeral[1]
            return {"port": port, "taken": taken, "ephemeral": ephemeral, "may_be_given_away": exposed}
    return {"port": None, "taken": taken, "ephemeral": ephemeral, "may_be_given_away": False}


def is_free(address: str, port: int) -> bool:
    """Whether a server could listen there: torch's binds all addresses, so nobody may have the port on any."""
    for where in ("", address):
        door, target = hello.socket_for(where, port, socket.SOCK_STREAM)
        with door:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                door.bind(target)
                door.listen(1)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    return False
    return True


class Claims:
    """Ports that were handed out a short time ago: one empty file each, named after the port."""

    def __init__(self, folder: Path | None, hold_s: float) -> None:
        self._folder = folder
        self._hold_s = hold_s

    def holds(self, port: int) -> bool:
        """Whether somebody is about to use it."""
        if self._folder is None:
            return False
        try:
            age = time.time() - (self._folder / str(port)).stat().st_mtime
        except FileNotFoundError:
            return False
        return -self._hold_s < age < self._hold_s

    def take(self, port: int) -> None:
        """Claim it."""
        if self._folder is not None:
            path = self._folder / str(port)
            path.touch(mode=0o600)
            os.utime(path)


@contextlib.contextmanager
def _claims(folder: str | None, hold_s: float) -> Iterator[Claims]:
    """The claims of a folder, while nobody else looks at them."""
    if folder is None or hold_s <= 0:
        yield Claims(None, 0)
        return
    place = Path(folder)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (place / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Claims(place, hold_s)


def listening(request: dict[str, Any]) -> dict[str, Any]:
    """Who listens on the given ports; the program only where it is ours to know."""
    wanted = set(request["ports"])
    found = [door for door in _listeners() if door["port"] in wanted]
    programs = _programs({door["inode"] for door in found})
    said = [
        {
            "address": door["address"],
            "port": door["port"],
            **programs.get(door["inode"], {"pid": None, "command": None}),
        }
        for door in found
    ]
    return {"listening": said, "ephemeral": ephemeral_range()}


def _listeners() -> Iterator[dict[str, Any]]:
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            lines = Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in (line.split() for line in lines):
            if fields[3] == LISTEN_STATE:
                address, _, port = fields[1].partition(":")
                yield {"address": _text(family, address), "port": int(port, 16), "inode": fields[9]}


def _text(family: int, hexadecimal: str) -> str:
    """An address as /proc writes it: words of 32 bits in the byte order of the machine."""
    raw = bytes.fromhex(hexadecimal)
    words = [raw[start : start + 4] for start in range(0, len(raw), 4)]
    return socket.inet_ntop(family, b"".join(word[::-1] if sys.byteorder == "little" else word for word in words))


def _programs(inodes: set[str]) -> dict[str, dict[str, Any]]:
    """Socket -> the process that holds it, as far as we may look."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for descriptor in (folder / "fd").iterdir():
                name = os.readlink(descriptor)  # noqa: PTH115  (Path.readlink is of Python 3.9)
                if name.startswith("socket:[") and name[8:-1] in inodes:
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    found[name[8:-1]] = {"pid": int(folder.name), "command": words[:PROGRAM_CHARACTERS]}
    return found


VERBS = {"free": free, "listening": listening}


def main(argv: list[str]) -> int:
    """Entry point."""
    if len(argv) != 1 or argv[0] not in VERBS:
        sys.stderr.write("usage: ports free|listening, with a request as JSON on stdin\n")
        return 2
    request = json.loads(sys.stdin.buffer.read(REQUEST_LIMIT_BYTES))
    sys.stdout.write(json.dumps(VERBS[argv[0]](request)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
