"""The torch half of a strategy: what the worker asks of a way to train over several ranks.

A strategy is a subclass of `Strategy`, which by itself trains the whole model on every rank and exchanges nothing. The
worker calls, in this order:

    __init__(setup)              refuse what cannot train, before a model is loaded
    split(model)                 take from the model what other ranks hold (layout "split" only)
    make_loss(model)             the module that computes the loss
    agree(loss), wrap(loss)      make weights equal on all ranks, then wrap, shard or connect; collective
    loaded()                     weights that were on the meta device have been read
    make_optimizer()
    forward_backward(...)        once for every micro-batch of a step; `join` where a rank has none
    gradients(parameters)        for the norm and for clipping
    after_update()               the optimizer has moved the weights
    evaluate(batch), reshard()   an evaluation, and its end
    full_state(...)              a checkpoint
    finish()                     the run has ended well

A strategy of your own overrides what it does differently. This one lets every rank take a step of its own and averages
the weights after each:

    class Averaging(Strategy):
        def after_update(self) -> None:
            for parameter in trainable(self.loss).values():
                dist.all_reduce(parameter.data)
                parameter.data /= self.world.size

The contract test, tests/train/test_contract.py, says what every strategy promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from gangline.runs.job import Job
from gangline.worker.batch import Batch, empty_batch
from gangline.worker.loss import CausalLoss
from gangline.worker.model import trainable
from gangline.worker.optimizer import gradients_of, make_optimizer
from gangline.worker.precision import Precision
from gangline.worker.process_group import ProcessGroup

if TYPE_CHECKING:
    from gangline.worker.loop import Stepper, TrainingRun
    from gangline.worker.weights import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySetup:
    """What a strategy is made from."""

    job: Job
    world: ProcessGroup
    precision: Precision
    beat: Callable[[], None] = lambda: None
    """Called within long phases, so that they are not taken for a hang."""

    @property
    def sent_as(self) -> torch.dtype | None:
        """The format that gradients travel in, where they are wider than that; None: the one they have."""
        return torch.bfloat16 if self.job.exchange == "bf16" else None


class GradientBuckets(Protocol):
    """Gradients that are all-reduced in buckets, whose size is chosen before the first step."""

    num_bytes: int
    """Of all gradients, as they are kept."""

    @property
    def packed(self) -> float:
        """Bytes that travel for each byte of a gradient."""
        ...

    @property
    def begun(self) -> bool:
        """Whether the size is settled already."""
        ...

    def begin(self, bucket_bytes: int) -> None:
        """Cut gradients into buckets of this size (as they are kept), before the first pass; collective."""
        ...


class Strategy:
    """One rank of a strategy; the base trains the whole model on every rank and exchanges nothing.

    Whatever the strategy, after the last micro-batch of a step `.grad` of the trained parameters holds the sum of
    `scale * loss` over all micro-batches of all ranks, or this rank's part of that sum.
    """

    min_ranks = 2
    """With fewer ranks the worker takes the base, which exchanges nothing."""
    layout: Literal["whole", "sharded", "split"] = "whole"
    """whole: every device holds the model. sharded: `wrap` divides every weight among ranks. split: `split` leaves each
    rank some layers or columns."""
    keeps_ties = True
    """Whether an output head that is the embedding table stays one tensor while weights are on the meta device."""
    expects_of_layers = ""
    """What a layout "split" needs of a model's layers, as the end of "expected layers that ..."."""

    keeps_gradients = False
    """Whether the tensors of gradients stay from step to step: they are set to zero then, not freed."""
    lockstep = False
    """Whether every pass through the model is a collective: then all ranks make equally many."""
    replicated = True
    """Whether every rank has the whole trained state between two steps, the same as all others have."""
    shard_group: dist.ProcessGroup | None = None
    """The ranks among which the trained weights are divided; None where every rank has all of them."""
    spans_hosts = False
    """Whether no single host has the whole trained state."""
    joins_by_empty_batch = False
    """Whether a rank without work takes part by a pass of one token without a target: exchanges are in the passes."""
    counts_loss = True
    """Whether micro-batches are this rank's to count: of the ranks that do the same ones together, one counts them. The
    losses that all of them return add up to the loss."""
    clips = False
    """Whether the update clips gradients itself."""
    draws_by_sample = True
    """Whether forward and backward of a pass happen within `forward_backward`, on whole rows, so that dropout can
    belong to samples; else it belongs to micro-batches."""
    finds_stragglers = True
    """Whether a rank's times tell how fast it is: not where one slow rank makes all others wait within a pass."""

    def __init__(self, setup: StrategySetup) -> None:
        """Raises UsageError for what of the job this strategy does not train."""
        self.setup = setup
        self.job = setup.job
        self.world = setup.world
        self.precision = setup.precision
        self.device = setup.world.device
        self.loss: CausalLoss

    # -- the model ----------------------------------------------------------------------------------------------------

    @property
    def meta_init(self) -> bool:
        """Whether the model is built on the meta device and every rank reads only the part that it keeps."""
        return self.layout != "whole"

    def split(self, model: nn.Module) -> None:
        """Take from the model what other ranks hold. May be called again, for another copy of the model."""

    def make_loss(self, model: nn.Module, *, is_meta: bool = False) -> CausalLoss:
        """The model with its loss: what is wrapped. is_meta: its weights are read later."""
        return CausalLoss(model, compute=self.precision.compute, is_meta=is_meta)

    def agree(self, loss: CausalLoss) -> None:
        """Make the trained weights equal on all ranks; collective."""
        if self.world.size > 1:
            agree_weights(trainable(loss).values())

    def wrap(self, loss: CausalLoss) -> None:
        """Make the loss ready to train; collective. Sets `self.loss`."""
        self.loss = loss

    def read_targets(self) -> Mapping[str, Target]:
        """Where the numbers of weights on the meta device go that are divided otherwise than as DTensors, by name."""
        return {}

    def loaded(self) -> None:
        """Every weight that was on the meta device has its numbers; collective."""

    def remote_weights(self) -> int:
        """How many weights of the layers that this rank computes lie on other ranks, for the FLOPs of a step."""
        return 0

    def make_optimizer(self) -> torch.optim.Optimizer:
        """What moves the trained weights."""
        return make_optimizer(self.loss.model, self.job.optimizer)

    # -- a step -------------------------------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """Add the gradient of `scale * loss` of one micro-batch; returns its summed loss, detached.

        The `last` micro-batch of a rank completes the exchange.
        """
        with self.precision.autocast(self.device):
            loss: torch.Tensor = self.loss(*batch.tensors)
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def join(self, *, last: bool) -> None:
        """Take part in a step without work of one's own: once (`last`), or, in `lockstep`, as often as others have
        more micro-batches.
        """
        if self.joins_by_empty_batch:
            self.forward_backward(empty_batch().to(self.device), scale=0.0, last=last)

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """The gradients of the step, or this rank's parts of them, for their norm. Of a weight that several ranks have
        whole beside their parts, one rank gives the gradient.
        """
        return gradients_of(parameters)

    def after_update(self) -> None:
        """The optimizer has moved the weights, on every rank; may be collective. Not called for a skipped step."""

    def waited_s(self) -> float:
        """Seconds of the last step in which this rank had computed everything and waited for the exchange."""
        return 0.0

    def stepper(self, run: TrainingRun) -> Stepper | None:
        """What moves the run on; None: the worker's synchronous steps."""
        return None

    def buckets(self) -> GradientBuckets | None:
        """Gradients whose buckets are to be sized before the first step; None: there are none."""
        return None

    def idle_exchange(self) -> str:
        """Who exchanges no gradients, so that the job's `exchange` has no effect; "" where it has one."""
        return "one rank" if self.world.size == 1 else ""

    # -- passes without gradients -------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """The summed loss of one micro-batch, without gradients; the losses of all ranks add up."""
        with self.precision.autocast(self.device):
            loss: torch.Tensor = self.loss(*batch.tensors)
        return loss

    def probe(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Logits, or the hidden states that this rank's layers give, [m, t, *]: to find out what a model can do."""
        return self.loss.logits(input_ids, position_ids)

    def reshard(self) -> None:
        """Free what passes without a gradient have gathered."""

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds besides weights and optimizer: the live tensors, by name.

        On the meta device where the strategy only knows shapes: then there is a `state_loader`.
        """
        return {}

    def as_shards(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same live tensors of a checkpoint; parts of a tensor as DTensors with the shape of the whole."""
        return dict(tensors)

    def full_state(self, tensors: Mapping[str, torch.Tensor], *, wanted: bool) -> dict[str, torch.Tensor]:
        """Such tensors as one rank alone would have them, for a checkpoint. wanted: by this rank; else it gets {}.

        Collective where anything is divided.
        """
        return dict(tensors) if wanted else {}

    def remote_names(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Names in a checkpoint that other ranks hold whole. tensors: those that this rank has. Collective."""
        return frozenset()

    def state_loader(self) -> Callable[[Mapping[str, torch.Tensor]], None] | None:
        """Takes some whole tensors of a checkpoint at a time; None: they are read into the live tensors in place."""
        return None

    def finish(self) -> None:
        """The run has ended well: delete what was only for it."""


def gather_shards(tensors: Mapping[str, torch.Tensor], *, wanted: bool) -> dict[str, torch.Tensor]:
    """`Strategy.full_state` where parts are DTensors: gathered one after the other, into this machine's memory."""
    found = {}
    for name, tensor in tensors.items():
        value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if wanted:
            found[name] = value.cpu() if value is not tensor else value
    return found


def agree_weights(trained: Iterable[nn.Parameter], *, group: dist.ProcessGroup | None = None) -> None:
    """Make weights equal on all ranks: compared by digest, sent from the first rank only if they differ.

    Unlike machines may draw or convert weights with other last bits. group: the ranks; None: all of them.
    """
    parameters = [each for each in trained if not each.is_meta]
    if not parameters:  # every rank reads its part of the same files
        return
    digests = torch.stack([_digest(parameter) for parameter in parameters])
    low, high = digests.clone(), digests.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    for parameter, differs in zip(parameters, (low != high).tolist(), strict=True):
        if differs:
            dist.broadcast(parameter.data, group=group, group_src=0)


def _digest(parameter: nn.Parameter) -> torch.Tensor:
    """63 bits of torch's own tensor hash (the sign bit cleared, for MIN and MAX of int64)."""
    return torch.hash_tensor(parameter.detach()).view(torch.int64) & 0x7FFFFFFFFFFFFFFF
