"""`python -m gangline.worker train <job.json> <gang.json> <root>`: one rank of a training run, under torchrun."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO

from gangline.errors import BadState, GanglineError, RunFailed
from gangline.runs.gang import held_by
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_record, write_record
from gangline.worker.checkpoint import Saver
from gangline.worker.loop import Loop
from gangline.worker.process_group import AbortHandler, ProcessGroup, abort_comm, join, leave, told_to_leave
from gangline.worker.progress import TrainingProgress, restore
from gangline.worker.rank_files import ErrorFile, Rendezvous, SaveOrder, StopFlag, arrive, first_line, unexpected
from gangline.worker.record import Recorder
from gangline.worker.run_io import LastStep, RunIO
from gangline.worker.session import Session, build_session, open_sets
from gangline.worker.step_profile import StepProfile

log = logging.getLogger(__name__)

_FAREWELL_S = 0.5


def train_main(argv: list[str]) -> NoReturn:
    """Train as one rank, and end the process; every failure is left in rank-<r>.error.json before."""
    parser = argparse.ArgumentParser(prog="gangline.worker train")
    for name in ("job", "gang", "root"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args(argv)
    arrival = arrive(arguments.gang, arguments.root)
    stream = (arrival.files / f"rank-{arrival.rank}.log").open("a", buffering=1)
    stop = StopFlag()
    stop.install(stream)
    _start_log(stream)
    ending = FailureExit(arrival)
    try:
        _train(Job.load(arguments.job), arrival, stop=stop, ending=ending)
    except Exception as error:  # noqa: BLE001 - it is told, whatever it is
        leave(ending.say(error))


class FailureExit:
    """How this rank ends when it does not end well: it says why, and saves what it has completed."""

    def __init__(self, arrival: Rendezvous) -> None:
        self._rank = arrival.rank
        self._words = ErrorFile(arrival.files / f"rank-{arrival.rank}.error.json")
        self._words.reserve()
        self.cut = AbortHandler()
        self.cut.install(self._leave_at_once)

    def say(self, error: Exception) -> int:
        """Leave the error behind, unless there is one; the exit code."""
        said = self._words.said
        return self._words.say(self._told(error)) if said is None else said.exit_code

    def save(self, error: Exception, last_step: LastStep) -> None:
        """The error first, and the others are let go: a save may take long, and may fail."""
        self.say(error)
        if isinstance(error, BadState):
            # all ranks find it in the same numbers; one that lost this one before it has them would save its own
            time.sleep(_FAREWELL_S)
            last_step.settle()
            return
        abort_comm()
        last_step.keep()

    def well(self) -> None:
        """Nothing is to be said."""
        self._words.unneeded()

    def _told(self, error: Exception) -> GanglineError:
        if isinstance(error, GanglineError):
            return error
        if self.cut.explains(error):
            return told_to_leave(f"{type(error).__name__}: {first_line(error)}")
        log.error("rank %d failed", self._rank, exc_info=error)
        return unexpected(error, self._rank)

    def _leave_at_once(self) -> None:
        try:
            self._words.say(told_to_leave())
        finally:
            os._exit(RunFailed.exit_code)


def _train(job: Job, arrival: Rendezvous, *, stop: StopFlag, ending: FailureExit) -> NoReturn:
    gang, layout, phase = arrival.gang, arrival.layout, arrival.phase
    gang.require_settings(job)
    job = gang.settings_of(arrival.rank, job)
    phase.enter("joining", step=0)
    world = join(gang)
    phase.enter("joined", step=0)
    log.info("joined: rank %d of %d on %s, %s", world.rank, world.size, world.host, world.device)
    recorder = Recorder(job, layout, world) if world.is_head else None
    log.info("loading %s", job.model.path)
    train_set, evaluation_set = open_sets(layout)
    make_saver = partial(_make_saver, job, layout, world, beat=phase.beat)
    saver = make_saver() if world.is_first_of_host else None
    callbacks = recorder.callbacks if recorder is not None else None
    outlets = RunIO(
        recorder=recorder,
        saver=saver,
        stop=stop,
        phase=phase,
        cut=ending.cut,
        callbacks=callbacks,
        save_order=SaveOrder(layout.save_order(gang.attempt)) if recorder is not None else None,
        profile=StepProfile(layout.profile_order(gang.attempt), world),
    )
    session = build_session(job, world, train_set=train_set, evaluation_set=evaluation_set, beat=outlets.beat)
    progress = restore(session, layout.checkpoints)
    _tell_start(session, progress, recorder)
    last_step = LastStep(
        session,
        progress,
        phase,
        files=arrival.files,
        checkpoints=layout.checkpoints,
        saver=lambda: saver or make_saver(),
    )
    has_failed = True
    try:
        ending.cut.stay()
        result = Loop(session, outlets, progress).run()
        if recorder is not None:
            write_record(layout.result(gang.attempt), {"result": result, "step": progress.step})
        has_failed = result == "failed"
    except Exception as error:
        ending.save(error, last_step)
        raise
    finally:
        if recorder is not None:
            recorder.close(in_haste=has_failed)
    ending.well()
    session.strategy.finish()
    if saver is not None:  # a save that failed on another host may have been a good one here
        saver.wait()
    leave(RunFailed.exit_code if result == "failed" else 0)


def _tell_start(session: Session, progress: TrainingProgress, recorder: Recorder | None) -> None:
    kind, steps, precision = session.job.method.kind, session.total_steps, session.precision.name
    log.info("%s from step %d of %d in %s", kind, progress.step, steps, precision)
    session.kernels.tell()
    if recorder is not None:
        recorder.event(
            "resumed" if progress.step else "started",
            step=progress.step,
            steps=steps,
            world_size=session.world.size,
            precision=precision,
            kernels=list(session.kernels.taken),
        )


def _make_saver(job: Job, layout: RunLayout, world: ProcessGroup, *, beat: Callable[[], None]) -> Saver:
    description = {
        "attempt": world.gang.attempt,
        "hosts": world.gang.hosts,
        "num_ranks": world.size,
        "fingerprints": load_record(layout.inputs, dict),
        "held": held_by(world.gang),
    }
    return Saver(layout.checkpoints, host=world.host, job=job.checkpoint, description=description, beat=beat)


def _start_log(stream: TextIO) -> None:
    logging.basicConfig(
        stream=stream, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.captureWarnings(True)
