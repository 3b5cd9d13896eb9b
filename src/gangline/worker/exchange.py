"""How an attempt's gradients are exchanged: settled once, before its first step, from what an all-reduce costs on this
very group and what the devices do.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from gangline.runs.formulas import AllReduce, Window, choose_buckets
from gangline.worker.agree import gather
from gangline.worker.batch import Batch, Indices, pick
from gangline.worker.bench_collective import measure, settle
from gangline.worker.model import base_of, trainable
from gangline.worker.progress import TrainingProgress
from gangline.worker.session import Session
from gangline.worker.strategy import GradientBuckets

log = logging.getLogger(__name__)

WARM_S = 2.0
"""A first pass that took longer than that is believed: getting memory and choosing kernels is little of it."""


def settle_exchange(session: Session, progress: TrainingProgress, micro_batch: Indices) -> dict[str, Any] | None:
    """Choose the size of buckets, or take the one of the checkpoint, and begin; figures of it for an event. Collective.

    None where ranks do not exchange gradients in every step, or this was done. micro_batch: the samples of one like
    those to come.
    """
    strategy = session.strategy
    buckets = strategy.buckets()
    if buckets is None or buckets.begun:
        who = strategy.idle_exchange()
        if who and session.job.exchange != "fp32":
            log.warning("exchange: %s has no effect: %s exchanges no gradients", session.job.exchange, who)
        return None
    figures: dict[str, Any] = {"measured": False}
    if progress.bucket_bytes is None or progress.bucket_ranks != session.world.size:
        figures = _measure(session, buckets, progress, micro_batch)
    assert progress.bucket_bytes is not None
    buckets.begin(progress.bucket_bytes)
    return {"bucket_bytes": progress.bucket_bytes, "gradient_bytes": buckets.num_bytes, **figures}


def _measure(
    session: Session, buckets: GradientBuckets, progress: TrainingProgress, micro_batch: Indices
) -> dict[str, Any]:
    world = session.world
    wire = measure_wire(world.device)
    batch = pick(micro_batch, session.train_set).to(world.device)
    windows = _windows(session, *_time_passes(session, batch))
    cut = choose_buckets(
        buckets.num_bytes, wire, windows, tail_bytes=_table_bytes(session.model), packed=buckets.packed
    )
    # the same arithmetic everywhere, but what it rests on the same bits is not left to a mathematical library
    progress.bucket_bytes, progress.bucket_ranks = int(gather(cut.num_bytes, world)[0]), world.size
    return {
        "measured": True,
        "latency_s": round(wire.latency_s, 6),
        "bytes_per_s": round(1 / wire.per_byte_s) if wire.per_byte_s else None,
        "backward_s": round(min(window.backward_s for window in windows), 6),
        "exposed_s": round(cut.exposed_s, 6),
    }


def _windows(session: Session, micro_batch_s: float, backward_s: float) -> list[Window]:
    """Of the ranks at work. Where shares move, all ranks end together, whatever is planned now."""
    world = session.world
    found = zip(world.shares, gather(micro_batch_s, world), gather(backward_s, world), strict=True)
    moving = world.gang.moving_shares
    return [
        Window(busy_s=backward if moving else share * whole, backward_s=backward)
        for share, whole, backward in found
        if share
    ]


def _time_passes(session: Session, batch: Batch) -> tuple[float, float]:
    """Seconds of a micro-batch, and of its backward pass, without any exchange. Gradients are let go afterwards."""
    seconds = _time_pass(session, batch)
    if seconds[0] < WARM_S:
        seconds = _time_pass(session, batch)
    for parameter in trainable(session.model).values():
        parameter.grad = None
    return seconds


def _time_pass(session: Session, batch: Batch) -> tuple[float, float]:
    device = session.world.device
    started = _now(device)
    with session.precision.autocast(device):
        loss: torch.Tensor = session.loss(*batch.tensors)
    half = _now(device)
    (loss * 0.0).backward()  # type: ignore[no-untyped-call]
    ended = _now(device)
    return ended - started, ended - half


def _now(device: torch.device) -> float:
    settle(device)
    return time.perf_counter()


def _table_bytes(model: torch.nn.Module) -> int:
    """Of the embedding table's gradient, which is ready last and as large as it is; 0 where it is not trained."""
    find: Any = getattr(base_of(model), "get_input_embeddings", None)
    weight = None if find is None else getattr(find(), "weight", None)
    return weight.numel() * weight.element_size() if weight is not None and weight.requires_grad else 0


SIZES = (16 << 10, 128 << 10, 1 << 20, 8 << 20)
ENOUGH_S = 0.02
"""An all-reduce that takes so long says how fast the links are, and the next size would take eight times as long."""
EACH_S = 0.1


def measure_wire(device: torch.device) -> AllReduce:
    """A line through all-reduces of two sizes; collective, about a second.

    Of several the fastest counts (each as its slowest rank saw it): what else machines do can only make one longer.
    The smaller size is mostly latency, the larger one is the first that takes `ENOUGH_S`.
    """
    small, small_s = SIZES[0], measure(SIZES[0], device, EACH_S)[0]
    large, large_s = small, small_s
    for size in SIZES[1:]:
        large, large_s = size, measure(size, device, EACH_S)[0]
        if large_s > ENOUGH_S:  # the same on all ranks
            break
    per_byte_s = max(0.0, large_s - small_s) / (large - small)
    return AllReduce(latency_s=max(0.0, small_s - small * per_byte_s), per_byte_s=per_byte_s)
