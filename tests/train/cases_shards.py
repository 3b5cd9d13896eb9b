"""What the ranks do in test_shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from gangline.errors import GanglineError
from gangline.worker.optimizer import state_tensors
from gangline.worker.progress import restore
from tests.train.cases_resume import digests_of
from tests.train.small import make_job, make_session, make_world, model_folder


def state(folder: str, *, shares, strategy: str, hosts, step: int, job: dict, alone: bool = False):
    """The whole state that a gang has after it went on from a step: name -> hash of its bits; or the error.

    alone: each rank by itself, without the hashes, which takes all of them. Every host has a folder of its own below `folder`.
    """
    world = make_world(shares, rank=dist.get_rank(), resume_step=step, strategy=strategy, hosts=hosts)
    words = dict(job)
    layers = words.pop("layers", 2)
    made = make_job(**words)
    made = replace(made, model=replace(made.model, path=model_folder(layers=layers)))
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
