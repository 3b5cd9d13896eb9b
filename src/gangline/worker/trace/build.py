"""The parts of a run on fake tensors: model, loss, optimizer, strategy, as `session.build_session` makes them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gangline.errors import ModelError
from gangline.runs.gang import Gang, GangRank
from gangline.runs.job import Job
from gangline.worker import loss as loss_module
from gangline.worker.batch import IGNORE
from gangline.worker.loss import CausalLoss
from gangline.worker.model import base_of, load_model
from gangline.worker.nf4 import require_library
from gangline.worker.optimizer import make_optimizer
from gangline.worker.order import Order
from gangline.worker.precision import Precision, agree_precision
from gangline.worker.session import Session, _make_scaler
from gangline.worker.strategy import Strategy, StrategySetup
from gangline.worker.trace.order import TraceOrder
from gangline.worker.world import World

CPU = torch.device("cpu")


class FullRows:
    """Samples of `length` tokens, each of them trained on but the last: the most that a micro-batch can hold."""

    def __init__(self, num_samples: int, *, length: int, vocabulary: int, num_documents: int) -> None:
        parts = [len(part) for part in np.array_split(np.arange(length), num_documents)]
        tokens = np.arange(length, dtype=np.int64) % vocabulary
        self._sample = SimpleNamespace(
            input_ids=tokens,
            targets=np.append(tokens[1:], IGNORE),
            position_ids=np.concatenate([np.arange(part, dtype=np.int64) for part in parts]),
        )
        self.lengths = np.full(num_samples, length, dtype=np.int64)
        self.label_counts = self.lengths - 1

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, index: int) -> SimpleNamespace:
        """All are alike."""
        del index
        return self._sample


def build_model(config: Any, order: TraceOrder) -> tuple[nn.Module, Job, Precision]:
    """The trainer's model on the meta device, with the job and the precision that it was built for."""
    with tempfile.TemporaryDirectory(prefix="gangline-trace-") as folder:
        config.save_pretrained(folder)
        job = order.job(folder)
        precision = agree_precision(job, CPU, world_size=1)
        try:
            with torch.device("meta"):
                model = load_model(job, device="meta", compute=precision.compute)
        except (ImportError, ValueError, RuntimeError, AttributeError) as error:
            raise ModelError(
                f"model.config: a model of type {config.model_type} cannot be built from it",
                seen=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error) else ''}",
                fix="compare config.json with the model's own, and its family with what transformers knows",
            ) from error
    return model, job, precision


def build_session(model: nn.Module, job: Job, precision: Precision, *, order: TraceOrder) -> Session:
    """The session of that job; called inside a FakeTensorMode."""
    _make_fake(model)
    with _probe_by_operations():
        loss = CausalLoss(model, compute=precision.compute)
    samples = FullRows(
        job.batch * 2,
        length=order.sequence_length,
        vocabulary=int(base_of(model).config.get_text_config().vocab_size),  # type: ignore[union-attr, operator]
        num_documents=2 if order.packing and order.attention != "flash_attention_2" else 1,
    )
    with _maps_by_shape(job):
        optimizer = make_optimizer(loss.model, job.optimizer)
    world = World(
        gang=Gang(run_id="trace", attempt=1, ranks=(GangRank(host="trace", share=order.passes),)), rank=0, device=CPU
    )
    strategy = Strategy(StrategySetup(job=job, world=world, precision=precision))
    strategy.wrap(loss)
    return Session(
        job=job,
        world=world,
        precision=precision,
        loss=loss,
        strategy=strategy,
        optimizer=optimizer,
        scaler=_make_scaler(CPU) if precision.scaled else None,
        train_set=samples,
        evaluation_set=None,
        order=Order(num_samples=len(samples), batch=job.batch, micro_batch=job.micro_batch, seed=job.seed),
        total_steps=2,
    )


@contextmanager
def _maps_by_shape(job: Job) -> Iterator[None]:
    """For bitsandbytes, which computes what each of 256 codes stands for from numbers; fake tensors have none."""
    if job.optimizer.kind == "adamw":
        yield
        return
    require_library(f"optimizer.kind: {job.optimizer.kind}")
    with patch("bitsandbytes.functional.create_dynamic_map", lambda **_: torch.empty(256)):
        yield


def _make_fake(model: nn.Module) -> None:
    """Put a fake tensor on the CPU in the place of every meta tensor; shared ones stay shared."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            # not empty_like: what has no fake argument is computed for real
            empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=CPU)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers, module.__dict__):
            for name, value in list(held.items()):
                if isinstance(value, torch.Tensor) and value.device.type == "meta":
                    held[name] = fake(value)


class _Operations(TorchDispatchMode):
    """Names of the operations that compute something: views, changes of dtype and questions are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not func.is_view and func is not torch.ops.aten._to_copy.default:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def _probe_by_operations() -> Iterator[None]:
    """The loss tries whether decoder and head give the model's logits; without numbers, the operations must tell."""
    own = loss_module._head_is_plain
    loss_module._head_is_plain = _head_is_all  # type: ignore[assignment]
    try:
        yield
    finally:
        loss_module._head_is_plain = own


def _head_is_all(core: Any, head: nn.Linear) -> bool:
    """Whether the model does nothing after its decoder but what its head does."""
    probe = torch.arange(8)[None]
    operations, ended = _Operations(), []

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        ended.append((output[0], len(operations.names)))

    hook = core.base_model.register_forward_hook(note)
    try:
        with operations:
            core(input_ids=probe, position_ids=probe, use_cache=False)
    finally:
        hook.remove()
    hidden, num_before = ended[-1]
    after = operations.names[num_before:]
    operations.names.clear()
    with operations:
        head(hidden)
    return after == operations.names
