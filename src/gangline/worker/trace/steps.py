"""Two steps of the real loop on fake tensors at one depth, with the peak of every instant.

The parts of a run on fake tensors: model, loss, optimizer, strategy, as `session.build_session` makes them.

The gradient buckets of DDP in a trace of a single process.
"""

from __future__ import annotations

import gc
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gangline.errors import ModelError, error_summary
from gangline.optimizers import EIGHT_BITS
from gangline.runs.gang import Gang, GangRank
from gangline.runs.job import Job
from gangline.worker import compat, documents
from gangline.worker import loss as loss_module
from gangline.worker.batch import Batch
from gangline.worker.data.tokens import NO_TARGET, RepeatedSamples, Sample
from gangline.worker.loop import Loop
from gangline.worker.loss import CausalLoss
from gangline.worker.model import base_of, layers_of, load_model, trainable
from gangline.worker.precision import Precision, agree_precision
from gangline.worker.process_group import ProcessGroup
from gangline.worker.progress import TrainingProgress
from gangline.worker.quantised import require_library
from gangline.worker.rank_files import StopFlag
from gangline.worker.run_io import RunIO
from gangline.worker.session import Session, assemble
from gangline.worker.strategy import Strategy, StrategySetup
from gangline.worker.trace.configs import at_depth
from gangline.worker.trace.order import AttentionKernel, TraceOrder

# How many bytes are allocated at every moment, counted over fake tensors.
#
# A storage counts from the operation that made it until nothing refers to it any more. What a kernel allocates inside
# itself and frees before it returns is not seen; where that matters, `kernels` allocates it on purpose.
#
# What a GPU would do otherwise than the CPU that traces: attention kernels, and the size of the loss's chunks.
#
# Flash and memory-efficient attention keep query, key, value, output and one fp32 number per row of scores; the plain
# ("math") kernel keeps the scores. Which one torch takes follows its own conditions (`sdp_utils.cpp`): flash needs
# 16-bit numbers, no mask and heads of 256 at the most; the memory-efficient one takes fp32 and masks, but no grouped
# heads.


FAKE_TENSOR = compat.FAKE_TENSOR.get()
UNSET_FAKE = compat.UNSET_FAKE.get()
READ_SCALAR, GROUPED_PRODUCT = compat.READ_SCALAR.get(), compat.GROUPED_PRODUCT.get()
DispatchMode: Any = compat.DISPATCH_MODE.get()
"""Sees every operation inside of it."""
COLLECT_EVERY = 100
"""Operations between two collections: tensors in reference cycles live until one finds them."""


class ByteTracker(DispatchMode):
    """Counts the storages of everything that is computed inside it; entered after (inside) a FakeTensorMode.

    Tensors with real data (the tokens of a batch, and the masks that follow from them) are computed for real, so that
    decisions which depend on them are those of a real step. A value that is read from a fake tensor is 0, or true.
    """

    def __init__(self, *, rounding_bytes: int = 1) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peaks: dict[str, int] = {}
        self._rounding_bytes = rounding_bytes
        self._instant = ""
        self._sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.num_operations = 0

    def instant(self, name: str) -> None:
        """From now on peaks count for the instant `name`; "" is none."""
        if name and name != self._instant:
            gc.collect()
        self._instant = name
        self._measure()

    def num_bytes(self, storage: torch.UntypedStorage) -> int:
        """Size of a storage as the allocator gives it out."""
        return -(-storage.nbytes() // self._rounding_bytes) * self._rounding_bytes

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, or its new size."""
        key, size = id(storage), self.num_bytes(storage)
        known = self._sizes.get(key)
        if known is None:
            self._sizes[key] = (weakref.ref(storage, lambda _: self._forget(key)), size)
            self.live_bytes += size
            self._measure()
        elif known[1] != size:
            self._sizes[key] = (known[0], size)
            self.live_bytes += size - known[1]
            self._measure()

    def __enter__(self) -> ByteTracker:
        # what is there already lives as long as the trace: collections need not look at it
        gc.collect()
        gc.freeze()
        resizing = self._resizing(torch.UntypedStorage.resize_)
        self._resize = patch.object(torch.UntypedStorage, "resize_", resizing)
        self._resize.start()
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._resize.stop()
        gc.unfreeze()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count what it gives back."""
        kwargs = kwargs or {}
        tensors = list(_tensors((args, kwargs)))
        fake = [tensor for tensor in tensors if isinstance(tensor, FAKE_TENSOR)]
        if fake and func is READ_SCALAR:
            return _neutral(fake[0].dtype)
        self.num_operations += 1
        if self.num_operations % COLLECT_EVERY == 0:
            gc.collect()
        if tensors and not fake:
            with UNSET_FAKE():
                result = func(*args, **kwargs)
        elif func is GROUPED_PRODUCT:
            result = _grouped_product(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self.add(tensor.untyped_storage())
        return result

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)[1]

    def _measure(self) -> None:
        if self._instant and self.live_bytes > self.peaks.get(self._instant, 0):
            self.peaks[self._instant] = self.live_bytes

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if id(storage) in self._sizes:
                self.add(storage)
            return result

        return resize_


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Every tensor among the arguments or the results of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _grouped_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Experts in fp32, too: the kernels take them, only the rule for their shapes insists on bf16 (torch 2.13)."""
    half = [value.to(torch.bfloat16) for value in args[:2]]
    result: torch.Tensor = func(*half, *args[2:], **kwargs)
    return result.to(args[0].dtype)


def _neutral(dtype: torch.dtype) -> bool | int | float:
    """What a trace reads from a fake tensor: no overflow, nothing found, every question answered with yes."""
    if dtype is torch.bool:
        return True
    return 0.0 if dtype.is_floating_point else 0


_FLASH_MOST_HEAD = 256
_FLASH_ROWS = 128


class KeptRows(torch.autograd.Function):
    """Attention that keeps no scores: shapes and bytes of the fused kernels, no numbers.

    query [b, h, s, d], key [b, g, t, d] and value [b, g, t, e] with g dividing h; returns [b, h, s, e].
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The output lies as [b, s, h, e], as the kernels write it."""
        batch, heads, rows, _ = query.shape
        output = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
        row_sums = query.new_empty(batch, heads, rows, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, row_sums, mask)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Gradients, beside what the kernels take meanwhile."""
        query, key, value, output, row_sums, _ = ctx.saved_tensors
        taken = [torch.empty_like(row_sums)]
        if query.element_size() == 2:
            taken.append(_flash_sums(query))
        if key.shape[1] != query.shape[1]:
            # flash adds the gradients of a group's heads at the end
            taken += [tensor.new_empty(*query.shape[:2], *tensor.shape[2:]) for tensor in (key, value)]
        del grad_outputs, output
        gradients = [_like_rows_first(tensor) for tensor in (query, key, value)]
        return (*gradients, None)


def _flash_sums(query: torch.Tensor) -> torch.Tensor:
    """The query's gradient in fp32, rows and heads rounded up as FlashAttention 2 does."""
    batch, heads, rows, width = query.shape
    step = 32 if width <= 128 else 64
    return query.new_empty(
        batch, heads, -(-rows // _FLASH_ROWS) * _FLASH_ROWS, -(-width // step) * step, dtype=torch.float32
    )


def _like_rows_first(tensor: torch.Tensor) -> torch.Tensor:
    batch, heads, rows, width = tensor.shape
    return tensor.new_empty(batch, rows, heads, width).transpose(1, 2)


@contextmanager
def kernels_of(kind: AttentionKernel) -> Iterator[None]:
    """Take the kernels of `kind` inside. For "flash" and "math" the loss takes its chunks as on a GPU, too."""
    if kind == "cpu":
        yield
        return
    attention = (_fused if kind == "flash" else _plain)(F.scaled_dot_product_attention)
    with (
        patch.object(F, "scaled_dot_product_attention", attention),
        patch.dict(loss_module.CHUNK_NUMBERS, cpu=loss_module.CHUNK_NUMBERS["cuda"]),
    ):
        yield


def _plain(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return own(*args, **kwargs)

    return attention


def _fused(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    plain = _plain(own)

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        query, key, value = (_cast(tensor) for tensor in (query, key, value))
        flash = query.element_size() == 2 and attn_mask is None and query.shape[-1] <= _FLASH_MOST_HEAD
        grouped = key.shape[1] != query.shape[1]
        if query.ndim != 4 or (grouped and not flash):
            return plain(query, key, value, attn_mask=attn_mask, **options)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            # torch makes numbers of it for the kernel, which keeps these
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        result: torch.Tensor = KeptRows.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
        return result

    return attention


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """Autocast knows the real function only."""
    if tensor.dtype is torch.float32 and torch.is_autocast_enabled("cpu"):
        return tensor.to(torch.get_autocast_dtype("cpu"))
    return tensor


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
        with kernels_of(order.attention_kernel), compat.FAKE_TENSOR_MODE.get()(allow_non_fake_inputs=True), tracker:
            session = build_session(model, job, precision, order=order)
            persistent = _persistent(session, tracker)
            _run(session, tracker, order)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ModelError(
            f"trace: a step of {config.model_type} cannot be run without numbers",
            seen=error_summary(error),
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


class InstantMeter(Protocol):
    """What measures memory instant by instant."""

    def instant(self, name: str) -> None:
        """From now on peaks count for the instant `name`."""


class _Marked(Strategy):
    """A strategy that tells the meter where a step stands."""

    def __init__(self, inner: Strategy, *, meter: InstantMeter, buckets: bool, as_on_gpu: bool) -> None:
        super().__init__(inner.setup)
        self._inner = inner
        self.loss = inner.loss
        self._meter = meter
        self.keeps_gradients = buckets
        self._as_on_gpu = as_on_gpu

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """As `inner` does it."""
        self._meter.instant("forward")
        if self._as_on_gpu:
            batch = Batch(*(tensor.clone() for tensor in batch.tensors))
        loss = self._inner.forward_backward(batch, scale=scale, last=last)
        if last:
            self._meter.instant("clip")
        return loss


def _run(session: Session, tracker: ByteTracker, order: TraceOrder) -> None:
    if order.ranks > 1:
        fill_buckets(list(trainable(session.model).values()))
    marked = mark(session, tracker, buckets=order.ranks > 1, as_on_gpu=order.attention_kernel != "cpu")
    outlets = RunIO(recorder=None, saver=None, stop=StopFlag())
    Loop(marked, outlets, TrainingProgress()).run()


def mark(session: Session, meter: InstantMeter, *, buckets: bool = False, as_on_gpu: bool = False) -> Session:
    """The session of one rank, which tells the meter at which of INSTANTS a step is. Its hooks hold no tensor.

    buckets: whether gradients stay between steps, as those of DDP. as_on_gpu: a batch is copied, as to a card.
    """
    core: Any = base_of(session.model)
    layers = layers_of(core)
    half = -(-len(layers) // 2)
    for index, layer in enumerate(layers):
        name = "backward-first" if index < half else "backward-last"
        layer.register_forward_hook(_at_gradient(name, meter))
    layers[0].register_forward_pre_hook(_before_layers(meter), with_kwargs=True)
    decoder = getattr(core, "base_model", core)
    decoder.register_forward_hook(lambda *_: meter.instant("loss"))
    session.loss.register_forward_hook(_at_gradient("backward-last", meter))
    assert isinstance(session.optimizer, torch.optim.Optimizer)
    session.optimizer.register_step_pre_hook(lambda *_: meter.instant("optimizer"))
    return replace(session, strategy=_Marked(session.strategy, meter=meter, buckets=buckets, as_on_gpu=as_on_gpu))


def _at_gradient(name: str, meter: InstantMeter) -> Any:
    """A forward hook: when the gradient of the output arrives, the instant `name` begins."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        tensor = output if isinstance(output, torch.Tensor) else output[0]
        if tensor.requires_grad:
            tensor.register_hook(lambda _: meter.instant(name))

    return hook


def _before_layers(meter: InstantMeter) -> Any:
    def hook(_module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        tensor = inputs[0] if inputs else keywords.get("hidden_states")
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: meter.instant("backward-rest"))

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


CPU = torch.device("cpu")
TO_COPY = compat.TO_COPY.get()


def full_samples(num_samples: int, *, length: int, vocabulary: int, num_documents: int) -> RepeatedSamples:
    """Samples of `length` tokens, trained on each of them but the last: the most that a micro-batch can hold."""
    parts = [len(part) for part in np.array_split(np.arange(length), num_documents)]
    tokens = np.arange(length, dtype=np.int64) % vocabulary
    sample = Sample(
        input_ids=tokens,
        targets=np.append(tokens[1:], NO_TARGET),
        position_ids=np.concatenate([np.arange(part, dtype=np.int64) for part in parts]),
    )
    return RepeatedSamples([sample], num_samples)


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
                seen=error_summary(error),
                fix="compare config.json with the model's own, and its family with what transformers knows",
            ) from error
    return model, job, precision


def build_session(model: nn.Module, job: Job, precision: Precision, *, order: TraceOrder) -> Session:
    """The session of that job; called inside a FakeTensorMode."""
    _make_fake(model)
    if job.data.packing:
        documents.keep_apart(base_of(model), length=order.sequence_length)
    # the loss tries whether decoder and head give the model's logits; without numbers, the operations must tell
    with patch.object(loss_module, "head_is_plain", _head_is_all):
        loss = CausalLoss(model, compute=precision.compute)
    samples = full_samples(
        job.batch * 2,
        length=order.sequence_length,
        vocabulary=int(base_of(model).config.get_text_config().vocab_size),  # type: ignore[union-attr, operator]
        num_documents=2 if order.packing and order.attention != "flash_attention_2" else 1,
    )
    gang = Gang(run_id="trace", attempt=1, ranks=(GangRank(host="trace", share=order.passes),))
    world = ProcessGroup(gang=gang, rank=0, device=CPU)
    with _maps_by_shape(job):
        return assemble(loss, Strategy(StrategySetup(job=job, world=world, precision=precision)), train_set=samples)


@contextmanager
def _maps_by_shape(job: Job) -> Iterator[None]:
    """For bitsandbytes, which computes what each of 256 codes stands for from numbers; fake tensors have none."""
    if job.optimizer.kind not in EIGHT_BITS:
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
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for name, value in [*parameters, *buffers, *vars(module).items()]:
            if isinstance(value, torch.Tensor) and value.is_meta:
                setattr(module, name, fake(value))


class _Operations(DispatchMode):
    """Names of the operations that compute something: views, changes of dtype and questions are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not func.is_view and func is not TO_COPY:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


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


def fill_buckets(parameters: Sequence[nn.Parameter]) -> None:
    """Make every gradient a view of one flat tensor per dtype, as it is in `strategy.ddp` from its first step on."""
    sizes: dict[torch.dtype, int] = {}
    places = []
    for parameter in parameters:
        places.append(sizes.get(parameter.dtype, 0))
        sizes[parameter.dtype] = places[-1] + parameter.numel()
    flat = {dtype: torch.zeros(size, dtype=dtype) for dtype, size in sizes.items()}
    for parameter, place in zip(parameters, places, strict=True):
        parameter.grad = flat[parameter.dtype][place : place + parameter.numel()].view(parameter.shape)
