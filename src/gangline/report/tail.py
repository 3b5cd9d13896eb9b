"""Reading files that grow, through a transport, by offset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

from gangline.errors import HostKeyRefused, HostUnreachable
from gangline.runs.cluster import Cluster
from gangline.runs.files import json_object
from gangline.runs.layout import AGENT_NAMES, RunLayout
from gangline.runs.record_versions import damaged
from gangline.transport.transport import Transport

LINE_BYTES = 1 << 20
"""A longer line is cut there: a file without an end must not cost memory without an end."""
AT_ONCE_BYTES = 64 << 20
"""How much of a file of records is read at once; the rest is for the next call."""


class Readable(Protocol):
    """What a tail needs of a Transport."""

    def read(self, path: PurePath, *, offset: int = 0, limit: int = 1 << 22) -> bytes:
        """See `Transport.read`."""
        ...


class Tail:
    """One growing text file on a host. A file that is not there yet is empty."""

    def __init__(self, transport: Readable, path: PurePath) -> None:
        self._transport = transport
        self._path = path
        self.is_behind = False
        """The last call stopped at its limit, and there may be more."""
        self._offset = 0
        self._rest = b""

    def lines(self, *, limit_bytes: int | None = None) -> list[str]:
        """Lines completed since the last call; a line still being written waits for its end.

        limit_bytes: about how much is read at most.
        """
        found: list[str] = []
        try:
            for line in self.stream(limit_bytes=limit_bytes):
                found.append(line)  # noqa: PERF402  (kept when the next one fails)
        except HostUnreachable:
            if not found:  # otherwise return what was read; the next call raises
                raise
        return found

    def stream(self, *, limit_bytes: int | None = None) -> Iterator[str]:
        """As `lines`, each as soon as it is read."""
        begun = self._offset
        self.is_behind = False
        while not self.is_behind:
            try:
                piece = self._transport.read(self._path, offset=self._offset)
            except FileNotFoundError:
                return
            except OSError as error:
                raise damaged(str(self._path), error.strerror or str(error)) from error
            if not piece:
                return
            self._offset += len(piece)
            self.is_behind = limit_bytes is not None and self._offset - begun >= limit_bytes
            *whole, self._rest = (self._rest + piece).split(b"\n")
            if len(self._rest) > LINE_BYTES:
                whole, self._rest = [*whole, self._rest], b""
            for line in whole:
                yield line.decode("utf-8", "replace")


class JsonTail(Tail):
    """One growing file of JSON objects, one per line. Lines that are not JSON objects are passed over."""

    def objects(self) -> list[dict[str, Any]]:
        """Objects completed since the last call, from at most 64 MiB at once."""
        values = map(json_object, self.lines(limit_bytes=AT_ONCE_BYTES))
        return [value for value in values if value is not None]


# The metrics of a run so far.


class History:
    """Steps and evaluations of a run; where a resumed run repeats a step, the last line of the step counts."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}
        self.evaluations: dict[int, dict[str, Any]] = {}

    def add(self, record: dict[str, Any]) -> None:
        """Take in one line of metrics.jsonl; other kinds of records are passed over."""
        step = record.get("step")
        if not isinstance(step, int):
            return
        if record.get("kind") == "step":
            # a repeated step moves to the end: the order is that of writing
            self.steps.pop(step, None)
            self.steps[step] = record
        elif record.get("kind") == "evaluation":
            self.evaluations[step] = record

    @property
    def last_step(self) -> dict[str, Any] | None:
        """The step that was written last, which after a resume need not be the highest."""
        return next(reversed(self.steps.values()), None) if self.steps else None

    def losses(self) -> list[tuple[float, float]]:
        """(step, training loss) by step."""
        return _points(self.steps)

    def evaluation_losses(self) -> list[tuple[float, float]]:
        """(step, evaluation loss) by step."""
        return _points(self.evaluations)

    def remaining_s(self, *, window: int = 20) -> float | None:
        """Time left at the mean speed of the last steps; None before the first."""
        last = self.last_step
        if last is None or not isinstance(last.get("steps"), int):
            return None
        recent = [record["step_s"] for record in list(self.steps.values())[-window:] if record.get("step_s")]
        return (last["steps"] - last["step"]) * sum(recent) / len(recent) if recent else None


def _points(records: dict[int, dict[str, Any]]) -> list[tuple[float, float]]:
    return [
        (float(step), float(records[step]["loss"]))
        for step in sorted(records)
        if isinstance(records[step].get("loss"), (int, float))
    ]


# Which log files a run has, and the last figures in its metrics.


LIMIT_BYTES = 1 << 30
"""Far more than any run writes: a limit for a file without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """One log file on a host."""

    name: str
    """For people: "pc1 rank 0" or "pc1 console"."""
    rank: int | None
    transport: Transport
    path: Path


def log_files(
    run_id: str, cluster: Cluster, transports: Mapping[str, Transport], *, attempt: int, console: bool
) -> tuple[list[LogFile], dict[str, HostUnreachable]]:
    """The logs of an attempt, by rank, of the hosts that answer, and why the others do not; `console`: torchrun's
    output instead, by host. Raises HostKeyRefused.
    """
    found: list[LogFile] = []
    silent: dict[str, HostUnreachable] = {}
    for host in cluster.hosts:
        folder = RunLayout(Path(host.workdir), run_id).attempt(attempt)
        try:
            found += (_console if console else _of_ranks)(host.name, transports[host.name], folder)
        except HostKeyRefused:
            raise
        except HostUnreachable as error:
            silent[host.name] = error
    return found, silent


def last_step(transport: Transport, metrics: Path) -> dict[str, Any] | None:
    """The step that was written last; None before the first, or for a malformed record."""
    last = ""
    for line in Tail(transport, metrics).stream(limit_bytes=LIMIT_BYTES):
        if '"step_s"' in line:
            last = line
    return json_object(last)


def _console(host: str, transport: Transport, folder: Path) -> list[LogFile]:
    path = folder / host / AGENT_NAMES["CONSOLE_LOG"]
    is_there = path.name in transport.names(path.parent)
    return [LogFile(name=f"{host} console", rank=None, transport=transport, path=path)] if is_there else []


def _of_ranks(host: str, transport: Transport, folder: Path) -> list[LogFile]:
    ranks = [
        int(name[5:-4])
        for name in transport.names(folder)
        if name.startswith("rank-") and name.endswith(".log") and name[5:-4].isdigit()
    ]
    return [
        LogFile(name=f"{host} rank {rank}", rank=rank, transport=transport, path=folder / f"rank-{rank}.log")
        for rank in sorted(ranks)
    ]
