"""Two steps of the real loop on fake tensors at one depth, with the peak of every instant."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gangline.errors import ModelError
from gangline.worker.batch import Batch
from gangline.worker.keep import Outlets
from gangline.worker.loop import Loop
from gangline.worker.model import base_of, layers_of, trainable
from gangline.worker.progress import Progress
from gangline.worker.session import Session
from gangline.worker.signals import StopFlag
from gangline.worker.strategy import Strategy
from gangline.worker.trace.buckets import fill_buckets
from gangline.worker.trace.build import build_model, build_session
from gangline.worker.trace.configs import at_depth
from gangline.worker.trace.kernels import kernels_of
from gangline.worker.trace.order import TraceOrder
from gangline.worker.trace.tracker import ByteTracker

INSTANTS = ("forward", "loss", "backward-last", "backward-first", "backward-rest", "clip", "optimizer")
"""forward: embedding and layers. loss: head and cross-entropy with the head's gradient. backward-last, backward-first:

the last and the first layers, whose peaks bound those between them. backward-rest: what lies before the layers. clip:
gradient norm and clipping. optimizer: its step.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """What a trace at one depth saw, in bytes."""

    layers: int
    instants: dict[str, int]
    """The peak of every instant of INSTANTS."""
    weights_bytes: int
    """Parameters and buffers."""
    gradients_bytes: int
    optimizer_bytes: int
    num_parameters: int
    num_trainable: int
    fused_loss: bool
    num_operations: int
    seconds: float


def trace_depth(config: Any, layers: int, order: TraceOrder) -> Depth:
    """Build the model with that many layers and run it. Raises ModelError for one that cannot be traced."""
    started = time.perf_counter()
    model, job, precision = build_model(at_depth(config, layers), order)
    tracker = ByteTracker(rounding_bytes=order.rounding_bytes)
    try:
        with kernels_of(order.attention_kernel), FakeTensorMode(allow_non_fake_inputs=True), tracker:
            session = build_session(model, job, precision, order=order)
            persistent = _persistent(session, tracker)
            _run(session, tracker, order)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ModelError(
            f"trace: a step of {config.model_type} cannot be run without numbers",
            seen=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:400] if str(error).strip() else ''}",
            fix="plan it by the closed form; a model whose shapes depend on values cannot be traced",
        ) from error
    return Depth(
        layers=layers,
        instants={name: tracker.peaks.get(name, 0) for name in INSTANTS},
        **persistent,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_trainable=sum(parameter.numel() for parameter in trainable(model).values()),
        fused_loss=session.loss.fused,
        num_operations=tracker.num_operations,
        seconds=round(time.perf_counter() - started, 3),
    )


class _Marked(Strategy):
    """A strategy that tells the tracker where a step stands."""

    def __init__(self, inner: Strategy, *, tracker: ByteTracker, buckets: bool, as_on_gpu: bool) -> None:
        super().__init__(inner.setup)
        self._inner = inner
        self._tracker = tracker
        self.keeps_gradients = buckets
        self._as_on_gpu = as_on_gpu

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """As `inner` does it."""
        self._tracker.instant("forward")
        if self._as_on_gpu:
            batch = Batch(*(tensor.clone() for tensor in batch.tensors))
        loss = self._inner.forward_backward(batch, scale=scale, last=last)
        if last:
            self._tracker.instant("clip")
        return loss


def _run(session: Session, tracker: ByteTracker, order: TraceOrder) -> None:
    if order.ranks > 1:
        fill_buckets(list(trainable(session.model).values()))
    _mark(session, tracker)
    strategy = _Marked(
        session.strategy, tracker=tracker, buckets=order.ranks > 1, as_on_gpu=order.attention_kernel != "cpu"
    )
    outlets = Outlets(recorder=None, saver=None, stop=StopFlag())
    Loop(replace(session, strategy=strategy), outlets, Progress()).run()


def _mark(session: Session, tracker: ByteTracker) -> None:
    """Hooks that name the instants. They hold no tensor."""
    core: Any = base_of(session.model)
    layers = layers_of(core)
    half = -(-len(layers) // 2)
    for index, layer in enumerate(layers):
        name = "backward-first" if index < half else "backward-last"
        layer.register_forward_hook(_at_gradient(name, tracker))
    layers[0].register_forward_pre_hook(_before_layers(tracker), with_kwargs=True)
    decoder = getattr(core, "base_model", core)
    decoder.register_forward_hook(lambda *_: tracker.instant("loss"))
    session.loss.register_forward_hook(_at_gradient("backward-last", tracker))
    assert isinstance(session.optimizer, torch.optim.Optimizer)
    session.optimizer.register_step_pre_hook(lambda *_: tracker.instant("optimizer"))


def _at_gradient(name: str, tracker: ByteTracker) -> Any:
    """A forward hook: when the gradient of the output arrives, the instant `name` begins."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        tensor = output if isinstance(output, torch.Tensor) else output[0]
        if tensor.requires_grad:
            tensor.register_hook(lambda _: tracker.instant(name))

    return hook


def _before_layers(tracker: ByteTracker) -> Any:
    def hook(_module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        tensor = inputs[0] if inputs else keywords.get("hidden_states")
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: tracker.instant("backward-rest"))

    return hook


def _persistent(session: Session, tracker: ByteTracker) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer states, as the tracker counts."""

    def total(tensors: Any) -> int:
        return sum(tracker.num_bytes(storage) for storage in {id(t): t.untyped_storage() for t in tensors}.values())

    trained = list(trainable(session.model).values())
    states = [value for state in session.optimizer.state.values() for value in state.values()]
    return {
        "weights_bytes": total([*session.model.parameters(), *session.model.buffers()]),
        "gradients_bytes": total(trained),
        "optimizer_bytes": total(states),
    }
