"""Memory of one rank: what lies there all the time, and every instant of a step on top of it.

The peak is a maximum over instants, not a sum: the loss, backward of the last layer, of the first layer and of the
embedding, the optimizer. `planning.tape` and `planning.block` compute a layer, `planning.logits` the loss,
`planning.states` what stays, `planning.instants` puts them together.
"""

from __future__ import annotations

from dataclasses import dataclass

from gangline.planning.architecture import Architecture
from gangline.planning.instants import Instant, Step
from gangline.planning.lora import lora_parameters
from gangline.planning.overheads import CPU, Overheads, Spread
from gangline.planning.padding import padded_experts
from gangline.planning.states import Term, disk_bytes, share_of
from gangline.planning.training import Strategy, Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a rank needs."""

    persistent: tuple[Term, ...]
    instants: tuple[Instant, ...]
    offloaded_bytes: int
    """In the machine's memory, in place of the card's."""
    process: Spread
    """Of the whole process: tensors with the allocator's gaps, context, communication buffers."""
    disk_bytes: int = 0
    """What of it lies on the host's disk."""

    @property
    def persistent_bytes(self) -> int:
        """Between two steps."""
        return sum(term.num_bytes for term in self.persistent)

    @property
    def peak(self) -> Instant:
        """The instant that needs most."""
        return max(self.instants, key=lambda instant: instant.num_bytes)

    @property
    def allocated_bytes(self) -> int:
        """The most that tensors take at any moment (torch's max_memory_allocated)."""
        return self.persistent_bytes + self.peak.num_bytes

    def fits(self, free_bytes: int) -> float:
        """Probability that the process fits into this much free memory. See `Spread.probability_below`."""
        return self.process.probability_below(free_bytes)


def rank_memory(
    architecture: Architecture, training: Training, strategy: Strategy, *, rank: int = 0, device: Overheads
) -> Memory:
    """Memory of `rank`, which computes with `training` under `strategy` on a device with these overheads.

    The peak lies at one of the instants: between the last and the first layer, activations fall and gradients rise in
    straight lines. Raises ModelError for adapters that match nothing (`lora_parameters`).
    """
    if training.method != "full":
        lora_parameters(architecture, training.rank, training.targets)
    share = share_of(padded_experts(architecture, training, strategy), strategy, rank)
    step = Step(share=share, training=training, strategy=strategy, in_ram=device == CPU)
    persistent, instants = step.persistent(), step.instants()
    allocated = sum(term.num_bytes for term in persistent) + max(each.num_bytes for each in instants)
    return Memory(
        persistent=persistent,
        instants=instants,
        offloaded_bytes=step.offloaded_bytes,
        process=device.process(allocated, num_ranks=strategy.world_size),
        disk_bytes=disk_bytes(share, training, strategy) if strategy.on_disk else 0,
    )
