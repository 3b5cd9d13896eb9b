"""The last complete step of an attempt that breaks: saved by those who are left, so that next to nothing is lost.

Between two steps every rank of a replicated strategy holds the whole state, and has it to itself: nothing of a save
needs the others. It is an ordinary part, of whatever step this host has completed; one whole part of one host is enough
to go on from. Not so with local SGD: within a round hosts have moved apart, and what they agree on is the round before,
which nobody holds any more; nor where the trained weights are in parts (fsdp), of which some have gone. Such a run goes
back to its last checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from gangline.errors import CheckpointError
from gangline.runs import checkpoints as disk
from gangline.runs.files import read_json
from gangline.runs.manifest import PART_FILE, Part, verify_part
from gangline.runs.process import ProcessId
from gangline.worker.checkpoint import Saver
from gangline.worker.phase import PhaseFile
from gangline.worker.progress import Progress
from gangline.worker.session import Session

log = logging.getLogger(__name__)

PATIENCE_S = 15.0
"""For ranks of this host that come before this one; longer than a guard lets one live that does not get on."""
_LOOK_S = 0.05


class LastStep:
    """What one rank does about it.

    phase: tells whether weights and optimizer are half-way. files: where rank-<r>.pid of this attempt lie.
    checkpoints: the run's folder of them on this host. saver: this rank's, or a new one: one rank of a host writes.
    """

    def __init__(
        self,
        session: Session,
        progress: Progress,
        phase: PhaseFile,
        *,
        files: Path,
        checkpoints: Path,
        saver: Callable[[], Saver],
    ) -> None:
        self._session = session
        self._progress = progress
        self._phase = phase
        self._files = files
        self._checkpoints = checkpoints
        self._saver = saver

    def keep(self) -> bool:
        """Save the step that was completed last, unless a checkpoint has it. Whether this rank did. Never raises."""
        try:
            self.settle()
            return self._is_whole() and self._is_new() and self._is_for_us() and self._save()
        except Exception:
            log.exception("the last complete step could not be saved")
            return False

    def settle(self) -> None:
        """Wait for the write in flight, if there is one: leaving would cut off a checkpoint that is good."""
        self._saver().wait()

    def _is_whole(self) -> bool:
        """Whether this rank holds the whole state of its last step, and of no other."""
        halfway = self._phase.where == ("update", self._progress.step + 1)
        return self._session.strategy.replicated and not halfway

    def _is_new(self) -> bool:
        return self._progress.step > (self._session.world.gang.resume_step or 0)

    def _is_for_us(self) -> bool:
        """Wait for ranks of this host that come first; False where one of them has saved it, or is still there."""
        step, deadline = self._progress.step, time.monotonic() + PATIENCE_S
        self._phase.enter("save", step=step + 1)
        while any(self._lives(rank) for rank in self._before()):
            if self._is_on_disk() or time.monotonic() > deadline:
                return False
            self._phase.beat()
            time.sleep(_LOOK_S)
        return True

    def _save(self) -> bool:
        session, step = self._session, self._progress.step
        if self._is_on_disk():
            return False
        saver = self._saver()
        saver.save(step, session.state_tensors(), self._progress.to_json(session.scaler), wait=True)
        if saver.failure is not None:
            raise saver.failure
        log.info("saved step %d before leaving", step)
        return True

    def _before(self) -> list[int]:
        world = self._session.world
        return [rank for rank in range(world.rank) if world.gang.ranks[rank].host == world.host]

    def _lives(self, rank: int) -> bool:
        """Whether that rank can still save; one that somebody has stopped cannot."""
        try:
            record = read_json(self._files / f"rank-{rank}.pid")
            process = ProcessId(pid=record["pid"], start_ticks=record["start_ticks"])
            stopped = _state(process.pid) in {b"T", b"t"}
        except (OSError, ValueError, KeyError):
            return False
        return process.is_alive and not stopped

    def _is_on_disk(self) -> bool:
        """Whether this host's part of the step is there, whole, and of this attempt."""
        world = self._session.world
        folder = disk.part_folder(self._checkpoints, self._progress.step, world.host)
        try:
            part = Part.from_bytes((folder / PART_FILE).read_bytes())
        except (OSError, ValueError, CheckpointError):
            return False
        return part.attempt == world.gang.attempt and not verify_part(folder, hashes=False)


def _state(pid: int) -> bytes:
    """The letter of a process's state, as in /proc."""
    # the command name may hold spaces and parentheses
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
