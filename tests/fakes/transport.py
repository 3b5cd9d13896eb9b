"""A transport without a host: files in memory, commands with results that a test has laid down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from gangline.errors import HostUnreachable
from gangline.transport.transport import ByteProgress, CommandResult, LineFeed, TailBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A command that was run."""

    argv: tuple[str, ...]
    stdin: bytes = b""
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted:
    """What a command leaves behind."""

    returncode: int = 0
    stdout: str = ""
    stderr: str = ""
    duration_s: float = 0.0
    """More than the caller's timeout_s: the caller sees a TimeoutError. Nobody waits for it."""


class FakeTransport:
    """A host in memory.

    answer: what a command leaves behind; by default every command is 127, not found.
    """

    def __init__(self, host: str, *, answer: Callable[[Call], Scripted] | None = None) -> None:
        self.host = host
        self.files: dict[PurePath, bytes] = {}
        self.calls: list[Call] = []
        self.reachable = True
        self.answer = answer or (lambda call: Scripted(returncode=127, stderr=f"{call.argv[0]}: not found"))

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        on_line: Callable[[str], None] | None = None,
    ) -> CommandResult:
        """Give the scripted result; see `Transport.run`."""
        self._need_host()
        call = Call(argv=tuple(argv), stdin=stdin, env=dict(env or {}))
        self.calls.append(call)
        scripted = self.answer(call)
        if scripted.duration_s > timeout_s:
            raise TimeoutError(f"{self.host}: {call.argv[0]} did not end within {timeout_s:g} s")
        if on_line:
            lines = LineFeed(on_line)
            lines.add(scripted.stdout.encode())
            lines.end()
        stdout, stderr = TailBuffer(), TailBuffer()
        stdout.add(scripted.stdout.encode())
        stderr.add(scripted.stderr.encode())
        return CommandResult(
            host=self.host,
            argv=call.argv,
            returncode=scripted.returncode,
            stdout=stdout.text(),
            stderr=stderr.text(),
        )

    def read(self, path: PurePath, *, offset: int = 0, limit: int = 1 << 22) -> bytes:
        """See `Transport.read`."""
        self._need_host()
        try:
            return self.files[PurePath(path)][offset : offset + limit]
        except KeyError:
            raise FileNotFoundError(f"{self.host}: {path}") from None

    def write(self, path: PurePath, data: bytes) -> None:
        """See `Transport.write`."""
        self._need_host()
        self.files[PurePath(path)] = bytes(data)

    def names(self, path: PurePath) -> list[str]:
        """See `Transport.names`."""
        self._need_host()
        return sorted({child.relative_to(path).parts[0] for child in self._below(path)})

    def push(self, source: Path, target: PurePath, *, on_progress: ByteProgress | None = None) -> None:
        """See `Transport.push`."""
        self._need_host()
        fresh = _contents(source)
        for child in [*self._below(target), PurePath(target)]:
            self.files.pop(child, None)
        self.files |= {PurePath(target) / name: data for name, data in fresh.items()}
        _tell(on_progress, fresh)

    def pull(self, source: PurePath, target: Path, *, on_progress: ByteProgress | None = None) -> None:
        """See `Transport.pull`."""
        self._need_host()
        below = {child.relative_to(source): self.files[child] for child in self._below(source)}
        if PurePath(source) in self.files:
            below = {PurePath(): self.files[PurePath(source)]}
        if not below:
            raise FileNotFoundError(f"{self.host}: {source}")
        for name, data in below.items():
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        _tell(on_progress, below)

    def home(self) -> PurePath:
        """See `Transport.home`."""
        self._need_host()
        return PurePath("/home/fake")

    def close(self) -> None:
        """Nothing is held open."""

    def _below(self, path: PurePath) -> list[PurePath]:
        return [child for child in self.files if PurePath(path) in child.parents]

    def _need_host(self) -> None:
        if not self.reachable:
            raise HostUnreachable(f"{self.host} does not answer", fix="this is a fake; set reachable")


def _tell(on_progress: ByteProgress | None, files: Mapping[PurePath, bytes]) -> None:
    if on_progress:
        total_bytes = sum(map(len, files.values()))
        on_progress(total_bytes, total_bytes)


def _contents(source: Path) -> dict[PurePath, bytes]:
    if source.is_file():
        return {PurePath(): source.read_bytes()}
    if not source.is_dir():
        raise FileNotFoundError(str(source))
    return {PurePath(child.relative_to(source)): child.read_bytes() for child in source.rglob("*") if child.is_file()}
