"""Files and folders to a host and back: as a stream on the channel, or by rsync beside it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePath

from gangline.errors import GanglineError, HostUnreachable
from gangline.remote import rsync
from gangline.remote.link import Link
from gangline.remote.transport import Progress
from gangline.remote.trees import Here, Measure, There, measured, raise_error

RSYNC_FROM_BYTES = 8 << 20
"""Below this a stream on the channel is quicker than the start of rsync, and nothing is lost if it breaks."""
PIECE_BYTES = 1 << 18
MEMBER_BYTES = 1 << 13
"""What a member of a stream costs besides its bytes, at most: a longest path and a few words."""
CLEAR_UP_S = 5.0
STDERR_BYTES = 1 << 16


def push(link: Link, source: Path, target: PurePath, *, on_progress: Progress | None) -> None:
    """Bring a file or folder to the host."""
    source.stat()  # what is not there needs no connection
    here, there = Here(link.connection().folder), There(link)
    near = os.path.realpath(source)
    size = measured(here.do("measure", near), "this computer")
    if not rsync_fits(link, size, near):
        _push_stream(here, there, near, str(target), _Counter(size, on_progress))
        return
    part = part_path(target, near)
    there.do(f"room-for-{'folder' if size.folder else 'file'}", part)
    _rsync(link, _slash(near, size), rsync.far(_slash(part, size)), size, on_progress)
    there.do("place", part, str(target))


def pull(link: Link, source: PurePath, target: Path, *, on_progress: Progress | None) -> None:
    """Bring a file or folder from the host."""
    here, there = Here(link.connection().folder), There(link)
    size = measured(there.do("measure", str(source)), link.host.name)
    target = target.absolute()
    if not rsync_fits(link, size, str(source)):
        _pull_stream(here, there, str(source), str(target), _Counter(size, on_progress))
        return
    part = part_path(target, f"{link.host.name}:{source}")
    here.do(f"room-for-{'folder' if size.folder else 'file'}", part)
    _rsync(link, rsync.far(_slash(str(source), size)), _slash(part, size), size, on_progress)
    here.do("place", part, str(target))


def rsync_fits(link: Link, size: Measure, source: str) -> bool:
    """Whether this goes by rsync; it takes a name with *, ? or [ for a pattern, and a noisy login for nonsense."""
    if size.bytes < RSYNC_FROM_BYTES or any(char in source for char in "*?[\\"):
        return False
    connection = link.connection()
    quiet = not connection.channel.frames.noise
    return quiet and connection.control_path is not None and rsync.is_here() and link.has_rsync()


def part_path(target: PurePath, source: str) -> str:
    """Where a copy grows, beside its target: the same for the same source, so that it is gone on with."""
    mark = hashlib.blake2b(os.fsencode(source), digest_size=6).hexdigest()
    return str(target.with_name(f".{target.name}.{mark}.part"))


def _rsync(link: Link, source: str, target: str, size: Measure, on_progress: Progress | None) -> None:
    connection = link.connection()
    assert connection.control_path is not None
    try:
        rsync.copy(rsync.argv(source, target, connection.control_path), size.bytes, link.host.name, on_progress)
    except GanglineError as error:
        if connection.channel.is_open:
            raise
        raise HostUnreachable(
            f"{link.host.name}: the connection was lost while files were copied", seen=error.seen, fix=error.fix
        ) from None


def _slash(path: str, size: Measure) -> str:
    """With a slash at the end: what is in the folder, not the folder."""
    return path + "/" if size.folder else path


class _Counter:
    """Tells the progress of a stream, and ends one that is longer than it can be."""

    def __init__(self, size: Measure, on_progress: Progress | None) -> None:
        self._total_bytes = size.bytes
        self._limit_bytes = size.bytes + (size.members + 1) * MEMBER_BYTES
        self._on_progress = on_progress
        self._bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count what went by."""
        self._bytes += num_bytes
        if self._on_progress:
            self._on_progress(min(self._bytes, self._total_bytes), self._total_bytes)

    def is_beyond(self) -> bool:
        """Whether more came than there can be."""
        return self._bytes > self._limit_bytes


def _push_stream(here: Here, there: There, source: str, target: str, counter: _Counter) -> None:
    with _NearEnd(here.argv("pack", source)) as near:

        def pieces() -> Iterator[bytes]:
            while piece := near.stdout.read(PIECE_BYTES):
                counter.add(len(piece))
                yield piece

        try:
            there.do("unpack", target, data=pieces())
        except HostUnreachable:
            raise
        except GanglineError:
            near.raise_if_failed(timeout_s=CLEAR_UP_S)  # then that is why the stream broke off
            raise


def _pull_stream(here: Here, there: There, source: str, target: str, counter: _Counter) -> None:
    with _NearEnd(here.argv("unpack", target)) as near:

        def on_piece(piece: bytes) -> None:
            counter.add(len(piece))
            if counter.is_beyond():
                raise GanglineError("more comes than there was to copy", fix="nothing of it was kept; try again")
            near.stdin.write(piece)

        with contextlib.suppress(BrokenPipeError):  # it has failed, and says why
            there.do("pack", source, on_piece=on_piece)
            near.stdin.close()
        near.raise_if_failed()


class _NearEnd:
    """This computer's end of a stream. When we leave early it sees the stream break off, and clears up."""

    def __init__(self, argv: list[str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed in __exit__)
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, start_new_session=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.stdin = self._process.stdin
        self.stdout = self._process.stdout

    def raise_if_failed(self, *, timeout_s: float | None = None) -> None:
        """Wait for its end, and raise what it met; nothing if it still runs after `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process.wait(timeout_s):
                self._stderr.seek(0)
                raise_error("this computer", self._stderr.read(STDERR_BYTES))

    def __enter__(self) -> _NearEnd:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        try:
            self._process.wait(CLEAR_UP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()
