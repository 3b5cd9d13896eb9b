"""Steps whose loss is finite and far outside what the steps before have said: they are not taken.

One such step, of broken rows or of a number that a machine got wrong, can undo what hundreds have learnt. What is
judged are the loss and the gradient norm of the whole batch, which every rank has from the same report, and the
arithmetic is medians, comparisons and single products, which round alike on every machine: all ranks say the same.

The bounds are wide, for a step that is skipped without need is data that is not learnt. The loss must be above all of
the last 50 and 1.5 times their median and 8 times their usual distance from it, and the norm above all of theirs and
4 times their median. Skipped steps are not taken in: after weights that are broken every loss is far off, and skipping
must not get used to it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 50
"""Steps of this attempt that must have been taken before one is judged."""
DEVIATIONS = 8.0
"""Of the loss from its median, in median absolute deviations."""
LOSS_FACTOR, NORM_FACTOR = 1.5, 4.0
"""Times the median, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A step that stands out."""

    loss: float
    """Per trained token."""
    usual_loss: float
    """Median of the steps before."""
    norm: float
    """Of the gradient."""
    usual_norm: float

    @property
    def words(self) -> str:
        """For people."""
        return (
            f"loss {self.loss:.4g} where the steps before had {self.usual_loss:.4g}, "
            f"gradient norm {self.norm:.4g} where they had {self.usual_norm:.4g}"
        )


class Spikes:
    """The steps of one attempt; it begins to judge when it has seen enough of them."""

    def __init__(self, *, warmup_steps: int) -> None:
        self._warmup_steps = warmup_steps
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)

    def judge(self, loss: float, norm: float, *, step: int) -> Spike | None:
        """Take in a step, unless it stands out; what it is then. Both numbers finite.

        loss: per trained token. norm: of the gradient, before it is clipped. step: 0-based; while the learning rate
        still rises losses may jump.
        """
        judges = len(self._losses) == self._losses.maxlen and step >= self._warmup_steps
        is_far = judges and _stands_out(loss, self._losses, factor=LOSS_FACTOR, deviations=DEVIATIONS)
        if is_far and _stands_out(norm, self._norms, factor=NORM_FACTOR):
            usual_loss, usual_norm = statistics.median(self._losses), statistics.median(self._norms)
            return Spike(loss=loss, usual_loss=usual_loss, norm=norm, usual_norm=usual_norm)
        self._losses.append(loss)
        self._norms.append(norm)
        return None


def _stands_out(value: float, before: Sequence[float], *, factor: float, deviations: float = 0.0) -> bool:
    if value <= max(before):
        return False
    middle = statistics.median(before)
    distance = statistics.median(abs(each - middle) for each in before)
    return value > factor * middle and value > middle + deviations * distance
