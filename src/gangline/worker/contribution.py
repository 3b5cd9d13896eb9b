"""What a rank has to say of a round of local SGD, and how the others hear of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gangline.worker.strategy.local_sgd import LocalSgd


@dataclass(slots=True, kw_only=True)
class Contribution:
    """One rank's part of a round. The figures of a host's inner steps are told by its first rank."""

    weight: float = 0.0
    """First rank: trained tokens of the inner steps that moved this host; 0: its change is left out."""
    lost: float = 0.0
    """First rank: 1 if this host had work, and nothing of it can be used."""
    inner_steps: float = 0.0
    """First rank: those that were tried."""
    skipped: float = 0.0
    """First rank: those of them that were skipped: their loss or gradient was not finite, or far off."""
    norm_sum: float = 0.0
    """First rank: gradient norms of those that were not skipped."""
    loss_sum: float = 0.0
    """Summed loss of this rank's micro-batches in inner steps that count."""
    micro_batches: float = 0.0
    tokens: float = 0.0
    """Of its micro-batches, padding included."""
    busy_s: float = 0.0
    """Reading and computing."""


def meet(own: Contribution, strategy: LocalSgd, *, waiting: Callable[[], None], limit_s: float) -> list[Contribution]:
    """The contributions of all ranks, by rank; collective. waiting, limit_s, errors: see `LocalSgd.meet`."""
    rows = strategy.meet(list(dataclasses.astuple(own)), waiting=waiting, limit_s=limit_s)
    return [Contribution(**dict(zip(_NAMES, row, strict=True))) for row in rows]


_NAMES = [field.name for field in dataclasses.fields(Contribution)]


def mean_loss(contributions: Sequence[Contribution]) -> float:
    """Loss per trained token over all that counts; not a number where nothing does."""
    tokens = math.fsum(each.weight for each in contributions)
    return math.fsum(each.loss_sum for each in contributions) / tokens if tokens else math.nan


def mean_norm(contributions: Sequence[Contribution]) -> float:
    """Mean gradient norm of the inner steps that count."""
    steps = math.fsum(each.inner_steps - each.skipped for each in contributions)
    return math.fsum(each.norm_sum for each in contributions) / steps if steps else math.nan
