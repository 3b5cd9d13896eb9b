"""The seam to a host: run a command, read and write files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a command on a host left behind."""

    host: str
    argv: tuple[str, ...]
    returncode: int
    """Negative: ended by that signal."""
    stdout: str
    stderr: str


class Transport(Protocol):
    """One host. The contract test in tests/unit/remote/ says what every implementation promises."""

    host: str

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        on_line: Callable[[str], None] | None = None,
    ) -> Result:
        """Run a command to its end. `env` is added to the host's own. `on_line` sees each line of stdout at once.

        Raises HostUnreachable when the host does not answer, TimeoutError after `timeout_s` (the command and
        everything it started is ended then). A command that fails is a Result, not an error.
        """
        ...

    def read(self, path: PurePath, *, offset: int = 0, limit: int = 1 << 22) -> bytes:
        """At most `limit` bytes from `offset`; b"" at the end; raises FileNotFoundError."""
        ...

    def write(self, path: PurePath, data: bytes) -> None:
        """Write a file so that it is whole or absent (temp + fsync + rename), mode 0600, with missing parents."""
        ...

    def names(self, path: PurePath) -> list[str]:
        """Names in a folder, sorted; [] where there is no such folder."""
        ...

    def push(self, source: Path, target: PurePath) -> None:
        """Bring a file or folder from this computer to the host. The target appears whole or not at all."""
        ...

    def pull(self, source: PurePath, target: Path) -> None:
        """Bring a file or folder from the host to this computer. The target appears whole or not at all."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...
