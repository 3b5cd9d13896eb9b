"""The callback `enough`: the run finishes once the mean loss of the last steps, or an evaluation, is low enough."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from gangline.callbacks import Action, Callback
from gangline.exporters import ExportedRun


@dataclass(frozen=True)
class Options:
    """What `callbacks: {enough: {...}}` may say; the first one can stand alone: `callbacks: {enough: 1.5}`."""

    loss: float = field(metadata={"help": "Finish at this loss or below it."})
    steps: int = field(default=10, metadata={"help": "Mean over so many steps."})


class Enough:
    """Keeps the losses of the last steps."""

    def __init__(self, options: Options, _run: ExportedRun) -> None:
        self._goal = options.loss
        self._losses: deque[float] = deque(maxlen=options.steps)

    def on_step(self, _step: int, values: Mapping[str, float]) -> Action | None:
        """Look at the mean of the last steps."""
        self._losses.append(values["train/loss"])
        is_full = len(self._losses) == self._losses.maxlen
        return Action.finish if is_full and sum(self._losses) / len(self._losses) <= self._goal else None

    def on_evaluation(self, _step: int, values: Mapping[str, float]) -> Action | None:
        """One evaluation is enough."""
        return Action.finish if values["evaluation/loss"] <= self._goal else None


ENOUGH = Callback(open=Enough, options=Options, help="Finish the run once its loss is low enough.")
