"""The transport over the system's OpenSSH: one connection per host, on which the agent answers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NoReturn

from gangline.agent.provision import tree_stream
from gangline.agent.rpc.wire import NAMES_BYTES
from gangline.errors import GanglineError, HostUnreachable
from gangline.runs.cluster import Host
from gangline.transport import connection as rsync
from gangline.transport.bootstrap import BOOTSTRAP, as_text, first_words
from gangline.transport.connection import MARGIN_S, HostLink
from gangline.transport.local import ERROR_CHARACTERS, copying
from gangline.transport.ssh_options import checked_name, destination, printable
from gangline.transport.transport import AGENT, OUTPUT_LIMIT_BYTES, ByteProgress, CommandResult, run_command

# The agent's code for files and folders (gangline.agent.provision.tree_stream), on a host.


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How much a tree holds."""

    members: int
    """Files and folders."""
    bytes: int
    folder: bool
    """Whether it is a folder, not a file."""


def do_there(
    link: HostLink,
    *words: str,
    data: bytes | Iterator[bytes] = b"",
    on_piece: Callable[[bytes], None] | None = None,
) -> bytes:
    """The output of a verb on the host, unless `on_piece` takes it. Raises the error that the verb met."""
    output = bytearray()
    code, stderr = link.agent(["trees", *map(as_text, words)], data=data, on_piece=on_piece or output.extend)
    if code:
        raise_error(link.host.name, stderr)
    return bytes(output)


def measured(said: bytes, where: str) -> Measure:
    """What `measure` says."""
    try:
        record = json.loads(said)
        measure = Measure(members=record["members"], bytes=record["bytes"], folder=record["folder"])
        if type(measure.members) is int and type(measure.bytes) is int and type(measure.folder) is bool:
            return measure
    except (ValueError, KeyError, TypeError):
        pass
    raise GanglineError(f"{where}: the size of a folder cannot be understood", seen=printable(repr(said[:100])))


def raise_error(where: str, stderr: bytes) -> NoReturn:
    """Raise what a verb met; its last line says it."""
    last = stderr.decode("utf-8", "replace").rstrip().rpartition("\n")[2]
    try:
        record = json.loads(last)
        number, text, path = record["errno"], printable(str(record["text"])), record["path"]
    except (ValueError, KeyError, TypeError):
        number, text, path = None, printable(last), None
    text = text[:ERROR_CHARACTERS]
    if type(number) is int:
        raise OSError(number, f"{where}: {text}", None if path is None else printable(str(path)))
    raise GanglineError(f"{where}: files cannot be copied", seen=text, fix="see what is said of it above")


# Files and folders to a host and back: as a stream on the channel, or by rsync beside it.


RSYNC_FROM_BYTES = 8 << 20
"""Below this a stream on the channel is quicker than the start of rsync, and nothing is lost if it breaks."""
MEMBER_BYTES = 1 << 13
"""What a member of a stream costs besides its bytes, at most: a longest path and a few words."""


def push(link: HostLink, source: Path, target: PurePath, *, on_progress: ByteProgress | None) -> None:
    """Bring a file or folder to the host."""
    near = os.path.realpath(source)
    with copying():
        size = Measure(**tree_stream.measure(os.fsencode(near)))
    if not rsync_fits(link, size, near):
        _push_stream(link, near, str(target), _Counter(size, on_progress))
        return
    part = part_path(target, near)
    do_there(link, f"room-for-{'folder' if size.folder else 'file'}", part)
    _rsync(link, _slash(near, size), rsync.far(_slash(part, size)), size, on_progress)
    do_there(link, "place", part, str(target))


def pull(link: HostLink, source: PurePath, target: Path, *, on_progress: ByteProgress | None) -> None:
    """Bring a file or folder from the host."""
    size = measured(do_there(link, "measure", str(source)), link.host.name)
    target = target.absolute()
    if not rsync_fits(link, size, str(source)):
        _pull_stream(link, str(source), os.fsencode(target), _Counter(size, on_progress))
        return
    part = part_path(target, f"{link.host.name}:{source}")
    with copying():
        tree_stream.room(os.fsencode(part), folder=size.folder)
    _rsync(link, rsync.far(_slash(str(source), size)), _slash(part, size), size, on_progress)
    with copying():
        tree_stream.place(os.fsencode(part), os.fsencode(target))


def rsync_fits(link: HostLink, size: Measure, source: str) -> bool:
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


def _rsync(link: HostLink, source: str, target: str, size: Measure, on_progress: ByteProgress | None) -> None:
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

    def __init__(self, size: Measure, on_progress: ByteProgress | None) -> None:
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


def _push_stream(link: HostLink, source: str, target: str, counter: _Counter) -> None:
    def pieces() -> Iterator[bytes]:
        for piece in tree_stream.pack(os.fsencode(source)):
            counter.add(len(piece))
            yield piece

    with copying():
        do_there(link, "unpack", target, data=pieces())


def _pull_stream(link: HostLink, source: str, target: bytes, counter: _Counter) -> None:
    def unpack() -> None:
        with os.fdopen(reader, "rb") as stream, copying():
            tree_stream.unpack(stream, target)

    def on_piece(piece: bytes) -> None:
        counter.add(len(piece))
        if counter.is_beyond():
            raise GanglineError("more comes than there was to copy", fix="nothing of it was kept; try again")
        stream.write(piece)

    reader, writer = os.pipe()
    with ThreadPoolExecutor(max_workers=1) as pool:
        unpacked = pool.submit(unpack)
        # A pipe that nobody reads any more: unpacking has failed, and its error says why.
        with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "wb") as stream:
            do_there(link, "pack", source, on_piece=on_piece)
        unpacked.result()


class ChannelTransport:
    """A host whose agent answers over a link. Connects at the first call, and again at the next call after a connection
    was lost.
    """

    def __init__(self, name: str, link: HostLink, *, output_limit_bytes: int) -> None:
        self.host = name
        self._output_limit_bytes = output_limit_bytes
        self._link = link
        weakref.finalize(self, self._link.close)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        on_line: Callable[[str], None] | None = None,
    ) -> CommandResult:
        """Run a command in a session of its own; see `Transport.run`. Of a longer output the last 8 MiB are kept."""
        body = {
            "op": "run",
            "argv": [as_text(word) for word in argv],
            "agent": argv[0] == AGENT,
            "env": {_name(name): as_text(value) for name, value in (env or {}).items()},
            "timeout_s": timeout_s,
        }

        def ask(on_piece: Callable[[bytes], None]) -> tuple[dict[str, Any], bytes]:
            return self._link.ask(body, data=stdin, on_piece=on_piece, timeout_s=timeout_s + MARGIN_S)

        limit_bytes = self._output_limit_bytes
        return run_command(self.host, argv, ask, timeout_s=timeout_s, on_line=on_line, limit_bytes=limit_bytes)

    def read(self, path: PurePath, *, offset: int = 0, limit: int = 1 << 22) -> bytes:
        """See `Transport.read`."""
        body = {"op": "read", "path": as_text(path), "offset": offset, "limit": limit}
        try:
            return self._collect(body, limit)
        except (NotADirectoryError, IsADirectoryError) as error:
            raise FileNotFoundError(error.errno, "no such file", str(path)) from error

    def write(self, path: PurePath, data: bytes) -> None:
        """See `Transport.write`."""
        self._link.ask({"op": "write", "path": as_text(path)}, data=data)

    def names(self, path: PurePath) -> list[str]:
        """See `Transport.names`."""
        listing = self._collect({"op": "names", "path": as_text(path)}, NAMES_BYTES)
        return sorted(os.fsdecode(name) for name in listing.split(b"\0") if name)

    def push(self, source: Path, target: PurePath, *, on_progress: ByteProgress | None = None) -> None:
        """See `Transport.push`. Large trees go by rsync where both sides have it, and go on where they broke off."""
        push(self._link, source, target, on_progress=on_progress)

    def pull(self, source: PurePath, target: Path, *, on_progress: ByteProgress | None = None) -> None:
        """See `Transport.pull`, and `push`."""
        pull(self._link, source, target, on_progress=on_progress)

    def home(self) -> PurePath:
        """See `Transport.home`."""
        hello = self._link.connection().hello
        assert hello is not None
        return PurePath(hello.home)

    def close(self) -> None:
        """End the connection; the next call makes a new one."""
        self._link.close()

    def _collect(self, body: dict[str, object], limit: int) -> bytes:
        data = bytearray()

        def on_piece(piece: bytes) -> None:
            data.extend(piece)
            if len(data) > limit:
                raise HostUnreachable(
                    f"{self.host} does not speak our protocol",
                    seen=f"more than the {limit} bytes that were asked for came for {body['op']} {body['path']}",
                )

        self._link.ask(body, on_piece=on_piece)
        return bytes(data)


class SshTransport(ChannelTransport):
    """A host behind ssh."""

    def __init__(
        self, host: Host, *, ssh_config: Path | None = None, output_limit_bytes: int = OUTPUT_LIMIT_BYTES
    ) -> None:
        """ssh_config: read in the place of the user's and the system's."""
        name = checked_name(host)
        destination(host)  # a bad one is refused before anything is started
        link = HostLink(host, BOOTSTRAP, first_words, ssh_config)
        super().__init__(name, link, output_limit_bytes=output_limit_bytes)


def _name(name: str) -> str:
    if "=" in name:
        raise ValueError("illegal environment variable name")
    return as_text(name)
