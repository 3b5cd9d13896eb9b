"""What processes do in test_broken: a whole run on the disk, and the ranks of its attempts."""

from __future__ import annotations

import os
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from gangline.errors import BadState
from gangline.runs.files import write_json
from gangline.runs.job import ModelJob, ReportJob, StrategyJob
from gangline.runs.layout import RunLayout
from gangline.worker.data.tokens import SetWriter, TokenSet
from gangline.worker.loop import Synchronous
from gangline.worker.pace import SLOWDOWN
from gangline.worker.process_group import LOST, AbortHandler, _sockets, abort_comm, connecting
from gangline.worker.rank_files import StopFlag, hold
from gangline.worker.train import train_main
from tests.train.messages import nccl_on_one_card
from tests.train.small import VOCABULARY, MemorySet, make_job, model_folder, norms_in_own_dtype

RUN_ID = "calm-otter-7"


def write_run(folder: str, *, steps: int, every_steps: int | None = None):
    """Model, tokens, inputs.json and job.json of a run in float64, below a host's work folder.

    every_steps: between two saves. Rounds of local SGD, where a gang is told to have them, are of two steps.
    """
    root = Path(folder)
    layout = RunLayout(root, RUN_ID)
    layout.folder.mkdir(parents=True)
    shutil.copytree(model_folder(), root / "model")
    rows = MemorySet(48)
    with SetWriter(layout.token_set("toys"), vocab_size=VOCABULARY, sequence_length=24, masked=False) as writer:
        for index in range(len(rows)):
            writer.add_text([int(token) for token in rows.sample(index).input_ids])
        writer.publish({}, packing=False)
    write_json(layout.inputs, {"train": "toys", "evaluation": None, "model": "m"})
    job = make_job(steps=steps, dropout=0.0)
    model = ModelJob(path=str(root / "model"), start="random")
    job = replace(job, model=model, report=ReportJob(exporters={}))
    checkpoint, rounds = replace(job.checkpoint, every_steps=every_steps), StrategyJob(inner_steps=2)
    replace(job, checkpoint=checkpoint, strategy=rounds).save(layout.job)


def train(
    folder: str,
    *,
    attempt: int,
    rank: int,
    world_size: int,
    port: int,
    slowdown: float = 1.0,
    fails_after: int | None = None,
    spoilt_after: int | None = None,
    device: str = "cpu",
):
    """Be one rank of an attempt. fails_after: so many samples it can read. spoilt_after: steps, then weights are bad.

    device: cuda: all ranks on the first GPU, over NCCL, which takes each of them for a host.
    """
    norms_in_own_dtype()
    os.environ.update({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else nccl_on_one_card(rank))
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, SLOWDOWN: slowdown}
    os.environ.update({name: str(value) for name, value in place.items()})
    if fails_after is not None:
        _fail_after(fails_after)
    if spoilt_after is not None:
        _spoil_after(spoilt_after)
    layout = RunLayout(Path(folder), RUN_ID)
    hold()
    train_main([str(layout.job), str(layout.gang(attempt)), folder])


def _fail_after(num_samples: int) -> None:
    plain, left = TokenSet.sample, [num_samples]

    def sample(self, index):
        left[0] -= 1
        if left[0] < 0:
            raise ValueError("the flour is damp")
        return plain(self, index)

    TokenSet.sample = sample


def _spoil_after(num_steps: int) -> None:
    plain = Synchronous.advance

    def advance(self):
        if self._progress.step == num_steps:
            raise BadState("the weights are not those of the others")
        return plain(self)

    Synchronous.advance = advance


def wait_for_ever(folder: str):
    """Rank 0 enters an exchange that rank 1 never joins; what rank 0 saw of it, and when."""
    stop, cut = StopFlag(), AbortHandler()
    with Path(folder, f"log-{dist.get_rank()}").open("a") as log:
        stop.install(log)
        cut.install(lambda: None)
        cut.stay()
        with connecting():
            group = dist.new_group([0, 1])
        # what is given back is read while the group still lives
        dist.barrier()
        Path(folder, f"ready-{dist.get_rank()}").touch()
        if dist.get_rank() == 1:
            time.sleep(60)
        try:
            dist.all_reduce(torch.zeros(1 << 16), group=group)
        except RuntimeError as error:
            return {
                "raised_s": time.monotonic(),
                "explained": cut.explains(error),
                "own_error_explained": cut.explains(ValueError("the flour is damp")),
                "stop": stop.raised,
            }
    return None


def severed():
    """What is left after `abort_comm`: the sockets that collectives open, the group's wait, and a connection of another."""
    with connecting():
        group = dist.new_group([0, 1])
    before = set(_sockets().values())
    for _ in range(2):
        dist.all_reduce(torch.ones(4), group=group)
    opened = len(set(_sockets().values()) - before)
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    error = ""
    if dist.get_rank() == 0:
        abort_comm()
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except RuntimeError as caught:
        error = str(caught)
    here.sendall(b"still here")
    return {"opened": opened, "error": LOST.search(error) is not None, "other": there.recv(16).decode()}
