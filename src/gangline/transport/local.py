"""The transport to this computer: commands as child processes, files as files."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import IO

from gangline.errors import UsageError
from gangline.runs.cluster import Host
from gangline.runs.files import sync_folder, write_atomic
from gangline.runs.state import ProcessId
from gangline.transport.transport import AGENT, OUTPUT_LIMIT_BYTES, ByteProgress, CommandResult, LineFeed, TailBuffer

# A copy of a file or folder on this computer, in place whole or not at all.


COPY_BYTES = 1 << 20


def place_copy(source: Path, target: Path, *, on_progress: ByteProgress | None = None) -> None:
    """Copy so that `target` is whole, or as it was before; nothing happens if both are the same place.

    As `Transport.push` says: for the owner alone, links are followed inside `source` only. Raises FileNotFoundError.
    """
    if target.exists() and source.samefile(target):
        return
    root = source.resolve(strict=True)
    copier = _Copier(root, on_progress)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    try:
        copier.copy(root, fresh)
        if target.is_dir():
            target.rename(old)  # a folder cannot be renamed onto a folder that is not empty
        fresh.rename(target)
        sync_folder(target.parent)
    finally:
        for leftover in (fresh, old):
            _remove(leftover)


class _Copier:
    """The copy of one tree."""

    def __init__(self, root: Path, on_progress: ByteProgress | None) -> None:
        self._root = root
        self._on_progress = on_progress
        self._total_bytes = sum(path.stat().st_size for path in _files(root)) if on_progress else 0
        self._done_bytes = 0

    def copy(self, source: Path, target: Path) -> None:
        """Copy one file, or a folder with what is in it."""
        real = source.resolve(strict=True)
        if not real.is_relative_to(self._root):
            raise UsageError(
                f"{source} is a link that leads out of {self._root}",
                seen=f"it leads to {real}",
                fix="it may lead to a key or a password: put a copy in its place, or copy what it leads to",
            )
        if real.is_dir():
            target.mkdir(mode=0o700)
            for child in sorted(real.iterdir()):
                self.copy(child, target / child.name)
            sync_folder(target)
        elif real.is_file():
            self._copy_file(real, target)
        else:
            raise UsageError(f"{source} is neither a file nor a folder", fix="it cannot be copied: take it away")

    def _copy_file(self, source: Path, target: Path) -> None:
        with source.open("rb") as reader, target.open("xb") as writer:
            while piece := reader.read(COPY_BYTES):
                writer.write(piece)
                self._done_bytes += len(piece)
                if self._on_progress:
                    self._on_progress(min(self._done_bytes, self._total_bytes), self._total_bytes)
            writer.flush()
            os.fsync(writer.fileno())
        target.chmod(0o700 if source.stat().st_mode & stat.S_IXUSR else 0o600)


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()] if root.is_dir() else [root]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


DRAIN_S = 0.2
"""How long output may still come after the command ended: what it left running may hold its pipes for ever."""
END_S = 5.0
"""How long processes may take to go after SIGKILL; one that hangs in the kernel is left to it."""
PIECE_BYTES = 1 << 16
PIPE_BYTES = 1 << 20
"""The most that a pipe holds."""
ALONE = (
    "import sys; sys.path[:] = filter(None, sys.path); del sys.argv[0]; "
    "import runpy; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
"""Runs a module as -m does, for a Python older than 3.11, which has no -P."""


class LocalTransport:
    """A host that is this computer, with a work folder of its own."""

    def __init__(self, host: Host, *, output_limit_bytes: int = OUTPUT_LIMIT_BYTES) -> None:
        self.host = host.name
        self._output_limit_bytes = output_limit_bytes

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        on_line: Callable[[str], None] | None = None,
    ) -> CommandResult:
        """Run a command in a session of its own; see `Transport.run`. Of a longer output the last 8 MiB are kept.

        A program that is not there is a Result with code 127, as from a shell or ssh.
        """
        try:
            process = subprocess.Popen(
                _real(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **(env or {})},
                start_new_session=True,  # Ctrl-C at our terminal is ours to handle
            )
        except OSError as error:
            text = f"{argv[0]}: {error.strerror}"
            return CommandResult(host=self.host, argv=tuple(argv), returncode=127, stdout="", stderr=text)
        conversation = _Conversation(process, stdin, on_line, self._output_limit_bytes)
        try:
            conversation.hold(time.monotonic() + timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{self.host}: {argv[0]} did not end within {timeout_s:g} s") from None
        finally:
            if process.poll() is None:  # timeout, Ctrl-C, or on_line raised
                _end_tree(process)
            conversation.close()
        return CommandResult(
            host=self.host,
            argv=tuple(argv),
            returncode=process.returncode,
            stdout=conversation.stdout.text(),
            stderr=conversation.stderr.text(),
        )

    def read(self, path: PurePath, *, offset: int = 0, limit: int = 1 << 22) -> bytes:
        """See `Transport.read`."""
        try:
            # O_NONBLOCK: a FIFO has no end, and nobody may write to it
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
                if stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
                    raise FileNotFoundError(errno.ENOENT, "a pipe in the place of a file", str(path))
                stream.seek(offset)
                return stream.read(limit)
        except (NotADirectoryError, IsADirectoryError) as error:
            raise FileNotFoundError(error.errno, "no such file", str(path)) from error

    def write(self, path: PurePath, data: bytes) -> None:
        """See `Transport.write`."""
        target = Path(path)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(target, data)

    def names(self, path: PurePath) -> list[str]:
        """See `Transport.names`."""
        try:
            return sorted(child.name for child in Path(path).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def push(self, source: Path, target: PurePath, *, on_progress: ByteProgress | None = None) -> None:
        """See `Transport.push`; nothing happens if both are the same place."""
        place_copy(source, Path(target), on_progress=on_progress)

    def pull(self, source: PurePath, target: Path, *, on_progress: ByteProgress | None = None) -> None:
        """See `Transport.pull`; nothing happens if both are the same place."""
        place_copy(Path(source), target, on_progress=on_progress)

    def home(self) -> PurePath:
        """See `Transport.home`."""
        return Path.home()

    def close(self) -> None:
        """Nothing is held open."""


class _Conversation:
    """stdin, stdout and stderr of one running command."""

    def __init__(
        self, process: subprocess.Popen[bytes], stdin: bytes, on_line: Callable[[str], None] | None, limit_bytes: int
    ) -> None:
        self.stdout = TailBuffer(limit_bytes)
        self.stderr = TailBuffer(limit_bytes)
        self._process = process
        self._unsent = memoryview(stdin)
        self._lines = LineFeed(on_line) if on_line else None
        self._selector = selectors.DefaultSelector()
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for stream, event in ((process.stdin, selectors.EVENT_WRITE), (process.stdout, selectors.EVENT_READ)):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, event)
        self._selector.register(process.stderr, selectors.EVENT_READ)

    def hold(self, deadline: float) -> None:
        """Talk until the command has ended and its output is read; raises TimeoutError at `deadline` (monotonic)."""
        ended_at: float | None = None
        after_end_bytes = 0
        while self._selector.get_map():
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError
            if ended_at is None and self._process.poll() is not None:
                ended_at = now
            ready = self._selector.select(min(DRAIN_S, deadline - now))
            num_bytes = 0
            for key, _ in ready:
                num_bytes += self._serve(key.fileobj)  # type: ignore[arg-type]
            after_end_bytes += num_bytes if ended_at is not None else 0
            # what it wrote is in the pipes; what it left running may hold them, and write, for ever
            is_drained = num_bytes == 0 or after_end_bytes > PIPE_BYTES
            if ended_at is not None and is_drained and time.monotonic() > ended_at + DRAIN_S:
                break
        if self._lines:
            self._lines.end()
        self._await_exit(deadline)

    def _await_exit(self, deadline: float) -> None:
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def _serve(self, stream: IO[bytes]) -> int:
        """Move what can be moved; how much output came."""
        if stream is self._process.stdin:
            self._send()
            return 0
        piece = os.read(stream.fileno(), PIECE_BYTES)
        if not piece:
            self._selector.unregister(stream)
        elif stream is self._process.stderr:
            self.stderr.add(piece)
        else:
            self.stdout.add(piece)
            if self._lines:
                self._lines.add(piece)
        return len(piece)

    def _send(self) -> None:
        stream = self._process.stdin
        assert stream is not None
        try:
            sent = os.write(stream.fileno(), self._unsent[:PIECE_BYTES]) if self._unsent else 0
            self._unsent = self._unsent[sent:]
        except BrokenPipeError:  # it does not read what we say
            self._unsent = self._unsent[:0]
        if not self._unsent:
            self._selector.unregister(stream)
            stream.close()

    def close(self) -> None:
        """Let go of the pipes."""
        self._selector.close()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def our_python(module: str, *words: str) -> list[str]:
    """The command that runs a module by the Python that runs us.

    Nothing of the current folder is imported, as -m would: it may be a project with a contextlib.py of its own.
    """
    how = ("-P", "-m") if hasattr(sys.flags, "safe_path") else ("-c", ALONE)
    return [sys.executable, *how, module, *words]


def _real(argv: Sequence[str]) -> list[str]:
    """The command with the agent's program in the place of its name."""
    return our_python("gangline.agent", *argv[1:]) if argv[0] == AGENT else list(argv)


def _end_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL the command, its session and all its descendants, and wait until they are gone."""
    # Stopped first, so that nothing forks between the look and the kill.
    for pid in _tree(process.pid):
        _send(pid, signal.SIGSTOP)
    family = [found for pid in _tree(process.pid) if (found := ProcessId.of(pid)) is not None]
    for member in family:
        _send(member.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + END_S
    while any(member.is_alive for member in family) and time.monotonic() < deadline:
        time.sleep(0.01)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _tree(root: int) -> list[int]:
    """`root`, its descendants, and every process of its session."""
    parents: dict[int, int] = {}
    found = {root}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(folder.name)
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            parents[pid] = int(fields[1])
            if int(fields[3]) == root:
                found.add(pid)
    grown = True
    while grown:
        below = {pid for pid, parent in parents.items() if parent in found}
        grown = not below <= found
        found |= below
    return sorted(found)
