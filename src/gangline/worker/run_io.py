"""Where a run writes, when it saves, and the last complete step of an attempt that breaks.

Ranks that are left after a failure save the last complete step, so that next to nothing is lost. Between two steps
every rank of a replicated strategy holds the whole state: such a save needs no other rank. It is an ordinary part; one
whole part of one host is enough to go on from. Other strategies cannot do it: within a round of local SGD hosts have
moved apart, and where weights are divided (fsdp) some parts have gone. Such a run goes back to its last checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gangline.callbacks import Action, Callbacks
from gangline.errors import CheckpointError
from gangline.runs import checkpoints as disk
from gangline.runs.checkpoints import FIRST_MIN, minutes_between
from gangline.runs.files import read_json
from gangline.runs.manifest import PART_FILE, CheckpointPart, verify_part
from gangline.runs.state import ProcessId
from gangline.runs.step_schedule import cadence
from gangline.worker.agree import StepReport, gather_json
from gangline.worker.balance import SharesMoved
from gangline.worker.checkpoint import Saver, send, shards_of_host
from gangline.worker.process_group import AbortHandler
from gangline.worker.progress import TrainingProgress
from gangline.worker.rank_files import PhaseFile, SaveOrder, StopFlag
from gangline.worker.record import Recorder
from gangline.worker.session import Session
from gangline.worker.step_profile import StepProfile

_SLOW_SAVE_S = 60.0
"""A background write that takes longer puts the next save off: waiting for it would hold the other ranks up."""

_AGREED = frozenset({"update", "ended"})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIO:
    """Where a loop writes and whom it obeys. The recorder exists on rank 0, the saver on one rank of each host."""

    recorder: Recorder | None
    saver: Saver | None
    stop: StopFlag
    phase: PhaseFile | None = None
    cut: AbortHandler | None = None
    callbacks: Callbacks | None = None
    """Where the recorder is."""
    save_order: SaveOrder | None = None
    """The same."""
    profile: StepProfile | None = None

    def enter(self, phase: str, *, step: int) -> None:
        """Say where this rank is; see `PhaseFile`. step: 1-based.

        Raises RunFailed if the gang has failed elsewhere, unless all ranks have agreed on what comes now.
        """
        if self.cut is not None and phase not in _AGREED:
            self.cut.check()
        if self.phase is not None:
            self.phase.enter(phase, step=step)

    def beat(self) -> None:
        """Say within a long phase that this rank is still there. Raises RunFailed as `enter` does."""
        if self.cut is not None:
            self.cut.check()
        if self.phase is not None:
            self.phase.beat()

    def data(self) -> AbstractContextManager[Any]:
        """Around the reading of a batch."""
        return nullcontext() if self.profile is None else self.profile.data()

    def asked(self, action: Action, *, step: int) -> bool:
        """Whether a callback asks for this; once, and noted as an event. step: the last one that is done."""
        name = None if self.callbacks is None else self.callbacks.take(action)
        if name is not None:
            self.event("callback", step=step, callback=name, asks=action.value)
        return name is not None

    def wants_save(self, *, step: int) -> bool:
        """Whether a callback asks for a save, or the user has ordered one; once for each."""
        is_ordered = self.save_order is not None and self.save_order.take()
        return self.asked(Action.save, step=step) or is_ordered

    def event(self, event: str, **details: object) -> None:
        """Note something that happened, where this rank is the one that writes."""
        if self.recorder is not None:
            self.recorder.event(event, **details)

    def tell_shares(self, moved: SharesMoved, hosts: Sequence[str], *, step: int, cause: str) -> None:
        """Note who does how much from the step after `step` on. hosts: of every rank."""
        what = moved.words(hosts)
        log.info("shares from step %d on: %s", step + 1, what)
        self.event(
            "shares",
            step=step,
            cause=cause,
            what=what,
            before=list(moved.before),
            shares=list(moved.after),
            micro_batch_s=[None if each is None else round(each, 6) for each in moved.micro_batch_s],
        )


class CheckpointSchedule:
    """Saves of one attempt on one rank."""

    def __init__(self, session: Session, outlets: RunIO, progress: TrainingProgress) -> None:
        self._session = session
        self._out = outlets
        self._progress = progress
        self.saved_step = progress.step
        """The step that was saved last, or the attempt began with. Every rank says the same."""
        self._saved_s = time.monotonic()
        self._known_failure: CheckpointError | None = None
        job, steps_per_epoch = session.job.checkpoint, session.order.steps_per_epoch
        self._marks = cadence(job.every_steps, job.every_epochs, steps_per_epoch=steps_per_epoch)
        self._waits = False

    @property
    def minutes_are_up(self) -> bool:
        """Whether the minutes between two saves have passed."""
        minutes = self._minutes
        return minutes is not None and time.monotonic() - self._saved_s >= 60 * minutes

    @property
    def _minutes(self) -> float | None:
        asked, saver = self._session.job.checkpoint.every_minutes, self._out.saver
        if asked != "auto":
            return asked
        if saver is None:
            return None  # those that save know when
        return FIRST_MIN if saver.saved is None else minutes_between(saver.stall_s, saver.saved.write_s)

    @property
    def failed(self) -> bool:
        """Whether this rank's last save failed, and nobody was told yet."""
        saver = self._out.saver
        return saver is not None and saver.failure not in (None, self._known_failure)

    @property
    def is_saving(self) -> bool:
        """Whether a write is going on in the background."""
        return self._out.saver is not None and self._out.saver.busy

    @property
    def is_slow(self) -> bool:
        """Whether a write has been going on for so long that the next save must wait."""
        saver = self._out.saver
        return saver is not None and saver.busy and time.monotonic() - self._saved_s > _SLOW_SAVE_S

    def is_due(self, report: StepReport, *, before: int) -> bool:
        """Whether to save now, after the optimizer steps that followed step `before`. Every rank says the same."""
        job, progress = self._session.job.checkpoint, self._progress
        every = self._marks.is_due(progress.step, before=before)
        self._waits = self._waits or (progress.is_best and job.keep_best) or bool(report.save) or every
        return self._waits and not report.slow_saves

    def save(self, *, wait: bool) -> None:
        """Save this step, unless that was done; `wait` until it is on the disk."""
        progress = self._progress
        if progress.step != self.saved_step:
            self._write(wait=wait)
        self.saved_step, self._saved_s, self._waits = progress.step, time.monotonic(), False
        if wait and self._out.saver is not None:
            self._out.saver.wait()

    def _write(self, *, wait: bool) -> None:
        """Hand this step to the saver; what is in parts is put together by all ranks, though few of them save."""
        session, progress, saver = self._session, self._progress, self._out.saver
        if saver is None and session.strategy.shard_group is None:
            return
        self._out.enter("save", step=progress.step + 1)
        tensors = session.state_tensors()
        if saver is not None:
            log.info("saving step %d", progress.step)
        if session.job.checkpoint.each_host == "part" and session.strategy.spans_hosts:
            self._save_pieces(tensors, wait=wait)
        else:
            whole = session.strategy.full_state(tensors, wanted=saver is not None)
            if saver is not None:
                saver.save(progress.step, whole, progress.to_json(session.scaler), wait=wait)
        if saver is not None:
            order = self._out.save_order
            ordered = {"ordered": True} if order is not None and order.answer() else {}
            self._out.event("saving", step=progress.step, **ordered)

    def _save_pieces(self, tensors: Mapping[str, torch.Tensor], *, wait: bool) -> None:
        """What the ranks of this host have; nothing passes between hosts."""
        session, progress, saver = self._session, self._progress, self._out.saver
        if saver is None:
            send(tensors, session.world)
        else:
            state = progress.to_json(session.scaler)
            saver.save_shards(progress.step, shards_of_host(tensors, session.world), state, wait=wait)

    def gives_up(self) -> bool:
        """After a save failed somewhere: whether the run ends. The rank whose save failed says why; others leave.

        Collective.
        """
        saver, job, world = self._out.saver, self._session.job.checkpoint, self._session.world
        failure = saver.failure if saver is not None else None
        causes = gather_json(failure.what if failure is not None and self.failed else "", world)
        self._known_failure = failure
        if failure is not None:
            log.error("%s", failure)
        hosts = [rank.host for rank in world.gang.ranks]
        what = "; ".join(f"rank {rank} on {hosts[rank]}: {cause}" for rank, cause in enumerate(causes) if cause)
        self._out.event("save-failed", step=self._progress.step, what=what)
        if job.on_failure == "continue":
            return False
        if failure is not None:
            raise failure
        return True


PATIENCE_S = 15.0
"""For ranks of this host that come before this one; longer than a host agent lets one live that does not get on."""
_LOOK_S = 0.05


class LastStep:
    """What one rank does about it.

    phase: tells whether weights and optimizer are half-way. files: where rank-<r>.pid of this attempt lie.
    checkpoints: the run's folder of them on this host. saver: this rank's, or a new one: one rank of a host writes.
    """

    def __init__(
        self,
        session: Session,
        progress: TrainingProgress,
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
        return [rank for rank in world.gang.ranks_on(world.host) if rank < world.rank]

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
            part = CheckpointPart.from_bytes((folder / PART_FILE).read_bytes())
        except (OSError, ValueError, CheckpointError):
            return False
        return part.attempt == world.gang.attempt and not verify_part(folder, hashes=False)


def _state(pid: int) -> bytes:
    """The letter of a process's state, as in /proc."""
    # the command name may hold spaces and parentheses
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
