"""The strategy `averaging`, plan half: what it can do and what it costs. Importable without torch."""

from __future__ import annotations

from collections.abc import Iterator

from gangline.planner.traffic import Exchange, TrafficQuery, trained_weights
from gangline.planner.training import BYTES
from gangline.strategies.base import Capabilities, PlanHalf


class Averaging(PlanHalf):
    """Every rank takes a step of its own, and weights are averaged after each."""

    kind = "averaging"
    train = "gangline_averaging_train:Averaging"
    meaning = "every rank takes a step of its own, then weights are averaged; NOT the same numbers as one big machine"
    capabilities = Capabilities(exact=False, own_gpu=False, asked_only="its numbers are others")
    moves_shares = False

    def traffic(self, ask: TrafficQuery) -> Iterator[Exchange]:
        """All trained weights, when the step is done."""
        number = ask.training.parameters
        yield Exchange(
            what="weights",
            operation="all_reduce",
            num_bytes=trained_weights(ask.architecture, ask.training) * BYTES[number],
            times=1,
            ranks=ask.size,
            number=number,
        )


AVERAGING = Averaging()
