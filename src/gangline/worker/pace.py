"""How fast this rank computes, and, in trials, how much slower it is made."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gangline.worker.agree import gather
from gangline.worker.batch import pick
from gangline.worker.order import Indices
from gangline.worker.session import Session


class Pace:
    """Seconds of a micro-batch on this rank."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._slowdown = session.world.gang.ranks[session.world.rank].slowdown
        self._micro_batch_s = 0.0

    def probe(self, micro_batches: Sequence[Indices]) -> list[float]:
        """Seconds that every rank takes for the first micro-batch, all of them at once; collective.

        The second of two passes counts: the first one gets memory and chooses kernels. Gradients are zero afterwards.
        """
        session = self._session
        batch = pick(micro_batches[0], session.train_set).to(session.world.device)
        passed_s = 0.0
        for _ in range(2):
            started = time.perf_counter()
            self.simulate_slowness()
            session.strategy.forward_backward(batch, scale=0.0, last=False).item()
            passed_s = time.perf_counter() - started
            self.took(passed_s, 1)
        session.optimizer.zero_grad(set_to_none=not session.strategy.keeps_gradients)
        return gather(passed_s, session.world)

    def took(self, seconds: float, num_micro_batches: int) -> None:
        """Note what micro-batches took, with the sleep of `simulate_slowness`."""
        self._micro_batch_s = seconds / max(1, num_micro_batches) / self._slowdown

    def simulate_slowness(self) -> None:
        """Trials only: sleep before a micro-batch (`GangRank.slowdown`)."""
        if self._slowdown > 1:
            time.sleep((self._slowdown - 1) * self._micro_batch_s)
