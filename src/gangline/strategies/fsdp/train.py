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

from collections.abc import Mapping

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

from gangline.runs.formulas import shard_dimension
from gangline.worker.adapters import is_initial
from gangline.worker.batch import Batch
from gangline.worker.buckets import INSIDE, by_host, sum_gradients, sum_over
from gangline.worker.loss import CausalLoss
from gangline.worker.model import RAM, base_of, layers_of, trainable
from gangline.worker.process_group import ProcessGroup
from gangline.worker.strategy import Strategy, StrategySetup, gather_shards
from gangline.worker.weights import materialize


class Fsdp(Strategy):
    """One rank's part of a model that lies on several."""

    layout = "sharded"
    keeps_ties = False  # a table that is divided twice would not be one any more
    lockstep = joins_by_empty_batch = True

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        offload = "parameters" in setup.job.strategy.offload
        self._offload = _offload(self.device) if offload else OffloadPolicy()
        self._parts_in = RAM if offload else None
        self._mesh = _mesh(setup.world)
        self._whole: list[nn.Parameter] = []
        """Adapters, which every rank has."""
        self._divided: list[FSDPModule] = []

    def wrap(self, loss: CausalLoss) -> None:
        """Divide the model layer by layer. Raises ModelError for one whose layers cannot be found."""
        super().wrap(loss)
        self.replicated = any(not each.requires_grad for each in loss.parameters())
        self._whole = list(trainable(loss).values()) if self.replicated else []
        self.shard_group = None if self.replicated else self._mesh.get_group(INSIDE)
        self.spans_hosts = not self.replicated and self._mesh.ndim == 1 and len(self.world.gang.hosts) > 1
        self._divided = self._shard(reshard=self.world.gang.reshard)
        materialize(loss, self.device, parts=self._parts_in)
        for method in ("look", "logits"):  # these pass through the model as `forward` does
            register_fsdp_forward_method(loss, method)

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """Add one micro-batch, as every other rank does now; `last`: of all of them."""
        loss = super().forward_backward(batch, scale=scale, last=last)
        if last and self._whole:
            sum_gradients(self._whole, lambda row: sum_over(row, self._mesh), sent_as=self.setup.sent_as)
        return loss

    def full_state(self, tensors: Mapping[str, torch.Tensor], *, wanted: bool) -> dict[str, torch.Tensor]:
        """Gather what is in parts, tensor by tensor, in this machine's memory; collective where anything is."""
        return gather_shards(tensors, wanted=wanted)

    def reshard(self) -> None:
        """Without `reshard` weights wait for the backward pass, which does not come."""
        for module in self._divided:
            module.reshard()

    def _shard(self, *, reshard: bool) -> list[FSDPModule]:
        """Divide layer by layer, so that no more than one of them is whole on the device."""
        began = {each for name, each in self.loss.named_parameters() if is_initial(name)}
        ignored = set(self._whole) | began
        parts = self._mesh.size(self._mesh.ndim - 1)
        for parameter in ignored:
            parameter.data = parameter.data.to(self.device)
        made: list[FSDPModule] = []
        for module in [*layers_of(base_of(self.loss.model)), self.loss]:
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

    def _policy(self) -> MixedPrecisionPolicy:
        """Weights travel in the format of computation, gradients as they are kept unless the job says otherwise."""
        sent_as = self.setup.sent_as
        if sent_as is not None and sent_as.itemsize >= next(iter(trainable(self.loss).values())).element_size():
            sent_as = None
        if self.replicated or not self.precision.mixed:
            return MixedPrecisionPolicy(reduce_dtype=sent_as, cast_forward_inputs=False)
        reduced = sent_as or self.precision.parameters
        return MixedPrecisionPolicy(param_dtype=self.precision.compute, reduce_dtype=reduced, cast_forward_inputs=False)


def _offload(device: torch.device) -> CPUOffloadPolicy:
    """Pinned, so that copies run beside computing; a machine without a GPU has no such memory, and needs none."""
    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


def _mesh(world: ProcessGroup) -> DeviceMesh:
    """Ranks by who has which part. hsdp: [hosts, ranks of each]; where hosts have unlike numbers of them, as fsdp."""
    counts = {world.gang.num_ranks(host) for host in world.gang.hosts}
    if world.gang.strategy == "hsdp" and len(counts) == 1 and counts != {1} and len(world.gang.hosts) > 1:
        return by_host(world)
    return DeviceMesh(world.device.type, torch.arange(world.size), mesh_dim_names=(INSIDE,))
