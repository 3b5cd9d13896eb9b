"""The transport to this computer: commands as child processes, files as files."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from gangline.agent import machine_leases
from gangline.agent.provision import tree_stream
from gangline.agent.rpc import command
from gangline.agent.rpc.wire import ServedRequest
from gangline.errors import GanglineError
from gangline.runs.cluster import Host
from gangline.runs.files import write_atomic
from gangline.transport.bootstrap import as_text
from gangline.transport.ssh_options import printable
from gangline.transport.transport import AGENT, OUTPUT_LIMIT_BYTES, ByteProgress, CommandResult, run_command

# A copy of a file or folder, by the agent's code for files and folders (gangline.agent.provision.tree_stream).


ERROR_CHARACTERS = 500


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Errors of a copy on this computer, raised as errors of gangline; raises GanglineError and OSError."""
    try:
        yield
    except tree_stream.TreeRefused as refused:
        raise GanglineError(
            "this computer: files cannot be copied",
            seen=printable(str(refused))[:ERROR_CHARACTERS],
            fix="a link may lead to a key or a password: put a copy in its place; take away other things than files",
        ) from None
    except OSError as error:
        if isinstance(error.filename, bytes):
            error.filename = os.fsdecode(error.filename)
        raise


def place_copy(source: Path, target: Path, *, on_progress: ByteProgress | None = None) -> None:
    """Copy so that `target` is whole, or as it was before; nothing happens if both are the same place.

    As `Transport.push` says: for the owner alone, links are followed inside `source` only. Raises FileNotFoundError.
    """
    if target.exists() and source.samefile(target):
        return
    near, done_bytes = os.fsencode(source), 0

    def on_bytes(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        if on_progress:
            on_progress(min(done_bytes, total_bytes), total_bytes)

    with copying():
        total_bytes = tree_stream.measure(near)["bytes"] if on_progress else 0
        tree_stream.copy(near, os.fsencode(target.absolute()), on_bytes)


ALONE = (
    "import sys; sys.path[:] = filter(None, sys.path); del sys.argv[0]; "
    "import runpy; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
"""Runs a module as -m does, for a Python older than 3.11, which has no -P."""


def leases_of_others() -> list[dict[str, Any]]:
    """What other users of this computer have, as `facts` of a host says it."""
    return machine_leases.rows_of_others({})


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
        asked = {
            "argv": [as_text(word) for word in _real(argv)],
            "env": {as_text(name): as_text(value) for name, value in (env or {}).items()},
            "timeout_s": timeout_s,
        }

        def ask(on_piece: Callable[[bytes], None]) -> tuple[dict[str, Any], bytes]:
            request = _LocalRequest(stdin, on_piece)
            try:
                command.run(request, asked, program=[], keep=())
            finally:
                request.close()
            return request.answer, request.stderr

        limit_bytes = self._output_limit_bytes
        return run_command(self.host, argv, ask, timeout_s=timeout_s, on_line=on_line, limit_bytes=limit_bytes)

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


class _LocalRequest(ServedRequest):
    """A request that the agent's code serves in this process: nothing travels."""

    def __init__(self, stdin: bytes, on_piece: Callable[[bytes], None]) -> None:
        super().__init__(0, None)  # type: ignore[arg-type]  # no frame is written
        self.answer: dict[str, Any] = {}
        self.stderr = b""
        self.input_ended = True
        self._inbox = [stdin]
        self._on_piece = on_piece

    def send(self, data: bytes) -> None:
        """Take output."""
        self._on_piece(data)

    def acknowledge(self, num_bytes: int) -> None:
        """All input is here already."""

    def end(self, answer: dict[str, Any], data: bytes = b"") -> None:
        """Take the answer, and the end of stderr."""
        self.answer, self.stderr = answer, data


def our_python(module: str, *words: str) -> list[str]:
    """The command that runs a module by the Python that runs us.

    Nothing of the current folder is imported, as -m would: it may be a project with a contextlib.py of its own.
    """
    how = ("-P", "-m") if hasattr(sys.flags, "safe_path") else ("-c", ALONE)
    return [sys.executable, *how, module, *words]


def _real(argv: Sequence[str]) -> list[str]:
    """The command with the agent's program in the place of its name."""
    return our_python("gangline.agent", *argv[1:]) if argv[0] == AGENT else list(argv)
