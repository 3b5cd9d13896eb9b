"""What the ranks do in test_shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gangline.errors import GanglineError
from gangline.runs.gang import held_by
from gangline.runs.job import CheckpointJob
from gangline.worker.checkpoint import Saver
from gangline.worker.optimizer import state_tensors
from gangline.worker.progress import TrainingProgress, restore
from gangline.worker.rank_files import StopFlag
from gangline.worker.run_io import CheckpointSchedule, RunIO
from tests.train.cases_resume import digests_of
from tests.train.peak import Peak
from tests.train.small import make_job, make_session, make_world, mixture_folder, model_folder


def state(folder: str, *, shares, strategy: str, hosts, step: int, job: dict, alone: bool = False, rows=(10,)):
    """The whole state that a gang has after it went on from a step: name -> hash of its bits; or the error.

    alone: each rank by itself, without the hashes, which takes all of them. Every host has a folder of its own below `folder`.
    """
    world = make_world(shares, rank=dist.get_rank(), resume_step=step, strategy=strategy, hosts=hosts, rows=rows)
    words = dict(job)
    layers, mixture = words.pop("layers", 2), words.pop("mixture", False)
    made = make_job(**words)
    made = replace(made, model=replace(made.model, path=mixture_folder() if mixture else model_folder(layers=layers)))
    session = make_session(made, world, num_evaluation=0)
    tensors = state_tensors(session.model, session.optimizer)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(float("nan"))
    try:
        progress = restore(session, Path(folder) / world.host)
    except GanglineError as error:
        return {"error": str(error), "digests": {}, "step": None}
    return {"error": "", "digests": {} if alone else digests_of(session), "step": progress.step}


def memory_of_a_save(folder: str, *, each_host: str):
    """Anonymous memory that a save takes at its peak on this rank, and what of the state it and its host have; bytes."""
    rank = dist.get_rank()
    world = make_world([4, 3, 3], rank=rank, strategy="fsdp", hosts=["pc0", "pc0", "pc1"])
    wide = model_folder(hidden_size=512, intermediate_size=2048)
    job = make_job(precision="fp32", checkpoint=CheckpointJob(every_minutes=None, each_host=each_host))
    session = make_session(replace(job, model=replace(job.model, path=wide)), world, num_evaluation=0)
    description = {"attempt": 1, "hosts": world.gang.hosts, "num_ranks": 3, "fingerprints": {}}
    description["held"] = held_by(world.gang)
    saver = None
    if world.is_first_of_host:
        saver = Saver(Path(folder) / world.host, host=world.host, job=session.job.checkpoint, description=description)
    checkpoints = CheckpointSchedule(
        session, RunIO(recorder=None, saver=saver, stop=StopFlag()), progress := TrainingProgress()
    )
    progress.step = 1
    tensors = state_tensors(session.model, session.optimizer).values()
    own = sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)
    with Peak() as peak:
        checkpoints.save(wait=False)
        if saver is not None:
            saver.wait()
    assert saver is None or saver.failure is None
    return {"peak": peak.num_bytes, "own": own, "whole": sum(each.nbytes for each in tensors)}
