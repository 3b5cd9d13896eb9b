"""How fast this rank computes, and, in trials, how much slower it is made."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gangline.worker.agree import gather
from gangline.worker.batch import Batch, pick
from gangline.worker.order import Indices
from gangline.worker.session import Session

NUM_PASSES = 3
"""Of the probe, at most; and seconds after which no further one begins."""
PROBE_S = 3.0


class Pace:
    """Seconds that this rank itself needs for a token, without the sleep of trials."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._slowdown = session.world.gang.ranks[session.world.rank].slowdown
        self._token_s = 0.0
        self._slept_s = 0.0
        self._tokens = 0

    def probe(self, micro_batches: Sequence[Indices]) -> list[float]:
        """Seconds that every rank takes for the first micro-batch, all of them at once; collective.

        A first pass gets memory and chooses kernels; of some more the fastest counts, for what else a machine does can
        only make a pass longer. Gradients are zero afterwards.
        """
        session = self._session
        batch = pick(micro_batches[0], session.train_set).to(session.world.device)
        self._pass_s(batch)
        fastest_s, started = self._pass_s(batch), time.perf_counter()
        for _ in range(NUM_PASSES - 1):
            if time.perf_counter() - started + fastest_s < PROBE_S:
                fastest_s = min(fastest_s, self._pass_s(batch))
        session.optimizer.zero_grad(set_to_none=not session.strategy.keeps_gradients)
        return gather(fastest_s, session.world)

    def took(self, seconds: float) -> None:
        """Note what the micro-batches since the last call took, with the sleep before them."""
        if self._tokens:
            self._token_s = max(0.0, seconds - self._slept_s) / self._tokens
        self._slept_s, self._tokens = 0.0, 0

    def simulate_slowness(self, batch: Batch) -> None:
        """Trials only: sleep before a micro-batch, `slowdown - 1` times as long as it takes by the last measurement."""
        self._tokens += batch.input_ids.numel()
        if self._slowdown > 1:
            started = time.perf_counter()
            time.sleep((self._slowdown - 1) * self._token_s * batch.input_ids.numel())
            self._slept_s += time.perf_counter() - started

    def _pass_s(self, batch: Batch) -> float:
        started = time.perf_counter()
        self.simulate_slowness(batch)
        self._session.strategy.forward_backward(batch, scale=0.0, last=False).item()
        passed_s = time.perf_counter() - started
        self.took(passed_s)
        return passed_s
