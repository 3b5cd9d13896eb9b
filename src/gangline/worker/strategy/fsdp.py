"""FSDP2: the model lies in parts on several ranks, and a layer is put together for as long as it is computed.

fsdp: one copy of the model over all ranks. hsdp: one copy over the ranks of every host, so that weights never leave it.

Under LoRA only the frozen weights are in parts. Adapters are small: every rank has all of them, and their gradients are
summed once a step, not for every micro-batch; so checkpoints, the last step of survivors and the comparison of replicas
are those of DDP (docs/decisions/0014). Under full fine-tuning weights, gradients and optimizer states are in parts.

Every pass through the model is a collective, so all ranks make equally many: those with less work send an empty one.
Offloaded, what is in parts lies in the machine's memory: a layer's part is copied to the card where it is gathered,
gradients back, and the processor updates. It is FSDP2's own policy, which knows of no part that stays.

Gradients are summed, not averaged, because the loss is already divided by the tokens of the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard

from gangline.errors import UsageError
from gangline.runs.sharding import shard_dimension
from gangline.worker.batch import Batch, empty_batch
from gangline.worker.in_ram import RAM
from gangline.worker.loss import CausalLoss
from gangline.worker.lots import in_lots, joined, spread
from gangline.worker.mesh import sum_over
from gangline.worker.model import base_of, layers_of, trainable
from gangline.worker.optimizer import gradients_of
from gangline.worker.precision import Precision
from gangline.worker.strategy.base import put_together
from gangline.worker.stream import materialise
from gangline.worker.world import World


class Fsdp:
    """One rank's part of a model that lies on several; collective to make."""

    keeps_gradients = False
    in_step = True
    has_loss = True
    clips = False

    def __init__(
        self,
        loss: CausalLoss,
        *,
        precision: Precision,
        world: World,
        sent_as: torch.dtype | None = None,
        offload: bool = False,
    ) -> None:
        """sent_as: the format that gradients travel in, where they are wider than that; None: as they are.
        offload: whether parts lie in the machine's memory.

        Raises ModelError for a model whose layers cannot be found; UsageError for a precision that needs a loss scale,
        and where ranks share a GPU.
        """
        self._loss = loss
        self._precision = precision
        self._device = world.device
        trained = list(trainable(loss).values())
        self.replicated = any(not each.requires_grad for each in loss.parameters())
        self._whole = trained if self.replicated else []
        self._sent_as = sent_as if sent_as is not None and sent_as.itemsize < trained[0].element_size() else None
        if not self.replicated and precision.scaled:
            raise _needs_scale(world.gang.strategy)
        if world.gang.shares_gpus:
            raise _shares_gpus(world.gang.strategy)
        self._mesh = _mesh(world)
        self.parts = None if self.replicated else self._mesh.get_group("shard")
        self.apart = not self.replicated and self._mesh.ndim == 1 and len(world.gang.hosts) > 1
        self._offload = _offload(world.device) if offload else OffloadPolicy()
        self._divided = self._shard(reshard=world.gang.reshard)
        materialise(loss, world.device, parts=RAM if offload else None)
        for method in ("look", "logits"):  # these pass through the model as `forward` does
            register_fsdp_forward_method(loss, method)

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """Add one micro-batch, as every other rank does now; `last`: of all of them."""
        with self._precision.autocast(self._device):
            loss: torch.Tensor = self._loss(*batch.tensors)
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        if last and self._whole:
            self._sum_up()
        return loss.detach()

    def join(self, *, last: bool) -> None:
        """Add zero while others add a micro-batch: one token without a target through the model."""
        self.forward_backward(empty_batch().to(self._device), scale=0.0, last=last)

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """This rank's part of each."""
        return gradients_of(parameters)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer are all there is."""
        return {}

    def placed(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """They are DTensors already."""
        return dict(tensors)

    def whole(self, tensors: Mapping[str, torch.Tensor], *, wanted: bool) -> dict[str, torch.Tensor]:
        """Put together what is in parts, tensor by tensor, in this machine's memory; collective where anything is."""
        return put_together(tensors, wanted=wanted)

    def elsewhere(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Every rank has a part of each."""
        del tensors
        return frozenset()

    def put_away(self) -> None:
        """Without `reshard` weights wait for the backward pass, which does not come."""
        for module in self._divided:
            module.reshard()

    def waited_s(self) -> float:
        """Exchange and computation alternate in every layer: not told apart."""
        return 0.0

    def _shard(self, *, reshard: bool) -> list[FSDPModule]:
        """Divide layer by layer, so that no more than one of them is whole on the device."""
        ignored = set(self._whole)
        parts = self._mesh.size(self._mesh.ndim - 1)
        for parameter in ignored:
            parameter.data = parameter.data.to(self._device)
        made: list[FSDPModule] = []
        for module in [*layers_of(base_of(self._loss.model)), self._loss]:
            divided = fully_shard(
                module,
                mesh=self._mesh,
                reshard_after_forward=reshard,
                mp_policy=self._policy(),
                offload_policy=self._offload,
                ignored_params=ignored,
                shard_placement_fn=lambda parameter: Shard(shard_dimension(parameter.shape, parts)),
            )
            # of this module alone; gloo has no sum that divides on the way
            divided.set_gradient_divide_factor(1.0)
            divided.set_force_sum_reduction_for_comms(True)
            made.append(divided)
        return made

    @torch.no_grad()
    def _sum_up(self) -> None:
        """Add up the adapters' gradients of all ranks."""
        for parameter in self._whole:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for lot in in_lots(parameter.grad for parameter in self._whole if parameter.grad is not None):
            row = joined(lot)
            sent = row if self._sent_as is None else row.to(self._sent_as)
            sum_over(sent, self._mesh)
            spread(sent, lot)

    def _policy(self) -> MixedPrecisionPolicy:
        """Weights travel in the format of computation, gradients as they are kept unless the job says otherwise."""
        if self.replicated or not self._precision.mixed:
            return MixedPrecisionPolicy(reduce_dtype=self._sent_as, cast_forward_inputs=False)
        reduced = self._sent_as or self._precision.parameters
        return MixedPrecisionPolicy(
            param_dtype=self._precision.compute, reduce_dtype=reduced, cast_forward_inputs=False
        )


def _offload(device: torch.device) -> CPUOffloadPolicy:
    """Pinned, so that copies run beside computing; a machine without a GPU has no such memory, and needs none."""
    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


def _mesh(world: World) -> DeviceMesh:
    """Ranks by who has which part. hsdp: [hosts, ranks of each]; where hosts have unlike numbers of them, as fsdp."""
    counts = {world.gang.num_ranks(host) for host in world.gang.hosts}
    device = world.device.type
    if world.gang.strategy == "hsdp" and len(counts) == 1 and counts != {1} and len(world.gang.hosts) > 1:
        ranks = torch.arange(world.size).view(len(world.gang.hosts), -1)
        return DeviceMesh(device, ranks, mesh_dim_names=("replicate", "shard"))
    return DeviceMesh(device, torch.arange(world.size), mesh_dim_names=("shard",))


def _shares_gpus(kind: str) -> UsageError:
    return UsageError(
        f"strategy: {kind} wants a GPU for every rank",
        seen="several ranks on one GPU, whose exchanges go over gloo; weights of layers do not",
        fix="set slots of every host to the number of its GPUs, or write strategy: ddp",
    )


def _needs_scale(kind: str) -> UsageError:
    return UsageError(
        f"strategy: {kind} cannot train every weight in fp16",
        seen="full fine-tuning with products in fp16, which need a loss scale; expected bf16 or fp32",
        fix="set precision: fp32 (or bf16 where every card can), or train adapters (method: lora)",
    )
