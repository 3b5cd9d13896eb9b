"""The seam to a host: run a command, read and write files."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

from gangline.errors import HostUnreachable

AGENT = "gangline-agent"
"""As the first word of a command: the agent's program on that host, run by the Python that runs the agent there."""

ByteProgress = Callable[[int, int], None]
"""Sees bytes done, and bytes in all."""


SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")
"""Variables of the user's shell that ranks on other hosts get, over stdin alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
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


Ask = Callable[[Callable[[bytes], None]], tuple[dict[str, Any], bytes]]
"""Runs a command; its argument sees each piece of stdout. Gives the agent's answer, and the end of stderr."""


def run_command(
    host: str,
    argv: Sequence[str],
    ask: Ask,
    *,
    timeout_s: float,
    on_line: Callable[[str], None] | None,
    limit_bytes: int,
) -> CommandResult:
    """Run a command as `Transport.run` says. limit_bytes: how much of stdout is kept, the end of it."""
    stdout = TailBuffer(limit_bytes)
    lines = LineFeed(on_line) if on_line else None

    def on_piece(piece: bytes) -> None:
        stdout.add(piece)
        if lines:
            lines.add(piece)

    answer, stderr = ask(on_piece)
    if answer.get("timeout"):
        raise TimeoutError(f"{host}: {argv[0]} did not end within {timeout_s:g} s")
    if lines:
        lines.end()
    code = exit_code(host, answer)
    text = stderr.decode("utf-8", "replace")
    return CommandResult(host=host, argv=tuple(argv), returncode=code, stdout=stdout.text(), stderr=text)


def exit_code(host: str, answer: dict[str, Any]) -> int:
    """The exit code in an answer."""
    code = answer.get("returncode")
    if type(code) is not int:
        raise HostUnreachable(f"{host} does not speak our protocol", seen="the end of a command without an exit code")
    return code


class Transport(Protocol):
    """One host. The contract test in tests/process/transport/ says what every implementation promises."""

    host: str

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        on_line: Callable[[str], None] | None = None,
    ) -> CommandResult:
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

    def push(self, source: Path, target: PurePath, *, on_progress: ByteProgress | None = None) -> None:
        """Bring a file or folder from this computer to the host. The target appears whole or not at all.

        Files arrive with mode 0600, or 0700 if they can be executed, in folders with mode 0700. A link arrives as what
        it leads to; one that leads out of the folder is refused, for it may lead to a key or a password. Raises
        FileNotFoundError.
        """
        ...

    def pull(self, source: PurePath, target: Path, *, on_progress: ByteProgress | None = None) -> None:
        """Bring a file or folder from the host to this computer, as `push` does the other way round."""
        ...

    def home(self) -> PurePath:
        """The home folder of the user there."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


# The output of a command: whole lines as they come, and a bounded tail of everything.


OUTPUT_LIMIT_BYTES = 8 << 20
LINE_LIMIT_CHARACTERS = 1 << 20
BLOCK_BYTES = 1 << 16


class TailBuffer:
    """The last `limit_bytes` of a stream: the end is where results and errors stand."""

    def __init__(self, limit_bytes: int = OUTPUT_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._blocks: deque[bytearray] = deque()
        """None is small but the last: a stream that comes byte by byte costs no more memory than any other."""
        self._size = 0
        self._dropped = 0

    def add(self, piece: bytes) -> None:
        """Take the next piece."""
        if self._blocks and len(self._blocks[-1]) < BLOCK_BYTES:
            self._blocks[-1] += piece
        else:
            self._blocks.append(bytearray(piece))
        self._size += len(piece)
        while self._size - len(self._blocks[0]) >= self._limit_bytes:
            first = self._blocks.popleft()
            self._size -= len(first)
            self._dropped += len(first)

    def text(self) -> str:
        """What is kept, as text; says how much is not."""
        data = bytearray()
        while self._blocks:  # one by one: at no time all of it is held twice
            data += self._blocks.popleft()
        self._blocks.append(data)
        cut = max(0, len(data) - self._limit_bytes)
        dropped = self._dropped + cut
        note = f"[the first {dropped} bytes are left out]\n" if dropped else ""
        return note + str(memoryview(data)[cut:], "utf-8", "replace")


class LineFeed:
    """Cuts a stream into lines and hands each one on at once; an endless line is cut at 1 Mi characters."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest: list[str] = []
        """The line that has no end yet, in pieces: joining it for every piece would cost the square of its length."""
        self._rest_characters = 0

    def add(self, piece: bytes) -> None:
        """Take the next piece."""
        *lines, rest = self._decoder.decode(piece).split("\n")
        for line in lines:
            self._keep(line)
            self._on_line(self._take().removesuffix("\r"))
        self._keep(rest)
        if self._rest_characters > LINE_LIMIT_CHARACTERS:
            self.end()

    def end(self) -> None:
        """Hand on a last line without an end."""
        if self._rest_characters:
            self._on_line(self._take())

    def _keep(self, piece: str) -> None:
        if piece:
            self._rest.append(piece)
            self._rest_characters += len(piece)

    def _take(self) -> str:
        line = "".join(self._rest)
        self._rest.clear()
        self._rest_characters = 0
        return line


def read_if_there(transport: Transport, path: PurePath, *, limit: int = 1 << 22) -> bytes | None:
    """As `Transport.read`, from the beginning; None where there is no such file, or the process of a /proc ends."""
    try:
        return transport.read(path, limit=limit)
    except (FileNotFoundError, ProcessLookupError):
        return None
