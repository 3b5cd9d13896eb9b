"""The seam to a host: run a command, read and write files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Protocol

AGENT = "gangline-agent"
"""As the first word of a command: the agent's program on that host, run by the Python that runs the agent there."""

Progress = Callable[[int, int], None]
"""Sees bytes done, and bytes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a command on a host left behind."""

    host: str
    argv: tuple[str, ...]
    returncode: int
    """Negative: ended by that signal."""
    stdout: str
    stderr: str


def below_home(path: str, home: PurePath) -> str:
    """A path of a host with the `~/` that it may begin with replaced by the home folder there."""
    return str(home / path[2:]) if path.startswith("~/") else path


class Transport(Protocol):
    """One host. The contract test in tests/process/remote/ says what every implementation promises."""

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

    def push(self, source: Path, target: PurePath, *, on_progress: Progress | None = None) -> None:
        """Bring a file or folder from this computer to the host. The target appears whole or not at all.

        Files arrive with mode 0600, or 0700 if they can be executed, in folders with mode 0700. A link arrives as what
        it leads to; one that leads out of the folder is refused, for it may lead to a key or a password. Raises
        FileNotFoundError.
        """
        ...

    def pull(self, source: PurePath, target: Path, *, on_progress: Progress | None = None) -> None:
        """Bring a file or folder from the host to this computer, as `push` does the other way round."""
        ...

    def home(self) -> PurePath:
        """The home folder of the user there."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...
