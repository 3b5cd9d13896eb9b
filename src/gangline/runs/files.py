"""Files that are whole or absent: temp + fsync + rename.

On a host: `python -m gangline.runs.files FOLDER` tells the digest of every file in a folder.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gangline.errors import RunFailed


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write `data` so that a reader, or a crash, sees the old file or the new one and nothing between.

    mode: of the file, whatever the umask is. Nobody who may write to the folder, too, can guess the name or have us
    follow a link.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(6).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # a disk that is full while we write does not say where
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON document atomically."""
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON document."""
    return json.loads(path.read_text(encoding="utf-8"))


def parse_json(text: str | bytes) -> Any:
    """`json.loads` of what anybody may have written; raises ValueError, and RecursionError where it is nested too deep.

    Garbage waits meanwhile: before Python 3.12, a collection may begin in the middle of a deep document, and what then
    ends (an object's `__del__`) has no stack left and prints an error of its own.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return json.loads(text)
    finally:
        if enabled:
            gc.enable()


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """A line of JSON as an object; None for anything else, such as a line that a crash cut off."""
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """blake2b-256 of a file's content, in hexadecimal, read in pieces."""
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """Name -> `file_digest` of every file in a folder; {} where there is no such folder."""
    return {path.name: file_digest(path) for path in sorted(folder.glob("*")) if path.is_file()}


def main(argv: Sequence[str]) -> int:
    """`FOLDER`: its `digests` as one line of JSON on stdout."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m gangline.runs.files FOLDER\n")
        return 2
    sys.stdout.write(json.dumps(digests(Path(argv[0]))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


# A disk that takes nothing more is no bug of ours: which file, on which computer, and what to do.


FULL = {
    errno.ENOSPC: ("its disk is full", "make room there"),
    errno.EDQUOT: ("your quota there is used up", "make room there, or ask for more"),
    errno.EROFS: ("its file system is read-only", "look at its disk: Linux ends writing after errors"),
}
"""What is seen then, and what to do."""


def full_disk(error: BaseException, *, here: str = "this computer") -> RunFailed | None:
    """The error for the user; None for another error.

    here: what this computer is called. What came from a host has its name in the text already.
    """
    if not isinstance(error, OSError) or error.errno not in FULL:
        return None
    seen, fix = FULL[error.errno]
    is_here = error.strerror in {None, os.strerror(error.errno)}
    elsewhere = "GANGLINE_HOME (or `workdir` of a host that is this computer)" if is_here else "`workdir` of that host"
    return RunFailed(
        f"{here}: {os.strerror(error.errno)}" if is_here else str(error.strerror),
        seen=f"expected room for {os.fsdecode(error.filename) if error.filename else 'a file'}; {seen}",
        fix=f"{fix}; or let {elsewhere} be a folder on another disk",
    )
