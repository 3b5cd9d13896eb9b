"""File work for the controller: read a piece, write whole or not at all, list a folder."""

from __future__ import annotations

import os
from typing import Any

from gangline.agent.request import Request
from gangline.agent.wire import MAX_DATA_BYTES

NAMES_BYTES = 8 << 20
"""A longer list of names is refused, not cut."""


def to_path(asked: dict[str, Any]) -> bytes:
    """The path that a request is about, as bytes."""
    path: str = asked["path"]
    return path.encode("utf-8", "surrogateescape")


def read(request: Request, asked: dict[str, Any]) -> None:
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


def write(request: Request, asked: dict[str, Any]) -> None:
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
    sync_folder(folder)
    request.end({})


def names(request: Request, asked: dict[str, Any]) -> None:
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


def sync_folder(folder: bytes) -> None:
    """Make a rename in `folder` survive power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
