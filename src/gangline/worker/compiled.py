"""`compile: true`: every decoder layer is compiled by itself with torch.compile, before the first step of an attempt.

Layers have one code, so the first ones are compiled and the others take what they find: a model of 80 layers takes no
longer than one of 2. Only what autograd records is compiled: evaluations run as they are.

A resumed run is to give the same bits as one that went on. What is compiled for a length depends on the length that
came first, so lengths are symbols from the beginning where samples have several, and a pass over the longest sample,
which changes nothing, comes before the first step. Where trials on the device would decide on the order of sums, none
are made (Inductor's `deterministic`). What was compiled lies in the folder that TORCHINDUCTOR_CACHE_DIR names, where
the next attempt on this host finds it.

Recomputation stays around the compiled layer: what transformers does inside of `forward` is done here, outside.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface

from gangline.errors import UsageError, error_summary
from gangline.worker import compat, documents
from gangline.worker.batch import Batch, pick
from gangline.worker.dropout import SampleDropout, random_parts
from gangline.worker.model import base_of, layers_of, trainable
from gangline.worker.session import Session

log = logging.getLogger(__name__)

INDUCTOR = "inductor"


class CompiledForward:
    """What a layer has in place of its `forward`: the compiled one in passes that it was compiled for, else its own."""

    def __init__(
        self, layer: nn.Module, *, rows: int, length: int, varies: bool, backend: str | Callable[..., Any]
    ) -> None:
        """rows, length: of the pass that it is compiled for. varies: others of several rows, or of one row like that,
        take the same code, whatever their length.
        """
        self._layer = layer
        self._own: Callable[..., Any] = layer.forward
        self._rows, self._length, self._varies = rows, length, varies
        self._recomputes = bool(getattr(layer, "gradient_checkpointing", False))
        if self._recomputes:
            layer.gradient_checkpointing = False  # type: ignore[assignment]
        options = {"deterministic": True} if backend == INDUCTOR else None
        self._compiled = torch.compile(self._own, dynamic=varies, backend=backend, options=options)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """As the layer's own."""
        hidden = given[0] if given else named["hidden_states"]
        run = self._compiled if torch.is_grad_enabled() and self._fits(*hidden.shape[:2]) else self._own
        if self._recomputes and self._layer.training:
            return compat.RECOMPUTE.of(self._layer)(partial(run, **named), *given)
        return run(*given, **named)

    def _fits(self, rows: int, length: int) -> bool:
        """Whether nothing has to be compiled for it: torch makes no symbols of 0 and 1."""
        if not self._varies:
            return (rows, length) == (self._rows, self._length)
        return length > 1 and (rows > 1) == (self._rows > 1)


def compile_layers(session: Session, *, backend: str | Callable[..., Any] = INDUCTOR) -> dict[str, Any]:
    """Compile the layers for the passes of this rank, without a trace in the model; figures for an event.

    Collective where passes are. Raises UsageError for a model that drops at random, or that cannot be compiled.
    """
    started, before = time.perf_counter(), dict(_counted())
    core: Any = base_of(session.model)
    if drops := list(islice(random_parts(session.model, getattr(core, "config", None)), 4)):
        raise UsageError(
            "compile: a model is compiled without dropout",
            seen=f"dropout in {', '.join(drops)}, whose masks are drawn by functions that are not compiled",
            fix="set it to 0 (method.dropout, or in the model's config.json), or delete compile",
        )
    attention = compat.ATTENTION.of(core.config)
    if attention in documents.FUNCTIONS:
        # they read where documents begin; layers are compiled up to them, and from them on
        AttentionInterface.register(attention, torch.compiler.disable(documents.FUNCTIONS[attention]))
    # DDP would have graphs cut where its buckets end; that of a layer is small
    compat.DYNAMO.get().optimize_ddp = False
    lengths = session.train_set.lengths
    batch = _longest(session)
    for layer in layers_of(core):
        rows, length = batch.input_ids.shape
        varies = bool(lengths.min() < lengths.max())
        made = CompiledForward(layer, rows=rows, length=length, varies=varies, backend=backend)
        layer.forward = made  # type: ignore[method-assign, assignment]
    try:
        _pass(session, batch)
    except compat.COMPILE_ERROR.get() as error:
        log.exception("the layers cannot be compiled")
        raise UsageError(
            "compile: the layers of this model cannot be compiled here",
            seen=f"expected code from torch.compile; {error_summary(getattr(error, 'inner_exception', error))}",
            fix="delete compile, or write kernels: torch beside it; on processors it needs g++ (apt install g++)",
        ) from error
    seconds = time.perf_counter() - started
    figures = {name: count - before[name] for name, count in _counted()}
    log.info("compiled the layers in %.1f s: %s", seconds, figures)
    return {"seconds": round(seconds, 3), **figures}


def _longest(session: Session) -> Batch:
    """A batch of this rank's size from the longest sample: the same in every attempt."""
    order, world = session.order, session.world
    number = order.micro_batch * world.gang.pass_lengths(order.micro_batch)[world.rank]
    return pick([int(np.argmax(session.train_set.lengths))] * number, session.train_set).to(world.device)


def _pass(session: Session, batch: Batch) -> None:
    """Forward and backward, which change nothing: neither gradients nor the generators of random numbers.

    Where ranks join other numbers of rows in a pass, the model's own code is watched first for what draws at random.
    """
    world, order = session.world, session.order
    joined = max(world.gang.pass_lengths(order.micro_batch)) > 1 and session.draws_by_sample
    samples = np.arange(len(batch.input_ids))
    with torch.random.fork_rng(devices=[world.device] if world.device.type == "cuda" else []):
        if joined:
            watch = SampleDropout(samples, seed=session.job.seed, step=0, device=world.device, joined=True)
            with torch.no_grad(), watch, session.precision.autocast(world.device):
                session.loss(*batch.tensors)
        with session.precision.autocast(world.device):
            loss: torch.Tensor = session.loss(*batch.tensors)
        (loss * 0.0).backward()  # type: ignore[no-untyped-call]
    for parameter in trainable(session.model).values():
        parameter.grad = None


def _counted() -> Iterator[tuple[str, int]]:
    """What this process has compiled so far, or found compiled."""
    counters = compat.COMPILE_COUNTERS.get()
    yield "graphs", counters["stats"]["unique_graphs"]
    yield "found", counters["inductor"]["fxgraph_cache_hit"]
    yield "made", counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"]
