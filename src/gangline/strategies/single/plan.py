"""The plan half of one rank, which exchanges nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from gangline.planner.training import PlannedStrategy
from gangline.strategies.base import Capabilities, PlanHalf

if TYPE_CHECKING:
    from gangline.planner.candidate import Scenario


class SinglePlan(PlanHalf):
    """One rank holds the model and does the whole batch."""

    kind = "single"
    train = "gangline.strategies.single.train:Single"
    meaning = "one rank holds the model and does the whole batch"
    capabilities = Capabilities(min_ranks=1, own_gpu=False, asked_only="")
    runs_as = "ddp"
    rank_settings: Literal["all"] = "all"

    def candidates(self, scenario: Scenario) -> Iterator[PlannedStrategy]:
        """On one rank only."""
        if len(scenario.world.placements) == 1:
            yield PlannedStrategy(kind=self.kind, world_size=1)


SINGLE = SinglePlan()
