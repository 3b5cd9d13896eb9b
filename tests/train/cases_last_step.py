"""What ranks do in test_last_step: a session after some steps, and who of a host saves it."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from gangline.runs import checkpoints as disk
from gangline.runs.checkpoints import part_folder
from gangline.runs.files import write_json
from gangline.runs.job import CheckpointJob
from gangline.runs.state import ProcessId
from gangline.worker import run_io as last_step
from gangline.worker.checkpoint import Saver
from gangline.worker.progress import TrainingProgress
from gangline.worker.rank_files import PhaseFile
from gangline.worker.run_io import LastStep
from tests.train.small import make_job, make_session, make_world

STEP = 7


def kept(folder: str, *, state: str = "", strategy: str = "ddp", resume_step: int | None = None):
    """A rank alone that has completed step 7 and stands in the next; whether it saved, and how often it can."""
    last = _last_step(
        Path(folder), TrainingProgress(step=STEP), [10], rank=0, strategy=strategy, resume_step=resume_step
    )
    if state == "updating":
        last._phase.enter("update", step=STEP + 1)
    elif state == "updated":
        last._phase.enter("update", step=STEP)
    elif state == "no disk":
        Path(folder).rmdir()
        Path(folder).touch()
    first = last.keep()
    return {"first": first, "again": last.keep(), "part": part_folder(Path(folder), STEP, "pc0").is_dir()}


def kept_while_it_writes(folder: str):
    """A rank whose next update is half-way, while step 7 is on its way to the disk; what is there when it has left.

    The write gets on only when somebody waits for it.
    """
    last = _last_step(Path(folder), TrainingProgress(step=STEP), [10], rank=0)
    last._phase.enter("update", step=STEP + 1)
    saver, awaited = last._saver(), threading.Event()
    plain = saver.wait

    def wait():
        awaited.set()
        plain()

    with patch.object(disk, "at_point", lambda _name: awaited.wait(20)):
        saver.save(STEP, {"weight": torch.ones(3)}, TrainingProgress(step=STEP).to_json(None))
        saver.wait = wait
        saved = last.keep()
        there = part_folder(Path(folder), STEP, "pc0").is_dir()
        wait()
    return {"saved": saved, "there": there}


def second_of_its_host(folder: str, *, first: str):
    """Two ranks of one host; what the second does, where the first is `alive`, `gone`, or has `saved`."""
    last_step.PATIENCE_S = 0.3
    rank = dist.get_rank()
    last = _last_step(Path(folder), TrainingProgress(step=STEP), [5, 5], rank=rank, hosts=["pc0", "pc0"])
    dist.barrier()
    if rank == 0:
        me = ProcessId.current()
        record = replace(me, start_ticks=me.start_ticks + 1) if first == "gone" else me
        write_json(Path(folder, "rank-0.pid"), record.to_json())
        if first == "saved":
            assert last.keep()
    dist.barrier()
    saved = last.keep() if rank == 1 else None
    dist.barrier()
    return saved


def _last_step(
    folder: Path, progress: TrainingProgress, shares, *, rank: int, strategy: str = "ddp", **words
) -> LastStep:
    world = make_world(shares, rank=rank, **words)
    world = replace(world, gang=replace(world.gang, strategy=strategy))
    session = make_session(make_job(steps=20), world, num_evaluation=0)
    description = {"attempt": 1, "hosts": world.gang.hosts, "num_ranks": len(shares), "fingerprints": {}}
    phase = PhaseFile(folder.with_name(f"rank-{rank}-{os.getpid()}.phase"))
    phase.enter("exchange", step=STEP + 1)
    saver = Saver(folder, host="pc0", job=CheckpointJob(), description=description)
    return LastStep(session, progress, phase, files=folder, checkpoints=folder, saver=lambda: saver)
