"""The transport over the system's OpenSSH: one connection per host, on which the agent answers."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath

from gangline.errors import HostUnreachable
from gangline.remote import copies
from gangline.remote.bootstrap import BOOTSTRAP, as_text, first_words
from gangline.remote.link import MARGIN_S, Link, exit_code
from gangline.remote.ssh_options import checked_name, destination
from gangline.remote.stream import OUTPUT_LIMIT_BYTES, LineFeed, TailBuffer
from gangline.remote.transport import AGENT, Progress, Result
from gangline.remote.wire import NAMES_BYTES
from gangline.runs.cluster import Host


class SshTransport:
    """A host behind ssh. Connects at the first call, and again at the next call after a connection was lost."""

    def __init__(
        self, host: Host, *, ssh_config: Path | None = None, output_limit_bytes: int = OUTPUT_LIMIT_BYTES
    ) -> None:
        """ssh_config: read in the place of the user's and the system's."""
        self.host = checked_name(host)
        destination(host)  # a bad one is refused before anything is started
        self._output_limit_bytes = output_limit_bytes
        self._link = Link(host, BOOTSTRAP, first_words, ssh_config)
        weakref.finalize(self, self._link.close)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        on_line: Callable[[str], None] | None = None,
    ) -> Result:
        """Run a command in a session of its own; see `Transport.run`. Of a longer output the last 8 MiB are kept."""
        stdout = TailBuffer(self._output_limit_bytes)
        lines = LineFeed(on_line) if on_line else None

        def on_piece(piece: bytes) -> None:
            stdout.add(piece)
            if lines:
                lines.add(piece)

        body = {
            "op": "run",
            "argv": [as_text(word) for word in argv],
            "agent": argv[0] == AGENT,
            "env": {_name(name): as_text(value) for name, value in (env or {}).items()},
            "timeout_s": timeout_s,
        }
        answer, stderr = self._link.ask(body, data=stdin, on_piece=on_piece, timeout_s=timeout_s + MARGIN_S)
        if answer.get("timeout"):
            raise TimeoutError(f"{self.host}: {argv[0]} did not end within {timeout_s:g} s")
        if lines:
            lines.end()
        return Result(
            host=self.host,
            argv=tuple(argv),
            returncode=exit_code(self.host, answer),
            stdout=stdout.text(),
            stderr=stderr.decode("utf-8", "replace"),
        )

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

    def push(self, source: Path, target: PurePath, *, on_progress: Progress | None = None) -> None:
        """See `Transport.push`. Large trees go by rsync where both sides have it, and go on where they broke off."""
        copies.push(self._link, source, target, on_progress=on_progress)

    def pull(self, source: PurePath, target: Path, *, on_progress: Progress | None = None) -> None:
        """See `Transport.pull`, and `push`."""
        copies.pull(self._link, source, target, on_progress=on_progress)

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


def _name(name: str) -> str:
    if "=" in name:
        raise ValueError("illegal environment variable name")
    return as_text(name)
