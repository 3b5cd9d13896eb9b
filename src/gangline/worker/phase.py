"""The phase file: where this rank is right now, readable by another process even when this one hangs."""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

PHASES = (
    "importing",
    "joining",
    "joined",
    "data",
    "compute",
    "exchange",
    "update",
    "evaluate",
    "save",
    "ended",
)
"""importing: torch. joining: the process group. joined: loading the model, restoring. The rest: one step."""
_RECORD = struct.Struct("<qqqd")


class PhaseFile:
    """A mapped record (step, phase, number of collectives entered, time); a few stores per change, no system call.

    The guard reads it, too (gangline.agent.ranks).
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
