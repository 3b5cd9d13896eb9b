"""Figures of a run: JSON lines always, TensorBoard and W&B where the job asks for them. Rank 0 only."""

from __future__ import annotations

import errno
import json
import math
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from gangline.errors import UsageError
from gangline.runs.events import now_iso
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout

MOST_WAITING = 4096
"""Lines that are kept in memory while a disk is full."""


class Reporter(Protocol):
    """Somewhere that figures go."""

    def scalars(self, values: Mapping[str, float], *, step: int) -> None:
        """Figures of one step, by slashed name."""
        ...

    def close(self) -> None:
        """Write out what is buffered."""
        ...


class Lines:
    """A file of JSON lines, each whole: one write call with O_APPEND.

    What finds no room on a full disk waits, and goes before the next line; of very many the last ones.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._stream = path.open("ab+", buffering=0)
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._is_torn = False
        self._close_torn_line()

    def write(self, kind: str, **values: Any) -> None:
        """Append one line with its kind and the time. Raises OSError where it has to wait."""
        line = {"kind": kind, "time": now_iso(), **values}
        self._waiting.append((json.dumps(_finite(line)) + "\n").encode())
        self.flush()

    def flush(self) -> None:
        """Append what waits. Raises OSError where there is still no room."""
        while self._waiting:
            line = (b"\n" if self._is_torn else b"") + self._waiting[0]
            written = self._stream.write(line) or 0
            self._is_torn = written < len(line) and (written > 0 or self._is_torn)
            if written >= len(line) - 1:  # all of it, but perhaps for its end
                self._waiting.popleft()
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def _close_torn_line(self) -> None:
        """A full disk may have cut the last line of an attempt before; ours must not be glued to it."""
        if self._stream.seek(0, 2) > 0:
            self._stream.seek(-1, 2)
            if self._stream.read(1) != b"\n":
                self._stream.write(b"\n")

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class TensorBoard:
    """TensorBoard event files: another one after a disk was full, for a writer that has failed fails for ever."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._open()

    def scalars(self, values: Mapping[str, float], *, step: int) -> None:
        """One scalar per name."""
        try:
            if self._writer is None:
                self._open()
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        except OSError:
            self._writer = None
            raise

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder))  # type: ignore[no-untyped-call]


class Wandb:
    """Weights & Biases, as an extra."""

    def __init__(self, job: Job, layout: RunLayout) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UsageError(
                "report.wandb: the package wandb is not installed on the head",
                seen=f"expected it beside torch; {error}",
                fix="pip install 'gangline[wandb]' there, or remove report.wandb",
            ) from error
        self._run = wandb.init(
            project=job.report.wandb_project,
            id=layout.run_id,
            name=layout.run_id,
            config=job.to_json(),
            dir=str(layout.folder),
            resume="allow",
        )

    def scalars(self, values: Mapping[str, float], *, step: int) -> None:
        """One logged row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()


def make_reporters(job: Job, layout: RunLayout) -> list[Reporter]:
    """The reporters that the job asks for. Raises UsageError for one that is not installed."""
    reporters: list[Reporter] = []
    if job.report.wandb_project is not None:
        reporters.append(Wandb(job, layout))
    if job.report.tensorboard:
        reporters.append(TensorBoard(layout.tensorboard))
    return reporters


def _finite(value: Any) -> Any:
    """JSON has no NaN: say it in words, so that any reader can parse the line and nobody overlooks it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
