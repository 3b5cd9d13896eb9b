"""Model FLOPs of a step, for the utilisation figure (MFU)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from gangline.worker.model import base_of
from gangline.worker.quantised import num_weights
from gangline.worker.session import Session


def step_flops(model: nn.Module, lengths: npt.NDArray[np.int64], *, full: bool, elsewhere: int = 0) -> float | None:
    """FLOPs that one step's samples need, without recomputation. elsewhere: weights of it that other ranks have.

    Per token 2 per weight forward and 2 per weight for the activations' gradient, and 2 more for the weights'
    gradient where they are trained; attention 4 * layers * hidden * length per token and pass (PaLM, appendix B).
    Embedding tables are looked up, not multiplied, unless the head is tied to them. Attention counts samples as whole,
    packed or not. None for a model that does not say its shape in the usual names.
    """
    core: Any = base_of(model)
    try:
        config = core.config.get_text_config()
        embedding, head = core.get_input_embeddings().weight, core.get_output_embeddings().weight
        squares = float((lengths.astype(np.float64) ** 2).sum())
        attention = 4.0 * config.num_hidden_layers * config.hidden_size * squares
    except AttributeError:
        return None
    weights = num_weights(core) + elsewhere
    weights -= 0 if embedding is head else getattr(embedding, "ds_numel", embedding.numel())
    passes = 3 if full else 2
    return passes * (2.0 * weights * float(lengths.sum()) + attention)


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
