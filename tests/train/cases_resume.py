"""What the ranks do in test_resume: run a piece of a training, save, and go on in another gang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gangline.runs.checkpoints import part_folder
from gangline.runs.gang import held_by
from gangline.runs.manifest import PART_FILE, commit_record
from gangline.worker.checkpoint import Saver
from gangline.worker.exchange import settle_exchange
from gangline.worker.model import trainable
from gangline.worker.optimizer import state_tensors
from gangline.worker.progress import restore
from tests.saved import place_commit
from tests.train.small import make_job, make_session, make_world, mixture_folder, model_folder, run_loop


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
    hosts=None,
    each_host: str = "whole",
    disks: bool = False,
    rows=(10,),
    settings=(),
    device: str = "cpu",
):
    """One attempt: from `resume_step` (None: the beginning) until stopped or done. Losses, samples and weights.

    lacking: hosts whose checkpoints are not looked at. hosts: of every rank. disks: every host has a folder of its own.
    """
    rank = dist.get_rank()
    place = {"strategy": strategy, "lacking": lacking, "hosts": hosts, "rows": rows, "settings": settings}
    place["device"] = device
    world = make_world(shares, rank=rank, resume_step=resume_step, **place)
    hosts = world.gang.hosts
    words = dict(job)
    warmup, layers, mixture = words.pop("warmup", 5), words.pop("layers", None), words.pop("mixture", False)
    made = make_job(steps=steps, **words)
    if layers is not None or mixture:
        path = mixture_folder() if mixture else model_folder(layers=layers)
        made = replace(made, model=replace(made.model, path=path))
    made = replace(made, schedule=replace(made.schedule, warmup_steps=warmup))
    made = replace(made, checkpoint=replace(made.checkpoint, each_host=each_host))
    session = make_session(made, world, num_evaluation=0)
    folders = {host: Path(folder) / host if disks else Path(folder) for host in hosts}
    checkpoints = folders[world.host]
    description = {"attempt": 1, "hosts": hosts, "num_ranks": len(shares), "fingerprints": {"train": "t"}}
    description["held"] = held_by(world.gang)
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
        parts = {host: (part_folder(folders[host], progress.step, host) / PART_FILE).read_bytes() for host in hosts}
        for each in set(folders.values()):
            place_commit(each, commit_record(parts))
    dist.barrier()
    trained = [parameter.detach() for parameter in trainable(session.model).values()]
    weights = torch.cat([(each.full_tensor() if isinstance(each, DTensor) else each).flatten() for each in trained])
    return {
        "result": result,
        "step": progress.step,
        "losses": captured.steps,
        "samples": read
        if world.gang.replica_groups.index(world.gang.replica_groups[rank]) == rank
        else [],  # others read the same
        "digest": str(torch.hash_tensor(weights).item()) if len(weights) else "",  # zero-3 shows none
        "state": digests_of(session) if disks else {},
    }


def digests_of(session) -> dict[str, str]:
    """The whole state: name -> hash of its bits; collective."""
    whole = session.strategy.full_state(state_tensors(session.model, session.optimizer), wanted=True)
    return {name: str(torch.hash_tensor(tensor.contiguous()).item()) for name, tensor in sorted(whole.items())}


def _listen(session, progress) -> list[tuple[int, int]]:
    read: list[tuple[int, int]] = []
    plain = session.train_set.sample

    def sample(index):
        read.append((progress.step, int(index)))
        return plain(index)

    session.train_set.sample = sample
    return read
