"""What the ranks do in test_exchange: buckets, formats, what travels, what is waited for."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from gangline.runs.checkpoints import part_folder
from gangline.runs.formulas import AllReduce
from gangline.runs.layout import RunLayout
from gangline.runs.manifest import PART_FILE, commit_record
from gangline.worker import exchange
from gangline.worker.agree import RankTimes, StepReport
from gangline.worker.checkpoint import Saver
from gangline.worker.exchange import measure_wire
from gangline.worker.model import trainable
from gangline.worker.progress import TrainingProgress, restore
from gangline.worker.record import Recorder
from tests.saved import place_commit
from tests.train.small import make_job, make_session, make_world, run_loop

CPU = torch.device("cpu")


def wire():
    """The line that was measured on this machine."""
    found = measure_wire(CPU)
    return {"latency_s": found.latency_s, "per_byte_s": found.per_byte_s}


def made_up_wire(latency_s: float, per_byte_s: float):
    """The line that is found, and the sizes that are looked at, where all-reduces take what this line says."""
    sizes = []

    def measured(size, device, share_s):
        sizes.append(size)
        return sorted([latency_s + size * per_byte_s] * 4 + [1.0])

    with mock.patch("gangline.worker.exchange.measure", measured):
        found = measure_wire(CPU)
    return {"latency_s": found.latency_s, "per_byte_s": found.per_byte_s, "largest": sizes[-1]}


def train(shares, *, number: str, steps: int, method: str = "lora", precision: str = "fp32"):
    """Losses of a run, the bytes of gradients that this rank gave to all-reduces, and a digest of its weights."""
    job = replace(make_job(method=method, precision=precision, steps=steps), exchange=number)
    session = make_session(job, make_world(shares, rank=dist.get_rank()), num_evaluation=0)
    sent: dict[str, int] = {}
    plain = dist.all_reduce

    def counted(tensor, *arguments, **words):
        if words.get("async_op"):
            kind = str(tensor.dtype).removeprefix("torch.")
            sent[kind] = sent.get(kind, 0) + tensor.nbytes
        return plain(tensor, *arguments, **words)

    progress = TrainingProgress()
    exchange.settle_exchange(session, progress, session.order.micro_batches(0)[0])
    with mock.patch.object(dist, "all_reduce", counted):
        _, captured = run_loop(session, progress=progress)
    weights = torch.cat([parameter.detach().flatten() for parameter in trainable(session.model).values()])
    return {
        "losses": [loss for _, loss, _ in captured.steps],
        "sent": sent,
        "gradient_bytes": weights.nbytes,
        "digest": str(torch.hash_tensor(weights).item()),
    }


def pure_bf16(shares):
    """Training in bf16 through and through, with bf16 asked for on the wire."""
    job = replace(make_job(method="lora", precision="bf16", steps=2, parameters="compute"), exchange="bf16")
    session = make_session(job, make_world(shares, rank=dist.get_rank()), num_evaluation=0)
    seen: dict[str, int] = {}
    plain = type(session.strategy._exchange).send

    def send(self, bucket):
        result = plain(self, bucket)
        seen[str(self._flying[-1][2].dtype if self._flying else bucket.buffer().dtype).removeprefix("torch.")] = 1
        return result

    with mock.patch.object(type(session.strategy._exchange), "send", send):
        run_loop(session)
    return {"sent": seen, "packed": session.strategy.packed}


def settled(shares):
    """The size that every rank settled on where their own clocks differ, and that of the event on rank 0."""
    job = make_job(precision="fp32", steps=2)
    session = make_session(job, make_world(shares, rank=dist.get_rank()), num_evaluation=0)
    own = {"backward_s": 0.1 * (1 + dist.get_rank())}
    with (
        mock.patch.object(exchange, "_time_passes", return_value=(1.5 * own["backward_s"], own["backward_s"])),
        mock.patch.object(exchange, "measure_wire", return_value=AllReduce(latency_s=1e-4, per_byte_s=1e-6)),
        mock.patch("gangline.runs.formulas.SMALLEST_BYTES", 8 << 10),
    ):
        progress = TrainingProgress()
        _, captured = run_loop(session, progress=progress)
    events = [event for event in captured.events if event["event"] == "exchange"]
    size = sum(parameter.numel() * 4 for parameter in trainable(session.model).values())
    return {"bucket_bytes": progress.bucket_bytes, "events": events, "gradient_bytes": size}


def piece(
    folder: str, *, shares, resume_step: int | None, stop_after: int | None, per_byte_s: float, own_buckets=False
):
    """One attempt on links that are measured so. The size of buckets, losses, and a digest of the weights."""
    rank = dist.get_rank()
    hosts = [f"pc{index}" for index in range(len(shares))]
    world = make_world(shares, rank=rank, resume_step=resume_step)
    session = make_session(make_job(precision="fp32", steps=12), world, num_evaluation=0)
    description = {"attempt": 1, "hosts": tuple(hosts), "num_ranks": len(shares), "fingerprints": {"train": "t"}}
    saver = Saver(Path(folder), host=world.host, job=session.job.checkpoint, description=description)
    progress = restore(session, Path(folder))
    if own_buckets:
        progress.bucket_bytes = None
    with (
        mock.patch.object(exchange, "measure_wire", return_value=AllReduce(latency_s=1e-5, per_byte_s=per_byte_s)),
        mock.patch.object(exchange, "_time_passes", return_value=(0.15, 0.1)),
        mock.patch("gangline.runs.formulas.SMALLEST_BYTES", 4 << 10),
        mock.patch("gangline.strategies.ddp.train.SMALLEST_BYTES", 4 << 10),
    ):
        _, captured = run_loop(session, saver=saver, progress=progress, stop_after=stop_after)
    saver.wait()
    dist.barrier()
    if rank == 0:
        parts = {host: (part_folder(Path(folder), progress.step, host) / PART_FILE).read_bytes() for host in hosts}
        place_commit(Path(folder), commit_record(parts))
    dist.barrier()
    weights = torch.cat([parameter.detach().flatten() for parameter in trainable(session.model).values()])
    return {
        "bucket_bytes": progress.bucket_bytes,
        "losses": captured.steps,
        "digest": str(torch.hash_tensor(weights).item()),
    }


def ready_order(*, checkpointing: bool):
    """The names of trained weights by bucket, first bucket first, and in the order in which gradients are ready."""
    job = replace(make_job(method="lora", precision="fp32"), activation_checkpointing=checkpointing)
    session = make_session(job, make_world([1, 1], rank=dist.get_rank()), num_evaluation=0)
    strategy = session.strategy
    names = {id(parameter): name for name, parameter in trainable(session.model).items()}
    buckets: list[list[str]] = []
    with mock.patch("gangline.strategies.ddp.train.SMALLEST_BYTES", 1 << 10):
        strategy.begin(2 << 10)
    plain = type(strategy._exchange).send

    def send(self, bucket):
        buckets.append([names[id(parameter)] for parameter in bucket.parameters()])
        return plain(self, bucket)

    ready: list[str] = []
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda each: ready.append(names[id(each)]))
        for parameter in trainable(session.model).values()
    ]
    with mock.patch.object(type(strategy._exchange), "send", send):
        batch = exchange.pick(session.order.micro_batches(0)[0], session.train_set)
        strategy.forward_backward(batch, scale=1.0, last=True)
    for hook in hooks:
        hook.remove()
    return {"buckets": buckets, "ready": ready}


def late_rank():
    """Rank 1 begins its step 0.3 s later; what both waited."""
    session = make_session(make_job(precision="fp32"), make_world([1, 1], rank=dist.get_rank()), num_evaluation=0)
    batch = exchange.pick(session.order.micro_batches(0)[0], session.train_set)
    session.strategy.forward_backward(batch, scale=1.0, last=True)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.3)
    session.strategy.forward_backward(batch, scale=1.0, last=True)
    return session.strategy.waited_s()


def lines():
    """What rank 0 writes down of a step of two ranks that waited unequally."""
    with tempfile.TemporaryDirectory() as folder:
        layout = RunLayout(Path(folder), "calm-otter-7")
        layout.folder.mkdir(parents=True, exist_ok=True)
        recorder = Recorder(make_job(), layout, make_world([3, 1], rank=0))
        times = [RankTimes(data_s=0.0, compute_s=1.0, wait_s=wait_s, memory_bytes=1) for wait_s in (0.25, 0.05)]
        report = StepReport(loss_sum=1.0, times=tuple(times))
        figures = {"loss": 1.0, "learning_rate": 1.0, "grad_norm": 1.0, "tokens_per_s": 1.0}
        recorder.step(report, step=1, shares=[3, 1], **figures)
        recorder.close()
        return [json.loads(line) for line in layout.metrics.read_text(encoding="utf-8").splitlines()]
