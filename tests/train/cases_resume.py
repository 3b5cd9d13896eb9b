"""What the ranks do in test_resume: run a piece of a training, save, and go on in another gang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gangline.runs.checkpoints import part_folder, place_commit
from gangline.runs.manifest import PART_FILE, commit_record
from gangline.worker.checkpoint import Saver
from gangline.worker.exchange import settle_exchange
from gangline.worker.model import trainable
from gangline.worker.progress import restore
from tests.train.small import make_job, make_session, make_world, model_folder, run_loop


def piece(
    folder: str,
    *,
    shares,
    steps: int,
    resume_step: int | None,
    stop_after: int | None,
    job: dict,
    strategy: str = "ddp",
    lacking=(),
):
    """One attempt: from `resume_step` (None: the beginning) until stopped or done. Losses, samples and weights.

    lacking: hosts whose checkpoints are not looked at.
    """
    rank = dist.get_rank()
    world = make_world(shares, rank=rank, resume_step=resume_step, strategy=strategy, lacking=lacking)
    hosts = world.gang.hosts
    words = dict(job)
    warmup, layers = words.pop("warmup", 5), words.pop("layers", None)
    made = make_job(steps=steps, **words)
    if layers is not None:
        made = replace(made, model=replace(made.model, path=model_folder(layers=layers)))
    made = replace(made, schedule=replace(made.schedule, warmup_steps=warmup))
    session = make_session(made, world, num_evaluation=0)
    checkpoints = Path(folder)
    description = {"attempt": 1, "hosts": hosts, "num_ranks": len(shares), "fingerprints": {"train": "t"}}
    saver = None
    if world.is_first_of_host:
        saver = Saver(checkpoints, host=world.host, job=session.job.checkpoint, description=description)
    progress = restore(session, checkpoints / "nothing" if world.host in lacking else checkpoints)
    # reads a sample to see how long backward takes, which belongs to no step
    settle_exchange(session, progress, session.order.micro_batches(0)[0])
    read = _listen(session, progress)
    result, captured = run_loop(session, saver=saver, progress=progress, stop_after=stop_after)
    if saver is not None:
        saver.wait()
    dist.barrier()
    if rank == 0:
        parts = {host: (part_folder(checkpoints, progress.step, host) / PART_FILE).read_bytes() for host in hosts}
        place_commit(checkpoints, commit_record(parts))
    dist.barrier()
    trained = [parameter.detach() for parameter in trainable(session.model).values()]
    weights = torch.cat([(each.full_tensor() if isinstance(each, DTensor) else each).flatten() for each in trained])
    return {
        "result": result,
        "step": progress.step,
        "losses": captured.steps,
        "samples": read if world.gang.crews.index(world.gang.crews[rank]) == rank else [],  # others read the same
        "digest": str(torch.hash_tensor(weights).item()),
    }


def _listen(session, progress) -> list[tuple[int, int]]:
    read: list[tuple[int, int]] = []
    plain = session.train_set.sample

    def sample(index):
        read.append((progress.step, int(index)))
        return plain(index)

    session.train_set.sample = sample
    return read
