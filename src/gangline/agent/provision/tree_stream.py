"""Files and folders on their way: what there is, as a stream, and put in place.

    trees measure SOURCE              {"members": 3, "bytes": 120, "folder": true} as JSON
    trees pack SOURCE                 the tree as a stream on stdout
    trees unpack TARGET               the tree from stdin, in the place of TARGET: whole, or as it was before
    trees room-for-file PART          make the folder that PART lies in; PART stays if it can be gone on with
    trees room-for-folder PART
    trees place PART TARGET           what rsync has left at PART, in the place of TARGET
    trees remove PART                 what rsync has left at PART, away

A failure is one line of JSON on stderr, and exit code 1.

The stream is not tar: links, devices, owners, absolute names and endless headers cannot even be written in it. It is
members, each a length (4 bytes), a JSON header {"name", "size" or null for a folder, "x": executable} and the bytes;
a length of 0 is the end, so that a broken stream is not taken for a whole one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import struct
import sys
import threading
from typing import Any, BinaryIO, Callable, Iterator, NamedTuple

from gangline.agent.host_files import sync

LENGTH = struct.Struct("!I")
MAX_HEADER_BYTES = 1 << 16
MAX_DEPTH = 64
COPY_BYTES = 1 << 18


class TreeRefused(Exception):
    """This tree, or stream, is not taken; the text says why."""


class Member(NamedTuple):
    """One file or folder of a tree."""

    name: bytes
    """Relative to the tree; b"" for its root."""
    path: bytes
    """Where it is read."""
    size: int | None
    """None: a folder."""
    executable: bool


def members(source: bytes) -> Iterator[Member]:
    """What a tree holds, folders before what is in them.

    Links inside the tree are followed; one that leads out of it is refused, for it may lead to a key or a password.
    Raises FileNotFoundError and Refused.
    """
    root = os.path.realpath(source)
    yield from _below(root, root, b"", 0)


def _below(root: bytes, path: bytes, name: bytes, depth: int) -> Iterator[Member]:
    real = os.path.realpath(path)
    if real != root and not real.startswith(root + b"/"):
        raise TreeRefused(f"{_shown(path)} is a link that leads out of the folder, to {_shown(real)}")
    found = os.stat(real)
    if stat.S_ISREG(found.st_mode):
        yield Member(name, real, found.st_size, bool(found.st_mode & stat.S_IXUSR))
    elif not stat.S_ISDIR(found.st_mode):
        raise TreeRefused(f"{_shown(path)} is neither a file nor a folder")
    elif depth > MAX_DEPTH:
        raise TreeRefused(f"{_shown(path)} is more than {MAX_DEPTH} folders deep, or a link to what it is in")
    else:
        yield Member(name, real, None, True)
        for child in sorted(os.listdir(real)):
            yield from _below(root, os.path.join(real, child), os.path.join(name, child), depth + 1)


def measure(source: bytes) -> dict[str, Any]:
    """How much a tree holds."""
    sizes = [member.size for member in members(source)]
    files = [size for size in sizes if size is not None]
    return {"members": len(sizes), "bytes": sum(files), "folder": len(files) < len(sizes)}


def pack(source: bytes) -> Iterator[bytes]:
    """A tree as a stream."""
    for member in list(members(source)):
        name = member.name.decode("utf-8", "surrogateescape")
        header = json.dumps({"name": name, "size": member.size, "x": member.executable}).encode()
        yield LENGTH.pack(len(header)) + header
        if member.size is not None:
            with open(member.path, "rb") as reader:
                yield from _pieces(reader, member.size)
    yield LENGTH.pack(0)


def unpack(stream: BinaryIO, target: bytes) -> None:
    """Put the tree of a stream in the place of `target`."""
    with _fresh(target) as fresh:
        try:
            while (header := _header(stream)) is not None:
                name = header["name"].encode("utf-8", "surrogateescape")
                _write(fresh, name, header["size"], header["x"] is True, _pieces(stream, header["size"] or 0))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise TreeRefused(f"{type(error).__name__}: {error}"[:500]) from error
        if not os.path.lexists(fresh):
            raise TreeRefused("a stream without a tree")


def copy(source: bytes, target: bytes, on_bytes: Callable[[int], None] | None = None) -> None:
    """Put a copy of a tree in the place of `target`. on_bytes: gets the size of every piece that is copied."""

    def counted(pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            yield piece
            if on_bytes:
                on_bytes(len(piece))

    with _fresh(target) as fresh:
        for member in list(members(source)):
            if member.size is None:
                _write(fresh, member.name, None, True, iter(()))
                continue
            with open(member.path, "rb") as reader:
                _write(fresh, member.name, member.size, member.executable, counted(_pieces(reader, member.size)))


@contextlib.contextmanager
def _fresh(target: bytes) -> Iterator[bytes]:
    """A place beside `target` for a new tree, which takes the place of `target` at the end; nothing else is left."""
    folder, name = os.path.split(target)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    _sweep(folder, name)
    fresh = os.path.join(folder, b".%b.%d.new" % (name, threading.get_native_id()))
    try:
        yield fresh
        place(fresh, target)
    finally:
        remove(fresh)


def _header(stream: BinaryIO) -> dict[str, Any] | None:
    (length,) = LENGTH.unpack(_exactly(stream, LENGTH.size))
    if length > MAX_HEADER_BYTES:
        raise TreeRefused(f"a header of {length} bytes")
    return json.loads(_exactly(stream, length)) if length else None


def _write(fresh: bytes, name: bytes, size: int | None, executable: bool, pieces: Iterator[bytes]) -> None:
    """Write one member below `fresh`. All that lies there was written by us, so that no link leads elsewhere."""
    parts = name.split(b"/") if name else []
    if any(part in {b"", b".", b".."} or b"\0" in part for part in parts) or len(parts) > MAX_DEPTH + 1:
        raise TreeRefused(f"the name {_shown(name)}")
    path = os.path.join(fresh, *parts)
    if size is None:
        os.mkdir(path, 0o700)
        return
    if type(size) is not int or size < 0:
        raise TreeRefused(f"a size of {size!r}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o700 if executable else 0o600), "wb") as writer:
        writer.writelines(pieces)


def place(part: bytes, target: bytes) -> None:
    """Make what lies at `part` safe on the disk, and put it in the place of `target` beside it."""
    for member in members(part):
        sync(member.path)
    old = os.path.join(os.path.dirname(target), b".%b.%d.old" % (os.path.basename(target), threading.get_native_id()))
    in_the_way = os.path.isdir(target) or (os.path.isdir(part) and os.path.lexists(target))
    if in_the_way:
        os.rename(target, old)  # nothing can be renamed onto a folder that is not empty
    try:
        os.rename(part, target)
    except OSError:
        if in_the_way:
            os.rename(old, target)
        raise
    sync(os.path.dirname(target))
    remove(old)


def room(part: bytes, *, folder: bool) -> None:
    """Make the folder that `part` lies in; what lies there already is kept if it can be gone on with."""
    os.makedirs(os.path.dirname(part), mode=0o700, exist_ok=True)
    if os.path.islink(part) or os.path.isdir(part) != folder:
        remove(part)
    if folder:
        os.makedirs(part, mode=0o700, exist_ok=True)


def remove(path: bytes) -> None:
    """Remove a file, link or folder, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _sweep(folder: bytes, name: bytes) -> None:
    """Remove what an `unpack` that was killed has left."""
    for child in os.listdir(folder):
        middle = child[len(name) + 2 : -4]
        if child == b".%b.%b.new" % (name, middle) and middle.isdigit() and not os.path.exists(b"/proc/" + middle):
            remove(os.path.join(folder, child))


def _pieces(reader: BinaryIO, size: int) -> Iterator[bytes]:
    while size:
        piece = reader.read(min(size, COPY_BYTES))
        if not piece:
            raise TreeRefused("the stream, or a file in it, is shorter than announced")
        yield piece
        size -= len(piece)


def _exactly(stream: BinaryIO, length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise TreeRefused("the stream broke off")
    return data


def _shown(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


def main(argv: list[str]) -> int:
    """Entry point; see above."""
    try:
        _act(argv[0], [os.fsencode(os.path.abspath(word)) for word in argv[1:]])
    except OSError as error:
        return _fail({"errno": error.errno, "text": error.strerror, "path": _shown_any(error.filename)})
    except TreeRefused as refused:
        return _fail({"errno": None, "text": str(refused), "path": None})
    return 0


def _act(verb: str, paths: list[bytes]) -> None:
    if verb == "measure":
        sys.stdout.write(json.dumps(measure(*paths)) + "\n")
    elif verb == "pack":
        sys.stdout.buffer.writelines(pack(*paths))
        sys.stdout.buffer.flush()
    elif verb == "unpack":
        unpack(sys.stdin.buffer, *paths)
    elif verb == "place":
        place(*paths)
    elif verb in {"room-for-file", "room-for-folder"}:
        room(*paths, folder=verb == "room-for-folder")
    elif verb == "remove":
        remove(*paths)
    else:
        raise TreeRefused(f"no verb is called {verb!r}")


def _fail(record: dict[str, Any]) -> int:
    sys.stderr.write(json.dumps(record) + "\n")
    return 1


def _shown_any(name: object) -> str | None:
    if isinstance(name, bytes):
        return _shown(name)
    return None if name is None else str(name)
