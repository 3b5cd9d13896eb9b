"""How the ranks of a gang share the work: decided once by the plan, and the same in every attempt that follows it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gangline.strategies.base import PlanHalf
from gangline.strategies.table import DEFAULT, plan_half


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What a plan and a gang both say. Their records have its fields among their own."""

    strategy: str = DEFAULT
    """A row of `strategies.table.STRATEGIES`."""
    stages: tuple[int, ...] = ()
    """Layers of each rank, in order, where ranks are stages of pipelines; those of each pipeline sum to the model's
    depth. None where the model's shape is not known: such a plan starts nothing."""
    replicas: int = 1
    """Pipelines side by side, one after the other in the order of ranks; see `runs.rows`."""
    reshard: bool = True
    """fsdp: weights of other ranks are given up after forward, and travel again for backward."""
    eager: bool = False
    """Pipelines: see `runs.schedule.ahead`."""
    moving_shares: bool = False
    """Shares follow the measured speeds of ranks, at the start and in every step; otherwise they stay as they are."""
    shares_gpus: bool = False
    """More ranks than GPUs on a machine: NCCL refuses that, so gradients go over gloo."""

    @property
    def half(self) -> PlanHalf:
        """The plan half of the strategy."""
        return plan_half(self.strategy)

    def division(self) -> dict[str, Any]:
        """These fields alone, to make another record from."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Division)}
