"""Tensor parallelism inside a host, data parallelism across hosts.

The ranks of a host have one copy of the model between them, cut by columns and rows (split.py), and all of them
do the same micro-batches. Hidden states are summed over them twice in every layer, forward and back, so they want the
links between GPUs of one machine; hosts do other micro-batches, as ranks do under DDP.

Gradients of what is cut are each rank's own: DDP sums them over the ranks of the same place on all hosts. Of what is
whole (embeddings, norms, the head, one half of every adapter) every rank has a part of the gradient; those are summed
over all ranks once a step, and come to the same bits on the ranks of a host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from gangline.errors import UsageError
from gangline.runs.job import Job
from gangline.strategies.ddp.train import Ddp
from gangline.strategies.tensor_parallel.split import ColumnSplit, TensorParallelGroup, split_columns
from gangline.worker.batch import Batch
from gangline.worker.buckets import ACROSS, by_host, sum_gradients, sum_over
from gangline.worker.loss import CausalLoss
from gangline.worker.model import trainable
from gangline.worker.optimizer import gradients_of
from gangline.worker.precision import Precision
from gangline.worker.process_group import ProcessGroup
from gangline.worker.strategy import Strategy, StrategySetup, agree_weights, backward_of_nothing, gather_shards


class TensorParallel(Strategy):
    """One rank's columns and rows of a model."""

    layout = "split"
    expects_of_layers = "compute with some of their heads and columns alone"
    replicated = False

    def __init__(self, setup: StrategySetup) -> None:
        """Raises UsageError for what cannot be trained in slices."""
        super().__init__(setup)
        _require_possible(setup.job, setup.precision, setup.world)
        self._mesh = by_host(setup.world)
        side = TensorParallelGroup.of(self._mesh, wire=setup.precision.compute)
        self.shard_group = side.group
        self.counts_loss = side.index == 0
        self._side = side
        self._across = self._mesh.get_group(ACROSS)
        self._several = self._mesh.size(0) > 1
        self.sliced: ColumnSplit
        """What this rank has of the model, once it is split."""
        self._whole: dict[str, nn.Parameter] = {}
        self._inner: Strategy

    def split(self, model: nn.Module) -> None:
        """Leave this rank's columns and rows of the layers."""
        self.sliced = split_columns(model, self._side, self._mesh)

    def make_loss(self, model: nn.Module, *, is_meta: bool = False) -> CausalLoss:
        """Of this rank's share of the positions."""
        compute = self.precision.compute
        return CausalLoss(model, compute=compute, own_positions=self.sliced.share, is_meta=is_meta)

    def agree(self, loss: CausalLoss) -> None:
        """Parts among the ranks of the same place, what is whole among all."""
        if not loss.is_meta or any(not each.requires_grad for each in loss.parameters()):
            parts, whole = self._of(loss)
            agree_weights(parts.values(), group=self._across)
            agree_weights(whole.values())
        # else every rank reads its part of the same files, and nothing is there yet

    def wrap(self, loss: CausalLoss) -> None:
        """Exchange parts among hosts by DDP."""
        super().wrap(loss)
        parts, self._whole = self._of(loss)
        inner = Ddp(self.setup, group=self._across, only=parts.values()) if self._several else Strategy(self.setup)
        inner.wrap(loss)
        self._inner = inner
        self.keeps_gradients = inner.keeps_gradients

    def read_targets(self) -> dict[str, torch.Tensor]:
        """Rows and columns of the whole weights."""
        named = self.loss.model.named_parameters()
        return {name: self.sliced.placed(name, each.detach()) for name, each in named if name in self.sliced.cuts}

    def remote_weights(self) -> int:
        """Those of the other ranks of this host."""
        return self.sliced.elsewhere(self.loss.model)

    def idle_exchange(self) -> str:
        """Gradients travel between hosts in the job's format, and inside one in that of products."""
        return "" if self._several else "one host under tp"

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """Add one micro-batch, as all ranks of the host do now; returns the loss of this rank's share of positions."""
        loss = self._inner.forward_backward(batch, scale=scale, last=last)
        if last:
            self._sum_up()
        return loss

    def join(self, *, last: bool) -> None:
        """Add zero, as all ranks of the host do: one token without a target through the model."""
        backward_of_nothing(self, last=last)

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """This rank's parts; those of what is whole are the first rank's of a host alone."""
        whole = set() if self.counts_loss else {id(each) for each in self._whole.values()}
        return gradients_of(each for each in parameters if id(each) not in whole)

    def as_shards(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parts with the shape that they have in the whole model."""
        return {name: self.sliced.placed(_weight_of(name), tensor) for name, tensor in tensors.items()}

    def full_state(self, tensors: Mapping[str, torch.Tensor], *, wanted: bool) -> dict[str, torch.Tensor]:
        """Put together what is in parts, tensor by tensor, in this machine's memory; collective inside a host."""
        return gather_shards(self.as_shards(tensors), wanted=wanted)

    def waited_s(self) -> float:
        """For the other hosts; exchanges inside a layer are not told apart from computing."""
        return self._inner.waited_s()

    def _of(self, loss: CausalLoss) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """The trained weights of which this rank has a part, and those that it has whole."""
        trained = trainable(loss.model)
        parts = {name: each for name, each in trained.items() if name in self.sliced.cuts}
        return parts, {name: each for name, each in trained.items() if name not in parts}

    def _sum_up(self) -> None:
        """Add up the gradients of what is whole; one that all ranks of a host have computed counts once."""
        for name, parameter in self._whole.items():
            if parameter.grad is not None and name in self.sliced.alike and not self.counts_loss:
                parameter.grad.zero_()
        sent_as = self.setup.sent_as if self._several else None
        sum_gradients(self._whole.values(), lambda row: sum_over(row, self._mesh), sent_as=sent_as)


def _require_possible(job: Job, precision: Precision, world: ProcessGroup) -> None:
    """Raises UsageError for what cannot be trained in slices."""
    kind, counts = job.method.kind, [world.gang.num_ranks(host) for host in world.gang.hosts]
    if len(set(counts)) > 1:
        raise _refused(
            "wants as many ranks on every host",
            seen=f"{', '.join(f'{count} on {host}' for host, count in zip(world.gang.hosts, counts, strict=True))}",
            fix="set slots of every host to the same number, or write strategy: fsdp",
        )
    if precision.scaled:
        raise _refused(
            "cannot train in fp16",
            seen="products in fp16, which need a loss scale over all ranks; expected bf16 or fp32",
            fix="set precision: fp32 (or bf16 where every card can)",
        )
    if kind == "qlora":
        raise _refused(
            f"cannot split weights of {job.method.bits} bits",
            seen="method: qlora, whose numbers share their scales; expected weights as they are",
            fix="write method: lora, or strategy: hsdp (or fsdp)",
        )
    if job.optimizer.kind != "adamw":
        raise _refused(
            "cannot keep moments of 8 bits",
            seen=f"optimizer.kind: {job.optimizer.kind}, whose blocks of 256 numbers with one scale would lie on two "
            "ranks, and on others in another gang",
            fix="write optimizer: {kind: adamw}, or strategy: ddp",
        )
    if world.gang.shares_gpus:
        raise _refused(
            "wants a GPU for every rank",
            seen="several ranks on one GPU",
            fix="set slots of every host to the number of its GPUs",
        )


def _weight_of(name: str) -> str:
    """The weight that a tensor of a checkpoint belongs to: see `optimizer.state_tensors`."""
    kind, _, rest = name.partition(".")
    return rest if kind == "model" else rest.rpartition(".")[0]


def _refused(what: str, *, seen: str, fix: str) -> UsageError:
    return UsageError(f"strategy: tp {what}", seen=seen, fix=fix)
