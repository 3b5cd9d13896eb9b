"""The plan half of local SGD: hosts train apart, and exchange what has changed once in `inner_steps` steps.

Sent across hosts: 2 (M-1)/M * P_t * q / H, for M hosts, H optimizer steps between two exchanges and q bytes of the
payload; inside a host as ddp. A step takes max(k_i t_i) + update + exchange / H.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from gangline.planner.states import FP32, Term
from gangline.planner.traffic import Exchange, TrafficQuery, trained_weights
from gangline.planner.training import BYTES, PlannedStrategy
from gangline.strategies.base import ADAMW_ONLY, ADAPTERS, Capabilities, Limit, PlanHalf
from gangline.strategies.ddp.plan import gradients

if TYPE_CHECKING:
    from gangline.planner.candidate import Scenario
    from gangline.planner.memory import Instant, Step
    from gangline.runs.job import StrategyJob

PAYLOAD_BYTES = {"int8": 1 + 4 / 256, "bf16": 2.0, "fp32": 4.0}
"""Of one changed weight on the wire; int8 with an fp32 scale per 256 (`train.py`)."""
EXCHANGED_NUMBERS = 4 << 20
"""Weights whose changes are exchanged at once (`train.py`)."""


class LocalSgdPlan(PlanHalf):
    """Every host trains a copy of its own for a while."""

    kind = "local-sgd"
    train = "gangline.strategies.local_sgd.train:LocalSgd"
    meaning = "every host trains a copy of its own for a while; NOT the same numbers as one big machine"
    guide = (
        "every host takes steps of its own, and hosts exchange once in `inner_steps` steps, for links that are too "
        "slow for full fine-tuning; other numbers than one big machine"
    )
    capabilities = Capabilities(
        limits=(
            Limit(
                key="method.kind",
                refused=ADAPTERS,
                why="adapters are small enough to be exchanged in every step, and the product of two means is not the "
                "mean of products",
                fix="write `strategy: ddp`, or `method: full`",
            ),
            replace(ADAMW_ONLY, why="hosts move apart by AdamW, for which the outer step was published"),
            Limit(
                key="exchange",
                refused=("bf16",),
                why="hosts exchange no gradients; strategy.payload is the format of what they exchange",
                fix="delete it",
            ),
        ),
        keys=("inner_steps", "payload", "outer"),
        min_ranks=1,
        own_gpu=False,
        asked_only="its numbers are others",
        exact=False,
    )
    usual = True
    in_rounds = True
    rank_settings: Literal["all"] = "all"
    shards_per_host = True

    def candidates(self, scenario: Scenario) -> Iterator[PlannedStrategy]:
        """Over hosts; where these have unlike numbers of ranks, each rank counts as one."""
        job, slots = scenario.query.strategy, scenario.world.fabric.slots
        if scenario.training.method == "full":
            size = slots[0] if len(slots) > 1 and len(set(slots)) == 1 else 1
            plain = scenario.plain(self.kind)
            yield replace(plain, shard_size=size, inner_steps=job.inner_steps, payload=job.payload)

    def keeps_buckets(self, strategy: PlannedStrategy) -> bool:
        """Inside a host."""
        return strategy.shard_size > 1

    def lasting_terms(self, step: Step) -> Iterable[Term]:
        """The weights of the last exchange as they are, and the outer momentum in fp32 at least, of the first rank."""
        width = BYTES[step.training.parameters]
        size = (width + max(FP32, width)) * step.share.num_trained(step.training)
        source = "weights of the last exchange, and momentum in fp32"
        yield Term(name="outer optimizer", num_bytes=size, source=source)

    def further_instants(self, step: Step) -> Iterable[Instant]:
        """Pieces of weights, anchor and momentum, their change, and what comes of rounding it."""
        from gangline.planner.memory import Instant

        numbers = min(EXCHANGED_NUMBERS, step.share.num_trained(step.training))
        size = 6 * numbers * max(FP32, BYTES[step.training.parameters])
        term = Term(name="exchanged changes", num_bytes=size, source=f"{numbers:,} numbers at once")
        yield Instant(name="exchange", terms=(term,))

    def traffic(self, ask: TrafficQuery) -> Iterator[Exchange]:
        """Halves of an all-reduce of the first ranks of hosts: the same bytes as a part by each rank."""
        inside, payload = ask.strategy.shard_size, ask.strategy.payload
        num_weights = trained_weights(ask.architecture, ask.training)
        width = max(PAYLOAD_BYTES[payload], BYTES[ask.training.parameters] if payload == "fp32" else 0)
        if inside > 1:
            yield from (replace(each, ranks=inside, among="shard") for each in gradients(ask))
        yield Exchange(
            what="changes of weights",
            operation="all_reduce",
            num_bytes=int(num_weights * width / inside),
            times=1 / ask.strategy.inner_steps,
            ranks=ask.size // inside,
            number=payload,
            among="replicas" if inside > 1 else "world",
        )

    def title(self, strategy: PlannedStrategy) -> str:
        """With the numbers that the job gives."""
        asked = f", {strategy.inner_steps} inner steps, {strategy.payload}" if strategy.asked else ""
        return self.kind + asked

    def reason(self, job: StrategyJob, *, num_ranks: int, num_hosts: int, rows: Sequence[Sequence[int]]) -> str:
        """For how long hosts train apart."""
        apart = f"each of the {num_hosts} hosts trains apart" if num_hosts > 1 else "the one host trains by itself"
        return (
            f"{apart} for {job.inner_steps} steps, then changes of weights are averaged ({job.payload}); "
            "NOT the same numbers as one big machine"
        )

    @property
    def not_alone(self) -> str:
        """A host could, but that measures nothing."""
        return "whose hosts train apart and hardly wait for each other"


LOCAL_SGD = LocalSgdPlan()
