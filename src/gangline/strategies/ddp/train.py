"""DistributedDataParallel with unequal numbers of micro-batches per rank.

Ranks keep their gradients to themselves (`no_sync`) until their last micro-batch; the exchange then sums, it does not
average, because the loss is already divided by the tokens of the whole step.
"""

# no `from __future__ import annotations`: DDP compares the hook's annotations as types
import inspect
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gangline.runs.formulas import SMALLEST_BYTES
from gangline.worker.batch import Batch
from gangline.worker.loss import CausalLoss
from gangline.worker.model import trainable
from gangline.worker.strategy import GradientBuckets, Strategy, StrategySetup

MIB = 1 << 20
# torch 2.13 renamed the option and warns of the old name; earlier ones know only that.
_BUFFER_OPTION = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


PIECE = 1 << 20
"""Numbers that are turned into another format at once."""
UNMEASURED = 16
"""Buckets where nobody has measured: inside a host, whose links are fast."""


class _Exchange:
    """What of a step's gradients is on its way, among whom, and since when all of them are.

    DDP is told at once that a bucket is done, and the end of backward waits for the network. So no call back into
    Python stands between two buckets: gloo's thread would need the interpreter's lock for it, which the model may hold.
    """

    def __init__(self, group: dist.ProcessGroup | None, sent_as: torch.dtype | None) -> None:
        self.sent_as = sent_as
        self.rests = False
        """Nothing is sent: gradients stay each rank's own."""
        self._group = group
        self._flying: list[tuple[dist.Work, torch.Tensor, torch.Tensor]] = []
        self._ready_s = self._ended_s = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Sum a bucket over all ranks, beginning now."""
        buffer = bucket.buffer()
        self._mark_ready(buffer.device)
        if self.rests:
            return _done(buffer)
        sent = buffer if self.sent_as is None else _narrow(buffer, self.sent_as)
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        assert work is not None
        self._flying.append((work, buffer, sent))
        self._land(wait=False)
        return _done(buffer)

    def finish(self, device: torch.device) -> None:
        """Wait for what is on its way."""
        self._land(wait=True)
        self._ended_s = time.perf_counter()
        if device.type == "cuda" and self._events is not None:
            self._events[1].record()

    def waited_s(self) -> float:
        """From the last bucket being ready to the end."""
        if self._events is not None:
            ready, ended = self._events
            ended.synchronize()
            return ready.elapsed_time(ended) / 1e3
        return max(0.0, self._ended_s - self._ready_s)

    def _mark_ready(self, device: torch.device) -> None:
        self._ready_s = time.perf_counter()
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record()

    def _land(self, *, wait: bool) -> None:
        """Take in the sums that have come."""
        while self._flying and (wait or self._flying[0][0].is_completed()):
            work, buffer, sent = self._flying.pop(0)
            work.wait()
            if sent is not buffer:
                _widen(sent, buffer)


def _done(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def _narrow(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers in a narrower format, in the first part of the same memory: there may be gigabytes of them.

    Piece by piece from the front: what is written lies before what has not been read.
    """
    if buffer.dtype.itemsize <= dtype.itemsize:
        return buffer
    narrow = buffer.view(dtype)[: buffer.numel()]
    for start in range(0, buffer.numel(), PIECE):
        piece = slice(start, start + PIECE)
        narrow[piece] = buffer[piece].to(dtype)
    return narrow


def _widen(narrow: torch.Tensor, buffer: torch.Tensor) -> None:
    """`_narrow` undone, from the back."""
    for start in reversed(range(0, buffer.numel(), PIECE)):
        piece = slice(start, start + PIECE)
        buffer[piece] = narrow[piece].to(buffer.dtype)


def _sum_hook(state: _Exchange, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.send(bucket)


@contextmanager
def _frozen(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """DDP exchanges what is trained while it is made: these parameters are none of its own for good."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


class Ddp(Strategy):
    """DDP over a process group, the default one unless told otherwise.

    Gradients are views of its buckets, and stay that: let go after a step, those of all micro-batches but the last
    would be made anew beside the buckets, and there would be two of each.
    """

    keeps_gradients = True
    joins_by_empty_batch = True

    def __init__(
        self,
        setup: StrategySetup,
        *,
        group: dist.ProcessGroup | None = None,
        narrows: bool = True,
        only: Collection[torch.nn.Parameter] | None = None,
    ) -> None:
        """narrows: whether gradients travel in the format that the job's `exchange` names, where they are wider.

        only: the parameters whose gradients are summed; None: all that are trained.
        """
        super().__init__(setup)
        self._group = group
        self._only = only
        self._exchange = _Exchange(group, setup.sent_as if narrows else None)
        self._ddp: DistributedDataParallel | None = None
        self._ignored: list[torch.nn.Parameter] = []
        self.num_bytes = 0
        """Of all gradients, as they are kept."""

    def wrap(self, loss: CausalLoss) -> None:
        """Find out what is exchanged; DDP itself is made once the size of buckets is known."""
        super().wrap(loss)
        trained = trainable(loss)
        summed = set(map(id, trained.values() if self._only is None else self._only))
        self._ignored = [parameter for parameter in trained.values() if id(parameter) not in summed]
        gradients = [(each.numel(), each.element_size()) for each in trained.values() if id(each) in summed]
        self.num_bytes = sum(numel * each for numel, each in gradients)
        sent_as = self._exchange.sent_as
        if sent_as is not None and sent_as.itemsize >= max(each for _, each in gradients):
            self._exchange.sent_as = None

    def buckets(self) -> GradientBuckets:
        """Its own."""
        return self

    @property
    def begun(self) -> bool:
        """Whether gradients are cut already."""
        return self._ddp is not None

    @property
    def packed(self) -> float:
        """Bytes that travel for each byte of a gradient."""
        sent_as = self._exchange.sent_as
        return 1.0 if sent_as is None else sent_as.itemsize / self.precision.parameters.itemsize

    def begin(self, bucket_bytes: int) -> None:
        """Cut gradients into buckets of this size (as they are kept), before the first pass; collective.

        Draws nothing from the generators: a micro-batch that has been seeded keeps its dropout.
        """
        self._ddp = self._wrap(bucket_bytes)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self._settle_buckets()

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """Add the gradient of `scale * loss`; the last micro-batch of this rank sums over all ranks."""
        if self._ddp is None:
            self.begin(-(-self.num_bytes // UNMEASURED))
            assert self._ddp is not None
        with nullcontext() if last else self._ddp.no_sync():
            with self.precision.autocast(self.device):
                loss: torch.Tensor = self._ddp(*batch.tensors)
            (loss * scale).backward()  # type: ignore[no-untyped-call]
        if last:
            self._exchange.finish(self.device)
        return loss.detach()

    def waited_s(self) -> float:
        """From this rank's last bucket being ready to the end of the exchange."""
        return self._exchange.waited_s()

    def _wrap(self, bucket_bytes: int) -> DistributedDataParallel:
        with _frozen(self._ignored):
            made = DistributedDataParallel(
                self.loss,
                process_group=self._group,
                bucket_cap_mb=max(SMALLEST_BYTES, bucket_bytes) / MIB,
                # weights are equal already (`agree_weights`); sending frozen ones would cost minutes on a slow link
                init_sync=False,
                **{_BUFFER_OPTION: False},
                gradient_as_bucket_view=True,
            )
        made.register_comm_hook(self._exchange, _sum_hook)
        return made

    def _settle_buckets(self) -> None:
        """Two passes that change nothing.

        DDP cuts its buckets anew after the first backward, which changes the order of sums; done before the first step
        of every attempt, a resumed run adds in the same order as the first. The second pass makes the gradients views
        of the new buckets. Gradients are zero then, and are not sent: those of a large model would take minutes.
        """
        assert self._ddp is not None
        self._exchange.rests = True
        self.join(last=True)
        self._ddp.zero_grad(set_to_none=True)
        self.join(last=True)
        self._ddp.zero_grad(set_to_none=False)
        self._exchange.rests = False
