"""`python -m gangline.worker train <job.json> <gang.json> <root>`: one rank of a training run, under torchrun."""

from __future__ import annotations

import argparse
import contextlib
import logging
import traceback
from pathlib import Path
from typing import NoReturn, TextIO

from gangline.errors import GanglineError, RunFailed
from gangline.runs.files import read_json, write_json
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.worker.arrival import Arrival, arrive
from gangline.worker.checkpoint import Saver
from gangline.worker.keep import Outlets
from gangline.worker.loop import Loop
from gangline.worker.progress import restore
from gangline.worker.record import Recorder
from gangline.worker.session import build_session, open_sets
from gangline.worker.signals import StopFlag
from gangline.worker.world import World, join, leave

log = logging.getLogger(__name__)

_RESERVE_BYTES = 16 << 10
"""More than an error.json ever has."""


def train_main(argv: list[str]) -> NoReturn:
    """Train as one rank, and end the process; every failure is left in rank-<r>.error.json before."""
    parser = argparse.ArgumentParser(prog="gangline.worker train")
    for name in ("job", "gang", "root"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args(argv)
    arrival = arrive(arguments.gang, arguments.root)
    files, rank = arrival.files, arrival.rank
    stream = (files / f"rank-{rank}.log").open("a", buffering=1)
    stop = StopFlag()
    stop.install(stream)
    _start_log(stream)
    last_words = files / f"rank-{rank}.error.json"
    try:
        _reserve(_reserve_of(last_words))
        _train(Job.load(arguments.job), arrival, stop=stop)
    except GanglineError as error:
        leave(_leave_error(last_words, error))
    except Exception as error:
        log.exception("rank %d failed", rank)
        leave(_leave_error(last_words, _unexpected(error, rank)))


def _train(job: Job, arrival: Arrival, *, stop: StopFlag) -> NoReturn:
    gang, layout, phase = arrival.gang, arrival.layout, arrival.phase
    phase.enter("joining", step=0)
    world = join(gang)
    phase.enter("joined", step=0)
    log.info("joined: rank %d of %d on %s, %s", world.rank, world.size, world.host, world.device)
    recorder = Recorder(job, layout, world) if world.is_head else None
    log.info("loading %s", job.model.path)
    train_set, evaluation_set = open_sets(layout)
    session = build_session(job, world, train_set=train_set, evaluation_set=evaluation_set)
    progress = restore(session, layout.checkpoints)
    log.info("%s from step %d of %d in %s", job.method.kind, progress.step, session.total_steps, session.precision.name)
    if recorder is not None:
        recorder.event(
            "resumed" if progress.step else "started",
            step=progress.step,
            steps=session.total_steps,
            world_size=world.size,
            precision=session.precision.name,
        )
    outlets = Outlets(recorder=recorder, saver=_make_saver(job, layout, world), stop=stop, phase=phase)
    try:
        result = Loop(session, outlets, progress).run()
        if recorder is not None:
            write_json(layout.result(gang.attempt), {"result": result, "step": progress.step})
    finally:
        if recorder is not None:
            recorder.close()
    _reserve_of(layout.attempt(gang.attempt) / f"rank-{world.rank}.error.json").unlink(missing_ok=True)
    leave(RunFailed.exit_code if result == "failed" else 0)


def _make_saver(job: Job, layout: RunLayout, world: World) -> Saver | None:
    if not world.is_first_of_host:
        return None
    description = {
        "attempt": world.gang.attempt,
        "hosts": world.gang.hosts,
        "num_ranks": world.size,
        "fingerprints": read_json(layout.inputs),
    }
    return Saver(layout.checkpoints, host=world.host, job=job.checkpoint, description=description)


def _start_log(stream: TextIO) -> None:
    logging.basicConfig(
        stream=stream, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.captureWarnings(True)


def _reserve(path: Path) -> None:
    """Keep room for a last word on a disk that becomes full; one that is full already has none."""
    with contextlib.suppress(OSError):
        path.write_bytes(bytes(_RESERVE_BYTES))


def _leave_error(path: Path, error: GanglineError) -> int:
    _reserve_of(path).unlink(missing_ok=True)
    # the log comes second: it could take the room that was kept for the error
    write_json(path, error.to_json())
    log.error("%s", error)
    return error.exit_code


def _reserve_of(error: Path) -> Path:
    return error.with_suffix(".reserve")


def _unexpected(error: Exception, rank: int) -> RunFailed:
    last = "".join(traceback.format_exception(error)[-3:]).strip()
    return RunFailed(
        f"rank {rank} failed: {type(error).__name__}: {str(error).splitlines()[0][:500] if str(error) else ''}",
        seen=last[-2000:],
        fix=f"the whole story is in rank-{rank}.log of this attempt",
    )
