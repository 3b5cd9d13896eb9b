"""DistributedDataParallel with unequal numbers of micro-batches per rank.

Ranks keep their gradients to themselves (`no_sync`) until their last micro-batch; the exchange then sums, it does not
average, because the loss is already divided by the tokens of the whole step.
"""

# no `from __future__ import annotations`: DDP compares the hook's annotations as types
import inspect
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gangline.worker.batch import Batch, empty_batch
from gangline.worker.loss import CausalLoss
from gangline.worker.model import trainable
from gangline.worker.precision import Precision

MIB = 1 << 20
# torch 2.13 renamed the option and warns of the old name; earlier ones know only that.
_BUFFER_OPTION = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def bucket_mib(num_bytes: int) -> float:
    """Size of a bucket: about a sixteenth of all gradients, between 1 and 25 MiB.

    DDP's own 25 MiB put a whole adapter into one or two buckets, whose exchange starts when backward is over and is
    hidden by nothing.
    """
    return min(25.0, max(1.0, num_bytes / MIB / 16))


class _Exchange:
    """State of the communication hook: when the last bucket was ready."""

    def __init__(self) -> None:
        self.ready_s = 0.0
        self.ready_event: torch.cuda.Event | None = None

    def mark(self, device: torch.device) -> None:
        self.ready_s = time.perf_counter()
        if device.type == "cuda":
            self.ready_event = torch.cuda.Event(enable_timing=True)
            self.ready_event.record()


def _sum_hook(state: _Exchange, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    state.mark(buffer.device)
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[union-attr, no-any-return]


class Ddp:
    """DDP over the default process group.

    Gradients are views of its buckets, and stay that: let go after a step, those of all micro-batches but the last
    would be made anew beside the buckets, and there would be two of each.
    """

    keeps_gradients = True

    def __init__(self, loss: CausalLoss, *, precision: Precision, device: torch.device) -> None:
        self._precision = precision
        self._device = device
        self._exchange = _Exchange()
        self._ended_s = 0.0
        self._ended_event: torch.cuda.Event | None = None
        num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trainable(loss).values())
        self._ddp = DistributedDataParallel(
            loss,
            bucket_cap_mb=bucket_mib(num_bytes),
            # weights are equal already (`agree_weights`); sending frozen ones would cost minutes on a slow link
            init_sync=False,
            **{_BUFFER_OPTION: False},
            gradient_as_bucket_view=True,
        )
        self._ddp.register_comm_hook(self._exchange, _sum_hook)
        self._settle_buckets()

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """Add the gradient of `scale * loss`; the last micro-batch of this rank sums over all ranks."""
        with nullcontext() if last else self._ddp.no_sync():
            with self._precision.autocast(self._device):
                loss: torch.Tensor = self._ddp(*batch.tensors)
            (loss * scale).backward()  # type: ignore[no-untyped-call]
        if last:
            self._mark_end()
        return loss.detach()

    def join(self) -> None:
        """Add zero: one token without a target through the model."""
        self.forward_backward(empty_batch().to(self._device), scale=0.0, last=True)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer are all there is."""
        return {}

    def waited_s(self) -> float:
        """From this rank's last bucket being ready to the end of the exchange."""
        if self._ended_event is not None and self._exchange.ready_event is not None:
            self._ended_event.synchronize()
            return self._exchange.ready_event.elapsed_time(self._ended_event) / 1e3
        return max(0.0, self._ended_s - self._exchange.ready_s)

    def _mark_end(self) -> None:
        self._ended_s = time.perf_counter()
        if self._device.type == "cuda":
            self._ended_event = torch.cuda.Event(enable_timing=True)
            self._ended_event.record()

    def _settle_buckets(self) -> None:
        """Two passes that change nothing.

        DDP cuts its buckets anew after the first backward, which changes the order of sums; done before the first step
        of every attempt, a resumed run adds in the same order as the first. The second pass makes the gradients views
        of the new buckets.
        """
        self.join()
        self._ddp.zero_grad(set_to_none=True)
        self.join()
        self._ddp.zero_grad(set_to_none=False)


def agree_weights(loss: CausalLoss) -> None:
    """Make trainable weights equal on all ranks: compared by digest, sent from rank 0 only if they differ.

    Unlike machines may draw or convert weights with other last bits.
    """
    parameters = list(trainable(loss).values())
    digests = torch.stack([_digest(parameter) for parameter in parameters])
    low, high = digests.clone(), digests.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    for parameter, differs in zip(parameters, (low != high).tolist(), strict=True):
        if differs:
            dist.broadcast(parameter.data, src=0)


def _digest(parameter: torch.nn.Parameter) -> torch.Tensor:
    """63 bits of torch's own tensor hash (the sign bit cleared, for MIN and MAX of int64)."""
    return torch.hash_tensor(parameter.detach()).view(torch.int64) & 0x7FFFFFFFFFFFFFFF
