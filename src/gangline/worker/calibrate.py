"""`calibrate`: how fast this rank computes, on a copy of the model with two layers of random weights, under torchrun.

    python -m gangline.worker calibrate '{"job": {...}, "config": {...}, "layers": 2, "points": [[1, 512], [4, 2048]],
                                          "by_module": false, "seconds": 60, "start_s": 90, "deadline_s": 160}'

config: of the copy, as config.json has it; nothing is downloaded. points: samples and their length, in order of size.
by_module: whether the run's strategy has weights by module (`strategies.base.Capabilities`), as kernels need to know.
All ranks are at work at the same time, as in training: cards of one host share its power, processors and memory. What
is next is agreed by all, and every rank writes a JSON line for everything that it timed. Each ends by itself at its
deadline, wherever it hangs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from gangline.runs.job import Job
from gangline.worker import compat
from gangline.worker.batch import Batch
from gangline.worker.bench_collective import (
    free_bytes,
    most,
    proc_bytes,
    rank_device,
    read_order,
    report,
    timed,
)
from gangline.worker.kernels.choice import KernelPlace, put_in_kernels
from gangline.worker.loss import CausalLoss, LinearCrossEntropy
from gangline.worker.model import base_of, random_model, trainable
from gangline.worker.optimizer import make_optimizer, update_once
from gangline.worker.pace import simulated_slowdown
from gangline.worker.precision import Precision, agree_precision
from gangline.worker.process_group import leave

REPEATS_LEAST, REPEATS_MOST = 3, 15
POINT_SHARE = 0.8
"""Of the time, for points; the rest is for the update."""
MEMORY_SHARE = 0.8
"""Of the free memory that a point may take, by what the one before it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationCopy:
    """The model, its loss and its update."""

    loss: CausalLoss
    optimizer: torch.optim.AdamW
    precision: Precision
    device: torch.device
    job: Job
    slowdown: float
    """Trials only: every time is reported so many times as long."""

    @property
    def core(self) -> Any:
        """The transformers model."""
        return base_of(self.loss.model)


def calibrate_main(argv: list[str]) -> int:
    """Entry point; does not return once the ranks have met."""
    order = read_order(argv)
    device = rank_device()
    # ranks exchange single numbers only, so the processor's backend will do everywhere
    dist.init_process_group("gloo", timeout=timedelta(seconds=order["deadline_s"]))
    run(order, build(order, device))
    leave(0)


def build(order: dict[str, Any], device: torch.device) -> CalibrationCopy:
    """The copy, drawn at random on the device."""
    job = Job.from_json(order["job"])
    precision = agree_precision(job, device, world_size=dist.get_world_size())
    model = random_model(job, order["config"], device=device, compute=precision.compute)
    loss = CausalLoss(model, compute=precision.compute)
    place = KernelPlace(loss=loss, job=job, device=device, precision=precision, by_module=order["by_module"])
    put_in_kernels(place, world_size=dist.get_world_size())
    return CalibrationCopy(
        loss=loss,
        optimizer=make_optimizer(loss.model, job.optimizer),
        precision=precision,
        device=device,
        job=job,
        slowdown=simulated_slowdown(),
    )


def run(order: dict[str, Any], copy: CalibrationCopy) -> None:
    """All points as long as there is time and memory, then the update."""
    begun = time.monotonic()
    until = begun + order["seconds"] * POINT_SHARE
    report("device", **describe(copy))
    taken: tuple[int, int] | None = None
    for number, (samples, length) in enumerate(order["points"]):
        left_s = until - time.monotonic()
        fits = taken is None or taken[1] * samples * length / taken[0] < MEMORY_SHARE * free_bytes(copy.device)
        over = most(float(left_s <= 0)) > 0
        if over or not fits:
            _skip(samples, length, "there was no time left" if fits else "too little free memory")
        if over or not most(float(fits)):
            break
        if fits:
            share_s = left_s / (len(order["points"]) - number)
            needed = point(copy, samples, length, depth=order["layers"], share_s=share_s)
            taken = (samples * length, needed) if needed else taken
    most(0.0)
    update(copy, until_s=begun + order["seconds"])


def point(copy: CalibrationCopy, samples: int, length: int, *, depth: int, share_s: float) -> int:
    """Time one size of micro-batch at both depths; returns the bytes that it took, 0 where it did not fit."""
    batch = _batch(copy, samples, length)
    try:
        base = _start_peak(copy.device)
        times = _Times(copy, batch, depth)
        times.take(until_s=time.monotonic() + share_s)
        times.tell()
        return max(1, _peak(copy.device) - base)
    except torch.cuda.OutOfMemoryError:
        copy.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        _skip(samples, length, "out of memory")
        return 0


class _Times:
    """Seconds of one size of micro-batch: whole, with one layer, and its head alone.

    In turns: what becomes slower meanwhile (heat, other programs) does so for all three, and their difference, of which
    all layers are reckoned, stays what it is.
    """

    def __init__(self, copy: CalibrationCopy, batch: Batch, depth: int) -> None:
        self._copy, self._batch = copy, batch
        self._rows: dict[int, list[tuple[float, float]]] = {depth: [], 1: []}
        self._heads: list[float] = []

    def take(self, *, until_s: float) -> None:
        """Once to warm up, then so often."""
        for _ in range(2):
            self._turn()
        pauses_s = {depth: (self._copy.slowdown - 1) * sum(rows[-1]) for depth, rows in self._rows.items() if rows}
        self._rows, self._heads = {depth: [] for depth in pauses_s}, []
        while len(self._heads) < REPEATS_MOST and (len(self._heads) < REPEATS_LEAST or time.monotonic() < until_s):
            self._turn(pauses_s)

    def tell(self) -> None:
        """A line for each depth."""
        slowdown = self._copy.slowdown
        head_s = slowdown * median_high(self._heads)
        for layers, rows in self._rows.items():
            whole = sorted(slowdown * sum(row) for row in rows)
            middle = median_high(whole)
            report(
                "point",
                layers=layers,
                tokens=self._batch.input_ids.numel(),
                length=self._batch.input_ids.shape[1],
                seconds=middle,
                head_s=min(head_s, middle),
                backward_share=median_high(row[1] / sum(row) for row in rows),
                spread=(whole[-1] - whole[0]) / 2 / middle,
                repeats=len(rows),
            )

    def _turn(self, pauses_s: dict[int, float] | None = None) -> None:
        for layers, rows in self._rows.items():
            with shallow(self._copy, layers) as done:
                if done:
                    # as in the loop: a host that is to be slow sleeps before each micro-batch, and leaves the machine
                    # to others meanwhile
                    if pauses_s and pauses_s[layers] > 0:
                        time.sleep(pauses_s[layers])
                    rows.append(_once(self._copy, self._batch))
        self._heads.append(_head(self._copy, self._batch))


def update(copy: CalibrationCopy, *, until_s: float) -> None:
    """Time the norm, clipping and the optimizer, as a step has them."""
    parameters = list(trainable(copy.loss.model).values())
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)

    once = partial(update_once, copy.optimizer, parameters, maximum=copy.job.optimizer.clip_norm)
    times = [timed(copy.device, once) for _ in range(2)][1:]
    while len(times) < REPEATS_MOST and (len(times) < REPEATS_LEAST or time.monotonic() < until_s):
        times.append(timed(copy.device, once))
    numbers = sum(parameter.numel() for parameter in parameters)
    report("optimizer", numbers=numbers, seconds=median_high(times), tensors=len(parameters))


def describe(copy: CalibrationCopy) -> dict[str, Any]:
    """What was timed, in the words of a profile."""
    cuda = copy.device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(copy.device) if cuda else "cpu",
        "torch": torch.__version__,
        "kernels": str(compat.ATTENTION.of(copy.core.config.get_text_config()) or ""),
        "fused_loss": copy.loss.fused,
        "dtype": copy.precision.name,
        "threads": 0 if cuda else torch.get_num_threads(),
    }


@contextmanager
def shallow(copy: CalibrationCopy, layers: int) -> Iterator[bool]:
    """The copy with its first `layers` layers only; False where they cannot be found."""
    decoder = getattr(copy.core, "base_model", copy.core)
    stack = next((x for x in decoder.modules() if isinstance(x, nn.ModuleList)), nn.ModuleList())
    if len(stack) <= layers:
        yield len(stack) == layers
        return
    whole = list(stack)
    del stack[layers:]
    try:
        yield True
    finally:
        stack.extend(whole[layers:])


def _once(copy: CalibrationCopy, batch: Batch) -> tuple[float, float]:
    """Seconds of forward, and of backward."""
    kept: list[torch.Tensor] = []

    def forward() -> None:
        with copy.precision.autocast(copy.device):
            kept.append(copy.loss(*batch.tensors))

    forward_s = timed(copy.device, forward)
    return forward_s, timed(copy.device, (kept[0] / batch.trained.numel()).backward)


def _head(copy: CalibrationCopy, batch: Batch) -> float:
    """Seconds of the output head with its loss, forward and backward, on made-up hidden states."""
    head = copy.core.get_output_embeddings()
    hidden = torch.randn(
        batch.input_ids.numel(), head.weight.shape[1], dtype=copy.precision.compute, device=copy.device
    ).requires_grad_()
    goal = batch.targets.flatten()

    def once() -> None:
        with copy.precision.autocast(copy.device):
            if copy.loss.fused:
                words = copy.precision.compute, True, copy.loss.rows_loss
                loss = LinearCrossEntropy.apply(hidden, head.weight, head.bias, goal, *words)  # type: ignore[no-untyped-call]
            else:
                loss = F.cross_entropy(head(hidden).float(), goal, reduction="sum")
        loss.backward()

    return timed(copy.device, once)


def _batch(copy: CalibrationCopy, samples: int, length: int) -> Batch:
    vocabulary = int(copy.core.config.get_text_config().vocab_size)
    tokens = torch.randint(0, vocabulary, (samples, length + 1))
    positions = torch.arange(length).expand(samples, length).contiguous()
    trained = torch.arange(samples * length)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, trained).to(copy.device)


def _start_peak(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    return _peak(device)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return proc_bytes(Path("/proc/self/status"), "VmHWM")


def _skip(samples: int, length: int, why: str) -> None:
    report("skipped", what=f"{samples} x {length} tokens", why=why)
