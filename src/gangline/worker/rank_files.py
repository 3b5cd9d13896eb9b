"""The files by which a rank tells others about itself, and the signals that it obeys; without torch.

    rank-<r>.pid          rendezvous marker: the process is there, before it imports torch for seconds or minutes
    rank-<r>.phase        where it is right now, readable by another process even when this one hangs
    rank-<r>.error.json   why it leaves, written before anything else is tried

SIGTERM asks it to save at the next step boundary and leave; SIGUSR1 makes it write its stacks; SIGUSR2 tells it that
the gang has failed elsewhere (`worker/process_group.py`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import mmap
import os
import signal
import struct
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from gangline.errors import GanglineError, RunFailed
from gangline.runs.files import sync_folder, write_json
from gangline.runs.gang import Gang
from gangline.runs.layout import PHASES, RunLayout
from gangline.runs.state import ProcessId

_RECORD = struct.Struct("<qqqd")


class PhaseFile:
    """A mapped record (step, phase, number of collectives entered, time); a few stores per change, no system call.

    The host agent reads it, too (gangline.agent.supervise.ranks).
    """

    def __init__(self, path: Path) -> None:
        # Not cut to nothing first: another mapping of it, in this process, would break at its next store.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Not only made so long: on a full disk the first store into a hole would be a bus error.
            os.posix_fallocate(descriptor, 0, _RECORD.size)
            self._map = mmap.mmap(descriptor, _RECORD.size)
        finally:
            os.close(descriptor)
        self._collectives = 0
        self.enter("importing", step=0)

    def enter(self, phase: str, *, step: int) -> None:
        """Say that this rank is now in `phase` of 1-based `step`."""
        self._collectives += phase == "exchange"
        _RECORD.pack_into(self._map, 0, step, PHASES.index(phase), self._collectives, time.time())

    @property
    def where(self) -> tuple[str, int]:
        """The phase and the 1-based step that were entered last."""
        step, phase, _, _ = _RECORD.unpack_from(self._map)
        return PHASES[phase], step

    def beat(self) -> None:
        """Say that this rank is still there: a wait for others that may be long is no hang."""
        step, phase, collectives, _ = _RECORD.unpack_from(self._map)
        _RECORD.pack_into(self._map, 0, step, phase, collectives, time.time())


log = logging.getLogger(__name__)

_RESERVE_BYTES = 16 << 10
"""More than an error.json ever has."""


class ErrorFile:
    """The error that ends this rank. The first counts: what follows it may follow from it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reserve = path.with_suffix(".reserve")
        self._lock = threading.Lock()
        self.said: GanglineError | None = None

    def reserve(self) -> None:
        """Keep room for them on a disk that becomes full; one that is full already has none."""
        with contextlib.suppress(OSError):
            self._reserve.touch(mode=0o600)
            self._reserve.write_bytes(bytes(_RESERVE_BYTES))

    def say(self, error: GanglineError) -> int:
        """Write the error, unless one is there; the exit code of the one that is."""
        with self._lock:
            if self.said is None:
                self.said = error
                self._write(json.dumps(error.to_json(), indent=2).encode())
                log.error("%s", error)
            return self.said.exit_code

    def _write(self, words: bytes) -> None:
        """Into the room that was kept, which is given to nobody else in between: another program may be waiting for it.

        The log comes after that, for it could take the room as well.
        """
        try:
            with self._reserve.open("r+b") as stream:
                stream.write(words)
                stream.truncate()
                stream.flush()
                os.fsync(stream.fileno())
            self._reserve.rename(self._path)
            sync_folder(self._path.parent)
        except OSError:  # there was none to keep
            self._reserve.unlink(missing_ok=True)
            write_json(self._path, json.loads(words))

    def unneeded(self) -> None:
        """This rank leaves well: give the room back."""
        self._reserve.unlink(missing_ok=True)


def unexpected(error: BaseException, rank: int) -> RunFailed:
    """An error that nobody foresaw, in three parts."""
    last = "".join(traceback.format_exception(error)[-3:]).strip()
    return RunFailed(
        f"rank {rank} failed: {type(error).__name__}: {first_line(error)}",
        seen=last[-2000:],
        fix=f"the whole story is in rank-{rank}.log of this attempt",
    )


def first_line(error: BaseException) -> str:
    """Of what it says."""
    return str(error).splitlines()[0][:500] if str(error) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """A rank that has said who it is."""

    gang: Gang
    layout: RunLayout
    rank: int
    phase: PhaseFile

    @property
    def files(self) -> Path:
        """Where the files of ranks lie."""
        return self.layout.attempt(self.gang.attempt)


def arrive(gang: Path, root: Path) -> Rendezvous:
    """Write rank-<r>.pid and rank-<r>.phase. May be called again, with the same result.

    The start time of the process is noted, too, so that a signal can never reach a later process with the same pid.
    """
    described = Gang.load(gang)
    layout = RunLayout(root, described.run_id)
    rank = int(os.environ.get("RANK", "0"))
    files = layout.attempt(described.attempt)
    write_json(files / f"rank-{rank}.pid", {**ProcessId.current().to_json(), "time": time.time()})
    phase = PhaseFile(files / f"rank-{rank}.phase")
    return Rendezvous(gang=described, layout=layout, rank=rank, phase=phase)


def early(argv: list[str]) -> None:
    """`arrive` for the words of `train`; what is wrong with them is told later, by who can tell it well."""
    try:
        _, gang, root = argv
        arrive(Path(gang), Path(root))
    except (OSError, ValueError, TypeError):
        return


def hold() -> None:
    """What comes before there is somebody to take it: SIGUSR2 waits until then, SIGUSR1 shows stacks on stderr.

    Either would end a process that imports torch, which takes seconds.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    faulthandler.register(signal.SIGUSR1, all_threads=True)


class SaveOrder:
    """A save that the user has ordered: a file of the attempt on the head, which rank 0 takes away."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_open = False

    def take(self) -> bool:
        """Take the order, if there is one; whether there was."""
        try:
            self._path.unlink()
        except OSError:  # there is none; or one that stays there, which would count at every step
            return False
        self._is_open = True
        return True

    def answer(self) -> bool:
        """Whether the save that begins is the answer to an order; once for each."""
        was_open, self._is_open = self._is_open, False
        return was_open


class StopFlag:
    """Whether this rank was asked to leave. The gang agrees on it at a step boundary, never one rank alone."""

    def __init__(self) -> None:
        self.raised = False

    def install(self, log: TextIO) -> None:
        """Listen to SIGTERM, ignore the terminal's Ctrl-C, write stacks to `log` on SIGUSR1."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.raised = True
