"""The plan half of data parallelism: every rank holds the model, and gradients are exchanged once a step.

Sent by every rank: 2 (N-1)/N * P_t * b, for N ranks and P_t trained weights of b bytes. A step of ranks that do k_i
micro-batches of t_i seconds takes max(k_i t_i) + exposed + update: gradients travel in buckets while the last
micro-batch of a rank runs backward; the slowest to have a bucket ready decides, and nothing hides the last one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from gangline.planner.traffic import Exchange, TrafficQuery, trained_weights
from gangline.planner.training import BYTES, PlannedStrategy
from gangline.runs.formulas import AllReduce, choose_buckets
from gangline.strategies.base import Capabilities, PlanHalf

if TYPE_CHECKING:
    from gangline.planner.speed import StepQuery
    from gangline.runs.job import StrategyJob


class DdpPlan(PlanHalf):
    """Every rank holds the whole model."""

    kind = "ddp"
    train = "gangline.strategies.ddp.train:Ddp"
    meaning = "every rank holds the whole model; only the gradients of trained weights travel"
    guide = "every device holds the model, and gradients are exchanged in every step"
    capabilities = Capabilities(own_gpu=False, asked_only="")
    rank_settings: Literal["all"] = "all"
    usual = True
    narrows = True

    def keeps_buckets(self, strategy: PlannedStrategy) -> bool:
        """Always."""
        return True

    def traffic(self, ask: TrafficQuery) -> Iterator[Exchange]:
        """All gradients."""
        return gradients(ask)

    def in_buckets(self, ask: StepQuery) -> StepQuery:
        """As many as the trainer chooses where links and devices are what they are here."""
        exchanges = ask.traffic.exchanges
        if not exchanges:
            return ask
        whole, *table = exchanges
        total, tail = sum(each.num_bytes for each in exchanges), sum(each.num_bytes for each in table)
        latency_s = ask.once(dataclasses.replace(whole, num_bytes=0))
        wire = AllReduce(latency_s=latency_s, per_byte_s=(ask.once(whole) - latency_s) / max(1, whole.num_bytes))
        cut = choose_buckets(total, wire, [ask.window(rank) for rank in ask.ranks], tail_bytes=tail)
        each, early = (total - tail) // cut.count, cut.count if table else cut.count - 1
        last = table or [dataclasses.replace(whole, num_bytes=total - early * each, hides="nothing")]
        several = [dataclasses.replace(whole, num_bytes=each, times=early)] if early else []
        return dataclasses.replace(ask, traffic=dataclasses.replace(ask.traffic, exchanges=(*several, *last)))

    def reason(self, job: StrategyJob, *, num_ranks: int, num_hosts: int, rows: Sequence[Sequence[int]]) -> str:
        """With the number of ranks."""
        return f"each of the {num_ranks} ranks holds the whole model; only the gradients of trained weights travel"


def gradients(ask: TrafficQuery) -> Iterator[Exchange]:
    """All gradients, while backward runs, and the embedding table's of a full fine-tune, which is ready when it ends.

    In how many buckets they travel depends on links and devices: see `Ddp.in_buckets`.
    """
    number = ask.kept
    table = ask.architecture.embedding_weights if ask.training.method == "full" else 0
    whole = Exchange(
        what="gradients",
        operation="all_reduce",
        num_bytes=(trained_weights(ask.architecture, ask.training) - table) * BYTES[number],
        times=1,
        ranks=ask.size,
        number=number,
        hides="last-backward",
    )
    yield whole
    if table:
        num_bytes = table * BYTES[number]
        yield dataclasses.replace(whole, what="gradients of the embedding table", num_bytes=num_bytes, hides="nothing")


DDP = DdpPlan()
