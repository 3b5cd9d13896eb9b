"""How fast this rank computes, its model FLOPs per step (MFU), and how much slower a trial makes it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from torch import nn

from gangline.errors import SpecError
from gangline.worker.agree import gather
from gangline.worker.batch import Batch, Indices, pick
from gangline.worker.model import base_of
from gangline.worker.quantised import QuantisedExperts, num_weights
from gangline.worker.session import Session

SLOWDOWN = "GANGLINE_SIMULATED_SLOWDOWN"
NUM_PASSES = 3
"""Of the probe, at most; and seconds after which no further one begins."""
PROBE_S = 3.0


def simulated_slowdown() -> float:
    """How many times as long micro-batches of this rank take (1: they are what they are). For trials with machines that
    are unlike: a rank sleeps before each of them, by what the one before it took.

    Raises SpecError for a value that is no number of at least 1.
    """
    text = os.environ.get(SLOWDOWN, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 1 <= factor < math.inf:
        raise SpecError(
            f"the environment variable {SLOWDOWN}",
            seen=f"expected a number of at least 1, such as 2.5, found {text!r}",
            fix="change it, or take it away, in `env` of that host in the cluster file",
        )
    return factor


class TokenSpeed:
    """Seconds that this rank itself needs for a token, without the sleep of trials."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._slowdown = simulated_slowdown()
        self._token_s = 0.0
        self._slept_s = 0.0
        self._tokens = 0
        self._warm = False

    def probe(self, micro_batches: Sequence[Indices]) -> list[float]:
        """Seconds of a micro-batch on every rank, from a pass over the first ones that it joins, all ranks at once;
        collective.

        A first pass gets memory and chooses kernels; of some more the fastest counts, for what else a machine does can
        only make a pass longer. Gradients are zero afterwards.
        """
        session = self._session
        length = session.world.gang.pass_lengths(session.order.micro_batch)[session.world.rank]
        together = micro_batches[:length]
        batch = pick(np.concatenate(together), session.train_set).to(session.world.device)
        self._pass_s(batch)
        if self._slowdown > 1:
            self._pass_s(batch)  # how long the next one sleeps
        fastest_s, started = self._pass_s(batch), time.perf_counter()
        for _ in range(NUM_PASSES - 1):
            if time.perf_counter() - started + fastest_s < PROBE_S:
                fastest_s = min(fastest_s, self._pass_s(batch))
        session.optimizer.zero_grad(set_to_none=not session.strategy.keeps_gradients)
        return gather(fastest_s / len(together), session.world)

    def took(self, seconds: float) -> None:
        """Note what the micro-batches since the last call took, with the sleep before them.

        The first call is not noted: what gets memory and chooses kernels takes many times as long as what follows.
        """
        if self._tokens:
            self._token_s = max(0.0, seconds - self._slept_s) / self._tokens if self._warm else 0.0
            self._warm = True
        self._slept_s, self._tokens = 0.0, 0

    def simulate_slowness(self, batch: Batch) -> None:
        """Trials only: sleep before a micro-batch, see `simulated_slowdown`."""
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


def step_flops(model: nn.Module, lengths: npt.NDArray[np.int64], *, full: bool, elsewhere: int = 0) -> float | None:
    """FLOPs that one step's samples need, without recomputation. elsewhere: weights of it that other ranks have.

    Per token 2 per weight forward and 2 per weight for the activations' gradient, and 2 more for the weights'
    gradient where they are trained; attention 4 * layers * hidden * length per token and pass (PaLM, appendix B).
    Embedding tables are looked up, not multiplied, unless the head is tied to them; of experts a token meets its own
    alone. Attention counts samples as whole, packed or not. None for a model that does not say its shape in the usual
    names.
    """
    core: Any = base_of(model)
    try:
        config = core.config.get_text_config()
        embedding, head = core.get_input_embeddings().weight, core.get_output_embeddings().weight
        squares = float((lengths.astype(np.float64) ** 2).sum())
        attention = 4.0 * config.num_hidden_layers * config.hidden_size * squares
    except AttributeError:
        return None
    if core not in _met:
        tables = 0 if embedding is head else getattr(embedding, "ds_numel", embedding.numel())
        idle = round(idle_weights(core, getattr(config, "num_experts_per_tok", None)))
        _met[core] = num_weights(core) - tables - idle
    passes = 3 if full else 2
    return passes * (2.0 * (_met[core] + elsewhere) * float(lengths.sum()) + attention)


_met: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Weights that a token is multiplied by, by model: to count them takes milliseconds, for which a GPU has nothing to do.
"""


def idle_weights(core: nn.Module, active: int | None) -> float:
    """Weights of experts, in tensors [experts, rows, columns], that a token does not meet if it goes through `active`
    of each; 0 for None.
    """
    found = 0.0
    for name, part in core.named_modules() if active else ():
        shapes = [part.shape] if isinstance(part, QuantisedExperts) else []
        if "expert" in name:
            shapes += [each.shape for each in part.parameters(recurse=False) if each.ndim == 3]
        found += sum(math.prod(shape) * max(0.0, 1 - active / shape[0]) for shape in shapes)  # type: ignore[operator]
    return found


def utilisation(flops: float | None, step_s: float, peaks: Sequence[float | None]) -> float | None:
    """MFU: FLOPs done per second over the sum of the devices' peaks; None when any of it is unknown."""
    known = [peak for peak in peaks if peak]
    if flops is None or len(known) < len(peaks) or step_s <= 0:
        return None
    return flops / step_s / sum(known)


def session_utilisation(session: Session, lengths: npt.NDArray[np.int64], seconds: float) -> float | None:
    """MFU of samples of these lengths in `seconds`; the catalogue's peaks are those of half-precision products."""
    peaks = [rank.peak_flops for rank in session.world.gang.ranks]
    if session.precision.compute.itemsize > 2 or None in peaks:
        return None
    full, elsewhere = session.job.method.kind == "full", session.strategy.remote_weights()
    flops = step_flops(session.model, lengths, full=full, elsewhere=elsewhere)
    return utilisation(flops, seconds, peaks)
