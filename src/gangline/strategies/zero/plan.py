"""The plan half of DeepSpeed's ZeRO: optimizer states (zero-1), gradients (zero-2) and weights (zero-3) in parts.

Sent by every rank, for k micro-batches, P weights and P_t trained ones of b bytes, c = (N-1)/N:

    zero-1    2c * P_t * b + c * P_t * b
    zero-2    k*2c * P_t * b + c * P_t * b     (DeepSpeed sums buckets of all ranks, and each keeps its own)
    zero-3    as fsdp

Of up to 500 million numbers at once, so that next to nothing of it hides behind backward: a step of zero-1 takes
max(k_i t_i) + exchange + update, and zero-2 exchanges after every micro-batch, all ranks together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from gangline.planner.states import Term
from gangline.planner.traffic import Exchange, TrafficQuery, trained_weights
from gangline.planner.training import BYTES, PlannedStrategy
from gangline.strategies.base import (
    ADAMW_ONLY,
    METHODS,
    NO_ACTIVATION_OFFLOADING,
    NO_COMPILE,
    Capabilities,
    Limit,
    PlanHalf,
)
from gangline.strategies.fsdp.plan import sharded_s, sharded_traffic

if TYPE_CHECKING:
    from gangline.planner.candidate import Scenario
    from gangline.planner.memory import Step
    from gangline.planner.speed import StepQuery
    from gangline.runs.job import StrategyJob

BUCKET_NUMBERS = 500_000_000
"""DeepSpeed's allgather_bucket_size and reduce_bucket_size, unless told otherwise."""
LIVE_NUMBERS = 1_000_000_000
"""DeepSpeed's stage3_max_live_parameters, unless told otherwise."""
LIMITS = (
    Limit(
        key="method.kind",
        refused=("qlora",),
        why="DeepSpeed divides no quantised weights",
        fix="write `strategy: fsdp`, or `method: lora`",
    ),
    Limit(
        key="precision.compute",
        refused=("fp16", "fp64"),
        why="its optimizer moves weights in fp32, and has no loss scale of ours",
        fix="write `precision: bf16` or `precision: fp32`",
    ),
    Limit(
        key="precision.parameters",
        refused=("compute",),
        why="its optimizer moves weights in fp32",
        fix="delete precision.parameters",
    ),
    replace(ADAMW_ONLY, why="states that lie in parts are those of torch's AdamW"),
    NO_ACTIVATION_OFFLOADING,
    NO_COMPILE,
    Limit(
        key="method.init",
        refused=(True,),
        why="DeepSpeed keeps no weights for a checkpoint that are not trained",
        fix="write `strategy: fsdp`, or `init: default`",
    ),
)


IN_PARTS = (
    Limit(
        key="method.dora",
        refused=(True,),
        why="the lengths of rows are computed from weights that DeepSpeed has in parts then",
        fix="write `strategy: fsdp`, or delete dora",
    ),
    Limit(
        key="method.modules_to_save",
        refused=(True,),
        why="their copies are made of weights that DeepSpeed has in parts then",
        fix="write `strategy: fsdp`, or delete modules_to_save",
    ),
    Limit(
        key="method.train_tokens",
        refused=(True,),
        why="the table whose rows they replace is in parts then",
        fix="write `strategy: fsdp`, or delete train_tokens",
    ),
    Limit(
        key="method.target_parameters",
        refused=(True,),
        why="these weights are in parts then, and no module of their own puts them together",
        fix="write `strategy: fsdp`, or delete target_parameters",
    ),
)
"""Limits of zero-3."""


class ZeroPlan(PlanHalf):
    """DeepSpeed has some of the state in parts over all ranks."""

    train = "gangline.strategies.zero.train:Zero"
    sharded_by = "deepspeed"
    moves_shares = False
    held: str
    """What lies in parts, in a few words."""

    def candidates(self, scenario: Scenario) -> Iterator[PlannedStrategy]:
        """With what the job says of it, if it asks for just that."""
        plain, offload = scenario.plain(self.kind), scenario.offload(self.kind)
        on_disk = plain.asked and scenario.query.strategy.offload_to is not None
        yield replace(plain, shard_size=plain.world_size, offload=offload, on_disk=on_disk)

    def traffic(self, ask: TrafficQuery) -> Iterator[Exchange]:
        """Gradients, and the weights that each rank has moved."""
        num_weights = trained_weights(ask.architecture, ask.training)
        number = ask.training.compute
        yield Exchange(
            what="gradients",
            operation="all_reduce",  # DeepSpeed's use_multi_rank_bucket_allreduce
            num_bytes=num_weights * BYTES[ask.kept],
            times=ask.micro_batches if self.parts == "gradients" else 1,
            ranks=ask.size,
            number=ask.kept,
        )
        yield Exchange(
            what="new weights",
            operation="all_gather",
            num_bytes=num_weights * BYTES[number],
            times=1,
            ranks=ask.size,
            number=number,
        )

    def backward_terms(self, step: Step) -> Iterable[Term]:
        """Buffers of one size (DeepSpeed's setup_buckets): two where exchanges and backward overlap."""
        if fixed := step.training.stack.bucket_numbers:
            size = (1 if self.parts == "weights" else 2) * fixed * BYTES[step.training.compute]
            yield Term(name="reduce buffers", num_bytes=size, source="DeepSpeed's reduce_bucket_size, overlap_comm")

    def update_terms(self, step: Step) -> Iterable[Term]:
        """New weights are gathered in buckets."""
        size = min(BUCKET_NUMBERS, step.share.num_trained(step.training)) * BYTES[step.training.compute]
        yield Term(name="gather bucket", num_bytes=size, source="DeepSpeed's allgather_bucket_size")

    def reason(self, job: StrategyJob, *, num_ranks: int, num_hosts: int, rows: Sequence[Sequence[int]]) -> str:
        """What lies in parts, and what elsewhere."""
        moved = ""
        if job.offload_to is not None:
            moved = f", and of it optimizer on the machines' disks, in {job.offload_to}"
        elif job.offload:
            moved = f", and of it {' and '.join(job.offload)} in the machines' memory"
        return f"DeepSpeed has {self.held} in parts over the {num_ranks} ranks{moved}"


def _capabilities(*offload: tuple[str, ...], keys: tuple[str, ...] = ()) -> Capabilities:
    return Capabilities(
        limits=LIMITS,
        keys=("offload", "deepspeed", *keys),
        offload=tuple((METHODS, parts) for parts in offload),
        asked_only="it is DeepSpeed's",
        package="deepspeed",
    )


class Zero1(ZeroPlan):
    """Stage 1."""

    kind = "zero-1"
    parts: Literal["states"] = "states"
    meaning = "as ddp, with the optimizer's states in parts"
    guide = "by DeepSpeed, the optimizer's states lie in parts on all devices"
    held = "optimizer states"
    capabilities = _capabilities(("optimizer",))


class Zero2(ZeroPlan):
    """Stage 2."""

    kind = "zero-2"
    parts: Literal["gradients"] = "gradients"
    meaning = "as zero-1, with gradients in parts: they travel after every micro-batch"
    guide = "as zero-1, with gradients in parts, too"
    held = "gradients and optimizer states"
    capabilities = _capabilities(("optimizer",))
    lockstep = True

    def backward_terms(self, step: Step) -> Iterable[Term]:
        """Gradients are summed in buckets."""
        yield from super().backward_terms(step)
        if step.full and step.training.stack.bucket_numbers is None:
            size = min(BUCKET_NUMBERS, step.share.num_trained(step.training)) * BYTES[step.training.compute]
            yield Term(name="reduce bucket", num_bytes=size, source="DeepSpeed's reduce_bucket_size")

    def total_s(self, ask: StepQuery) -> float:
        """All ranks exchange after every micro-batch."""
        k = max(1.0, ask.traffic.micro_batches)
        return k * max(map(ask.micro_s, ask.ranks)) + ask.spent("nothing")


class Zero3(ZeroPlan):
    """Stage 3."""

    kind = "zero-3"
    parts: Literal["weights"] = "weights"
    meaning = "weights, gradients and states in parts: weights travel for every micro-batch, forward and backward"
    guide = "as zero-2, with weights in parts, too"
    held = "all state"
    capabilities = replace(
        _capabilities(("optimizer",), ("optimizer", "parameters"), keys=("offload_to",)),
        limits=(*LIMITS, *IN_PARTS),
        weights_by_module=True,
    )
    lockstep = True

    def traffic(self, ask: TrafficQuery) -> Iterator[Exchange]:
        """Layer by layer, adapters with the others."""
        return sharded_traffic(ask, with_adapters=True)

    def gathered(self, step: Step, num_bytes: int, source: str) -> tuple[int, str]:
        """So many numbers are kept, even those of layers that are done."""
        live = min(step.share.num_parameters, LIVE_NUMBERS) * BYTES[step.training.compute]
        return max(num_bytes, live), "DeepSpeed's max_live_parameters"

    def update_terms(self, step: Step) -> Iterable[Term]:
        """No weights are gathered then."""
        return ()

    def total_s(self, ask: StepQuery) -> float:
        """As fsdp."""
        return sharded_s(ask)


ZERO_1 = Zero1()
ZERO_2 = Zero2()
ZERO_3 = Zero3()
