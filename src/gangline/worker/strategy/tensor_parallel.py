"""Tensor parallelism inside a host, data parallelism across hosts.

The ranks of a host have one copy of the model between them, cut by columns and rows (worker/slice.py), and all of them
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
from gangline.worker.batch import Batch, empty_batch
from gangline.worker.loss import CausalLoss
from gangline.worker.lots import in_lots, joined, pieces, spread
from gangline.worker.mesh import ACROSS, sum_over
from gangline.worker.model import trainable
from gangline.worker.optimizer import gradients_of
from gangline.worker.precision import Precision
from gangline.worker.slice import Slice
from gangline.worker.strategy.base import put_together
from gangline.worker.strategy.ddp import Ddp, agree_weights
from gangline.worker.strategy.single import Single
from gangline.worker.world import World


class TensorParallel:
    """One rank's columns and rows of a model; collective to make."""

    clips = False
    apart = False
    in_step = False  # hosts do not wait for each other between two passes, and ranks of a host have as many
    replicated = False

    def __init__(
        self,
        loss: CausalLoss,
        sliced: Slice,
        *,
        precision: Precision,
        world: World,
        sent_as: torch.dtype | None = None,
    ) -> None:
        """sent_as: the format that gradients travel in between hosts, where they are wider."""
        self._sliced = sliced
        self._mesh = mesh = sliced.mesh
        self._device = world.device
        self.parts = sliced.side.group
        self.has_loss = sliced.side.index == 0
        trained = trainable(loss.model)
        cut = {name: each for name, each in trained.items() if name in sliced.cuts}
        self._whole = {name: each for name, each in trained.items() if name not in sliced.cuts}
        self._several = mesh.size(0) > 1
        self._sent_as = sent_as if self._several and sent_as is not None else None
        across = mesh.get_group(ACROSS)
        if not loss.is_hollow or any(not each.requires_grad for each in loss.parameters()):
            agree_weights(cut.values(), group=across)
            agree_weights(self._whole.values())
        # else every rank reads its part of the same files, and nothing is there yet
        self._inner: Ddp | Single
        if self._several:
            self._inner = Ddp(
                loss, precision=precision, device=world.device, group=across, sent_as=sent_as, only=cut.values()
            )
        else:
            self._inner = Single(loss, precision=precision, device=world.device)
        self.keeps_gradients = self._inner.keeps_gradients

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """Add one micro-batch, as all ranks of the host do now; returns the loss of this rank's share of positions."""
        loss = self._inner.forward_backward(batch, scale=scale, last=last)
        if last:
            self._sum_up()
        return loss

    def join(self, *, last: bool = True) -> None:
        """Add zero, as all ranks of the host do: one token without a target through the model."""
        self.forward_backward(empty_batch().to(self._device), scale=0.0, last=last)

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """This rank's parts; those of what is whole are the first rank's of a host alone."""
        whole = set() if self.has_loss else {id(each) for each in self._whole.values()}
        return gradients_of(each for each in parameters if id(each) not in whole)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer are all there is."""
        return {}

    def placed(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parts with the shape that they have in the whole model."""
        return {name: self._sliced.placed(_weight_of(name), tensor) for name, tensor in tensors.items()}

    def whole(self, tensors: Mapping[str, torch.Tensor], *, wanted: bool) -> dict[str, torch.Tensor]:
        """Put together what is in parts, tensor by tensor, in this machine's memory; collective inside a host."""
        return put_together(self.placed(tensors), wanted=wanted)

    def elsewhere(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Every rank of a host has a part of each."""
        del tensors
        return frozenset()

    def put_away(self) -> None:
        """Nothing is put together for a pass."""

    def waited_s(self) -> float:
        """For the other hosts; exchanges inside a layer are not told apart from computing."""
        return self._inner.waited_s()

    @torch.no_grad()
    def _sum_up(self) -> None:
        """Add up the gradients of what is whole; one that all ranks of a host have computed counts once."""
        gradients = []
        for name, parameter in self._whole.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif name in self._sliced.alike and not self.has_loss:
                parameter.grad.zero_()
            gradients.append(parameter.grad)
        for lot in in_lots(piece for each in gradients for piece in pieces(each)):
            row = joined(lot)
            narrow = self._sent_as is not None and self._sent_as.itemsize < row.dtype.itemsize
            sent = row.to(self._sent_as) if narrow else row
            sum_over(sent, self._mesh)
            spread(sent, lot)


def require_slices(job: Job, precision: Precision, world: World) -> None:
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
            f"cannot cut weights of {job.method.bits} bits",
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
